"""Messages between workers and servers, over connections of their own.

A worker asks, one request at a time; on each rank with servers a thread for every other rank answers. Gloo's messages
would pass a thread of its own on both sides, which uses more time than all that is done with small ones.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from lockstep.strategies.methods.parameter_server.dealer import Dealer
from lockstep.strategies.methods.parameter_server.schedule import Arrival
from lockstep.strategies.methods.parameter_server.server import Host, Push
from lockstep.strategies.sync.connections import Connections, connect, receive, receive_bytes

_TAKE, _READ, _PUSH, _MEET, _BYE, _FAILED = range(6)
_CONNECT_S = 60.0
_WAIT_S = 0.2
"""After which a server answers that it has no new version yet, so that a worker can see what has failed."""


class Links:
    """One rank's end: what it asks, and the threads that answer."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        sizes: Sequence[Sequence[int]],
        num_servers: int,
        need_of: Callable[[int], int] | None,
    ) -> None:
        """Every rank of the default process group calls it.

        `hosts`: the rank of each server; `sizes`: of each rank the bytes of the values of its servers; `need_of`: the
        version that a batch needs at least, if newer ones will do.
        """
        self._rank, self._hosts, self._sizes = rank, hosts, sizes
        self._num_servers, self._need_of = num_servers, need_of
        self._header = struct.Struct(f"<{6 + num_servers}d")
        others, answering = [r for r in range(len(sizes)) if r != rank], sorted({0, *hosts})
        self._asked: Connections = {}
        """By rank with servers where this one asks."""
        self._peers: Connections = {}
        """By rank where it asks this one."""
        if others:
            above = [r for r in answering if r != rank]
            self._asked, self._peers = connect(rank, len(sizes), above, others if rank in answering else [], _CONNECT_S)
        self._ahead: dict[int, list[tuple[int, Tensor]]] = {}
        """By batch the values that came with its number."""
        self.spares_ranks = bool(others) and not any(hosts)
        """Whether a rank may die: one without a server, as rank 0 has all."""
        self._threads: list[threading.Thread] = []
        self.host: Host | None = None
        self.dealer: Dealer | None = None
        self._ends = False

    def serve(self, host: Host | None, dealer: Dealer | None) -> None:
        self.host, self.dealer = host, dealer
        for peer in self._peers:
            thread = threading.Thread(target=self._answer, args=(peer,), name=f"answers rank {peer}", daemon=True)
            thread.start()
            self._threads.append(thread)

    # ---- a worker asks ---------------------------------------------------------------------------------

    def take(self, clock: int, vote: int, order: int, late: bool) -> tuple[int | None, int]:
        """`Dealer.take` of rank 0."""
        if self.dealer is not None:
            return self.dealer.take(self._rank, clock, vote, order, late)
        self._ask(0, _TAKE, clock, vote, order, late)
        batch, stop, version = map(int, self._row_from(self._asked, 0)[:3])
        if version >= 0:
            self._ahead[batch] = [(version, self._flat_from(self._asked, 0, sum(self._sizes[0])))]
        return None if batch < 0 else batch, stop

    def read_for(self, batch: int, meanwhile: Callable[[], None]) -> list[tuple[int, Tensor]]:
        """`read` what `batch` needs at least."""
        assert self._need_of is not None
        ahead = self._ahead.pop(batch, None)
        return ahead or self.read([self._need_of(batch)] * self._num_servers, False, meanwhile)

    def meet(self) -> list[int]:
        """Wait for all ranks that live; return them. Every rank calls it, between steps."""
        if self.dealer is not None:
            living = self.dealer.meet(self._rank, self._has_failed)
        else:
            self._ask(0, _MEET)
            row = receive_bytes(self._asked[0], len(self._sizes), 0)
            living = [rank for rank, lives in enumerate(row) if lives]
        self._raise_failure()
        return living

    def read(self, needs: Sequence[int], exactly: bool, meanwhile: Callable[[], None]) -> list[tuple[int, Tensor]]:
        """Of each server version and values (`Host.read`); waits until they are there, and calls `meanwhile` now and
        then."""
        found: dict[int, tuple[int, Tensor]] = {}
        waiting = sorted(set(self._hosts))
        while waiting:
            remote = [q for q in waiting if q != self._rank]
            for q in remote:
                self._ask(q, _READ, *needs, exactly)
            for q in waiting:
                of_q = {i: needs[i] for i, host in enumerate(self._hosts) if host == q}
                got = self._own_read(of_q, exactly) if q == self._rank else self._remote_read(q, of_q)
                found.update(got or {})
            waiting = [q for q in waiting if any(h == q and i not in found for i, h in enumerate(self._hosts))]
            self._raise_failure()
            if waiting:
                meanwhile()
        return [found[i] for i in range(self._num_servers)]

    def _has_failed(self) -> bool:
        return self.host is not None and self.host.failure is not None

    def _raise_failure(self) -> None:
        if self.host is not None and self.host.failure is not None:
            raise RuntimeError(f"the parameter server of rank {self._rank} has failed") from self.host.failure

    def push(self, arrival: Arrival, count: float, flats: Mapping[int, Tensor]) -> None:
        """Send a gradient to all servers: of each rank that has any one message; none if the batch has no gradient."""
        for q in sorted(set(self._hosts)):
            flat = flats.get(q)
            if q == self._rank and self.host is not None:
                self.host.push(arrival, Push(count, flat))
                if self.dealer is not None:
                    self.dealer.arrived(q, arrival.batch)
                continue
            self._ask(q, _PUSH, *arrival.read, arrival.batch, arrival.made, count, flat is not None)
            if flat is not None:
                self._asked[q].sendall(_bytes(flat))

    def close(self) -> None:
        """Tell the servers that this worker asks nothing more, and let this rank's threads end with theirs."""
        for q in self._asked:
            self._ask(q, _BYE)
        for thread in self._threads:
            thread.join()
        self._shut()

    def abandon(self) -> None:
        """Tell the others that this rank ends with an error, and wait for no answer."""
        for q in self._asked:
            with suppress(OSError):  # it has gone before
                self._ask(q, _FAILED)
        self._shut()

    def _shut(self) -> None:
        self._ends = True
        for connection in (*self._asked.values(), *self._peers.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            connection.close()

    # ---- messages --------------------------------------------------------------------------------------

    def _ask(self, rank: int, kind: int, *numbers: float) -> None:
        self._asked[rank].sendall(self._row(kind, *numbers))

    def _row(self, *numbers: float) -> bytes:
        return self._header.pack(*numbers, *[0.0] * (6 + self._num_servers - len(numbers)))

    def _row_from(self, connections: Connections, rank: int) -> tuple[float, ...]:
        return self._header.unpack(receive_bytes(connections[rank], self._header.size, rank))

    def _flat_from(self, connections: Connections, rank: int, nbytes: int) -> Tensor:
        flat = torch.empty(nbytes, dtype=torch.uint8)
        receive(connections[rank], _bytes(flat), rank)
        return flat

    def _own_read(self, needs: Mapping[int, int], exactly: bool) -> dict[int, tuple[int, Tensor]] | None:
        assert self.host is not None
        return self.host.read(needs, exactly, _WAIT_S)

    def _remote_read(self, rank: int, needs: Mapping[int, int]) -> dict[int, tuple[int, Tensor]] | None:
        versions = self._row_from(self._asked, rank)
        if versions[0] == -2:
            raise RuntimeError(f"the parameter server of rank {rank} has failed: see its own error")
        if versions[0] == -1:
            return None
        flat = self._flat_from(self._asked, rank, sum(self._sizes[rank]))
        parts = flat.split(list(self._sizes[rank]))
        return {i: (int(versions[n]), part) for n, (i, part) in enumerate(zip(needs, parts, strict=True))}

    # ---- a server answers ------------------------------------------------------------------------------

    def _answer(self, peer: int) -> None:
        try:
            while True:
                kind, *numbers = self._row_from(self._peers, peer)
                if kind == _BYE:
                    return
                if kind == _FAILED:
                    raise RuntimeError(f"rank {peer} has failed: see its own error")
                if kind == _TAKE:
                    self._answer_take(peer, numbers)
                elif kind == _MEET:
                    assert self.dealer is not None
                    living = self.dealer.meet(peer, self._has_failed)
                    self._peers[peer].sendall(bytes(rank in living for rank in range(len(self._sizes))))
                elif kind == _READ:
                    self._answer_read(peer, numbers)
                else:
                    self._answer_push(peer, numbers)
        except BaseException as error:
            if self._ends or self.host is None or self.host.failure is not None:
                return
            if self.spares_ranks and self.dealer is not None and isinstance(error, OSError):
                self.dealer.died(peer)
            else:
                self.host.failure = error

    def _answer_take(self, peer: int, numbers: Sequence[float]) -> None:
        """With the batch come the values to compute it on, if they are all here already."""
        assert self.dealer is not None and self.host is not None
        batch, stop = self.dealer.take(peer, int(numbers[0]), int(numbers[1]), int(numbers[2]), bool(numbers[3]))
        found = None
        if batch is not None and self._need_of is not None and not any(self._hosts) and self.host.failure is None:
            found = self.host.read({0: self._need_of(batch)}, False, 0.0)
        version = -1 if found is None else found[0][0]
        self._peers[peer].sendall(self._row(-1 if batch is None else batch, stop, version))
        if found is not None:
            self._peers[peer].sendall(_bytes(found[0][1]))

    def _answer_read(self, peer: int, numbers: Sequence[float]) -> None:
        host, size = self.host, self._num_servers
        assert host is not None
        needs = {i: int(numbers[i]) for i in host.servers}
        try:
            found = host.read(needs, bool(numbers[size]), _WAIT_S)
        except RuntimeError:
            self._peers[peer].sendall(self._row(-2))
            return
        if found is None:
            self._peers[peer].sendall(self._row(-1))
            return
        self._peers[peer].sendall(self._row(*(version for version, _ in found.values())))
        for _, flat in found.values():
            self._peers[peer].sendall(_bytes(flat))

    def _answer_push(self, peer: int, numbers: Sequence[float]) -> None:
        host, size = self.host, self._num_servers
        assert host is not None
        batch, made, count, has_tensors = numbers[size : size + 4]
        flat = self._flat_from(self._peers, peer, host.nbytes) if has_tensors else None
        read = [int(number) for number in numbers[:size]]
        host.push(Arrival(int(batch), peer, read, int(made)), Push(count, flat))
        if self.dealer is not None:
            self.dealer.arrived(peer, int(batch))


def _bytes(flat: Tensor) -> memoryview:
    return flat.numpy().data
