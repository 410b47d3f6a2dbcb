"""Messages between workers and servers, over gloo's point-to-point calls in a process group of their own.

A worker asks, one request at a time; on each rank with servers a thread for every other rank answers. No receive is
polled, as `irecv().is_completed()` never turns true on gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.methods.parameter_server.dealer import Dealer
from lockstep.strategies.methods.parameter_server.schedule import Arrival
from lockstep.strategies.methods.parameter_server.server import Host, Push

_ASKS, _ANSWERS = 1, 2
"""Tags: a rank asks its peer's servers while that one asks its own."""
_TAKE, _READ, _PUSH, _MEET, _BYE, _FAILED = range(6)
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
        group: dist.ProcessGroup | None,
        need_of: Callable[[int], int] | None,
    ) -> None:
        """`hosts`: the rank of each server; `sizes`: of each rank the bytes of the values of its servers; `group`: all
        ranks, if there are several; `need_of`: the version that a batch needs at least, if newer ones will do."""
        self._rank, self._hosts, self._sizes = rank, hosts, sizes
        self._num_servers, self._group, self._need_of = num_servers, group, need_of
        self._ahead: dict[int, list[tuple[int, Tensor]]] = {}
        """By batch the values that came with its number."""
        self.spares_ranks = group is not None and not any(hosts)
        """Whether a rank may die: one without a server, as rank 0 has all."""
        self._threads: list[threading.Thread] = []
        self.host: Host | None = None
        self.dealer: Dealer | None = None
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def serve(self, host: Host | None, dealer: Dealer | None) -> None:
        self.host, self.dealer = host, dealer
        if self._group is None or (host is None and dealer is None):
            return
        for peer in range(len(self._sizes)):
            if peer != self._rank:
                thread = threading.Thread(target=self._answer, args=(peer,), name=f"answers rank {peer}", daemon=True)
                thread.start()
                self._threads.append(thread)

    # ---- a worker asks ---------------------------------------------------------------------------------

    def take(self, clock: int, vote: int, late: bool = False) -> tuple[int | None, int]:
        """`Dealer.take` of rank 0."""
        if self.dealer is not None:
            return self.dealer.take(self._rank, clock, vote, late)
        self._ask(0, _TAKE, clock, vote, late)
        batch, stop, version = map(int, self._receive(0, 3).tolist())
        if version >= 0:
            self._ahead[batch] = [(version, self._receive(0, sum(self._sizes[0]), torch.uint8))]
        return None if batch < 0 else batch, stop

    def read_for(self, batch: int, meanwhile: Callable[[], None]) -> list[tuple[int, Tensor]]:
        """`read` what `batch` needs at least."""
        assert self._need_of is not None
        ahead = self._ahead.pop(batch, None)
        return ahead or self.read([self._need_of(batch)] * self._num_servers, False, meanwhile)

    def meet(self) -> list[int]:
        """Wait for all ranks that live; return them. Every rank calls it, between steps."""
        self.settle()
        if self.dealer is not None:
            living = self.dealer.meet(self._rank, self._has_failed)
        else:
            self._ask(0, _MEET)
            row = self._receive(0, len(self._sizes)).tolist()
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
        self.settle()
        for q in sorted(set(self._hosts)):
            flat = flats.get(q)
            if q == self._rank and self.host is not None:
                self.host.push(arrival, Push(count, flat))
                if self.dealer is not None:
                    self.dealer.arrived(q, arrival.batch)
                continue
            self._ask(q, _PUSH, *arrival.read, arrival.batch, arrival.made, count, flat is not None)
            if flat is not None:
                work = dist.isend(flat, q, group=self._group, tag=_ASKS)
                assert work is not None
                self._sending.append((work, flat))

    def settle(self) -> None:
        """Wait until what was pushed has been sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def close(self) -> None:
        """Tell the servers that this worker asks nothing more, and let this rank's threads end with theirs."""
        self.settle()
        for q in sorted({0, *self._hosts}):
            if q != self._rank and self._group is not None:
                self._ask(q, _BYE)
        for thread in self._threads:  # one that is left would take messages of the threads that follow it
            thread.join()
        self._threads.clear()

    def abandon(self) -> None:
        """Tell rank 0 that this one ends with an error, and does not wait for an answer."""
        if self._group is not None and self._rank and self._hosts:
            with suppress(RuntimeError):  # it has gone before
                self._last_word = dist.isend(self._row(_FAILED), 0, group=self._group, tag=_ASKS)

    # ---- messages --------------------------------------------------------------------------------------

    @property
    def _header(self) -> int:
        return 6 + self._num_servers

    def _row(self, kind: int, *numbers: float) -> Tensor:
        return torch.tensor([kind, *numbers, *[0.0] * (self._header - 1 - len(numbers))], dtype=torch.float64)

    def _ask(self, rank: int, kind: int, *numbers: float) -> None:
        dist.send(self._row(kind, *numbers), rank, group=self._group, tag=_ASKS)

    def _receive(self, rank: int, size: int, dtype: torch.dtype = torch.float64, tag: int = _ANSWERS) -> Tensor:
        got = torch.empty(size, dtype=dtype)
        dist.recv(got, rank, group=self._group, tag=tag)
        return got

    def _send(self, rank: int, row: Tensor) -> None:
        dist.send(row, rank, group=self._group, tag=_ANSWERS)

    def _own_read(self, needs: Mapping[int, int], exactly: bool) -> dict[int, tuple[int, Tensor]] | None:
        assert self.host is not None
        return self.host.read(needs, exactly, _WAIT_S)

    def _remote_read(self, rank: int, needs: Mapping[int, int]) -> dict[int, tuple[int, Tensor]] | None:
        versions = self._receive(rank, self._num_servers).tolist()
        if versions[0] == -2:
            raise RuntimeError(f"the parameter server of rank {rank} has failed: see its own error")
        if versions[0] == -1:
            return None
        flat = self._receive(rank, sum(self._sizes[rank]), torch.uint8)
        parts = flat.split(list(self._sizes[rank]))
        return {i: (int(versions[n]), part) for n, (i, part) in enumerate(zip(needs, parts, strict=True))}

    # ---- a server answers ------------------------------------------------------------------------------

    def _answer(self, peer: int) -> None:
        try:
            while True:
                kind, *numbers = self._receive(peer, self._header, tag=_ASKS).tolist()
                if kind == _BYE:
                    return
                if kind == _FAILED:
                    raise RuntimeError(f"rank {peer} has failed: see its own error")
                if kind == _TAKE:
                    self._answer_take(peer, numbers)
                elif kind == _MEET:
                    assert self.dealer is not None
                    living = self.dealer.meet(peer, self._has_failed)
                    row = [float(rank in living) for rank in range(len(self._sizes))]
                    self._send(peer, torch.tensor(row, dtype=torch.float64))
                elif kind == _READ:
                    self._answer_read(peer, numbers)
                else:
                    self._answer_push(peer, numbers)
        except BaseException as error:
            if self.dealer is not None and self.spares_ranks and _is_gone(error):
                self.dealer.died(peer)
            elif self.host is not None and self.host.failure is None and not _is_gone(error):
                self.host.failure = error

    def _answer_take(self, peer: int, numbers: Sequence[float]) -> None:
        """With the batch come the values to compute it on, if they are all here already."""
        assert self.dealer is not None and self.host is not None
        batch, stop = self.dealer.take(peer, int(numbers[0]), int(numbers[1]), bool(numbers[2]))
        found = None
        if batch is not None and self._need_of is not None and not any(self._hosts) and self.host.failure is None:
            found = self.host.read({0: self._need_of(batch)}, False, 0.0)
        version = -1 if found is None else found[0][0]
        self._send(peer, torch.tensor([-1 if batch is None else batch, stop, version], dtype=torch.float64))
        if found is not None:
            self._send(peer, found[0][1])

    def _answer_read(self, peer: int, numbers: Sequence[float]) -> None:
        host, size = self.host, self._num_servers
        assert host is not None
        needs = {i: int(numbers[i]) for i in host.servers}
        row = torch.full((size,), -1.0, dtype=torch.float64)
        try:
            found = host.read(needs, bool(numbers[size]), _WAIT_S)
        except RuntimeError:
            self._send(peer, row * 2)
            return
        if found is None:
            self._send(peer, row)
            return
        row[: len(found)] = torch.tensor([version for version, _ in found.values()], dtype=torch.float64)
        self._send(peer, row)
        flats = [flat for _, flat in found.values()]
        self._send(peer, flats[0] if len(flats) == 1 else torch.cat(flats))

    def _answer_push(self, peer: int, numbers: Sequence[float]) -> None:
        host, size = self.host, self._num_servers
        assert host is not None
        batch, made, count, has_gradient = numbers[size : size + 4]
        flat = self._receive(peer, host.nbytes, torch.uint8, _ASKS) if has_gradient else None
        read = [int(number) for number in numbers[:size]]
        host.push(Arrival(int(batch), peer, read, int(made)), Push(count, flat))
        if self.dealer is not None:
            self.dealer.arrived(peer, int(batch))


def _is_gone(error: BaseException) -> bool:
    """Whether the peer has closed its connection: its own error is the one to see."""
    return isinstance(error, RuntimeError) and "onnection" in str(error)
