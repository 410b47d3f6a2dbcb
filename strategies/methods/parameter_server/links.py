"""Messages between workers and servers, over gloo's point-to-point calls in a process group of their own.

A worker asks, one request at a time; on each rank with servers a thread for every other rank answers. No receive is
polled, as `irecv().is_completed()` never turns true on gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.methods.parameter_server.schedule import Arrival
from lockstep.strategies.methods.parameter_server.server import Host, Push

_ASKS, _ANSWERS = 1, 2
"""Tags: a rank asks its peer's servers while that one asks its own."""
_TAKE, _READ, _PUSH, _BYE = range(4)
_WAIT_S = 0.2
"""After which a server answers that it has no new version yet, so that a worker can see what has failed."""


class Dealer:
    """Hands out the batches of each clock to whoever is free; rank 0 has it."""

    def __init__(self, workers: int, ranks: int, clock: int) -> None:
        self._workers, self._ranks, self._first = workers, ranks, clock
        self._next = (clock + 1) * workers
        self._own = [[*range(r * workers // ranks, (r + 1) * workers // ranks)] for r in range(ranks)]
        """Of the first clock every rank gets its part, so that each has logged something."""
        self._votes = 0
        self._stops: dict[int, tuple[int, int]] = {}
        """By clock what all ranks conclude, and how many of them have asked."""
        self._lock = threading.Lock()

    def take(self, rank: int, clock: int, vote: int) -> tuple[int | None, int]:
        """The next batch of a clock for `rank`; None if all are handed out, with what the ranks conclude of their votes
        to stop: what the first one that has finished with the clock knew, the same for all."""
        with self._lock:
            self._votes = max(self._votes, vote)
            if clock == self._first:
                if self._own[rank]:
                    return clock * self._workers + self._own[rank].pop(0), 0
            elif self._next // self._workers == clock:
                self._next += 1
                return self._next - 1, 0
            stop, asked = self._stops.get(clock, (self._votes, 0))
            self._stops[clock] = stop, asked + 1
            if asked + 1 == self._ranks:
                del self._stops[clock]
            return None, stop


class Links:
    """One rank's end: what it asks, and the threads that answer."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        sizes: Sequence[Sequence[int]],
        num_servers: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`hosts`: the rank of each server; `sizes`: of each rank the bytes of the values of its servers; `group`: all
        ranks, if there are several."""
        self._rank, self._hosts, self._sizes = rank, hosts, sizes
        self._num_servers, self._group = num_servers, group
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

    def take(self, clock: int, vote: int) -> tuple[int | None, int]:
        """`Dealer.take` of rank 0."""
        if self.dealer is not None:
            return self.dealer.take(self._rank, clock, vote)
        self._ask(0, _TAKE, clock, vote)
        batch, stop = self._receive(0, 2).tolist()
        return None if batch < 0 else int(batch), int(stop)

    def read(self, needs: Sequence[int], exactly: bool) -> list[tuple[int, Tensor]]:
        """Of each server version and values (`Host.read`); waits until they are there."""
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
            if self.host is not None and self.host.failure is not None:
                raise RuntimeError(f"the parameter server of rank {self._rank} has failed") from self.host.failure
        return [found[i] for i in range(self._num_servers)]

    def push(self, arrival: Arrival, count: float, flats: Mapping[int, Tensor]) -> None:
        """Send a gradient to all servers: of each rank that has any one message; none if the batch has no gradient."""
        self.settle()
        for q in sorted(set(self._hosts)):
            flat = flats.get(q)
            if q == self._rank and self.host is not None:
                self.host.push(arrival, Push(count, flat))
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

    # ---- messages --------------------------------------------------------------------------------------

    @property
    def _header(self) -> int:
        return 6 + self._num_servers

    def _ask(self, rank: int, kind: int, *numbers: float) -> None:
        row = torch.zeros(self._header, dtype=torch.float64)
        row[: 1 + len(numbers)] = torch.tensor([kind, *numbers], dtype=torch.float64)
        dist.send(row, rank, group=self._group, tag=_ASKS)

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
            raise RuntimeError(f"the parameter server of rank {rank} has failed; see its error")
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
                if kind == _TAKE:
                    assert self.dealer is not None
                    batch, stop = self.dealer.take(peer, int(numbers[0]), int(numbers[1]))
                    self._send(peer, torch.tensor([-1 if batch is None else batch, stop], dtype=torch.float64))
                elif kind == _READ:
                    self._answer_read(peer, numbers)
                else:
                    self._answer_push(peer, numbers)
        except BaseException as error:
            if self.host is not None and self.host.failure is None and not _is_gone(error):
                self.host.failure = error

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


def _is_gone(error: BaseException) -> bool:
    """Whether the peer has closed its connection: its own error is the one to see."""
    return isinstance(error, RuntimeError) and "onnection" in str(error)
