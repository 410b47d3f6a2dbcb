"""ModelCheckpoint with Lightning's arguments, names and moments."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import callbacks
from lockstep.callbacks._support.checkpoint_options import filled, versioned
from lockstep.callbacks.base import Callback
from lockstep.trainer.lightning.callbacks.uncalled import Uncalled

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.trainer import Trainer


class Checkpoint(Callback):
    """Base of callbacks that save."""


class ModelCheckpoint(Uncalled, callbacks.ModelCheckpoint, Checkpoint):
    """`lockstep.callbacks.ModelCheckpoint`, whose folders are named as Lightning names its files.

    As in Lightning, validations more or less often than once an epoch make it save after validations only, and
    `every_n_epochs=0` never saves but for `save_last`. Raises TypeError for `save_on_exception`, for a
    CHECKPOINT_NAME_LAST with placeholders, and for a subclass with a method that Lightning's calls on itself.
    """

    FILE_EXTENSION = ".ckpt"
    CHECKPOINT_NAME_LAST = "last"
    CHECKPOINT_JOIN_CHAR = "-"
    """The separator of epoch and step if no `filename` is given."""
    CHECKPOINT_EQUALS_CHAR = "="
    """The separator of a name and its value."""
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        **options: Any,
    ) -> None:
        if save_on_exception:
            raise TypeError(
                "ModelCheckpoint has no save_on_exception; a signal commits a checkpoint by itself, and for other "
                "errors every_n_train_steps=… keeps a recent one"
            )
        self._check_last()
        by_epochs = not every_n_train_steps and train_time_interval is None
        super().__init__(
            dirpath,
            filename,
            monitor,
            verbose=verbose,
            save_last=bool(save_last),
            save_top_k=0 if by_epochs and every_n_epochs == 0 else save_top_k,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_train_steps=every_n_train_steps or None,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs or None,
            save_on_train_epoch_end=save_on_train_epoch_end if by_epochs else None,
            **options,
        )
        self._is_named = bool(filename)
        self._given_moment = self.save_on_train_epoch_end
        self._counts_versions = enable_version_counter

    def _check_last(self) -> None:
        if "{" in self.CHECKPOINT_NAME_LAST:
            raise TypeError(
                f"CHECKPOINT_NAME_LAST={self.CHECKPOINT_NAME_LAST!r} of ModelCheckpoint must be one name, as the "
                "folder is replaced by each save; write placeholders into filename"
            )

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._check_last()  # again, as it may be set once the callback is made
        super().setup(trainer, module, stage)

    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """The path of the checkpoint for these values, in `dirpath` where that is known; a value that is missing is
        written as nan. `filename` is another template, `ver` goes behind the name, `prefix` before it."""
        own = self.filename if self._is_named else f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        name = filled(filename or own, metrics, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)
        parts = [prefix or "", name, "" if ver is None else f"v{ver}"]
        name = self.CHECKPOINT_JOIN_CHAR.join(filter(None, parts)) + self._extension
        return os.path.join(self.dirpath or "", name)

    def _name(self, trainer: Trainer) -> str:
        return os.path.basename(super()._name(trainer)).removesuffix(self._extension)

    @property
    def _extension(self) -> str:  # type: ignore[override]
        return self.FILE_EXTENSION

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        super().on_train_start(trainer, module)
        once = trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval in (None, 1.0)
        if self._given_moment is None:
            self.save_on_train_epoch_end = None if once or not any(trainer.num_val_batches) else False

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._ended = True
        by_epochs = self.every_n_train_steps is None and self.train_time_interval is None
        due = by_epochs and (self._epoch(trainer) + 1) % (self.every_n_epochs or 1) == 0
        ranks = due and self._metric is None and self.save_on_train_epoch_end is not False
        if self._fitting and (ranks or self.save_last):
            self._consider(trainer, rank=ranks)
        self._ended = False

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the scores of `best_k_models` by path, to `<dirpath>/best_k_models.yaml` without `filepath`."""
        lines = [f"{path}: {float(score)}\n" for path, score in self.best_k_models.items()]
        text = "".join(lines) or "{}\n"
        Path(filepath or os.path.join(self.dirpath or "", "best_k_models.yaml")).write_text(text)

    def _free_path(self, trainer: Trainer, name: str) -> str:
        name = self.CHECKPOINT_NAME_LAST if name == "last" else name
        path = os.path.join(str(self.dirpath), name)
        if not self._counts_versions:
            return path + self._extension
        free = versioned(path, self._extension, self.STARTING_VERSION) if trainer.is_global_zero else path
        return str(trainer.strategy.broadcast(free))
