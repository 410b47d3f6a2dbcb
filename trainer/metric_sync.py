"""How torchmetrics objects meet over ranks: states of other shapes, ranks without a sample, ranks that share samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.snapshot import torchmetrics_of

if TYPE_CHECKING:
    from strategies import Strategy

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
MAX_DIMS = 8


@contextmanager
def synced_metrics(module: nn.Module, strategy: Strategy) -> Iterator[None]:
    """While it lasts the metrics of `module` gather their states through `strategy`.

    torchmetrics' own gathering ends the process (an assertion in gloo) where one rank has seen no sample
    and a metric keeps samples, and counts those twice that several ranks share.
    """
    metrics = [metric for metric in torchmetrics_of(module).values() if metric.dist_sync_fn is None] if strategy.world_size > 1 else []
    for metric in metrics:
        metric.dist_sync_fn = Gather(strategy)
    try:
        yield
    finally:
        for metric in metrics:
            metric.dist_sync_fn = None


class Gather:
    """`gather(tensor)` returns the tensor of each rank that reports and has one. Every rank calls it."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """`group` is torchmetrics' and not used. Shapes and dtypes may differ; up to 8 dimensions."""
        strategy = self._strategy
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        header = [int(strategy.reports), DTYPES.index(tensor.dtype), data.numel(), tensor.dim(), *tensor.shape]
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


def _nothing() -> None:
    return None
