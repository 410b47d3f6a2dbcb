"""What every rank holds for itself and rank 0's overwrites: buffers, such as the statistics of BatchNorm, and whole
models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.sync.collectives import local
from lockstep.strategies.sync.contents import same_values

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_LOOKS = 10
"""Steps in which the host waits for an accelerator to compare buffers."""


class SharedBuffers:
    """Rank 0's buffers overwrite the others' after each step.

    `broadcast`: True whatever the others hold; None if they hold the same, but for statistics of normalizing layers;
    False leaves each rank its own.
    """

    def __init__(self, model: nn.Module, broadcast: bool | None, group: dist.ProcessGroup | None = None) -> None:
        self._model, self._broadcast, self._group = model, broadcast, group
        self._modules = [module for module in model.modules() if module._buffers]
        self._looks = 0

    def share(self, had_samples: bool) -> None:
        """Every rank of the group calls it after a step. Raises RuntimeError for a buffer that differs from rank 0's,
        on a rank that `had_samples` in all of the step."""
        if self._broadcast is False or not self._modules:
            return
        compares = self._broadcast is None and had_samples
        self._looks += compares
        differing = share_buffers(self._modules, self._group, compares, waits=self._looks <= _LOOKS)
        if not differing:
            return
        names = sorted(name for name, buffer in self._model.named_buffers() if id(buffer) in differing)
        raise RuntimeError(
            f"after a step the ranks hold different values of a buffer ({', '.join(names[:5])}), computed from the "
            "samples of each, and none of them is that of one process; sum what goes into it over the ranks "
            "(self.sum_over_ranks), use virtual_ranks, or give the strategy broadcast_buffers=True to take rank 0's"
        )


@torch.no_grad()
def share_model(model: nn.Module) -> None:
    """Rank 0's parameters and buffers overwrite the others'. Every rank calls it."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    share_buffers(model.modules())


@torch.no_grad()
def share_buffers(
    modules: Iterable[nn.Module], group: dist.ProcessGroup | None = None, compares: bool = False, waits: bool = False
) -> set[int]:
    """Rank 0's buffers of each module itself overwrite the others', as in DDP; one broadcast a dtype. Every rank of the
    group calls it.

    With `compares` returns the `id` of those that were others on this rank, without statistics of normalizing layers;
    on an accelerator only if the host `waits` for it.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    compared: set[int] = set()
    for buffer, is_statistic in {
        id(buffer): (buffer, isinstance(module, _NORMS))
        for module in modules
        for buffer in module._buffers.values()
        if buffer is not None
    }.values():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
        if compares and not is_statistic and (waits or buffer.is_cpu):
            compared.add(id(buffer))
    differing = set()
    for buffers in by_dtype.values():
        mine = [local(buffer) for buffer in buffers]  # that of a tensor-parallel layer is a DTensor
        flat = torch.cat([buffer.reshape(-1) for buffer in mine])
        dist.broadcast(flat, group=group, group_src=0)
        pieces = [piece.view_as(own) for own, piece in zip(mine, flat.split([b.numel() for b in mine]), strict=True)]
        for buffer, own, piece in zip(buffers, mine, pieces, strict=True):
            if id(buffer) in compared and not same_values(own, piece):
                differing.add(id(buffer))
        for own, piece in zip(mine, pieces, strict=True):
            own.copy_(piece)
    return differing
