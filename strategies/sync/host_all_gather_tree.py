"""A few numbers from every rank to every rank over several nodes: up and down a tree of connections.

A rank is connected with its parent and its children, so N ranks need N - 1 connections, and one exchange 2 (N - 1)
messages, of the size of one rank's numbers; a gloo all-gather needs N (N - 1) of each. On the way up the lowest, the
highest and the sum of each number are taken. Only if someone asks for them do the numbers of each rank travel.
A thread waits for the messages, beside what the rank computes.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lockstep.strategies.sync.connections import Ended, connect, receive_bytes

FANOUT = 8
"""Children of a rank. 64 ranks are two levels below the first, 4,096 are four."""
_HEADER = struct.Struct("<qq")  # what kind of message, and how many numbers follow
_NUMBERS, _ENDED = 0, 1


def numbers(world_size: int, group: dist.ProcessGroup | None) -> Sequence[int]:
    """The numbers among all ranks of those of a group, by which messages name them."""
    return range(world_size) if group is None else dist.get_process_group_ranks(group)


class Links:
    """The connections of one rank: `parent` is None on the first, `children` are by rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        fanout: int = FANOUT,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Connect the ranks of `group`, by default all, of which this is number `rank`; each calls it."""
        self.rank, self.names = rank, numbers(world_size, group)
        below = range(rank * fanout + 1, min(world_size, rank * fanout + fanout + 1))  # the order of what is summed
        above = [(rank - 1) // fanout] if rank else []
        ours, self.children = connect(rank, world_size, above, below, timeout_s, group)
        self.parent = next(iter(ours.items()), None)

    def reduce(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """Lowest, highest and sum of each number over all ranks, one after the other."""
        width = len(numbers)
        found = [*numbers, *numbers, *numbers]
        for child, connection in self.children.items():
            theirs = _receive(connection, child)
            for i in range(width):
                found[i] = min(found[i], theirs[i])
                found[width + i] = max(found[width + i], theirs[width + i])
                found[2 * width + i] += theirs[2 * width + i]
        return self._handed_down(tuple(found))

    def gather(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """The numbers of all ranks, each with its rank before them, in no order."""
        rows = (float(self.rank), *numbers)
        for child, connection in self.children.items():
            rows += _receive(connection, child)
        return self._handed_down(rows)

    def end(self, rank: int) -> None:
        """Tell the others that `rank` has ended, and close."""
        for connection in self._all():
            with suppress(OSError):
                connection.sendall(_HEADER.pack(_ENDED, rank))
        self.close()

    def close(self) -> None:
        for connection in self._all():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            connection.close()

    def _all(self) -> list[socket.socket]:
        return [*self.children.values(), *([self.parent[1]] if self.parent is not None else [])]

    def _handed_down(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        if self.parent is not None:
            above, connection = self.parent
            _send(connection, above, numbers)
            numbers = _receive(connection, above)
        for child, connection in self.children.items():
            _send(connection, child, numbers)
        return numbers


class Worker:
    """Runs what it is given, in order, in a thread of its own."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._tasks: queue.SimpleQueue[tuple[Callable[..., Any], tuple[float, ...]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._given = self._done = 0
        self._agreement: tuple[float, ...] = ()
        self._ended: int | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep exchange", daemon=True)
        self._thread.start()

    def give(self, work: Callable[..., Any], numbers: tuple[float, ...]) -> None:
        self._given += 1
        self._tasks.put((work, numbers))

    def result(self, timeout_s: float) -> tuple[float, ...]:
        """What came of the task given last. Raises RuntimeError for a rank that has ended or does not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._done == self._given or self._ended is not None, timeout_s)
            if self._done == self._given:
                return self._agreement
        if self._ended is not None:
            raise RuntimeError(f"rank {self._links.names[self._ended]} has ended: see its own error")
        raise RuntimeError(
            f"a rank did not come to the end of its step within {timeout_s:g} s: see its own error, or give a longer "
            "timeout_s"
        )

    def close(self) -> None:
        self._tasks.put(None)
        self._links.close()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, numbers = task
            try:
                result = work(numbers)
            except Ended as error:
                self._links.end(error.rank)
                with self._changed:
                    self._ended = error.rank
                    self._changed.notify_all()
                return
            with self._changed:
                self._agreement, self._done = result, self._done + 1
                self._changed.notify_all()


def _send(connection: socket.socket, rank: int, numbers: tuple[float, ...]) -> None:
    try:
        connection.sendall(_HEADER.pack(_NUMBERS, len(numbers)) + struct.pack(f"<{len(numbers)}d", *numbers))
    except OSError:
        raise Ended(_cause(connection, rank)) from None


def _receive(connection: socket.socket, rank: int) -> tuple[float, ...]:
    kind, number = _HEADER.unpack(receive_bytes(connection, _HEADER.size, rank))
    if kind == _ENDED:
        raise Ended(number)
    return struct.unpack(f"<{number}d", receive_bytes(connection, 8 * number, rank))


def _cause(connection: socket.socket, rank: int) -> int:
    """Who has ended, where sending to `rank` fails: it may have said so before it closed."""
    try:
        while True:
            _receive(connection, rank)
    except Ended as error:
        return error.rank
