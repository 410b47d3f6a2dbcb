"""What every rank holds for itself and rank 0's overwrites: buffers, such as the statistics of BatchNorm, and whole
models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.sync.collectives import local


@torch.no_grad()
def share_model(model: nn.Module) -> None:
    """Rank 0's parameters and buffers overwrite the others'. Every rank calls it."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    share_buffers(model.modules())


def share_buffers(modules: Iterable[nn.Module], group: dist.ProcessGroup | None = None) -> None:
    """Rank 0's buffers of each module itself overwrite the others', as in DDP; one broadcast a dtype. Every rank of the
    group calls it."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in {
        id(buffer): buffer for module in modules for buffer in module._buffers.values() if buffer is not None
    }.values():
        by_dtype.setdefault(buffer.dtype, []).append(local(buffer))  # that of a tensor-parallel layer is a DTensor
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, group=group, group_src=0)
        for buffer, piece in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(piece.view_as(buffer))
