"""Sums over ranks by messages between two of them: the algorithms that `DDP(all_reduce=…)` chooses from.

With N ranks and n bytes each:

    ring               2 (N - 1) messages one after the other, each of n / N bytes
    halving_doubling   2 log2 N messages, of n / 2, n / 4 … n / N bytes and back
    tree               2 log2 N messages of n bytes
    hierarchical       a tree within each node, a ring between the first ranks of nodes

All add each element once, on one rank, and send the sum to the others: so all ranks have the same bits.
Sources: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (2009); Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.launch.process_group import new_group

ALGORITHMS = ("ring", "halving_doubling", "tree", "hierarchical")


class AllReduce:
    """Sums tensors over all ranks by one of `ALGORITHMS`. Every rank constructs it, and calls it in the same order.

    `node_rank`: this rank's node, for "hierarchical". On CPU a thread does the work, beside the backward.
    """

    def __init__(self, algorithm: str, node_rank: int, device: torch.device) -> None:
        self._group = new_group()
        nodes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(nodes, torch.tensor([node_rank], device=device))
        places = [int(node) for node in nodes]
        self._nodes = [[rank for rank, at in enumerate(places) if at == node] for node in sorted(set(places))]
        self._algorithm = algorithm
        self._thread = ThreadPoolExecutor(1, "all_reduce") if device.type == "cpu" else None

    def __call__(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Start the sum of a flat tensor, in place."""
        if self._thread is None:
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device])
            self._run(tensor, future)
        else:
            future = torch.futures.Future()
            self._thread.submit(self._run, tensor, future)
        return future

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, tensor: Tensor, future: torch.futures.Future[Tensor]) -> None:
        try:
            add_up(tensor, self._algorithm, self._nodes, self._group)
            future.set_result(tensor)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch annotates the value


@torch.no_grad()
def add_up(tensor: Tensor, algorithm: str, nodes: Sequence[Sequence[int]], group: dist.ProcessGroup | None) -> None:
    """Sum a flat tensor over the ranks of `nodes`, a list of ranks for each node, in place. Each of them calls it."""
    ranks, links = list(itertools.chain(*nodes)), _Links(group)
    if algorithm == "hierarchical":
        (mine,) = [node for node in nodes if links.rank in node]
        _reduce(tensor, mine, links)
        if links.rank == mine[0]:
            _ring(tensor, [node[0] for node in nodes], links)
        _broadcast(tensor, mine, links)
    elif algorithm == "tree":
        _reduce(tensor, ranks, links)
        _broadcast(tensor, ranks, links)
    else:
        (_ring if algorithm == "ring" else _halving_doubling)(tensor, ranks, links)


class _Links:
    """Messages between two ranks of a group of all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> None:
        calls = []
        if receive is not None and receive.numel():  # before sends: see strategies/sync/messages.py
            calls.append(dist.P2POp(dist.irecv, receive, source, self._group))
        if send is not None and send.numel():
            calls.append(dist.P2POp(dist.isend, send, to, self._group))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()


def _ring(tensor: Tensor, ranks: Sequence[int], links: _Links) -> None:
    """Each rank sends to the next one: first parts of sums, then whole sums."""
    number, place = len(ranks), ranks.index(links.rank)
    after, before = ranks[(place + 1) % number], ranks[place - 1]
    chunks = tensor.tensor_split(number)
    received = torch.empty_like(chunks[0])
    for step in range(number - 1):
        mine, theirs = chunks[(place - step) % number], chunks[(place - step - 1) % number]
        links.exchange(mine, after, received[: theirs.numel()], before)
        theirs.add_(received[: theirs.numel()])
    for step in range(number - 1):
        links.exchange(chunks[(place + 1 - step) % number], after, chunks[(place - step) % number], before)


def _halving_doubling(tensor: Tensor, ranks: Sequence[int], links: _Links) -> None:
    """Pairs at growing distances exchange halves of what they still add; ranks beyond a power of two join a partner."""
    power, place = 1 << (len(ranks).bit_length() - 1), ranks.index(links.rank)
    if place >= power:
        links.exchange(tensor, ranks[place - power], None, 0)
        links.exchange(None, 0, tensor, ranks[place - power])
        return
    joined = ranks[place + power] if place + power < len(ranks) else None
    if joined is not None:
        received = torch.empty_like(tensor)
        links.exchange(None, 0, received, joined)
        tensor.add_(received)
    halves: list[tuple[int, Tensor, Tensor]] = []
    mine, distance = tensor, 1
    while distance < power:
        low, high = mine.tensor_split(2)
        peer = ranks[place ^ distance]
        keep, give = (low, high) if place & distance == 0 else (high, low)
        received = torch.empty_like(keep)
        links.exchange(give, peer, received, peer)
        keep.add_(received)
        halves.append((peer, keep, give))
        mine, distance = keep, 2 * distance
    for peer, keep, give in reversed(halves):
        links.exchange(keep, peer, give, peer)
    if joined is not None:
        links.exchange(tensor, joined, None, 0)


def _reduce(tensor: Tensor, ranks: Sequence[int], links: _Links) -> None:
    """The sum on the first of the ranks."""
    place, distance = ranks.index(links.rank), 1
    while distance < len(ranks):
        if place & distance:
            links.exchange(tensor, ranks[place - distance], None, 0)
            return
        if place + distance < len(ranks):
            received = torch.empty_like(tensor)
            links.exchange(None, 0, received, ranks[place + distance])
            tensor.add_(received)
        distance *= 2


def _broadcast(tensor: Tensor, ranks: Sequence[int], links: _Links) -> None:
    """What the first of the ranks has, on all: `_reduce` the other way."""
    place, distance = ranks.index(links.rank), 1
    while distance < len(ranks):
        distance *= 2
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == distance:
            links.exchange(None, 0, tensor, ranks[place - distance])
        elif place % (2 * distance) == 0 and place + distance < len(ranks):
            links.exchange(tensor, ranks[place + distance], None, 0)
