"""Callbacks with Lightning's arguments, in Lightning's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, SequentialSampler

from lockstep import callbacks
from lockstep.callbacks._support.parameter_state import ParameterState, is_held
from lockstep.callbacks.base import Callback
from lockstep.strategies.data.source import bounds
from lockstep.trainer.lightning.callbacks.uncalled import Uncalled

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.trainer import Trainer


class EarlyStopping(Uncalled, callbacks.EarlyStopping):
    """`lockstep.callbacks.EarlyStopping`."""

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__(
            monitor,
            min_delta=min_delta,
            patience=patience,
            verbose=verbose,
            mode=mode,
            strict=strict,
            check_finite=check_finite,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            check_on_train_epoch_end=check_on_train_epoch_end,
            log_rank_zero_only=log_rank_zero_only,
        )


class DeviceStatsMonitor(callbacks.DeviceStats):
    """`lockstep.callbacks.DeviceStats`, whose names differ; `cpu_stats` changes nothing."""

    def __init__(self, cpu_stats: bool | None = None) -> None:
        super().__init__()


class LearningRateFinder(Uncalled, callbacks.LRFinder):
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


class BatchSizeFinder(Uncalled, callbacks.BatchSizeFinder):
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
