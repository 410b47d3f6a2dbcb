"""A few numbers from every rank to every rank, in every step: through shared memory on one node, over a tree of
connections on several.

A collective wakes a thread in each rank and interrupts what the cores do; numbers in shared memory are there when they
are looked for.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.strategies.sync.host_all_gather_tree import Links, Worker, numbers

RING = 256
"""How many messages a rank may be ahead of one that reads its messages."""


class Reduced(NamedTuple):
    """What all ranks have posted, number by number."""

    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    total: tuple[float, ...]


class Exchange(ABC):
    """One rank's end. All ranks post the same number of messages, each of `width` numbers."""

    @abstractmethod
    def post(self, *numbers: float) -> None:
        """Tell the others; does not wait for them."""

    @abstractmethod
    def reduced(self) -> Reduced:
        """Wait until every rank has posted as many messages as this one; return what the latest of these amount to.

        Equal on all ranks, which may leave it unread. Raises RuntimeError for a rank that has ended or does not come
        within the timeout.
        """

    @abstractmethod
    def read(self) -> list[tuple[float, ...]]:
        """The latest message of each rank, in rank order. Every rank calls it, for the same message; else as
        `reduced`."""

    peeks = False
    """Whether `peek` finds anything."""

    def peek(self) -> list[tuple[float, ...] | None]:
        """Of each rank, in rank order, the message that belongs to this rank's latest if it is there by now; does not
        wait."""
        return []

    def close(self) -> None:  # noqa: B027 - shared memory needs no end
        """Use it no more."""


def open_exchange(
    rank: int, world_size: int, width: int, timeout_s: float, group: dist.ProcessGroup | None = None
) -> Exchange:
    """Set up an exchange between the ranks of `group`, by default all; this is number `rank`. Each calls it."""
    if dist.get_backend() == "fake":
        return _Alike(world_size)
    size = 8 + world_size * RING * _Memory.record(width).size
    secret = secrets.randbits(62)
    file = _create(size, secret) if rank == 0 else -1
    mine = torch.tensor([os.getpid(), file, secret])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine, group=group)
    pid, theirs, named = everyone[0].tolist()
    memory = _open(pid, theirs, named, size)
    opened = torch.tensor(memory is not None)
    dist.all_reduce(opened, dist.ReduceOp.MIN, group=group)
    if file >= 0:
        os.close(file)
    if memory is None or not opened:
        return _Tree(Links(rank, world_size, timeout_s, group=group), timeout_s)
    return _Memory(memory, rank, width, [int(row[0]) for row in everyone], timeout_s, numbers(world_size, group))


def _create(size: int, secret: int) -> int:
    """A file without a name, which leaves nothing behind, with `secret` at its begin; -1 where the system has none."""
    if not hasattr(os, "memfd_create"):
        return -1
    file = os.memfd_create("lockstep-exchange")
    try:
        os.truncate(file, size)
        os.pwrite(file, struct.pack("<q", secret), 0)
    except OSError:  # no memory to share
        os.close(file)
        return -1
    return file


def _open(pid: int, file: int, secret: int, size: int) -> mmap.mmap | None:
    """The memory of rank 0; None where its process is on another machine, on which that number may be anything."""
    try:
        theirs = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        memory = mmap.mmap(theirs, size) if os.fstat(theirs).st_size == size else None
    except OSError:  # no memory
        return None
    finally:
        os.close(theirs)
    return memory if memory is not None and struct.unpack_from("<q", memory)[0] == secret else None


class _Alike(Exchange):
    """Of ranks that are only planned: all have posted what this one has."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._latest: tuple[float, ...] = ()

    def post(self, *numbers: float) -> None:
        self._latest = tuple(map(float, numbers))

    def reduced(self) -> Reduced:
        return Reduced(self._latest, self._latest, tuple(number * self._world_size for number in self._latest))

    def read(self) -> list[tuple[float, ...]]:
        return [self._latest] * self._world_size


class _Memory(Exchange):
    """Each rank writes into a ring of its own; a checksum tells a message that is whole from one that is being
    written."""

    peeks = True

    @staticmethod
    def record(width: int) -> struct.Struct:
        return struct.Struct(f"<q{width}dq")

    def __init__(
        self, memory: mmap.mmap, rank: int, width: int, pids: list[int], timeout_s: float, names: Sequence[int]
    ) -> None:
        self._memory = memory
        self._record = self.record(width)
        self._checked = struct.Struct(f"<q{width}d")
        self._pids, self._names = pids, names
        self._timeout_s = timeout_s
        self._rings = [8 + i * RING * self._record.size for i in range(len(pids))]
        self._mine = self._rings[rank]
        self._turn = 0

    def post(self, *numbers: float) -> None:
        self._turn += 1
        message = self._checked.pack(self._turn, *numbers)
        at = self._mine + self._turn % RING * self._record.size
        self._memory[at : at + self._record.size] = message + _CHECK.pack(zlib.crc32(message))

    def reduced(self) -> Reduced:
        rows = self.read()
        if len(rows) == 1:
            return Reduced(rows[0], rows[0], rows[0])
        return Reduced(tuple(map(min, *rows)), tuple(map(max, *rows)), tuple(map(sum, zip(*rows, strict=True))))

    def read(self) -> list[tuple[float, ...]]:
        return [self._look(rank) or self._wait(rank) for rank in range(len(self._rings))]

    def peek(self) -> list[tuple[float, ...] | None]:
        found: list[tuple[float, ...] | None] = []
        for ring in self._rings:
            at = ring + self._turn % RING * self._record.size
            message = self._memory[at : at + self._record.size]
            turn, *numbers, check = self._record.unpack(message)
            found.append(tuple(numbers) if turn == self._turn and zlib.crc32(message[:-8]) == check else None)
        return found

    def _look(self, rank: int) -> tuple[float, ...] | None:
        at = self._rings[rank] + self._turn % RING * self._record.size
        message = self._memory[at : at + self._record.size]
        turn, *numbers, check = self._record.unpack(message)
        if turn == self._turn and zlib.crc32(message[:-8]) == check:
            return tuple(numbers)
        if turn > self._turn and zlib.crc32(message[:-8]) == check:
            raise RuntimeError(
                f"rank {self._names[rank]} is {RING} messages ahead, so what it said is lost; every rank must take "
                "part in each step"
            )
        return None

    def _wait(self, rank: int) -> tuple[float, ...]:
        begin, looks = time.monotonic(), 0
        while True:
            message = self._look(rank)
            if message is not None:
                return message
            looks += 1
            if looks < _LOOKS:
                continue
            waited = time.monotonic() - begin
            self._check_alive(rank, waited)
            time.sleep(min(waited / 32, 0.01))  # is late by little of what it has waited

    def _check_alive(self, rank: int, waited: float) -> None:
        try:
            os.kill(self._pids[rank], 0)
        except ProcessLookupError:
            raise RuntimeError(f"rank {self._names[rank]} has ended: see its own error") from None
        if waited > self._timeout_s:
            raise RuntimeError(
                f"rank {self._names[rank]} did not come to the end of its step within {self._timeout_s:g} s: see "
                "its own error, or give a longer timeout_s"
            )


_CHECK = struct.Struct("<q")
_LOOKS = 20
"""Reads of a message that has not come, at once one after the other: about 30 us, less than it takes to go to sleep and
wake up."""


class _Tree(Exchange):
    """Sends and receives in a thread, so that nobody who reads late holds up the others."""

    def __init__(self, links: Links, timeout_s: float) -> None:
        self._links, self._worker, self._timeout_s = links, Worker(links), timeout_s
        self._latest: tuple[float, ...] = ()
        self._known: Reduced | None = None

    def post(self, *numbers: float) -> None:
        self._latest, self._known = tuple(map(float, numbers)), None
        self._worker.give(self._links.reduce, self._latest)

    def reduced(self) -> Reduced:
        if self._known is None:
            found, width = self._worker.result(self._timeout_s), len(self._latest)
            self._known = Reduced(found[:width], found[width : 2 * width], found[2 * width :])
        return self._known

    def read(self) -> list[tuple[float, ...]]:
        self.reduced()
        self._worker.give(self._links.gather, self._latest)
        found, width = self._worker.result(self._timeout_s), len(self._latest) + 1
        return [row[1:] for row in sorted(found[i : i + width] for i in range(0, len(found), width))]

    def close(self) -> None:
        self._worker.close()
