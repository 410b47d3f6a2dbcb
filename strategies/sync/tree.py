"""Sums over shares whose bits do not depend on how many ranks the shares are on.

Shares 0 … S-1, S a power of two, are added in one binary tree: 0 and 1, 2 and 3, then these sums, and so on. A rank
whose shares follow each other holds a subtree and adds it by itself (`PartialSums`); ranks add their subtrees in pairs
(`all_reduce`, `reduce_scatter`), by recursive halving, as in Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005): neighbors first, so that the tree is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.sync.collectives import local

T = TypeVar("T")


class PartialSums(Generic[T]):
    """Adds values that come one after the other as the leaves of a binary tree, keeping a partial sum a level.

    `add(first, second)` returns the sum of two neighbors and may change both.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._sums: list[tuple[int, T]] = []

    def append(self, value: T) -> None:
        level = 0
        while self._sums and self._sums[-1][0] == level:
            value = self._add(self._sums.pop()[1], value)
            level += 1
        self._sums.append((level, value))

    def total(self) -> T:
        """The sum, once a power of two of values has been appended; empties the tree."""
        ((_, value),) = self._sums
        self._sums = []
        return value


def total_of(numbers: Sequence[float]) -> float:
    """The sum of numbers in the tree's order; those that lack to a power of two count as zeros."""
    sums = PartialSums[float](lambda one, other: one + other)
    missing = (1 << (len(numbers) - 1).bit_length()) - len(numbers)
    for number in (*numbers, *[0.0] * missing):
        sums.append(number)
    return sums.total()


def add_gradients(one: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    """The sums of two shares' gradients, in place, of which ranks may hold parts; a missing one counts as zeros."""
    pairs = list(zip(one, other, strict=True))
    both = [(local(a), local(b)) for a, b in pairs if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in pairs]


def reduce_scatter(chunks: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks, a power of two of them, of this rank's chunk; `chunks` has one a rank, `[ranks, numel]`.

    Every rank of the group calls it. Each sends and receives (ranks - 1) / ranks of `chunks`.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    distance = 1
    while distance < num_ranks:
        pairs = chunks.unflatten(0, (-1, 2))  # the chunks whose numbers end, in binary, as this rank's so far
        mine = rank // distance % 2
        theirs = pairs[:, 1 - mine].contiguous()
        received = torch.empty_like(theirs)
        _exchange(theirs, received, rank ^ distance, group)
        chunks = received.add_(pairs[:, mine])
        distance *= 2
    return chunks[0]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a tensor over ranks, a power of two of them, in place. Every rank of the group calls it."""
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return
    if num_ranks == 2:  # of two numbers the engine's sum is the tree's
        dist.all_reduce(tensor, group=group)
        return
    flat = tensor.reshape(-1)
    missing = -flat.numel() % num_ranks
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    mine = reduce_scatter(padded.view(num_ranks, -1), group)
    dist.all_gather([*padded.view(num_ranks, -1).unbind(0)], mine.contiguous(), group=group)
    if padded.data_ptr() != tensor.data_ptr():
        tensor.copy_(padded[: flat.numel()].view_as(tensor))


def _exchange(send: Tensor, receive: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    peer = peer if group is None else dist.get_global_rank(group, peer)
    # Receives first: see strategies/sync/messages.py.
    calls = [dist.P2POp(dist.irecv, receive, peer, group), dist.P2POp(dist.isend, send, peer, group)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
