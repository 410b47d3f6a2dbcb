"""How torchmetrics objects meet over ranks: states of other shapes, ranks without a sample, ranks that share
samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.strategies.sync.collective_fingerprint import counting_once
from lockstep.trainer.checkpoint.rank_state import torchmetrics_of

if TYPE_CHECKING:
    from lockstep.strategies import Strategy

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
MAX_DIMS = 8


@contextmanager
def synced_metrics(module: nn.Module, strategy: Strategy) -> Iterator[None]:
    """While it lasts the metrics of `module` gather their states through `strategy`.

    torchmetrics' own gathering ends the process (an assertion in gloo) where one rank has seen no sample
    and a metric keeps samples, and counts those twice that several ranks share. Raises ValueError for a metric over the
    last updates, of which a rank has its own.
    """
    refuse_windows(module, strategy.topology.data_size)
    metrics = (
        [metric for metric in torchmetrics_of(module).values() if metric.dist_sync_fn is None]
        if strategy.topology.world_size > 1
        else []
    )
    for metric in metrics:
        metric.dist_sync_fn, metric._sync_dist = Gather(strategy), EvenLists(metric, strategy)
    try:
        with uncached(metrics):
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


class EvenLists:
    """`metric._sync_dist` where ranks have updated a metric more or less often.

    torchmetrics gathers the tensors of a list one by one, where it does not join them first (retrieval), and so
    takes a rank's third for another's first metric. Here every rank gathers equally many.
    """

    def __init__(self, metric: Any, strategy: Strategy) -> None:
        self._metric, self._strategy = metric, strategy

    @counting_once()
    def __call__(self, *args: Any, **options: Any) -> None:
        metric = self._metric
        names = [
            name
            for name, reduction in metric._reductions.items()
            if reduction is None and isinstance(getattr(metric, name), list)
        ]
        if names:
            lengths = (
                self._strategy.all_gather(torch.tensor([len(getattr(metric, name)) for name in names])).amax(0).tolist()
            )
            for name, length in zip(names, lengths, strict=True):
                mine = getattr(metric, name)
                setattr(metric, name, mine + [torch.empty(0, device=metric.device)] * (length - len(mine)))
        type(metric)._sync_dist(metric, *args, **options)

    def __deepcopy__(self, memo: Any) -> EvenLists:
        return EvenLists(memo.get(id(self._metric), self._metric), self._strategy)

    def __reduce__(self) -> Any:
        return _nothing, ()  # as `Gather`


def _nothing() -> None:
    return None
