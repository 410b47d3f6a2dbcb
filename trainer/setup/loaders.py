"""Loaders of a run: where they come from, how they are sharded, how many batches a limit allows, and what of their data
must be the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lockstep.strategies.data.combined import CombinedLoader, is_nested, is_several
from lockstep.strategies.data.order import other_indices
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.trainer.seeding import derive

if TYPE_CHECKING:
    from lockstep.trainer.datamodule import DataModule
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState


@dataclass(frozen=True)
class Sources:
    """Where the loaders of a run come from: what the caller gave, else the DataModule, else the module."""

    loaders: Mapping[str, Any] = field(default_factory=dict)
    """By kind: "train", "val", "test", "predict"."""
    datamodule: DataModule | None = None

    def get(self, module: Module, kind: str) -> Any:
        """The loader, the list or dict of loaders, or None."""
        given = self.loaders.get(kind)
        if given is not None:
            return given
        for owner in (self.datamodule, module):
            method = None if owner is None else loader_method(owner, kind)
            found = None if method is None else method()  # a user may have set it to None
            if found is not None:
                return found
        return None


def loader_method(owner: Module | DataModule, kind: str) -> Callable[[], Any] | None:
    """The method of a Module or DataModule that returns its loaders of a kind."""
    if kind == "train":
        return owner.train_dataloader
    if kind == "val":
        return owner.val_dataloader
    return owner.test_dataloader if kind == "test" else owner.predict_dataloader


def evaluation_loaders(run: RunState, sources: Any, kind: str, overfit: float | int = 0) -> list[ShardedLoader]:
    """The sharded loaders of an evaluation, in order; sets the Trainer's number of batches of each."""
    loaders = loaders_of(sources)
    shuffle = False if overfit else None
    sharded = [_shared_out(run, loader, derive(run.seed, kind, i), shuffle) for i, loader in enumerate(loaders)]
    measure_evaluation(run, sharded, kind)
    return sharded


def measure_evaluation(run: RunState, sharded: Sequence[ShardedLoader], kind: str) -> None:
    """Set the Trainer's number of batches, and limit, of each loader of an evaluation."""
    arguments = run.arguments
    overfit = arguments.overfit_batches if run.stage == "fit" else 0
    limits = {
        "val": arguments.limit_val_batches,
        "test": arguments.limit_test_batches,
        "predict": arguments.limit_predict_batches,
    }
    wanted = overfit or limits[kind]
    name = "overfit_batches" if overfit else f"limit_{kind}_batches"
    run.evaluation_limits[kind] = [limit_of(wanted, length_of(loader), name) for loader in sharded]
    size = run.strategy.virtual_ranks or run.strategy.topology.data_size
    for i, (loader, limit) in enumerate(zip(sharded, run.evaluation_limits[kind], strict=True)):
        if (
            arguments.split_batches
            and not loader.splits
            and limit is not None
            and size > 1
            and not (kind == "predict" and arguments.fast_dev_run)
        ):
            if limit % size:
                raise ValueError(
                    f"{name}={wanted} is {limit} batches in all with split_batches=True, but those of loader {i} "
                    "cannot be cut and "
                    f"do not share out over {size} ranks; give a multiple of {size} or a DataLoader with a batch_size"
                )
            run.evaluation_limits[kind][i] = limit // size
    counts = [math.inf if (n := length_of(loader)) is None else n for loader in sharded]
    run.evaluation_batches[kind] = [
        n if limit is None else min(n, limit) for n, limit in zip(counts, run.evaluation_limits[kind], strict=True)
    ]
    steps = arguments.num_sanity_val_steps
    if run.sanity_checking and steps >= 0:
        limited = run.evaluation_limits[kind]
        run.evaluation_limits[kind] = [steps if limit is None else min(limit, steps) for limit in limited]


def follow_training(run: RunState, loader: ShardedLoader) -> bool:
    """Read data whose length has changed as it is now; return whether it has. Every rank calls it at the start of an
    epoch.

    Raises ValueError if the length is not the same on all ranks.
    """
    return _follow(run, [loader], run.progress.current_epoch, "training")


def follow_evaluation(run: RunState, loaders: Sequence[ShardedLoader], kind: str) -> None:
    """Measure loaders of `kind` again if the length of their data has changed. Every rank calls it before they are
    read. Raises as `follow_training`."""
    if _follow(run, loaders, 0, kind):
        measure_evaluation(run, loaders, kind)


def check_orders(run: RunState, loaders: Sequence[ShardedLoader], kind: str) -> None:
    """Raise RuntimeError, on all ranks, if a user's sampler has yielded other indices on some of them. Every rank calls
    it once the loaders are read, where no step has compared them."""
    orders = [loader.order for loader in loaders]
    if run.world_size == 1 or not loaders:
        return
    first, *others = run.strategy.all_gather(torch.tensor([hashed for hashed, _ in orders])).tolist()
    for rank, found in enumerate(others, 1):
        if found != first:
            name = next(name for here, there, (_, name) in zip(first, found, orders, strict=True) if here != there)
            raise other_indices(name, kind, f"rank {rank}", 0)


def check_rows(run: RunState, loaders: Sequence[ShardedLoader], weighed: bool) -> None:
    """Raise ValueError, on all ranks, if a collate function has made more rows of a sample on one rank than on another,
    whose means were `weighed` as if it made equally many. Every rank calls it once it has read some batches.

    A rank by itself sees only that its own batches differ.
    """
    loaders = [loader for loader in loaders if loader.may_filter]
    if run.world_size == 1 or not loaders:
        return
    mine = [rows if weighed else (math.inf, 0.0) for loader in loaders for rows in loader.rows_each]
    found = run.strategy.all_gather(torch.tensor(mine, dtype=torch.float64))
    for least, most in zip(found[..., 0].amin(0).tolist(), found[..., 1].amax(0).tolist(), strict=True):
        if least < most > 1:
            raise ValueError(
                f"the loader's collate function makes {least:g} rows of a sample on one rank and {most:g} on another, "
                "so the mean over a batch cannot be weighted among ranks; return Loss(total, count) from "
                "training_step, and give self.log batch_size="
            )


def samples_of_all(run: RunState, window: Window) -> int:
    """The samples that collate functions left in a window, over all ranks. Every rank calls it."""
    mine = sum(micro_batch.num_samples for micro_batch in window.micro_batches)
    return int(run.strategy.all_reduce(torch.tensor(mine))) * run.strategy.topology.data_size // run.world_size


def _follow(run: RunState, loaders: Sequence[ShardedLoader], epoch: int, kind: str) -> bool:
    """Whether any of the loaders has another length than before."""
    lengths = [loader.lengths(epoch) for loader in loaders]
    if run.world_size > 1 and loaders:
        first, *others = run.strategy.all_gather(torch.tensor([n for each in lengths for n in each])).tolist()
        for rank, found in enumerate(others, 1):
            if found != first:
                here, there = (each[0] if len(each) == 1 else each for each in (first, found))
                names = ", ".join(type(loader.dataset).__name__ for loader in loaders)
                raise ValueError(
                    f"the {kind} data must have the same length on all ranks, but that of {names} is {here} on rank 0 "
                    f"and {there} on rank {rank}; change it alike on every rank"
                )
    changed = [loader.follow(now) for loader, now in zip(loaders, lengths, strict=True)]
    return any(changed)


def _shared_out(run: RunState, loader: Any, seed: int, shuffle: bool | None) -> ShardedLoader:
    """A loader to evaluate; with `split_batches` its batches are split over ranks if they can be, as in training."""
    if run.arguments.split_batches and (run.strategy.virtual_ranks or run.strategy.topology.data_size > 1):
        with suppress(ValueError):  # its batches are not ours to cut
            return run.strategy.shard_loader(loader, seed=seed, shuffle=shuffle, split=True)
    return run.strategy.shard_loader(loader, seed=seed, shuffle=shuffle)


def loaders_of(source: Any) -> list[Any]:
    """The loaders in what a user gives: None, a loader, or a list or dict of loaders, nested or not."""
    if source is None:
        return []
    if isinstance(source, CombinedLoader) and source.mode == "sequential":
        return list(source.named().values())
    if is_several(source):
        return [
            loader
            for item in (source.values() if isinstance(source, Mapping) else source)
            for loader in (loaders_of(item) if is_nested(item) else [item])
        ]
    return [] if isinstance(source, (list, tuple)) and not source else [source]


def combined(source: Any) -> Any:
    """A dict or list of training loaders as one loader, a CombinedLoader of one loader as that; anything else as it
    is."""
    if isinstance(source, CombinedLoader) and source.mode == "sequential" and len(source.named()) == 1:
        return next(iter(source.named().values()))
    return CombinedLoader(source) if is_several(source) else source


def limit_of(wanted: float | int | None, total: int | None, name: str) -> int | None:
    """Batches that a limit allows: a whole number as it is, a fraction of the total; None for no limit."""
    if wanted is None or (isinstance(wanted, float) and wanted == 1.0):
        return None
    if isinstance(wanted, int):
        return wanted
    if total is None:
        raise ValueError(
            f"{name}={wanted} is a fraction, which needs a loader of known length; give a number of batches"
        )
    limit = int(total * wanted)
    if limit == 0 and wanted > 0:
        raise ValueError(
            f"{name}={wanted} of {total} batches is less than one; give at least {1 / total:.4f} or a number of batches"
        )
    return limit


def length_of(loader: ShardedLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
