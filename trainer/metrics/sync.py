"""How torchmetrics objects meet over ranks: states of other shapes, ranks without a sample, ranks that share
samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from lockstep.strategies.sync.collective_fingerprint import counting_once
from lockstep.trainer.checkpoint.rank_state import torchmetrics_of
from lockstep.trainer.checkpoint.safetensors_file import CODES
from lockstep.trainer.kept.owners import modules_of
from lockstep.trainer.metrics.beside import watched_updates
from lockstep.trainer.metrics.gathering import gather_values
from lockstep.trainer.metrics.groups import fix_groups
from lockstep.trainer.metrics.updates import (
    as_sent,
    count_no_more,
    count_updates,
    counted_updates,
    growing,
    joined,
    leader_of,
    reduced,
    rows_of,
)

if TYPE_CHECKING:
    from lockstep.strategies import Strategy
    from lockstep.trainer.run.state import RunState

DTYPES = [*CODES]
MAX_DIMS = 8


@contextmanager
def synced_metrics(module: nn.Module, strategy: Strategy, callbacks: Iterable[Any]) -> Iterator[None]:
    """While it lasts the metrics of `module`, and those in attributes of `callbacks`, gather their states through
    `strategy`.

    torchmetrics' own gathering ends the process (an assertion in gloo) where one rank has seen no sample
    and a metric keeps samples, and counts those twice that several ranks share. Raises ValueError for a metric over the
    last updates, of which a rank has its own, and at its update for one that counts beside its states.
    """
    place, found = strategy.topology, _found(module, callbacks)
    named = {name: metric for name, metric, _ in found}
    refuse_windows(named, place.data_size)
    num_ranks = place.data_size if place.world_size > 1 else strategy.num_devices
    parts = [part for _, metric, part in found if metric.dist_sync_fn is None and place.world_size > 1]
    metrics = [metric for _, metric, _ in found if metric.dist_sync_fn is None and place.world_size > 1]
    for metric, part in zip(metrics, parts, strict=True):
        metric.dist_sync_fn, metric._sync_dist = Gather(strategy), Lists(metric, strategy, part)
    try:
        with uncached(metrics), counted_updates(metrics), watched_updates(named, num_ranks, place.world_size == 1):
            yield
    finally:
        for metric in metrics:
            metric.dist_sync_fn = None
            del metric._sync_dist


def sync_made(run: RunState, module: nn.Module) -> None:
    """Let metrics that hooks of the start of a run or an epoch have made gather as those do that there were before."""
    for _, metric, part in _found(module, run.callbacks) if run.world_size > 1 and run.shares is None else ():
        if metric.dist_sync_fn is not None:
            continue
        run.undo.append(partial(_let_alone, ref(metric), metric.compute_with_cache))
        metric.dist_sync_fn, metric._sync_dist = Gather(run.strategy), Lists(metric, run.strategy, part)
        metric.compute_with_cache, metric._computed = False, None
        count_updates(metric)


def _let_alone(of: ref[Any], with_cache: bool) -> None:
    if (metric := of()) is not None:  # else the next epoch has made another one
        metric.dist_sync_fn, metric.compute_with_cache = None, with_cache
        del metric._sync_dist
        count_no_more(metric)


def _found(module: nn.Module, callbacks: Iterable[Any]) -> list[tuple[str, Any, nn.Module]]:
    """The torchmetrics objects of `module` and in attributes of callbacks: names, objects, and what holds them."""
    found = {id(metric): (name, metric, module) for name, metric in torchmetrics_of(module).items()}
    for place, part in modules_of(callbacks, module).items():
        fix_groups(part)
        for name, metric in torchmetrics_of(part).items():
            found.setdefault(id(metric), (f"{place}.{name}" if name else place, metric, part))
    return [*found.values()]


@contextmanager
def uncached(metrics: Sequence[Any]) -> Iterator[None]:
    """While it lasts each `compute` of `metrics` gathers: a rank that has seen no sample since the last one would
    return what it has kept, and others wait for it or take its next metric for this one."""
    kept = [metric.compute_with_cache for metric in metrics]
    for metric in metrics:
        metric.compute_with_cache, metric._computed = False, None
    try:
        yield
    finally:
        for metric, value in zip(metrics, kept, strict=True):
            metric.compute_with_cache = value


def refuse_windows(metrics: Mapping[str, Any], num_ranks: int) -> None:
    """Raise ValueError for a metric over the last updates, where several ranks or shares have some of them."""
    for name, metric in metrics.items() if num_ranks > 1 else ():
        if any(kind.__module__ == "torchmetrics.wrappers.running" for kind in type(metric).__mro__):
            raise ValueError(
                f"{name} ({type(metric).__name__}) is over the last {getattr(metric, 'window', 'few')} updates, and "
                f"each of {num_ranks} ranks or shares has others; log the metric that it wraps, or use one rank"
            )


class Gather:
    """`gather(tensor)` returns the tensor of each rank that reports and has one. Every rank calls it."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @counting_once()
    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """`group` is torchmetrics' and not used. Shapes and dtypes may differ; up to 8 dimensions."""
        strategy = self._strategy
        data = (
            tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        )  # one element may have any stride
        header = [
            int(strategy.topology.is_reporting_rank),
            DTYPES.index(tensor.dtype),
            data.numel(),
            tensor.dim(),
            *tensor.shape,
        ]
        headers = strategy.all_gather(torch.tensor(header + [0] * (MAX_DIMS + 4 - len(header)))).tolist()
        longest = -(-max(row[2] for row in headers) // 16) * 16  # so that every row is aligned for its dtype
        rows: Any = strategy.all_gather(nn.functional.pad(data, (0, longest - data.numel()))) if longest else []
        found = []
        for row, (reports, dtype, size, dims, *shape) in zip(rows, headers, strict=False):
            if reports and size:
                found.append(row[:size].view(DTYPES[dtype]).reshape(shape[:dims]))
        return found or [tensor]

    def __deepcopy__(self, memo: Any) -> Gather:
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy in a file or another process belongs to no run


class Lists:
    """`metric._sync_dist` for states that grow by what an update adds: lists, which stay lists, as in one process, and
    tensors of rows.

    torchmetrics gathers the items of some lists one by one, where ranks may have more or fewer, and takes them for
    another's state; joins those of others by rank; and one that is empty, as the boxes of an image without any, is
    missing beside the states that it belongs to.
    """

    def __init__(self, metric: Any, strategy: Strategy, module: nn.Module) -> None:
        self._metric, self._strategy, self._module = metric, strategy, module

    @counting_once()
    def __call__(self, *args: Any, **options: Any) -> None:
        metric = self._metric
        lists = {name: getattr(metric, name) for name in growing(metric)}
        own = lists if self._strategy.topology.is_reporting_rank else {}
        sent = as_sent(metric, own, metric._update_count, rows_of(leader_of(metric, self._module)))
        everyone = gather_values(self._strategy, sent, "state") if lists else []
        for name in lists:
            setattr(metric, name, [])
        reductions = metric._reductions
        metric._reductions = of_all_samples(metric)
        try:
            type(metric)._sync_dist(metric, *args, **options)
        finally:
            metric._reductions = reductions
        together = joined([part for part in everyone if part])
        for name, held in lists.items():
            device = held[0].device if len(held) and isinstance(held[0], Tensor) else metric.device
            items = [item.to(device) if isinstance(item, Tensor) else item for item in together.get(name, ())]
            setattr(metric, name, reduced(items, held, metric._reductions[name]))

    def __deepcopy__(self, memo: Any) -> Lists:
        return Lists(memo.get(id(self._metric), self._metric), self._strategy, self._module)

    def __reduce__(self) -> Any:
        return _nothing, ()  # as `Gather`


def of_all_samples(metric: Any) -> dict[str, Any]:
    """How each state of `metric` is put together; a mean only where it is the same for all."""
    from torchmetrics.utilities import dim_zero_mean

    named = metric._reductions.items()
    return {name: partial(_the_same, metric, name) if how is dim_zero_mean else how for name, how in named}


def _the_same(metric: Any, name: str, values: Tensor) -> Tensor:
    if not all(torch.equal(value, values[0]) for value in values):
        raise ValueError(
            f"{type(metric).__name__} keeps {name} with dist_reduce_fx='mean', and ranks or shares with other samples "
            "hold other values, whose mean is not that of one process; keep a sum and a count with "
            "dist_reduce_fx='sum', and divide them in compute"
        )
    return values[0]


def _nothing() -> None:
    return None
