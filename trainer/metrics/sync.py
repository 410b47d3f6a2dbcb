"""How torchmetrics objects meet over ranks: states of other shapes, ranks without a sample, ranks that share
samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.strategies.sync.collective_fingerprint import counting_once
from lockstep.trainer.checkpoint.rank_state import torchmetrics_of
from lockstep.trainer.checkpoint.safetensors_file import CODES
from lockstep.trainer.metrics.beside import watched_updates
from lockstep.trainer.metrics.gathering import gather_values

if TYPE_CHECKING:
    from lockstep.strategies import Strategy

DTYPES = [*CODES]
MAX_DIMS = 8


@contextmanager
def synced_metrics(module: nn.Module, strategy: Strategy) -> Iterator[None]:
    """While it lasts the metrics of `module` gather their states through `strategy`.

    torchmetrics' own gathering ends the process (an assertion in gloo) where one rank has seen no sample
    and a metric keeps samples, and counts those twice that several ranks share. Raises ValueError for a metric over the
    last updates, of which a rank has its own, and at its update for one that counts beside its states.
    """
    place, found = strategy.topology, torchmetrics_of(module)
    refuse_windows(module, place.data_size)
    num_ranks = place.data_size if place.world_size > 1 else strategy.num_devices
    metrics = [metric for metric in found.values() if metric.dist_sync_fn is None] if place.world_size > 1 else []
    for metric in metrics:
        metric.dist_sync_fn, metric._sync_dist = Gather(strategy), Lists(metric, strategy)
    try:
        with uncached(metrics), watched_updates(found, num_ranks, place.world_size == 1):
            yield
    finally:
        for metric in metrics:
            metric.dist_sync_fn = None
            del metric._sync_dist


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


def refuse_windows(module: nn.Module, num_ranks: int) -> None:
    """Raise ValueError for a metric over the last updates, where several ranks or shares have some of them."""
    for name, metric in torchmetrics_of(module).items() if num_ranks > 1 else ():
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
    """`metric._sync_dist` for states that are lists, which stay lists, as in one process.

    torchmetrics gathers the items of some lists one by one, where ranks may have more or fewer, and takes them for
    another's state; joins those of others by rank; and one that is empty, as the boxes of an image without any, is
    missing beside the states that it belongs to.
    """

    def __init__(self, metric: Any, strategy: Strategy) -> None:
        self._metric, self._strategy = metric, strategy

    @counting_once()
    def __call__(self, *args: Any, **options: Any) -> None:
        metric = self._metric
        lists = {name: held for name in metric._reductions if isinstance(held := getattr(metric, name), list)}
        own = lists if self._strategy.topology.is_reporting_rank else {}
        sent = {name: _sent(items) for name, items in own.items()}
        everyone = gather_values(self._strategy, sent, "state") if lists else []
        for name in lists:
            setattr(metric, name, [])
        reductions = metric._reductions
        metric._reductions = of_all_samples(metric)
        try:
            type(metric)._sync_dist(metric, *args, **options)
        finally:
            metric._reductions = reductions
        together = joined([{name: _received(part[name]) for name in lists} for part in everyone if part])
        for name, items in together.items():
            held = lists[name]
            device = held[0].device if held and isinstance(held[0], Tensor) else metric.device
            items = [item.to(device) if isinstance(item, Tensor) else item for item in items]
            if items:
                setattr(metric, name, reduced(items, metric._reductions[name]))

    def __deepcopy__(self, memo: Any) -> Lists:
        return Lists(memo.get(id(self._metric), self._metric), self._strategy)

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


def joined(parts: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """The lists of a metric with the items of all ranks, or shares: an item of each in turn, which is the order of one
    process if an update adds one item. Where an update adds more items to one list than to another they follow by rank,
    so that items that belong together are at the same place in each."""
    is_even = all(len({len(items) for items in part.values() if items}) < 2 for part in parts)
    rows = {name: [part[name] for part in parts] for name in (parts[0] if parts else ())}
    return {name: [*(in_turn(row) if is_even else chain.from_iterable(row))] for name, row in rows.items()}


def in_turn(rows: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """An item of each row in turn."""
    return (item for turn in zip_longest(*rows, fillvalue=_NOTHING) for item in turn if item is not _NOTHING)


def reduced(items: list[Any], reduction: Any) -> Any:
    """What `compute` gets of a list: the list, as in one process, or what the metric's own reduction makes of it."""
    from torchmetrics.utilities import dim_zero_cat

    return items if reduction in (None, dim_zero_cat) else reduction(items)


def _sent(items: list[Any]) -> Any:
    """Tensors that are alike but for their number of rows as one, with these numbers: fewer to send."""
    kinds = {(item.dtype, item.shape[1:], item.dim()) if isinstance(item, Tensor) else None for item in items}
    if len(items) < 2 or len(kinds) > 1 or None in kinds:
        return items
    if not items[0].dim():
        return {"rows": torch.stack(items), "numbers": None}
    return {"rows": torch.cat(items), "numbers": [len(item) for item in items]}


def _received(sent: Any) -> list[Any]:
    if not isinstance(sent, dict):
        return sent
    return [*(sent["rows"].unbind() if sent["numbers"] is None else sent["rows"].split(sent["numbers"]))]


_NOTHING = object()


def _nothing() -> None:
    return None
