"""The norm of a gradient, with the same bits however its rows are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BINS = 3


@torch.no_grad()
def total_norm(
    pieces: Sequence[Tensor], rows: int, device: torch.device, groups: Sequence[dist.ProcessGroup | None] = ()
) -> Tensor:
    """The 2-norm (0-dim, float64) of tensors of which this rank holds some rows.

    `pieces`: what this rank holds of them; a row is whole on one rank. `rows`: how many all tensors have together.
    `groups`: the ranks that hold other rows. Every rank of them calls it, with the same number of rows.

    A row's norm is taken by torch. The sum of their squares is that of Demmel and Nguyen, "Parallel Reproducible
    Summation" (2015): each is cut into pieces that are multiples of one unit, so that sums of pieces are exact, in
    any order.
    """
    found = [_row_norms(tensor) for tensor in pieces if tensor.numel()]
    norms = (
        torch.cat([row.to(device) for row in found]) if found else torch.zeros(0, dtype=torch.float64, device=device)
    )
    largest = norms.max() if norms.numel() else torch.zeros((), dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scale = torch.where(
        largest > 0, torch.exp2(-torch.frexp(largest)[1].double().clamp(-1000, 1000)), torch.ones_like(largest)
    )
    rest = (norms * scale).square_()  # at most 1: the scale is a power of two
    bits = math.ceil(math.log2(max(2, rows)))
    sums = []
    for i in range(_BINS):
        unit = 1.5 * 2.0 ** ((i + 1) * bits - 53 * i)
        part = (rest + unit) - unit
        rest = rest - part
        sums.append(part.sum())
    total = torch.stack(sums)
    for group in groups:
        dist.all_reduce(total, group=group)
    return ((total[0] + total[1]) + total[2]).sqrt() / scale


def _row_norms(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.dim() < 2:
        return tensor.reshape(-1).double().abs()
    return torch.linalg.vector_norm(tensor.reshape(tensor.shape[0], -1), dim=1, dtype=torch.float64)
