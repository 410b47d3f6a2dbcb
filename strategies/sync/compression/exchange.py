"""What shares have encoded, brought to every rank: payloads of all, or their means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.launch.program.values import elements
from lockstep.strategies.sync.messages import gather_rows
from lockstep.strategies.sync.tree import PartialSums, all_reduce

Payload = Sequence[Tensor]


class Exchange:
    """Shares are on the ranks of `group` in their order, as many on each; one rank exchanges nothing."""

    def __init__(self, own: Sequence[int], num_shares: int, group: dist.ProcessGroup | None) -> None:
        self._num_ranks = num_shares // len(own)
        self._num_shares = num_shares
        self._group = group

    def gather(self, own: Sequence[Sequence[Payload]]) -> list[list[Payload]]:
        """The payloads of all shares, from those of each own one: a list of payloads for each share."""
        rows = torch.stack([_bytes([tensor for payload in payloads for tensor in payload]) for payloads in own])
        everyone = self._gather_rows(rows)
        return [_split(row, own[0]) for row in everyone.unbind(0)]

    def mean(self, own: Sequence[Sequence[Payload]]) -> list[Payload]:
        """The means of payloads over all shares, added in the tree of `strategies/sync/tree.py`."""
        kinds = sorted({tensor.dtype for payload in own[0] for tensor in payload}, key=str)
        means: dict[torch.dtype, list[Tensor]] = {}
        for dtype in kinds:
            likes = [tensor for payload in own[0] for tensor in payload if tensor.dtype == dtype]
            rows = [
                torch.cat([t.reshape(-1) for payload in payloads for t in payload if t.dtype == dtype])
                for payloads in own
            ]
            total = self._sum(rows).div_(self._num_shares)
            parts = total.split([like.numel() for like in likes])
            means[dtype] = [part.view_as(like) for part, like in zip(parts, likes, strict=True)]
        queues = {dtype: iter(tensors) for dtype, tensors in means.items()}
        return [[next(queues[tensor.dtype]) for tensor in payload] for payload in own[0]]

    def _sum(self, rows: list[Tensor]) -> Tensor:
        powers = all(number & (number - 1) == 0 for number in (len(rows), self._num_ranks))
        if not powers:  # they do not form subtrees, so every rank adds all
            rows = list(self._gather_rows(torch.stack(rows)).unbind(0))
            rows += [torch.zeros_like(rows[0])] * ((1 << (len(rows) - 1).bit_length()) - len(rows))
        sums = PartialSums[Tensor](lambda one, other: one + other)
        for row in rows:
            sums.append(row)
        total = sums.total()
        if powers and self._num_ranks > 1:
            all_reduce(total, self._group)
        return total

    def _gather_rows(self, rows: Tensor) -> Tensor:
        if self._num_ranks == 1:
            return rows
        everyone = rows.new_empty(self._num_ranks, *rows.shape)
        if rows.is_cpu:
            gather_rows(rows, everyone, self._group)
        else:
            dist.all_gather([*everyone.unbind()], rows, group=self._group)
        return everyone.flatten(0, 1)


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([elements(tensor).view(torch.uint8) for tensor in tensors])


def _split(row: Tensor, like: Sequence[Payload]) -> list[Payload]:
    """Undo `_bytes` of payloads with the shapes and dtypes of `like`."""
    found: list[Payload] = []
    start = 0
    for payload in like:
        tensors = []
        for tensor in payload:
            end = start + tensor.numel() * tensor.element_size()
            tensors.append(row[start:end].clone().view(tensor.dtype).view(tensor.shape))  # clone: aligned
            start = end
        found.append(tensors)
    return found
