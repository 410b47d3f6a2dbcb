"""Tuner: the searches of LRFinder and BatchSizeFinder by a call."""

from __future__ import annotations

from typing import Any

from lockstep import callbacks
from lockstep.callbacks.base import Callback
from lockstep.callbacks.tuning.lr_finder import LRSweep
from lockstep.trainer import tuner
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.lightning.callbacks.adapters import BatchSizeFinder, LearningRateFinder
from lockstep.trainer.lightning.utilities import rank_zero_warn
from lockstep.trainer.module import Module, attach
from lockstep.trainer.setup.loaders import Sources
from lockstep.trainer.trainer import Trainer


class Found:
    """What `lr_find` returns."""

    def __init__(self, sweep: LRSweep) -> None:
        self.sweep = sweep

    @property
    def results(self) -> dict[str, list[float]]:
        """The rates under "lr" and their losses under "loss"."""
        return {"lr": self.sweep.lrs, "loss": self.sweep.losses}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate found without so many points at both ends; None if there are too few points."""
        return self.sweep.suggestion(skip_begin, skip_end)

    def plot(self, suggest: bool = True, show: bool = False) -> Any:
        """A figure of the loss by rate; needs matplotlib."""
        figure = self.sweep.plot()
        if show:
            figure.show()
        return figure


class Tuner:
    """Finds a learning rate or a batch size for `trainer` before `fit`, as the callbacks LRFinder and BatchSizeFinder
    do."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> Found | None:
        """Search a learning rate in `fit` with copies of `model`, and set it unless `update_attr` is False.

        With `fast_dev_run` nothing is searched, as in `scale_batch_size`. `weights_only` changes nothing, as in `fit`.
        """
        if self._skips("lr_find"):
            return None
        finder = LearningRateFinder(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        self._search(finder, model, train_dataloaders, datamodule, method)
        assert finder.result is not None
        return Found(finder.result)

    def scale_batch_size(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Search the largest batch that fits into memory, and set it; `max_val` is as BatchSizeFinder's."""
        if self._skips("scale_batch_size"):
            return None
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self._search(finder, model, train_dataloaders, datamodule, method)
        return finder.result

    def _skips(self, search: str) -> bool:
        if self._trainer.arguments.fast_dev_run:
            rank_zero_warn(f"{search} searches nothing, as fast_dev_run is set")
        return bool(self._trainer.arguments.fast_dev_run)

    def _search(
        self, finder: Callback, model: Module, loaders: Any, datamodule: DataModule | None, method: str
    ) -> None:
        if method != "fit":
            raise ValueError(
                f"method must be 'fit', got {method!r}: evaluation has no learning rate; set sizes by hand"
            )
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        run = self._trainer._run
        kinds = (callbacks.LRFinder, callbacks.BatchSizeFinder)
        given = run.callbacks
        run.callbacks = [*(item for item in given if not isinstance(item, kinds)), finder]
        try:
            tuner.search(run, model, Sources({"train": loaders, "val": None}, datamodule))
        finally:
            run.callbacks = given
            attach(model, self._trainer)
