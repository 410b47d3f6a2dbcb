"""Callbacks with Lightning's arguments, in Lightning's order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, SequentialSampler

from lockstep import callbacks
from lockstep.callbacks._support.parameter_state import ParameterState, is_held
from lockstep.callbacks.base import Callback
from lockstep.strategies.data.source import bounds
from lockstep.trainer.lightning.utilities import ModelSummary as Summary

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.trainer import Trainer


class EarlyStopping(callbacks.EarlyStopping):
    """`lockstep.callbacks.EarlyStopping`."""

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        *args: Any,
        **options: Any,
    ) -> None:
        names = ("strict", "check_finite", "stopping_threshold", "divergence_threshold", "check_on_train_epoch_end")
        options |= dict(zip(names, args, strict=False))
        super().__init__(monitor, min_delta=min_delta, patience=patience, verbose=verbose, mode=mode, **options)


class ModelSummary(callbacks.ModelSummary):
    """`lockstep.callbacks.ModelSummary`, which shows nothing with `max_depth=0`; a subclass may override `summarize`,
    which is given `options`.
    """

    def __init__(self, max_depth: int = 1, **options: Any) -> None:
        super().__init__(max_depth)
        self._options = options

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if not self.max_depth:
            return
        if type(self).summarize is ModelSummary.summarize:
            super().on_fit_start(trainer, module)
        elif trainer.is_global_zero:
            table = Summary(module, self.max_depth)
            modes = ["train" if layer.training else "eval" for _, layer in table.named_modules]
            all_modes = [layer.training for layer in module.modules()][1:]
            self.summarize(
                [
                    (" ", list(map(str, range(len(modes))))),
                    ("Name", table.layer_names),
                    ("Type", table.layer_types),
                    ("Params", [f"{number:,}" for number in table.param_nums]),
                    ("Mode", modes),
                ],
                table.total_parameters,
                table.trainable_parameters,
                table.model_size,
                {"train": all_modes.count(True), "eval": all_modes.count(False)},
                total_flops=getattr(table, "total_flops", 0),
                **self._options,
            )

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Override to show the columns of the table and its sums, on rank 0."""


class RichModelSummary(ModelSummary):
    """`lockstep.callbacks.ModelSummary`; the table is a text."""


class ProgressBar(callbacks.ProgressBar):
    """`lockstep.callbacks.ProgressBar`; what draws Lightning's bars changes nothing, but `refresh_rate=0` shows none.

    Raises TypeError for a subclass that overrides what Lightning's bars call.
    """

    def __init__(self, refresh_rate: int = 1, *args: Any, **options: Any) -> None:
        super().__init__()
        self.refresh_rate = refresh_rate
        self._disabled = False
        self._trainer: Trainer | None = None

    @property
    def is_enabled(self) -> bool:
        return not self._disabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        return not self.is_enabled

    def enable(self) -> None:
        """Show the bar from the next `fit`, `validate`, `test` or `predict` on."""
        self._disabled = False

    def disable(self) -> None:
        """Show nothing."""
        self._disabled = True
        self.hide()

    def get_metrics(self, trainer: Trainer, module: Module) -> dict[str, Any]:
        """What the bar shows after its counts: the version of the logger, and values of `prog_bar=True`."""
        version = getattr(trainer.logger, "version", None)
        named = {} if version is None else {"v_num": version[-4:] if isinstance(version, str) else version}
        return named | super().get_metrics(trainer, module)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._trainer = trainer
        if self.is_disabled:
            self.hide()

    @property
    def trainer(self) -> Trainer:
        """That which runs, or ran last, with this bar."""
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__} has no trainer before a run")
        return self._trainer

    @property
    def total_train_batches(self) -> int | float:
        """Batches of the epoch, or as many as `max_steps` leaves."""
        trainer = self.trainer
        steps = trainer.max_steps or -1
        left = steps - trainer.global_step if trainer.max_epochs == -1 and steps > 0 else math.inf
        return min(trainer.num_training_batches, left)

    @property
    def total_val_batches(self) -> int | float:
        """Batches of a validation over all loaders; 0 in an epoch without one."""
        every = self.trainer.check_val_every_n_epoch
        validates = every is None or (self.trainer.current_epoch + 1) % every == 0
        return sum(self.trainer.num_val_batches) if validates else 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trainer": None}

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            if name.startswith("init_") and name.endswith("_tqdm"):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, which the progress bar of lockstep.lightning does not call; "
                    "choose what the bar shows with log(prog_bar=True)"
                )


class TQDMProgressBar(ProgressBar):
    """`lockstep.callbacks.ProgressBar`; `TQDM_MINITERS` of the environment is the least `refresh_rate`."""

    def __init__(self, refresh_rate: int = 1, *args: Any, **options: Any) -> None:
        super().__init__(max(refresh_rate, int(os.environ.get("TQDM_MINITERS") or 0)), *args, **options)


class RichProgressBar(ProgressBar):
    """`lockstep.callbacks.ProgressBar`."""


@dataclass
class RichProgressBarTheme:
    """Styles of Lightning's `RichProgressBar`; they change nothing."""

    description: Any = ""
    progress_bar: Any = "#6206E0"
    progress_bar_finished: Any = "#6206E0"
    progress_bar_pulse: Any = "#6206E0"
    batch_progress: Any = ""
    time: Any = "dim"
    processing_speed: Any = "dim underline"
    metrics: Any = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class DeviceStatsMonitor(callbacks.DeviceStats):
    """`lockstep.callbacks.DeviceStats`, whose names differ; `cpu_stats` changes nothing."""

    def __init__(self, cpu_stats: bool | None = None) -> None:
        super().__init__()


class LearningRateFinder(callbacks.LRFinder):
    """`lockstep.callbacks.LRFinder`, which also searches in too few steps for a suggestion, and then sets nothing."""

    fewest_steps = 1

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        super().__init__(
            min_lr,
            max_lr,
            num_training_steps,
            mode=mode,
            early_stop_threshold=early_stop_threshold,
            update_attr=update_attr,
            attr_name=attr_name or None,
        )

    @property
    def optimal_lr(self) -> Any:
        """What the last search measured; `suggestion()` is the rate."""
        return self.result


class BatchSizeFinder(callbacks.BatchSizeFinder):
    """`lockstep.callbacks.BatchSizeFinder`; raises TypeError for `max_val`, as `max_trials` ends the search."""

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if max_val != 8192:
            raise TypeError("BatchSizeFinder has no argument 'max_val'; lower max_trials instead")
        super().__init__(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin if mode == "binsearch" else 0.0
        )

    @property
    def optimal_batch_size(self) -> int | None:
        """What the last search found."""
        return self.result


class WeightAveraging(callbacks.WeightAveraging):
    """`lockstep.callbacks.WeightAveraging` with the mean of all updates, one after each step, or what `avg_fn` or
    `multi_avg_fn` of `torch.optim.swa_utils` makes of them.

    ValueError at `fit` for a function if a strategy shards parameters.
    """

    def __init__(
        self,
        device: Any = None,
        use_buffers: bool = True,
        avg_fn: Callable[..., Any] | None = None,
        multi_avg_fn: Callable[..., Any] | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("WeightAveraging takes avg_fn or multi_avg_fn, but both are given; drop one of them")
        super().__init__(None, use_buffers=use_buffers)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn

    def parameter_state(self, trainer: Trainer, module: Module) -> ParameterState:
        state = super().parameter_state(trainer, module)
        for name, given in (("avg_fn", self._avg_fn), ("multi_avg_fn", self._multi_avg_fn)):
            whole = name == "avg_fn" or all(map(is_held, state.parameters()))
            if given is not None and (not whole or any(hasattr(p, "to_local") for p in state.parameters())):
                raise ValueError(
                    f"{name} of WeightAveraging would see parts of the model under {trainer.strategy.name}; use "
                    "EMAWeightAveraging(decay=…), or lockstep.callbacks.WeightAveraging for the mean"
                )
        return state

    def multi_average(self) -> Callable[[list[Tensor], list[Tensor], int], Any]:
        if self._avg_fn is None and self._multi_avg_fn is None:
            return super().multi_average()

        def average(averages: list[Tensor], weights: list[Tensor], done: int) -> None:
            count = torch.tensor(done, device=averages[0].device)
            if self._multi_avg_fn is not None:
                self._multi_avg_fn(averages, weights, count)
                return
            assert self._avg_fn is not None
            for old, new in zip(averages, weights, strict=True):
                old.copy_(self._avg_fn(old, new, count))

        return average

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class EMAWeightAveraging(callbacks.WeightAveraging):
    """`lockstep.callbacks.WeightAveraging` with a decay."""

    def __init__(
        self,
        device: Any = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        super().__init__(decay, update_every_n_steps=update_every_n_steps, use_buffers=use_buffers)
        self._first_step, self._first_epoch, self._every = (
            update_starting_at_step,
            update_starting_at_epoch,
            update_every_n_steps,
        )

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None and step_idx >= (self._first_step or 0) and step_idx % self._every == 0:
            return True
        return epoch_idx is not None and self._first_epoch is not None and epoch_idx >= self._first_epoch


class BasePredictionWriter(Callback):
    """Base of callbacks that write predictions: override `write_on_batch_end`, `write_on_epoch_end` or both.

    On several ranks each writes its own batches, into files of its own; `lockstep.callbacks.PredictionWriter` writes
    one file in the order of the dataset. Of ranks that share samples one writes. Raises RuntimeError for virtual ranks.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ValueError(f"write_interval must be 'batch', 'epoch' or 'batch_and_epoch', got {write_interval!r}")
        self.interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        prediction: Any,
        batch_indices: list[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write one batch; `batch_indices` are the samples' places in the dataset, None if the loader does not say."""
        raise NotImplementedError

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: Module, predictions: list[Any], batch_indices: list[Any]
    ) -> None:
        """Write all batches, a list of them for each loader if there are several."""
        raise NotImplementedError

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.arguments.virtual_ranks is not None:
            raise RuntimeError(
                f"{type(self).__name__} derives from BasePredictionWriter, which writes whole batches, and "
                "virtual_ranks cuts them into shares; predict without virtual_ranks, or use "
                "lockstep.callbacks.PredictionWriter"
            )
        self._predictions, self._indices = [], []

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.strategy.topology.is_reporting_rank:
            return
        indices = _indices(trainer, batch_idx, dataloader_idx)
        if self.interval != "epoch":
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval != "batch":
            while len(self._predictions) <= dataloader_idx:
                self._predictions.append([])
                self._indices.append([])
            self._predictions[dataloader_idx].append(tree_map_only(Tensor, _to_cpu, outputs))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self.interval != "batch" and trainer.strategy.topology.is_reporting_rank:
            predictions = self._predictions[0] if len(self._predictions) == 1 else self._predictions
            self.write_on_epoch_end(trainer, module, predictions, self._indices)


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _indices(trainer: Trainer, batch_idx: int, dataloader_idx: int) -> list[int] | None:
    """The places in the dataset of what this rank has of a batch; None if the loader does not say."""
    loaders = trainer.predict_dataloaders
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    loader = loaders[dataloader_idx] if isinstance(loaders, list | tuple) else loaders
    if not isinstance(loader, DataLoader) or not loader.batch_size or not isinstance(loader.sampler, SequentialSampler):
        return None
    topology = trainer.strategy.topology
    size = loader.batch_size if trainer.arguments.split_batches else loader.batch_size * topology.data_size
    batch = range(len(loader.dataset))[batch_idx * size :][:size]  # type: ignore[arg-type]
    first, end = bounds(len(batch), topology.data_rank, topology.data_size)
    return list(batch[first:end])
