"""A few numbers from every rank to every rank over several nodes: up and down a tree of connections.

A rank is connected with its parent and its children, so N ranks need N - 1 connections, and one exchange 2 (N - 1)
messages, of the size of one rank's numbers; a gloo all-gather needs N (N - 1) of each. On the way up the lowest, the
highest and the sum of each number are taken. Only if someone asks for them do the numbers of each rank travel.
A thread waits for the messages, beside what the rank computes.
"""

from __future__ import annotations

import hmac
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from lockstep.strategies.launch.process_group import own_address

FANOUT = 8
"""Children of a rank. 64 ranks are two levels below the first, 4,096 are four."""
_HEADER = struct.Struct("<qq")  # what kind of message, and how many numbers follow
_NUMBERS, _ENDED = 0, 1
_HELLO = struct.Struct("<32sq")
_ADDRESS_BYTES = 96
_PATIENCE_S = 10.0
"""How long a connection may take to say who it is."""


class Ended(Exception):
    """A rank has ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Links:
    """The connections of one rank: `parent` is None on the first, `children` are by rank."""

    def __init__(self, rank: int, world_size: int, timeout_s: float, fanout: int = FANOUT) -> None:
        """Connect the ranks of the default process group; every rank calls it."""
        self.rank = rank
        below = range(rank * fanout + 1, min(world_size, rank * fanout + fanout + 1))
        address = own_address() if below else ""
        listener = socket.create_server((address, 0), backlog=fanout) if below else None
        secret = torch.randint(0, 256, (32,), dtype=torch.uint8, generator=_fresh())
        dist.broadcast(secret, 0)
        port = listener.getsockname()[1] if listener is not None else 0
        text = json.dumps([address, port]).encode().ljust(_ADDRESS_BYTES)
        addresses = [torch.empty(_ADDRESS_BYTES, dtype=torch.uint8) for _ in range(world_size)]
        dist.all_gather(addresses, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        hello = bytes(secret.tolist())
        self.parent: tuple[int, socket.socket] | None = None
        self.children: dict[int, socket.socket] = {}
        if rank:
            above = (rank - 1) // fanout
            host, port = json.loads(bytes(addresses[above].tolist()))
            self.parent = above, socket.create_connection((host, port), timeout=timeout_s)
            self.parent[1].sendall(_HELLO.pack(hello, rank))
        if listener is not None:
            with listener:
                listener.settimeout(timeout_s)
                while len(self.children) < len(below):
                    connection, _ = listener.accept()
                    who = _greeted(connection, hello)
                    if who in below and who not in self.children:
                        self.children[who] = connection
                    else:
                        connection.close()
        self.children = {child: self.children[child] for child in below}  # in the order of ranks, as what is summed
        for connection in self._all():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
            raise RuntimeError(f"rank {self._ended} has ended: see its own error")
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
    kind, number = _HEADER.unpack(_read(connection, _HEADER.size, rank))
    if kind == _ENDED:
        raise Ended(number)
    return struct.unpack(f"<{number}d", _read(connection, 8 * number, rank))


def _cause(connection: socket.socket, rank: int) -> int:
    """Who has ended, where sending to `rank` fails: it may have said so before it closed."""
    try:
        while True:
            _receive(connection, rank)
    except Ended as error:
        return error.rank


def _read(connection: socket.socket, size: int, rank: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = connection.recv(size - len(data))
        except OSError:
            more = b""
        if not more:
            raise Ended(rank)
        data += more
    return data


def _greeted(connection: socket.socket, secret: bytes) -> int:
    """Which rank has connected; -1 for anybody who does not know the secret of this run."""
    connection.settimeout(_PATIENCE_S)
    try:
        theirs, rank = _HELLO.unpack(_read(connection, _HELLO.size, -1))
    except Ended:
        return -1
    return rank if hmac.compare_digest(theirs, secret) else -1


def _fresh() -> torch.Generator:
    """Random numbers that training does not draw from."""
    generator = torch.Generator()
    generator.seed()
    return generator
