"""The servers of one rank: parameters, and a thread in which the user's optimizers step them, clock by clock."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.methods.parameter_server.layout import Layout
from lockstep.strategies.methods.parameter_server.schedule import Arrival, Record
from lockstep.strategies.modules.parameter_hooks import share_attributes
from lockstep.strategies.optimizers.copies import duplicate
from lockstep.strategies.optimizers.numbers import changes, numbers_of, put, same
from lockstep.strategies.sync.collectives import clip_values


class Push(NamedTuple):
    """What a worker computed for a batch."""

    count: float  # type: ignore[assignment]  # hides tuple.count
    """What its losses counted."""
    flat: Tensor | None
    """Gradients, weighted by what the losses counted, and in the first batch of a clock buffers; of each server of the
    rank one after the other. None if the batch has neither."""


@dataclass
class Post:
    """What a clock's step is, beside its gradients: the same on every rank."""

    samples: int
    """Samples of the clock, by which gradients were divided."""
    numbers: dict[str, dict[int, dict[str, Any]]]
    """By optimizer and group what user code and schedulers have changed in its numbers since the last clock."""
    clips: list[tuple[str, float, str]] = field(default_factory=list)
    """Optimizer, limit and algorithm of each call of `clip_gradients`."""


class Server:
    """Some of the parameters and buffers, and for each optimizer a copy that steps them."""

    def __init__(self, tensors: Mapping[str, Tensor], optimizers: Mapping[str, Optimizer]) -> None:
        self.layout = Layout(tensors)
        self.own = {id(t): _own(t) for t in tensors.values()}
        """By `id` of the worker's tensor."""
        self.tensors = list(self.own.values())
        self.optimizers: dict[str, Optimizer] = {}
        self.groups: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        """By optimizer the groups that have a parameter here, with their place in the user's optimizer."""
        for key, optimizer in optimizers.items():
            self._copy(key, optimizer)
        self._given = {(key, i): numbers_of(group) for key, groups in self.groups.items() for i, group in groups}
        """What groups held when their optimizer was made, and what was put there since."""
        self.snapshots: dict[int, Tensor] = {}
        """By version a message of all values; the newest, and those that a replay still reads."""

    def _copy(self, key: str, optimizer: Optimizer) -> None:
        others = {
            id(p): nn.Parameter(torch.empty(0), requires_grad=False)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) not in self.own
        }
        made = duplicate(optimizer, {**self.own, **others})
        here = set(map(id, self.tensors))
        for group in made.param_groups:
            group["params"][:] = [p for p in group["params"] if id(p) in here]
        for gone in [p for p in made.state if isinstance(p, Tensor) and id(p) not in here]:
            del made.state[gone]
        groups = [(i, group) for i, group in enumerate(made.param_groups) if group["params"]]
        if groups:
            made.param_groups[:] = [group for _, group in groups]
            self.optimizers[key], self.groups[key] = made, groups

    def snapshot(self, version: int) -> None:
        flat = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        self.layout.write([t.detach() for t in self.tensors], flat)
        self.snapshots[version] = flat

    def put_numbers(self, post: Post) -> None:
        """Raises RuntimeError for a number that the optimizer's own steps have changed too."""
        for key, groups in self.groups.items():
            for i, group in groups:
                changed, given = post.numbers.get(key, {}).get(i, {}), self._given[key, i]
                now = numbers_of(group) if changed else {}
                if twice := sorted(name for name in changed if not same(now.get(name), given.get(name))):
                    raise RuntimeError(
                        f"{type(self.optimizers[key]).__name__} changes {twice[0]!r} of its param_groups in its step, "
                        "on a server, and a scheduler or hook changes it on the workers; use strategy='ddp'"
                    )
                put(group, changed)
                given |= {name: group[name] for name in changed}

    def numbers(self) -> list[list[Any]]:
        """By optimizer and group what the optimizers' own steps have changed, as JSON data."""
        return [
            [key, i, found]
            for key, groups in self.groups.items()
            for i, group in groups
            if (found := changes(numbers_of(group), self._given[key, i]))
        ]

    def norms(self, key: str) -> dict[int, Tensor]:
        """The norm of each gradient, by the parameter's place in `tensors`."""
        stepped = set(map(id, self.parameters(key)))
        return {
            i: torch.linalg.vector_norm(t.grad)
            for i, t in enumerate(self.tensors)
            if id(t) in stepped and t.grad is not None
        }

    def parameters(self, key: str) -> list[Tensor]:
        return [p for _, group in self.groups.get(key, ()) for p in group["params"]]

    @torch.no_grad()
    def take(self, sums: list[Tensor | None], scale: float) -> None:
        """Let these be the gradients of the step that follows, and the new values of buffers."""
        for tensor, value in zip(self.tensors, sums, strict=True):
            if isinstance(tensor, nn.Parameter):
                tensor.grad = value if value is None or scale == 1.0 else value.mul_(scale)
            elif value is not None:
                tensor.copy_(value)

    def step(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()
        for tensor in self.tensors:
            tensor.grad = None


class Host:
    """All servers of one rank, and the thread that steps them.

    `kept(server, version)` says how many batches of a replay are still to read it.
    """

    def __init__(
        self,
        servers: Mapping[int, Server],
        workers: int,
        clock: int,
        total_norm: Callable[[Mapping[int, Mapping[int, Tensor]]], Tensor],
        readers: Mapping[int, Counter[int]] | None,
        record: Record | None,
    ) -> None:
        self.servers, self.workers, self.version = dict(servers), workers, clock
        self.failure: BaseException | None = None
        self._total_norm, self._readers, self._record = total_norm, readers, record
        self._changed = threading.Condition()
        self._arrived: dict[int, dict[int, Push]] = defaultdict(dict)
        """By clock what has arrived of it: by share of the clock."""
        self._sums: dict[int, list[list[Tensor | None]]] = {}
        """By clock, for each server, the sum over the shares that follow each other from the first."""
        self._added: Counter[int] = Counter()
        self._posts: dict[int, Post] = {}
        self._ends = False
        self.nbytes = sum(server.layout.nbytes for server in self.servers.values())
        for server in self.servers.values():
            server.snapshot(clock)
        self._thread = threading.Thread(target=self._run, name="parameter server", daemon=True)
        self._thread.start()

    # ---- what workers ask ------------------------------------------------------------------------------

    def push(self, arrival: Arrival, push: Push) -> None:
        clock, share = divmod(arrival.batch, self.workers)
        with self._changed:
            self._arrived[clock][share] = push
            if self._record is not None:
                self._record.add(arrival)
            if self._readers is not None:  # now, as a worker that has read may die
                for i in self.servers:
                    self._readers[i][arrival.read[i]] -= 1
                    self._drop(i)
            self._changed.notify_all()

    def read(self, needs: Mapping[int, int], exactly: bool, timeout_s: float) -> dict[int, tuple[int, Tensor]] | None:
        """Of each server version and values, at least of the version that it `needs`, or `exactly` that; None if it is
        not there within `timeout_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.failure or self.version >= max(needs.values()), timeout_s):
                return None
            if self.failure is not None:
                raise RuntimeError(f"a parameter server has failed: {self.failure}") from self.failure
            found = {}
            for i, need in needs.items():
                version = need if exactly else self.version
                found[i] = version, self.servers[i].snapshots[version]
            return found

    def post(self, clock: int, post: Post) -> None:
        with self._changed:
            self._posts[clock] = post
            self._changed.notify_all()

    def flush(self) -> None:
        if self._record is not None:
            with self._changed:
                self._record.flush()

    def close(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(2.0)
        if self._record is not None:
            self._record.close()

    # ---- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ends or self._waits_to_be_added() or self._is_complete())
                    if self._ends:
                        return
                    work = self._waits_to_be_added()
                if work is not None:
                    self._add(*work)
                else:
                    self._apply()
        except BaseException as error:
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _waits_to_be_added(self) -> tuple[int, Push] | None:
        """A push whose gradients are next in the order of its clock: sums do not depend on when gradients arrive."""
        for clock, arrived in self._arrived.items():
            if self._added[clock] in arrived:
                return clock, arrived[self._added[clock]]
        return None

    def _is_complete(self) -> bool:
        return self._added[self.version] == self.workers and self.version in self._posts

    @torch.no_grad()
    def _add(self, clock: int, push: Push) -> None:
        if push.flat is not None:
            sums = self._sums.get(clock)
            start, parts = 0, []
            for server in self.servers.values():
                parts.append(server.layout.read(push.flat[start : start + server.layout.nbytes]))
                start += server.layout.nbytes
            if sums is None:
                self._sums[clock] = parts
            else:
                for into, more in zip(sums, parts, strict=True):
                    into[:] = [_sum(one, other) for one, other in zip(into, more, strict=True)]
        with self._changed:
            self._arrived[clock][self._added[clock]] = push._replace(flat=None)
            self._added[clock] += 1

    def _apply(self) -> None:
        clock = self.version
        post, pushes, sums = self._posts.pop(clock), self._arrived.pop(clock), self._sums.pop(clock, None)
        del self._added[clock]
        total = math.fsum(pushes[share].count for share in range(self.workers))
        if not total or sums is None:
            raise RuntimeError(
                f"no batch of step {clock} has a loss, and a parameter server cannot know that before other workers "
                "have computed on; return a loss from training_step, or use strategy='ddp'"
            )
        for server, values in zip(self.servers.values(), sums, strict=True):
            server.put_numbers(post)
            server.take(values, post.samples / total)
        self._clip(post)
        for server in self.servers.values():
            server.step()
            server.snapshot(clock + 1)
        with self._changed:
            self.version = clock + 1
            for i in self.servers:
                self._drop(i)
            self._changed.notify_all()

    def _clip(self, post: Post) -> None:
        """As torch does, by the norm of the mean gradient of the clock over all servers."""
        for key, limit, algorithm in post.clips:
            if algorithm != "norm":
                for server in self.servers.values():
                    clip_values(server.parameters(key), limit)
                continue
            norm = self._total_norm({i: server.norms(key) for i, server in self.servers.items()})
            for server in self.servers.values():
                torch.nn.utils.clip_grads_with_norm_(server.parameters(key), limit, norm)

    def _drop(self, i: int) -> None:
        """Forget the versions of a server that nobody will read."""
        readers = self._readers[i] if self._readers is not None else {}
        snapshots = self.servers[i].snapshots
        for version in [v for v in snapshots if v != self.version and readers.get(v, 0) <= 0]:
            del snapshots[version]


def _own(tensor: Tensor) -> Tensor:
    """A tensor of the server's: a copy, in the CPU's memory."""
    value = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    share_attributes(tensor, value)
    return value


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Their sum, in the memory of the first that is there."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)
