"""What the loggers of this package share: a folder for each run, hyperparameters, and what rank 0 alone writes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lockstep.callbacks._support.hparams import plain, plain_params
from lockstep.callbacks._support.null_writer import NullWriter
from lockstep.callbacks.base import Logger, check_local

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class RunLogger(Logger):
    """A logger that opens its writer at first use, on rank 0, in the folder of the run.

    Args:
        save_dir: folder above all runs; None takes the Trainer's `default_root_dir`.
        name: folder of this experiment below `save_dir`; None takes the module's class name.
        version: folder of this run below `name`, a number N for `version_N`; None takes the next free one.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] | None = None, name: str | None = None, version: str | int | None = None
    ) -> None:
        if save_dir is not None:
            check_local(f"save_dir of {type(self).__name__}", save_dir)
        self.save_dir = None if save_dir is None else os.path.expanduser(save_dir)
        with suppress(AttributeError):  # a subclass may define them as properties
            self.name = name
        with suppress(AttributeError):
            self.version = version
        self._is_writer = True
        self._trainer: Trainer | None = None
        self._hparams: dict[str, Any] = {}
        self._hparams_are_written = True

    @property
    def root_dir(self) -> str | None:
        """Folder of this experiment: the one above `run_dir`."""
        return os.path.dirname(self.run_dir) if self.run_dir else None

    @property
    def has_folder(self) -> bool:
        """Whether what is logged can be written. CSVLogger and TensorBoardLogger hold metrics that are logged before a
        run until there is its folder."""
        return self.log_dir is not None

    @property
    def experiment(self) -> Any:
        if not self._is_writer:
            return NullWriter()
        self._folder()
        try:
            return self._open()
        except Exception as error:  # the user's step asked for it, and must not end by it
            self._is_writer = False
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            name = type(self).__name__
            warnings.warn(f"{name} stops logging, training continues: {what}", RuntimeWarning, stacklevel=2)
            return NullWriter()

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._trainer, self._is_writer = trainer, trainer.is_global_zero

    def log_hyperparams(self, params: Any, metrics: dict[str, float] | None = None, step: int | None = None) -> None:
        """Add `params`, a mapping or an argparse namespace, which are written with the first metrics, or by `save` or
        `finalize`."""
        self._hparams |= plain_params(params)
        self._hparams_are_written = False
        if metrics:
            self.log_metrics(metrics, step)

    def save(self) -> None:
        """Write hyperparameters that came before the first metrics."""
        if self._is_writer and not self._hparams_are_written and self.log_dir is not None:
            self._open()

    def _open(self) -> Any:
        """What `experiment` is, ready for use on rank 0. Its errors end this logger, never the training."""
        raise NotImplementedError

    def _folder(self) -> str:
        """The run's folder. Raises RuntimeError outside of a run."""
        if self.log_dir is None:
            raise RuntimeError(
                f"{type(self).__name__} has no folder yet: log from within fit, validate, test or predict"
            )
        return self.log_dir

    @staticmethod
    def _row(column: str, at: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A row with the step `at` in `column`; a metric of that name is under `metric/COLUMN`."""
        return {column: at} | {
            f"metric/{key}" if key == column else key: plain(value) for key, value in metrics.items()
        }

    def _at(self, step: int | None) -> int:
        """The step to log at: the given one, or the last optimizer step."""
        return step if step is not None else self._trainer.global_step if self._trainer is not None else 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trainer": None}
