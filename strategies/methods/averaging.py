"""Sums over learners whose bits do not depend on which rank runs which learner.

Learners 0 … L-1 are the leaves of one binary tree, filled up to a power of two with leaves that do not exist: 0 and 1
are added, 2 and 3, then these sums, and so on. A rank adds the subtrees whose learners it runs all; the ranks exchange
these, each rank adds up a part of the elements, and all gather the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.sync.messages import RingGather, chunks, wait

Node = tuple[int, int]
"""Level and index in the level: (0, l) is learner l."""


def add_up(values: dict[Node, Tensor], learners: int) -> dict[Node, Tensor]:
    """Add neighbors of the tree as long as both are there, in place; what is left are the roots of subtrees."""
    values = dict(values)
    for level in range((learners - 1).bit_length()):
        for node in sorted(node for node in values if node[0] == level and not node[1] % 2):
            other = level, node[1] + 1
            if other in values or other[1] << level >= learners:
                value = values.pop(node)
                values[level + 1, node[1] // 2] = value.add_(values.pop(other)) if other in values else value
    return values


def subtrees(own: range, learners: int) -> list[Node]:
    """The roots of the subtrees that a rank adds up by itself, in order."""
    return sorted(add_up({(0, learner): torch.zeros(()) for learner in own}, learners))


def sum_over_learners(
    own: Sequence[Tensor], assignment: Sequence[range], rank: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The sum over all learners of flat tensors of one length and dtype, which it may change; equal on all ranks.

    `own` are those of `assignment[rank]`, in order. Every rank of the group calls it.
    """
    learners, ranks = assignment[-1].stop, len(assignment)
    mine = add_up({(0, learner): tensor for learner, tensor in zip(assignment[rank], own, strict=True)}, learners)
    if ranks == 1:
        ((_, total),) = mine.items()
        return total
    nodes = [subtrees(learners_of, learners) for learners_of in assignment]
    if own[0].is_cpu:
        return _sum_by_messages(mine, nodes, learners, rank, group)
    numel = own[0].numel()
    width = -(-numel // ranks)
    rows = torch.stack([torch.nn.functional.pad(mine[node], (0, width * ranks - numel)) for node in nodes[rank]])
    sent = rows.view(len(rows), ranks, width).transpose(0, 1).contiguous()
    received = rows.new_empty(sum(map(len, nodes)), width)
    dist.all_to_all_single(
        received.view(-1), sent.view(-1), [len(part) * width for part in nodes], [len(rows) * width] * ranks, group
    )
    parts = dict(zip([node for part in nodes for node in part], received.unbind(), strict=True))
    ((_, total),) = add_up(parts, learners).items()
    gathered = rows.new_empty(ranks, width)
    dist.all_gather([*gathered.unbind()], total.contiguous(), group=group)
    return gathered.view(-1)[:numel]


def _sum_by_messages(
    mine: dict[Node, Tensor],
    nodes: Sequence[Sequence[Node]],
    learners: int,
    rank: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The same in chunks: the sums of the first ones are on their way to all ranks while others arrive."""
    ranks = len(nodes)
    total = torch.empty_like(next(iter(mine.values())))
    peers = [(rank + i) % ranks for i in range(1, ranks)]
    arriving = [
        {
            node: (dist.irecv(part, group=group, group_src=peer), part)
            for peer in peers
            for node in nodes[peer]
            for part in [torch.empty_like(chunk)]
        }
        for chunk in chunks(total.tensor_split(ranks)[rank])
    ]
    gather = RingGather(total.tensor_split(ranks), group)
    own = {node: [chunks(part) for part in value.tensor_split(ranks)] for node, value in mine.items()}
    sent = [
        dist.isend(own[node][peer][i], group=group, group_dst=peer)
        for i in range(max(len(parts) for parts in own[nodes[rank][0]]))
        for peer in peers
        for node in nodes[rank]
        if i < len(own[node][peer])
    ]
    for i, (chunk, others) in enumerate(zip(chunks(total.tensor_split(ranks)[rank]), arriving, strict=True)):
        parts = {node: own[node][rank][i] for node in nodes[rank]}
        for node, (work, part) in others.items():
            wait(work)
            parts[node] = part
        ((_, value),) = add_up(parts, learners).items()
        chunk.copy_(value)
        gather.send(chunk)
    gather.finish()
    for work in sent:
        wait(work)
    return total


def gather_numbers(own: Sequence[float], assignment: Sequence[range], group: dist.ProcessGroup | None) -> list[float]:
    """A number of each learner, in order, on all ranks. Every rank of the group calls it."""
    if len(assignment) == 1:
        return list(own)
    longest = max(map(len, assignment))
    mine = torch.zeros(longest, dtype=torch.float64)
    mine[: len(own)] = torch.tensor(own, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in assignment]
    dist.all_gather(rows, mine, group=group)
    return [number for row, learners in zip(rows, assignment, strict=True) for number in row[: len(learners)].tolist()]
