"""The servers of a run and a rank's way to them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import Topology
from lockstep.strategies.launch.process_group import backend_of
from lockstep.strategies.methods.parameter_server.dealer import Dealer
from lockstep.strategies.methods.parameter_server.layout import Layout, spread
from lockstep.strategies.methods.parameter_server.links import Links
from lockstep.strategies.methods.parameter_server.schedule import Arrival, Record, Schedule
from lockstep.strategies.methods.parameter_server.server import Host, Post, Server
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.optimizers.attributes import take_over
from lockstep.strategies.optimizers.hidden_state import HiddenState
from lockstep.strategies.optimizers.numbers import changes, numbers_of, put
from lockstep.strategies.sync.contents import same_bits, sum_of_bits


class Options(NamedTuple):
    """What the numbers of a run depend on."""

    workers: int
    servers: int
    staleness: int


FOREVER = timedelta(days=365)
"""For threads that wait for slow workers."""


def group_of_servers(num_servers: int, topology: Topology) -> dist.ProcessGroup | None:
    """For the threads of the ranks with servers, if there are several; every rank makes it once a run.

    On GPUs it has NCCL too, though they send tensors of the host: the other ranks split NCCL's group in any case, which
    waits for all.
    """
    holders = [*range(min(num_servers, topology.world_size))]
    return dist.new_group(holders, backend=backend_of(topology.device), timeout=FOREVER) if len(holders) > 1 else None


class Ends(NamedTuple):
    """What an engine steps in, and by which it sends."""

    host: Callable[..., Any] = Host
    links: Callable[..., Any] = Links
    group: Callable[[int, Topology], dist.ProcessGroup | None] = group_of_servers


class Engine:
    """From a step on until `close`; every rank makes one."""

    def __init__(
        self,
        topology: Topology,
        wrapped: nn.Module,
        optimizers: Mapping[str, Optimizer],
        options: Options,
        clock: int,
        schedule: Schedule | None,
        folder: str | None,
        norms: dist.ProcessGroup | None,
        ends: Ends,
    ) -> None:
        self.first_clock, self._schedule, self._optimizers = clock, schedule, optimizers
        self._staleness, self._workers, num_servers = options.staleness, options.workers, options.servers
        self._rank, world_size, self._num_servers = topology.rank, topology.world_size, num_servers
        readers = self._readers(clock)
        stepped = {id(p) for o in optimizers.values() for group in o.param_groups for p in group["params"]}
        tensors: dict[str, Tensor] = {n: p for n, p in wrapped.named_parameters() if id(p) in stepped}
        self._kept = {n: (p, int(sum_of_bits(p))) for n, p in wrapped.named_parameters() if id(p) not in stepped}
        """The parameters that no optimizer steps, and what tells whether user code has changed them."""
        places = {name: _place(wrapped, name) for name, _ in wrapped.named_buffers()}
        self._places = {
            name: (module, key)
            for name, (module, key) in places.items()
            if key not in module._non_persistent_buffers_set  # caches, which are each rank's own
        }
        tensors |= {name: buffer for name, buffer in wrapped.named_buffers() if name in self._places}
        self._marks: list[tuple[int, int]] = []
        self._names = list(tensors)
        self._parts = spread(tensors, num_servers)
        self._layouts = [Layout(part) for part in self._parts]
        self._last: list[Tensor] = []
        """By server the values that this rank has read last."""
        self._hosts = [i % world_size for i in range(num_servers)]
        self._before = {key: [numbers_of(group) for group in o.param_groups] for key, o in optimizers.items()}
        self._held = {key: [list(group["params"]) for group in o.param_groups] for key, o in optimizers.items()}
        mine = {
            i: Server(part, optimizers)
            for i, (part, host) in enumerate(zip(self._parts, self._hosts, strict=True))
            if host == self._rank
        }
        for optimizer in optimizers.values():
            optimizer.state = HiddenState(optimizer, "the state of {} is on the servers, which step it")
        self._norms = norms
        record = None
        if self._rank == 0 and folder is not None:
            record = Record(folder, options._asdict(), clock)
        self._host = ends.host(mine, self._workers, clock, self._total_norm, readers, record)
        sizes = [
            [layout.nbytes for layout, host in zip(self._layouts, self._hosts, strict=True) if host == rank]
            for rank in range(world_size)
        ]
        need_of = self._need_of if schedule is None else None
        self._links = ends.links(self._rank, self._hosts, sizes, num_servers, need_of)
        dealer = Dealer(self._workers, world_size, clock) if self._rank == 0 else None
        self._links.serve(self._host if mine or dealer else None, dealer)

    def _readers(self, clock: int) -> dict[int, Counter[int]] | None:
        if self._schedule is None:
            return None
        readers: dict[int, Counter[int]] = {i: Counter() for i in range(self._num_servers)}
        for batch, read in self._schedule.reads.items():
            if batch >= clock * self._workers:
                if min(read) < clock:
                    raise RuntimeError(
                        f"the schedule that is replayed has batch {batch} read parameters of step {min(read)}, but "
                        f"this replay begins again at step {clock}, where the recorded run did not wait for all ranks; "
                        "resume a checkpoint that the recorded run has saved, or replay without one"
                    )
                for i, version in enumerate(read):
                    readers[i][version] += 1
        return readers

    @property
    def spares_ranks(self) -> bool:
        """Whether others take over what a rank has that dies."""
        return self._links.spares_ranks

    def take(self, clock: int, vote: int, order: int = 0, late: bool = False) -> tuple[int | None, int]:
        return self._links.take(clock, vote, order, late)

    def meet(self) -> list[int]:
        return self._links.meet()

    def read(self, batch: int, meanwhile: Callable[[], None]) -> list[int]:
        """Let the model hold parameters that `batch` may be computed on; their versions by server.

        `meanwhile` is called now and then until they are there; it may compute other batches.
        """
        self._refuse_changes()
        if self._schedule is not None:
            return self._put(self._links.read(self._schedule.of(batch), exactly=True, meanwhile=meanwhile))
        return self._put(self._links.read_for(batch, meanwhile))

    def _need_of(self, batch: int) -> int:
        return max(self.first_clock, batch // self._workers - self._staleness)

    def drain(self, clock: int, meanwhile: Callable[[], None]) -> None:
        """Let the model hold what the steps of all clocks before `clock` made."""
        self._refuse_changes()
        self._put(self._links.read([clock] * self._num_servers, exactly=False, meanwhile=meanwhile))
        self._host.flush()

    @torch.no_grad()
    def _put(self, found: list[tuple[int, Tensor]]) -> list[int]:
        for part, layout, (_, flat) in zip(self._parts, self._layouts, found, strict=True):
            for tensor, value in zip(self._now(part), layout.read(flat), strict=True):
                assert value is not None
                if tensor is not None and tensor.shape == value.shape:  # else user code has made another one
                    tensor.data.copy_(value)
        self._last = [flat for _, flat in found]
        self.note_buffers()
        return [version for version, _ in found]

    def _now(self, part: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The tensors of a server as the model has them: a step may have put another one in the place of a buffer."""
        found: list[Tensor | None] = []
        for name, tensor in part.items():
            module, key = self._places.get(name, (None, ""))
            found.append(tensor if module is None else module._buffers.get(key))
        return found

    def note_buffers(self) -> None:
        """The buffers are as a batch has left them, which may change them."""
        self._marks = self._now_marked()

    def _now_marked(self) -> list[tuple[int, int]]:
        """What tells whether code has changed or replaced a buffer of the state dict."""
        now = [module._buffers.get(key) for module, key in self._places.values()]
        return [(id(buffer), 0 if buffer is None else buffer._version) for buffer in now]

    def _changed_buffers(self) -> list[str]:
        pairs = zip(self._places, self._marks, self._now_marked(), strict=False)
        return [name for name, before, now in pairs if now != before]

    def refuse_changed_buffers(self) -> None:
        if changed := self._changed_buffers():
            raise RuntimeError(
                f"the buffers {shortened(changed)} were changed in a hook or in an evaluation, on a worker, whose "
                "values a parameter server would overwrite; change them in training_step, or on every rank within "
                "`with trainer.whole(module):`"
            )

    def changed(self) -> list[str]:
        """The parameters that are not what this rank has read last, and those without optimizer that were changed; the
        buffers that were since a batch was computed."""
        names = [name for name, (parameter, bits) in self._kept.items() if int(sum_of_bits(parameter)) != bits]
        names += self._changed_buffers()
        for part, layout, flat in zip(self._parts, self._layouts, self._last, strict=True):
            for (name, tensor), value in zip(part.items(), layout.read(flat), strict=True):
                if isinstance(tensor, nn.Parameter) and value is not None and not same_bits(tensor, value):
                    names.append(name)
        return names

    def _refuse_changes(self) -> None:
        self.refuse_changed_buffers()
        changed = self.changed() if self._last else []
        if changed:
            raise RuntimeError(
                f"the parameters {shortened(changed)} were changed outside of the optimizer, on a worker, whose "
                "weights may be old and which a parameter server would overwrite; change them on every rank within "
                "`with trainer.whole(module):`, not in training_step"
            )

    def push(self, batch: int, versions: list[int], count: float, ran: bool) -> None:
        """Send the gradients that the model has, if the batch counted anything; buffers too if it `ran` as the first of
        its clock."""
        clock, share = divmod(batch, self._workers)
        flats: dict[int, Tensor] = {}
        leaves = ran and not share
        if count or leaves:
            pieces: dict[int, list[Tensor]] = defaultdict(list)
            for part, layout, host in zip(self._parts, self._layouts, self._hosts, strict=True):
                flat = torch.empty(layout.nbytes, dtype=torch.uint8)
                sent = [
                    (t.grad if count else None) if isinstance(t, nn.Parameter) else (t if leaves else None)
                    for t in self._now(part)
                ]
                layout.write(sent, flat)
                pieces[host].append(flat)
            flats = {host: parts[0] if len(parts) == 1 else torch.cat(parts) for host, parts in pieces.items()}
        self._links.push(Arrival(batch, self._rank, versions, clock + 1), count, flats)

    def changed_numbers(self, key: str, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """By group what is other in the numbers of `optimizer` than when this was asked last."""
        held = [list(group["params"]) for group in optimizer.param_groups]
        if [[id(p) for p in group] for group in held] != [[id(p) for p in group] for group in self._held[key]]:
            raise RuntimeError(
                f"the parameter groups of optimizer {key!r} hold other parameters than at its first step, which a "
                "parameter server cannot take over; give it all parameters in configure_optimizers, some of them frozen"
            )
        now = [numbers_of(group) for group in optimizer.param_groups]
        before, self._before[key] = self._before[key], now
        return {i: found for i, (n, b) in enumerate(zip(now, before, strict=True)) if (found := changes(n, b))}

    def post(self, clock: int, post: Post) -> None:
        if self._host.servers:
            self._host.post(clock, post)

    @contextmanager
    def shown(self, of_all: Callable[[Any], list[Any]]) -> Iterator[dict[int, str]]:
        """While it lasts the user's optimizers hold the state of what this rank's servers step, and in their groups
        what steps on any server have changed; yields the names of that state by `id` of the parameters.

        Every rank calls it; `of_all` gives what each rank has given it.
        """
        owned: dict[int, str] = {}
        groups = {key: optimizer.param_groups for key, optimizer in self._optimizers.items()}
        before = {key: [numbers_of(group) for group in held] for key, held in groups.items()}
        stepped = of_all([numbers for server in self._host.servers.values() for numbers in server.numbers()])
        for key, i, changed in (numbers for of_rank in stepped for numbers in of_rank):
            put(groups[key][i], changed)
        hidden = {key: optimizer.state for key, optimizer in self._optimizers.items()}
        for key, optimizer in self._optimizers.items():
            state: defaultdict[Any, Any] = defaultdict(dict)
            for i, server in self._host.servers.items():
                users = {id(server.own[id(t)]): t for t in self._parts[i].values()}
                if key in server.optimizers:
                    take_over(key, optimizer, server.optimizers[key])
                    for tensor, entry in server.optimizers[key].state.items():
                        state[users.get(id(tensor), tensor)] = entry
                owned |= {id(t): name for name, t in self._parts[i].items()}
            optimizer.state = state
        try:
            yield owned
        finally:
            for key, optimizer in self._optimizers.items():
                optimizer.state = hidden[key]
                for group, numbers in zip(groups[key], before[key], strict=True):
                    put(group, changes(numbers, numbers_of(group)))
                    for name in numbers_of(group).keys() - numbers.keys():
                        del group[name]

    def dissolve(self, of_all: Callable[[Any], list[Any]]) -> dict[int, str]:
        """End the servers, and leave the user's optimizers what `shown` shows; returns what it yields."""
        optimizers = self._optimizers.values()
        with self.shown(of_all) as owned:
            held = [(o.state, [numbers_of(group) for group in o.param_groups]) for o in optimizers]
        self.close()
        for optimizer, (state, numbers) in zip(optimizers, held, strict=True):
            optimizer.state = state
            for group, now in zip(optimizer.param_groups, numbers, strict=True):
                group.update(now)
        return owned

    def close(self) -> None:
        self._links.close()
        self._host.close()

    def abandon(self) -> None:
        """End this rank's servers after an error; threads that answer others end with these."""
        self._links.abandon()
        self._host.close()

    def _total_norm(self, norms: Mapping[int, Mapping[int, Tensor]]) -> Tensor:
        """The norm of all tensors, of those of each own server by place; its bits do not depend on which server has
        which. The threads of all ranks call it."""
        places = {name: i for i, name in enumerate(self._names)}
        rows = torch.zeros(2, len(places), dtype=torch.float64)  # second row: whether there is one
        for server, of_server in norms.items():
            names = list(self._parts[server])
            for place, norm in of_server.items():
                rows[:, places[names[place]]] = torch.stack([norm.double(), norm.new_ones((), dtype=torch.float64)])
        if self._norms is not None:
            dist.all_reduce(rows, group=self._norms)
        return torch.linalg.vector_norm(rows[0, rows[1] > 0])


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
