"""Trainer with Lightning's arguments and defaults."""

from __future__ import annotations

import math
import os
from typing import Any

from torch import Tensor

from lockstep import callbacks as _callbacks
from lockstep.callbacks.base import Logger
from lockstep.strategies.devices import resolve_accelerator
from lockstep.trainer.facts import TrainerState
from lockstep.trainer.lightning.arguments import ours, savers
from lockstep.trainer.lightning.loops import EvaluationLoop, FitLoop, PredictionLoop
from lockstep.trainer.lightning.parsing import from_environment
from lockstep.trainer.lightning.types import RunningStage, TrainerFn, TrainerStatus
from lockstep.trainer.lightning.utilities import MisconfigurationException
from lockstep.trainer.metrics.reduction import of_kind
from lockstep.trainer.setup import compilation
from lockstep.trainer.trainer import Trainer as _Trainer

_DEFAULTS = {
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "limit_test_batches": 1.0,
    "limit_predict_batches": 1.0,
    "val_check_interval": 1.0,
    "min_epochs": 0,
}
"""What arguments are where they limit nothing, for code that computes with them."""
_NOTHING = ("max_epochs", "max_steps", "limit_train_batches")
"""Arguments of which 0 lets `fit` train nothing."""


class Trainer(_Trainer):
    """`lockstep.Trainer` with Lightning's arguments and defaults: 1,000 epochs if nothing limits a run, and runs in
    `lightning_logs/version_N`.

    It takes Lockstep's own arguments too. None stands for a default, and `PL_TRAINER_MAX_EPOCHS` and the like in the
    environment for what is not given. Raises TypeError for an argument that is not offered, with what to write instead,
    and MisconfigurationException, a ValueError, for a value that is not possible.
    """

    def __init__(self, **arguments: Any) -> None:
        self._barebones = bool(arguments.get("barebones"))
        self._predictions: list[Any] = []
        given = from_environment() | arguments
        zero = {name for name in _NOTHING if name in given and _is_zero(given[name])}
        try:
            super().__init__(**ours({name: value for name, value in given.items() if name not in zero}))
        except ValueError as error:
            raise MisconfigurationException(str(error)) from None
        zero = set() if self.fast_dev_run else zero
        self._trains_none = "limit_train_batches" in zero
        self._is_open = given.get("max_epochs") is None and not self.fast_dev_run
        self._idle = savers(given) if self.fast_dev_run else []
        if "max_epochs" in zero:
            self._run.max_epochs = 0
        if "max_steps" in zero or self._trains_none:
            self._run.max_steps = 0

    @property
    def barebones(self) -> bool:
        """Whether all that takes time beside the steps is turned off."""
        return self._barebones

    @property
    def accelerator(self) -> str:
        """ "cpu" or "gpu"; what "auto" stands for is found by now."""
        return "cpu" if resolve_accelerator(self.arguments.accelerator) == "cpu" else "gpu"

    @property
    def max_epochs(self) -> int | None:
        """The last epoch's number; -1 if only steps or time limit the run, and None before `fit` if it is not given."""
        own = super().max_epochs
        return None if self._is_open else -1 if own is None else own

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._limit_epochs(value)

    def _limit_epochs(self, value: int | None) -> None:
        self._is_open = False
        self._run.max_epochs = None if value == -1 else value

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps; -1 for no limit, and the batches of `fast_dev_run`."""
        steps = self.arguments.max_steps if self._trains_none else super().max_steps
        return int(self.arguments.fast_dev_run) or -1 if steps is None else steps

    @max_steps.setter
    def max_steps(self, value: int | None) -> None:
        self._run.max_steps = None if value == -1 else value

    @property
    def loggers(self) -> list[Logger]:
        """All of them. Other ones can be set between runs."""
        return super().loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger] | None) -> None:
        if self._run.active:
            raise RuntimeError(f"loggers of a Trainer cannot be set while it runs {self._run.stage}; set them before")
        for logger in loggers or ():
            if not isinstance(logger, Logger):
                raise TypeError(f"a logger of a Trainer must be a Logger, but one is {logger!r}")
            logger.run_dir = None
        self._run.log_dir = None  # the next run has a folder of its own
        self._run.callbacks = [*(loggers or ()), *(c for c in self._run.callbacks if not isinstance(c, Logger))]

    @property
    def logger(self) -> Logger | None:
        """The first logger; in a `fast_dev_run` one that writes nothing. Another one can be set between runs."""
        return super().logger

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def checkpoint_callback(self) -> _callbacks.ModelCheckpoint | None:
        """The first ModelCheckpoint; in a `fast_dev_run` it saves nothing."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[_callbacks.ModelCheckpoint]:
        """All of them; in a `fast_dev_run` they save nothing."""
        return super().checkpoint_callbacks or self._idle

    @property
    def log_dir(self) -> str | None:
        """Folder of the run, before it that of the first logger; `default_root_dir` without a logger."""
        own = super().log_dir
        return (self.loggers[0].log_dir or own) if self.loggers else own or str(self.arguments.default_root_dir)

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Batches of the validation before training; infinity for all."""
        steps = self.arguments.num_sanity_val_steps
        return math.inf if steps < 0 else steps

    @property
    def progress_bar_callback(self) -> _callbacks.ProgressBar | None:
        """The progress bar; None with `enable_progress_bar=False`."""
        return next((item for item in self.callbacks if isinstance(item, _callbacks.ProgressBar)), None)

    @property
    def early_stopping_callbacks(self) -> list[_callbacks.EarlyStopping]:
        """All of them."""
        return [item for item in self.callbacks if isinstance(item, _callbacks.EarlyStopping)]

    @property
    def state(self) -> TrainerState:
        """As `lockstep.Trainer.state`, with members of Lightning's enums, which are equal to the strings."""
        status, fn, stage = super().state
        return TrainerState(TrainerStatus(status), fn and TrainerFn(fn), stage and RunningStage(stage))

    @property
    def fast_dev_run(self) -> int | bool:
        """The batches of a trial run; True for 1."""
        batches = self.arguments.fast_dev_run
        return True if batches == 1 else batches

    @property
    def ckpt_path(self) -> str | None:
        """Path of the checkpoint that the last run began with."""
        return self._run.begins_from

    @property
    def evaluating(self) -> bool:
        """Whether validation or a test runs, the validation before training included."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def enable_validation(self) -> bool:
        """Whether `fit` validates."""
        return any(self.num_val_batches)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of the validation before training, for each loader."""
        return [min(self.num_sanity_val_steps, batches) for batches in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each rank in a test, for each loader."""
        return self._run.evaluation_batches["test"]

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each rank in `predict`, for each loader."""
        return self._run.evaluation_batches["predict"]

    @property
    def device_ids(self) -> list[int]:
        """The devices of this node, which are always the first ones that torch sees."""
        return list(range(self.num_devices))

    @property
    def progress_bar_metrics(self) -> Any:
        """What `self.log(…, prog_bar=True)` shows, as floats."""
        shown: dict[str, Tensor] = super().progress_bar_metrics
        return {name: float(value) for name, value in shown.items()}

    @property
    def fit_loop(self) -> FitLoop:
        """Where training is, and its limits."""
        return FitLoop(self)

    @property
    def validate_loop(self) -> EvaluationLoop:
        return EvaluationLoop(self, "val")

    @property
    def test_loop(self) -> EvaluationLoop:
        return EvaluationLoop(self, "test")

    @property
    def predict_loop(self) -> PredictionLoop:
        return PredictionLoop(self, "predict")

    def __getattr__(self, name: str) -> Any:
        if name == "limit_train_batches" and self._trains_none:
            return 0
        value = super().__getattr__(name)
        if name in ("limit_train_batches", "limit_val_batches") and self.arguments.overfit_batches:
            return self.arguments.overfit_batches
        return _DEFAULTS[name] if value is None and name in _DEFAULTS else value

    def _plain(self, model: Any) -> Any:
        """The module in the place of what torch.compile has made of it; it is compiled as by `Trainer(compile=True)`.
        Called at the start of each run."""
        plain = getattr(model, "_orig_mod", model)
        options = self.arguments.compile or plain is not model
        self._run.compile_options = compilation.check(options, self._run.strategy)
        return plain

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """As `lockstep.Trainer.fit`; `weights_only` changes nothing, as no checkpoint is unpickled."""
        plain = self._plain(model)
        if ckpt_path in ("auto", "last") and not getattr(self.checkpoint_callback, "dirpath", None):
            for logger in self.loggers:
                if getattr(logger, "took_version", False) and logger.run_dir is None:
                    raise ValueError(
                        f"ckpt_path={ckpt_path!r} looks for the newest version, but logger.log_dir was read before "
                        f"fit, which has taken version {logger.version}; give the logger version=, or read log_dir in "
                        "setup"
                    )
        self._is_open = False
        for saver in self._idle:
            saver.dirpath = saver.dirpath or os.path.abspath(
                os.path.join(self.arguments.default_root_dir, "checkpoints")
            )
        super().fit(plain, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def validate(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """As `lockstep.Trainer.validate`; a value logged per step and per epoch is there once."""
        return _of_epochs(super().validate(self._plain(model), dataloaders, datamodule, ckpt_path, verbose))

    def test(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """As `lockstep.Trainer.test`; a value logged per step and per epoch is there once."""
        return _of_epochs(super().test(self._plain(model), dataloaders, datamodule, ckpt_path, verbose))

    def predict(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """As `lockstep.Trainer.predict`; `return_predictions=None` returns them."""
        returns = return_predictions is None or return_predictions
        returned = super().predict(self._plain(model), dataloaders, datamodule, ckpt_path, returns)
        self._predictions = returned or []
        return returned

    def save_checkpoint(
        self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None, **options: Any
    ) -> None:
        """As `lockstep.Trainer.save_checkpoint`. Raises TypeError for `storage_options`."""
        if storage_options is not None:
            raise TypeError("save_checkpoint writes a folder and takes no storage_options; copy the folder afterwards")
        super().save_checkpoint(filepath, bool(weights_only), **options)


def _of_epochs(returned: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: v for name, v in found.items() if of_kind(name, "epoch") not in found} for found in returned]


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0
