"""Stale-synchronous training: workers compute on parameters that may be old, servers step them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Capabilities, StepFn, StepHooks, StepResult, Strategy, Topology
from lockstep.strategies.checkpoint_state import Reader, State, gather_state
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.strategies.launch import environment, launcher, process_group
from lockstep.strategies.methods.compared import ComparedWeights
from lockstep.strategies.methods.options import check_whole
from lockstep.strategies.methods.parameter_server.data import DealtLoader
from lockstep.strategies.methods.parameter_server.dealer import shares_of
from lockstep.strategies.methods.parameter_server.engine import Ends, Engine, Options
from lockstep.strategies.methods.parameter_server.refusals import LATER, REFUSES, couples_parameters, refuse_hooks
from lockstep.strategies.methods.parameter_server.schedule import Schedule
from lockstep.strategies.methods.parameter_server.server import Post
from lockstep.strategies.methods.parameter_server.worker import Worker
from lockstep.strategies.optimizers.hidden_state import others_of
from lockstep.strategies.sync.buffers import share_model

T = TypeVar("T")

_SERVER_BYTES = 4_000_000
"""Parameters that are worth a server of their own, as a batch costs messages to each."""


class ParameterServer(ComparedWeights):
    """Stale-synchronous parallel training with servers that hold the parameters.

    Batches are handed out to whichever rank is free. `workers` batches that follow each other are a *clock*, whose
    gradients make one optimizer step on the servers, weighted as everywhere; so `global_step` counts clocks. A batch of
    clock c is computed on parameters of version c - `staleness` at least, where version v holds the steps of clocks
    before v. With `staleness=0` the numbers are those of `ddp`; random ones are drawn as with `virtual_ranks` equal to
    `workers`.

    `staleness`: how many steps the parameters that a batch is computed on may be old.
    `workers`: batches a clock; a multiple of the number of ranks, which it is by default.
    `servers`: how many ranks hold parameters, rank 0 first; by default one for each 4 MB, at most all. Where it
        is one, the other ranks may die: those that live compute their batches.
    `replay`: the `schedule.jsonl` of a run, which then is repeated bit for bit on any number of ranks that divides its
        workers. It brings `workers`, `servers` and `staleness`.
    `meet_every`: clocks between those in which all ranks wait for each other, to publish what was logged and to see
        whether callbacks ask for something.
    `timeout_s`: how long a collective may wait for the other ranks, in seconds.
    """

    capabilities = Capabilities(exact=False, synchronous=False, refuses=REFUSES)

    def __init__(
        self,
        staleness: int = 4,
        *,
        workers: int | None = None,
        servers: int | None = None,
        replay: str | Path | None = None,
        meet_every: int = 50,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self._schedule = None if replay is None else Schedule(replay)
        if self._schedule is not None:
            if workers is not None or servers is not None:
                raise ValueError("replay brings workers and servers; leave them out")
            workers, servers, staleness = (getattr(self._schedule, k) for k in ("workers", "servers", "staleness"))
        for name, value in (("workers", workers), ("servers", servers), ("meet_every", meet_every)):
            if value is not None:
                check_whole(name, value, 1)
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise ValueError(f"staleness must be a whole number of steps, 0 for none, but staleness={staleness!r}")
        self.staleness, self._workers, self._wanted_servers = staleness, workers, servers
        self._meet_every, self.ends = meet_every, Ends()
        self._clock = 0
        """Clocks that this rank has passed."""
        self._optimizers: dict[str, Optimizer] = {}
        self._have_met = False
        self.num_servers = servers or 1
        """Known once optimizers are set up."""
        self._engine: Engine | None = None
        self._worker: Worker | None = None
        self._owned: dict[int, str] | None = None
        """After servers have ended, the names by `id` of the parameters whose state this rank has; None for all."""
        self._members: list[int] = []
        """The ranks that live, by the numbers that they began with."""
        self._evaluated: list[ShardedLoader] = []
        self._norms: dist.ProcessGroup | None = None
        self._post: Post | None = None

    # ---- processes -------------------------------------------------------------------------------------

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        chosen = super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        ranks = environment.num_ranks(self.num_devices * num_nodes)
        self.virtual_ranks = self._workers or ranks
        if self.virtual_ranks % ranks:
            raise ValueError(
                f"workers={self.virtual_ranks} must be a multiple of the number of ranks, but there are {ranks}"
            )
        if self._schedule is None and self._wanted_servers is not None and self._wanted_servers > ranks:
            raise ValueError(f"servers={self._wanted_servers} are more than the {ranks} ranks")
        return chosen

    def launch(self, fn: Callable[..., T], *args: Any) -> T:
        if not self.starts_ranks:
            return fn(*args)
        spare = range(1, self.num_devices) if self._wanted_servers in (None, 1) else ()  # if there is one server
        return launcher.launch(fn, args, self.num_devices, spare=spare)

    def setup(self) -> Topology:
        topology = super().setup()
        self._members = [*range(topology.world_size)]
        return topology

    @property
    def shares(self) -> tuple[int, ...]:
        """The workers that this rank stands for in evaluation, and whose batches of the first clock it gets."""
        return tuple(shares_of(self.topology.rank, self.topology.world_size, self.virtual_ranks))

    @property
    def ranks_meet(self) -> bool:  # type: ignore[override]
        """So that they can publish: in the run's first two clocks, for which all ranks wait, and in every
        `meet_every`-th. Not in the first two after a resume: the run never stopped does not publish there."""
        return self._engine is None or self._clock % self._meet_every == 0 or self._clock <= 2

    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.abandon()
        self._engine = self._worker = self._norms = None
        self._clock, self._optimizers, self._evaluated, self._have_met, self._owned = 0, {}, [], False, None
        super().teardown()

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.topology.device)
        refuse_hooks(self._parameter_hooks)
        share_model(model)
        return model

    def teardown_module(self, wrapped: nn.Module) -> None:
        self.synchronize(wrapped)
        self._dissolve()
        super().teardown_module(wrapped)

    # ---- optimizers ------------------------------------------------------------------------------------

    def setup_optimizers(self, wrapped: nn.Module, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        needs_one = [couples_parameters(key, optimizer) for key, optimizer in optimizers.items()]
        self.num_servers = 1 if any(needs_one) else self._wanted_servers or self._enough_servers(wrapped)
        self._optimizers = super().setup_optimizers(wrapped, optimizers)
        return self._optimizers

    def clip_gradients(
        self, wrapped: nn.Module, optimizer: Optimizer, value: float, algorithm: str = "norm"
    ) -> Tensor | None:
        """Have the servers clip the gradient of the clock, when it is complete. Returns None: its norm is not known
        yet."""
        if value == float("inf"):
            raise RuntimeError(f"the norm of the gradient is not known: {LATER}; use strategy='ddp'")
        assert self._post is not None
        self._post.clips.append((self._key_of(optimizer), float(value), algorithm))
        return None

    def optimizer_step(
        self, wrapped: nn.Module, optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Have the servers step `optimizer` when the gradient of the clock is complete, with the numbers that its
        parameter groups have now."""
        if closure is not None:
            self._refuse("closures")
        assert self._post is not None and self._engine is not None
        key = self._key_of(optimizer)
        self._post.numbers[key] = self._engine.changed_numbers(key, optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn
        if self._post.numbers.keys() == self._optimizers.keys():
            self._engine.post(self._clock - 1, self._post)
            self._post = None
            if self._clock - self._engine.first_clock <= 2:  # where it is checked that steps move parameters
                self.synchronize(wrapped)
            elif self.ranks_meet:
                self._meet(is_drained=False)
        return True

    def _key_of(self, optimizer: Optimizer) -> str:
        return next(key for key, held in self._optimizers.items() if held is optimizer)

    # ---- collectives of the caller ---------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self._gather("all_reduce")
        return super().all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._gather("all_gather")
        return super().all_gather(tensor)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        self._gather("broadcast")
        return super().broadcast(value, src)

    def _of_all(self, value: Any) -> list[Any]:
        return [self.broadcast(value, rank) for rank in range(self.topology.world_size)]

    def barrier(self, name: str = "") -> None:
        self._gather("barrier")
        super().barrier()

    def _gather(self, what: str) -> None:
        """Before a collective of the caller's: all ranks must be between steps, and be alive."""
        self._refuse_in_batch(what)
        if self._engine is not None and not self._have_met:
            self._meet(is_drained=False)

    def _refuse_in_batch(self, what: str) -> None:
        if self._worker is not None and self._worker.computes:
            raise RuntimeError(
                f"{what} was called while a batch is computed, which other ranks of a parameter server do not compute "
                "at the same time; call it in a hook such as on_train_epoch_end, in on_train_batch_end only once "
                "global_step has moved, or use strategy='ddp'"
            )

    # ---- data ------------------------------------------------------------------------------------------

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 0, split: bool = False
    ) -> ShardedLoader:
        """A loader to train on, whose windows are clocks, is given `accumulate`; without, it is one to evaluate."""
        kind = DealtLoader if accumulate else ShardedLoader
        own = tuple(range(self.virtual_ranks)) if accumulate else self.shares
        sharded = kind(
            loader,
            rank=own[0],
            size=self.virtual_ranks,
            seed=seed,
            shuffle=shuffle,
            accumulate=accumulate or 1,
            split=split,
            sum_over_ranks=None if accumulate else lambda n: int(self.all_reduce(torch.tensor(n))),
            virtual=own,
        )
        self._evaluated += [] if accumulate else [sharded]
        return sharded

    # ---- one clock -------------------------------------------------------------------------------------

    def forward_backward(
        self, wrapped: nn.Module, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        """Compute those batches of a clock that are this rank's, and send their gradients to the servers.

        What it returns is known before the clock is complete: `count` is 1 for "some", and `loss` is None.
        """
        if not hooks.automatic:
            self._refuse("manual_optimization")
        refuse_hooks(self._parameter_hooks)
        if window.num_shares != self.virtual_ranks:
            raise RuntimeError(
                "a parameter server trains on windows of all workers; give shard_loader the argument accumulate"
            )
        num_samples, worker, self._have_met = window.num_samples, self._running(wrapped, hooks), False
        stop = worker.clock(self._clock, window, step_fn, hooks)
        self._clock += 1
        self._post = Post(num_samples, {})
        return StepResult(1.0, stop, None)

    # ---- servers ---------------------------------------------------------------------------------------

    def _running(self, wrapped: nn.Module, hooks: StepHooks) -> Worker:
        if self._engine is None or self._worker is None:
            options = Options(self.virtual_ranks, self.num_servers, self.staleness)
            self._norms = self._norms or self.ends.group(self.num_servers, self.topology)
            self._engine = Engine(
                self.topology,
                wrapped,
                self._optimizers,
                options,
                self._clock,
                self._schedule,
                hooks.folder,
                self._norms,
                self.ends,
            )
            place, forward = f"rank {self.topology.rank}", partial(self.precision.autocast, self.topology.device)
            self._owned = None
            self._worker = Worker(
                self._engine, wrapped, self._optimizers, self.virtual_ranks, place, forward, self._check_changes
            )
        return self._worker

    def _enough_servers(self, wrapped: nn.Module) -> int:
        nbytes = sum(p.numel() * p.element_size() for p in wrapped.parameters())
        return max(1, min(self.topology.world_size, nbytes // _SERVER_BYTES))

    def synchronize(self, wrapped: nn.Module) -> None:
        """Wait for the steps of all clocks so far, and let the model hold what they made. Every rank calls it, between
        steps."""
        if self._engine is not None and self._worker is not None:
            self._engine.drain(self._clock, self._worker.help)
            self._meet(is_drained=True)  # else a rank could compute on before another one has read

    def _meet(self, is_drained: bool) -> None:
        """Wait for the other ranks, before they call collectives; without those that have died since they met last."""
        engine, worker = self._engine, self._worker
        assert engine is not None and worker is not None
        self._have_met = True
        if not engine.spares_ranks:
            if is_drained:
                self.barrier()
            return
        living = engine.meet()
        if len(living) == self.topology.world_size:
            return
        if not is_drained:
            engine.drain(self._clock, worker.help)
            living = engine.meet()
        self._members = [self._members[rank] for rank in living]
        self._rejoin(living.index(self.topology.rank), len(living))
        self._dissolve()

    def _rejoin(self, rank: int, world_size: int) -> None:
        """Join a new process group of `self._members`; ranks get new numbers."""
        self._norms = None
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        process_group.destroy_process_group()
        self.topology = replace(self.topology, rank=rank, data_rank=rank, world_size=world_size, data_size=world_size)
        backend = process_group.backend_of(self.topology.device)
        world, device = environment.detect(), self.topology.device
        process_group.init_process_group(world, backend, self.timeout_s, device, self._members)
        for loader in self._evaluated:
            loader.set_virtual(self.shares)

    def _dissolve(self) -> None:
        """End the servers, all of whose steps are done, and give the optimizers their state; the next step starts
        others, with what the model holds then."""
        if self._engine is None:
            return
        self._owned = self._engine.dissolve(self._of_all)
        self._engine = self._worker = None

    @contextmanager
    def whole(self, wrapped: nn.Module) -> Iterator[None]:
        self._refuse_in_batch("trainer.whole")
        self.synchronize(wrapped)
        yield
        engine = self._engine
        if engine is None or int(self.all_reduce(torch.tensor(len(engine.changed())), "max")):
            self._refuse_different(wrapped)
            self._dissolve()

    @contextmanager
    def evaluation_weights(
        self, wrapped: nn.Module, optimizers: Iterable[Optimizer], restore: bool = True
    ) -> Iterator[None]:
        self.synchronize(wrapped)
        with super().evaluation_weights(wrapped, optimizers, restore):
            yield

    def state_dict(self, wrapped: nn.Module, optimizers: dict[str, Optimizer]) -> State:
        self.synchronize(wrapped)
        if not optimizers or (self._engine is None and self._owned is None):
            for key, optimizer in optimizers.items():
                others_of(key, optimizer, optimizer.state_dict(), is_spread=True)  # as it will be
            return super().state_dict(wrapped, optimizers)
        with nullcontext(self._owned) if self._engine is None else self._engine.shown(self._of_all) as owned:
            state = gather_state(wrapped, optimizers, self.local_shard, owned)
        for key in optimizers:
            saved = state.meta["optimizers"][key]
            saved["state"] = {name: entry for part in self._of_all(saved["state"]) for name, entry in part.items()}
        state.meta["extra"] = {self.name: self.extra_state(wrapped)}
        return state

    def load_state_dict(self, wrapped: nn.Module, optimizers: dict[str, Optimizer], state: Reader) -> None:
        self.synchronize(wrapped)
        self._dissolve()
        super().load_state_dict(wrapped, optimizers, state)
        self._owned = self._owned if not optimizers else None

    def extra_state(self, wrapped: nn.Module) -> dict[str, Any]:
        return {"clock": self._clock}

    def load_extra_state(self, wrapped: nn.Module, saved: dict[str, Any]) -> None:
        self._clock = int(saved.get("clock", 0))

    def trainability_changed(self, wrapped: nn.Module, names: list[str]) -> None:
        """Nothing to do: a frozen parameter gets no gradient, and then no server steps it."""
