"""A parameter server's worker and servers on one rank, without threads and connections: what they send is noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import Strategy
from lockstep.strategies.data.sharded_loader import Window
from lockstep.strategies.methods.parameter_server.data import Later
from lockstep.strategies.methods.parameter_server.engine import Ends
from lockstep.strategies.methods.parameter_server.server import Post, Push, Server
from lockstep.strategies.methods.parameter_server.strategy import ParameterServer
from lockstep.strategies.planning.memory import HOST, OPTIMIZER, REDUCTION, ROUND
from lockstep.strategies.planning.trial_mode import CollectiveCall, TrialMode

_DTYPE = "uint8"
"""Of messages."""


def ranks_with_servers(strategy: Strategy) -> int:
    """How many ranks hold parameters of a parameter server, rank 0 first; 0 for other strategies."""
    if not isinstance(strategy, ParameterServer):
        return 0
    return min(strategy.num_servers, strategy.topology.world_size)


def without_threads(
    strategy: Strategy, wrapped: nn.Module, optimizers: Mapping[str, Optimizer], mode: TrialMode
) -> None:
    """Let the servers of `strategy`, if it has any, step when a worker posts, and note messages in place of sending
    them."""
    if isinstance(strategy, ParameterServer):
        rank = _Rank(mode, strategy, wrapped, optimizers)
        strategy.ends = Ends(partial(_Host, rank), partial(_Links, rank), lambda *_: None)


class _Rank(NamedTuple):
    """What is tried."""

    mode: TrialMode
    strategy: ParameterServer
    wrapped: nn.Module
    optimizers: Mapping[str, Optimizer]

    @property
    def num_ranks(self) -> int:
        return self.strategy.topology.world_size

    def note_norms(self) -> None:
        """What the servers of several ranks tell each other of each tensor, to clip."""
        if (holders := ranks_with_servers(self.strategy)) > 1:
            stepped = {id(p) for o in self.optimizers.values() for group in o.param_groups for p in group["params"]}
            number = sum(id(p) in stepped for p in self.wrapped.parameters()) + len(list(self.wrapped.buffers()))
            self.mode.calls.append(
                CollectiveCall("all-reduce", "float64", 16 * number, OPTIMIZER, tuple(range(holders)))
            )


def own_batches(strategy: Strategy, window: Window) -> Window:
    """`window` as this rank computes it: those of a parameter server have the batches of all workers."""
    if isinstance(strategy, ParameterServer):
        number = len(window.micro_batches) // strategy.virtual_ranks
        for i, micro_batch in enumerate(window.micro_batches):
            batch = micro_batch.batch if i // number in strategy.shares else None
            micro_batch.batch = batch() if isinstance(batch, Later) else batch
    return window


class _Host:
    """In place of a `Host`; holds one gradient of each rank at once."""

    failure = None

    def __init__(self, rank: _Rank, servers: Mapping[int, Server], workers: int, clock: int, *_: Any) -> None:
        self.servers, self.workers, self.version = dict(servers), workers, clock
        self.nbytes = sum(server.layout.nbytes for server in self.servers.values())
        self._rank, self._mode = rank, rank.mode
        self._sums: list[list[Tensor | None]] = []
        self._pushed = 0
        for server in self.servers.values():
            self._mode.mark(HOST, server.tensors)
            self._snapshot(server)

    def push(self, _: Any, push: Push) -> None:
        self._pushed += 1
        if push.flat is not None:
            self._add(push.flat)

    def post(self, clock: int, post: Post) -> None:
        """Get what others send in a clock, answer them, and step."""
        self._mode.stage = REDUCTION
        others = self.workers - self._pushed
        self._mode.calls += [
            CollectiveCall(kind, _DTYPE, self.nbytes, ROUND, (0, 1)) for kind in ("send", "recv") for _ in range(others)
        ]
        arrived = [torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(self._rank.num_ranks - 1)]  # 1: there
        while arrived:
            self._add(arrived.pop(0))
        without = {id(p) for p in self._rank.wrapped.parameters() if p.grad is None}
        for server, sums in zip(self.servers.values(), self._sums, strict=True):
            server.put_numbers(post)
            have = zip(server.own, sums, strict=True)
            server.take([None if worker in without else value for worker, value in have], scale=1.0)
        self._sums, self._pushed, self.version = [], 0, clock + 1
        self._clip(post)
        for server in self.servers.values():
            server.step()
            self._snapshot(server)
            del server.snapshots[clock]

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def _snapshot(self, server: Server) -> None:
        server.snapshot(self.version)
        self._mode.mark(HOST, [server.snapshots[self.version]])

    def _add(self, flat: Tensor) -> None:
        parts, start = [], 0
        for server in self.servers.values():
            parts.append(server.layout.read(flat[start : start + server.layout.nbytes]))
            start += server.layout.nbytes
        for into, more in zip(self._sums, parts, strict=False):
            for one, other in zip(into, more, strict=True):
                if one is not None and other is not None:
                    one.add_(other)
        self._sums = self._sums or parts

    def _clip(self, post: Post) -> None:
        servers = list(self.servers.values())
        for key, limit, algorithm in post.clips:
            own = [p for server in servers for p in server.parameters(key)]
            if algorithm != "norm":
                torch.nn.utils.clip_grad_value_(own, limit)
            else:
                torch.nn.utils.clip_grad_norm_(own, limit)
                self._rank.note_norms()


class _Links:
    """In place of `Links`: gives a rank the batches of its workers."""

    spares_ranks = True

    def __init__(self, tried: _Rank, rank: int, hosts: Sequence[int], sizes: Sequence[Sequence[int]], *_: Any) -> None:
        self._tried, self._mode, self._rank, self._hosts = tried, tried.mode, rank, hosts
        self._sizes = [sizes[host][hosts[:i].count(host)] for i, host in enumerate(hosts)]
        """In bytes, of the values of each server."""
        self._clock, self._has_read = -1, False
        self._dealt: list[int] = []
        self._host: Any = None

    def serve(self, host: Any, _: Any) -> None:
        self._host = host

    def take(self, clock: int, *_: Any) -> tuple[int | None, int]:
        if clock != self._clock:
            strategy = self._tried.strategy
            self._clock, self._dealt = clock, [clock * strategy.virtual_ranks + share for share in strategy.shares]
        return (self._dealt.pop(0) if self._dealt else None), 0

    def read(self, *_: Any, **__: Any) -> list[tuple[int, Tensor]]:
        """Of each server version and values; before, the worker compares what it has read with what it has now."""
        self._mode.stage = REDUCTION
        if self._has_read:
            self._mode.transfers.append(CollectiveCall("to host", _DTYPE, sum(self._sizes), OPTIMIZER, ()))
        self._has_read = True
        return [(self._clock, self._values(i)) for i in range(len(self._hosts))]

    read_for = read

    def _values(self, i: int) -> Tensor:
        if self._hosts[i] == self._rank:
            return self._host.servers[i].snapshots[self._host.version]
        self._note("recv", self._sizes[i], self._hosts[i])
        flat = torch.ones(self._sizes[i], dtype=torch.uint8)
        self._mode.mark(HOST, [flat])
        return flat

    def push(self, arrival: Any, count: float, flats: Mapping[int, Tensor]) -> None:
        self._mode.stage = REDUCTION
        self._mode.mark("gradients", [p.grad for p in self._tried.wrapped.parameters() if p.grad is not None])
        for host, flat in flats.items():
            self._mode.mark(HOST, [flat])
            self._mode.transfers.append(CollectiveCall("to host", _DTYPE, flat.nbytes, OPTIMIZER, ()))
            if host == self._rank:
                self._host.push(arrival, Push(count, flat))
            else:
                self._note("send", flat.nbytes, host)

    def _note(self, kind: str, num_bytes: int, host: int) -> None:
        self._mode.calls.append(CollectiveCall(kind, _DTYPE, num_bytes, OPTIMIZER, (host, self._rank)))

    def meet(self) -> list[int]:
        return [*range(self._tried.num_ranks)]

    def close(self) -> None: ...

    def abandon(self) -> None: ...
