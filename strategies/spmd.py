"""Base of the strategies in which every rank runs the same program: processes, devices, collectives and state.

`strategies/hooks.py` is what a strategy overrides, `strategies/step.py` the optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Strategy, Topology, W
from lockstep.strategies.checkpoint_state import LocalShard, Reader, State, gather_state
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.devices import check_launcher, device_index, resolve_accelerator, resolve_devices
from lockstep.strategies.launch import environment, fault_injection, launcher, process_group, sidecar, watchdog
from lockstep.strategies.launch.program.contexts import refuse_hooks_on_all
from lockstep.strategies.launch.rng import HookDraws
from lockstep.strategies.modules.activation_checkpointing import find_recomputed, keep, recompute
from lockstep.strategies.modules.blocks import Rule, is_metric
from lockstep.strategies.modules.casts import follow_casts, forget_casts, watch_casts
from lockstep.strategies.modules.meta import materialize
from lockstep.strategies.modules.model_changes import refuse_embeddings, refuse_shared_memory
from lockstep.strategies.modules.parameter_hooks import ParameterHooks
from lockstep.strategies.modules.user_edits import UserEdits
from lockstep.strategies.optimizers import modes
from lockstep.strategies.optimizers.fused import fuse
from lockstep.strategies.optimizers.owners import Owners, described
from lockstep.strategies.optimizers.saved_groups import add_saved_groups, restore_state
from lockstep.strategies.precision import Precision
from lockstep.strategies.step import SPMDStep
from lockstep.strategies.sync import collectives
from lockstep.strategies.sync.compression.compression import Compression, Layout
from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.step_agreement import StepAgreement

T = TypeVar("T")


class SPMDStrategy(SPMDStep[W]):
    """Base of the strategies in which every rank runs the user's step itself and autograd runs backward through it.

    Derive from it and override its hooks, which `strategies/hooks.py` lists.

    `activation_checkpointing`: True computes what lies within a block again in the backward, in place of keeping it,
        for the blocks that `find_blocks` takes by itself; a class, a name, a list of them or a function says which.
    """

    single_process = False
    """True where one process is all there ever is."""
    one_rank: Callable[..., Strategy] | None = None
    """What runs in place of this strategy on one rank, unless LOCKSTEP_FORCE_MESH=1 asks for the strategy itself. It
    gets `activation_checkpointing`; None if another option has an effect on one rank."""
    stays_on_one_rank = False
    """Whether the strategy itself then runs in one process without a group, unless LOCKSTEP_FORCE_MESH=1."""
    max_devices: int | None = None
    """The most devices that the strategy can use on a node, or None for all."""
    timeout_s = 1800.0
    """How long a collective may wait for the other ranks, in seconds."""
    compressor: Compressor | None = None
    """What gradients are sent by, if they are compressed."""
    broadcast_buffers: bool | None = None
    """Whether rank 0's buffers overwrite the others', whatever these hold; None: it is an error if they differ."""
    data_groups = 1
    """Groups of neighboring data ranks that get equal shares of a micro-batch, before the ranks of a group do."""

    def __init__(self, *, activation_checkpointing: bool | Rule = False) -> None:
        super().__init__()
        if isinstance(activation_checkpointing, (int, float)) and not isinstance(activation_checkpointing, bool):
            raise ValueError(
                "activation_checkpointing must be True, False or say which blocks, but "
                f"activation_checkpointing={activation_checkpointing!r}"
            )
        self.activation_checkpointing: bool | Rule = (
            "auto" if activation_checkpointing is True else activation_checkpointing
        )
        self.num_devices = self._num_nodes = 1
        self._accelerator = "cpu"
        self._ready = False
        self._evaluation: modes.Evaluation | None = None
        self._owners: dict[int, Owners] = {}
        """By `id` of an optimizer where its parameters are stepped, if each is on one rank."""
        self._writes_owned = True
        """Whether a checkpoint's common state has what this rank keeps for them."""
        self._end_watchdog: Callable[[], None] = _nothing
        self._refusal: Callable[[str], RuntimeError] | None = None
        """What a collective raises that the caller calls now, by its name; None if all ranks can meet."""

    # ---- 1. processes and devices ----------------------------------------------------------------------

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        seconds: Any = self.timeout_s
        if not isinstance(seconds, (int, float)) or not 0 < seconds < 1e9:
            raise ValueError(f"timeout_s must be a number of seconds above 0 and below 1e9, but timeout_s={seconds!r}")
        self.precision = Precision(precision)
        self._accelerator = resolve_accelerator(accelerator)
        self._num_nodes = num_nodes
        if self.stays_on_one_rank:  # another Trainer may have used this object on one rank
            self.single_process, self.max_devices = type(self).single_process, type(self).max_devices
        self.num_devices = resolve_devices(devices, self._accelerator, self.max_devices)
        num_ranks = environment.num_ranks(self.num_devices * num_nodes)
        alone = num_ranks == 1 and not environment.forces_mesh()
        if alone and self.stays_on_one_rank:
            self.single_process, self.max_devices = True, 1
        fault_injection.parse(os.environ)
        watchdog.limit_s()
        check_launcher(self.name, self.single_process, devices, self.num_devices, num_nodes)
        if self.one_rank is None or not alone:
            self._refuse(self.precision.name)
            return self
        chosen = self.one_rank(activation_checkpointing=self.activation_checkpointing)
        return chosen.configure(devices=1, accelerator=accelerator, num_nodes=num_nodes, precision=precision)

    @property
    def expected_topology(self) -> Topology:
        if self.single_process:
            return Topology()
        num_ranks = environment.num_ranks(self.num_devices * self._num_nodes)
        return Topology(world_size=num_ranks, data_size=self.data_size_of(num_ranks))

    def check(self, model: nn.Module) -> None:
        refuse_embeddings(model, self.expected_topology.data_size, self.name)
        if self.expected_topology.world_size > 1:
            refuse_hooks_on_all()
        if self.cuts_gradients and not self.single_process:
            refuse_shared_memory(model, self.name)
        if self.activation_checkpointing is not False:
            find_recomputed(model, self.activation_checkpointing)  # type: ignore[arg-type]

    @property
    def starts_ranks(self) -> bool:  # type: ignore[override]
        return not self.single_process and self.num_devices > 1 and environment.detect() is None

    def launch(self, fn: Callable[..., T], *args: Any) -> T:
        return launcher.launch(fn, args, self.num_devices) if self.starts_ranks else fn(*args)

    def setup(self) -> Topology:
        world = None if self.single_process else environment.detect()
        device = torch.device(self._accelerator)
        if self._accelerator == "cuda":
            device = torch.device("cuda", device_index(world, torch.cuda.device_count()))
        self.topology = Topology(device=device)
        if world is not None:
            self.topology = Topology(
                rank=world.rank,
                local_rank=world.local_rank,
                world_size=world.world_size,
                node_rank=world.node_rank,
                num_nodes=world.num_nodes,
                device=device,
                data_rank=world.rank,
                data_size=world.world_size,
            )
        self._ready = True
        fault_injection.load(self.topology.rank)
        if self.topology.device.type == "cuda":
            torch.cuda.set_device(self.topology.device)
            self._copies = torch.cuda.Stream()
        self._on_cpu = self.topology.device.type == "cpu"
        self._found, self._one = (
            make((), dtype=torch.float32, device=self.topology.device) for make in (torch.zeros, torch.ones)
        )
        self.precision.setup(self.topology.device)
        self._in_group = not self.single_process
        if self._in_group:
            if self.topology.world_size == 1:
                world = None  # a group of one meets nobody
            elif world is None or world.launcher not in ("lockstep", "plan"):
                self._end_watchdog = sidecar.guard(self.topology.rank)
            process_group.init_process_group(world, process_group.backend_of(device), self.timeout_s, device)
            self._agreement = StepAgreement(self.topology.rank, self.topology.world_size, self.timeout_s)
        if self.compressor is not None:
            layout = Layout((self.topology.data_rank,), self.topology.data_size, writes_memory=self.topology.rank == 0)
            self._compression = Compression(self.compressor, layout)
        return self.topology

    def teardown(self) -> None:
        if not self._ready:
            return
        fault_injection.fault("teardown")
        fault_injection.unload()
        self._end_watchdog()
        self._end_watchdog = _nothing
        for owners in self._owners.values():
            owners.close()
        self._owners = {}
        self._ready = self._in_group = False
        if self._agreement is not None:
            self._agreement.close()
        self._edits.end_own()
        self._agreement, self._edits = None, UserEdits()
        forget_casts()
        self._looks = self._steps_on_host = False
        self._non_finite, self._watched, self._copies, self._trained_by = None, [], None, ()
        self._step_hooks, self._parameter_hooks, self._hook_draws = NO_HOOKS, ParameterHooks(), None
        if self._changes is not None:
            self._changes.close()
            self._changes = None
        self.precision.teardown()
        process_group.destroy_process_group()

    def setup_module(self, model: nn.Module) -> W:
        if self.topology.rank == 0 or not self.capabilities.builds_on_meta:
            materialize(model)
        keep(model)  # a run that failed may have left some
        watch_casts()
        self.check(model)
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._parameter_hooks = ParameterHooks()
        if self._in_group and not self.virtual_ranks and (self.capabilities.steps_together or self.cuts_gradients):
            self._hook_draws = HookDraws(self.broadcast, self.topology.rank == 0, self.topology.data_size == 1)
            self._parameter_hooks.around = self._hook_draws.around
        self._parameter_hooks.take(model.named_parameters())
        if self.activation_checkpointing is not False:
            recompute(model, self.activation_checkpointing)  # type: ignore[arg-type]
        wrapped = self.wrap(self.precision.convert(model))
        for parameter in self.unwrap(wrapped).parameters():
            follow_casts(parameter)
        for metric in filter(is_metric, model.modules()):
            metric.to(self.topology.device)  # what moves parameters and buffers does not know their states
        return wrapped

    def teardown_module(self, wrapped: W) -> None:
        model = self.unwrap(wrapped)
        keep(model)
        self._parameter_hooks.put_back(model.named_parameters())

    def setup_optimizers(self, wrapped: W, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        if len(optimizers) > 1:
            self._refuse("several_optimizers")
        if self.topology.device.type == "cuda":
            for optimizer in optimizers.values():
                fuse(optimizer)
                parameters = (p for group in optimizer.param_groups for p in group["params"])
                self._steps_on_host |= any(p.device.type == "cpu" for p in parameters)
        # Walking through the modules in each step would cost more than the check of the gradients.
        self._watched = list(wrapped.parameters())
        if self.precision.scaler is not None:
            self.precision.scaler.watch(
                optimizers.values(),
                self._watched,
                self.topology.device,
                on_host=self._steps_on_host,
                cut=self.cuts_gradients,
            )
        self._watch_changes(wrapped)
        self._compare_edits(self.unwrap(wrapped), optimizers)
        if self._compression is not None:
            self._compression.watch(self.unwrap(wrapped), optimizers.values())
        self._evaluation, self._trained_by = None, optimizers.values()
        modes.train(optimizers.values(), partial(self.open_optimizer, wrapped))
        return optimizers

    def _compare_edits(self, model: nn.Module | None, optimizers: dict[str, Optimizer]) -> None:
        if self._agreement is not None and self.capabilities.steps_together:
            self._edits = UserEdits(model, optimizers)
            self._agreement.edits = self._edits.take
            self._agreement.num_hooks = self._parameter_hooks.number

    @contextmanager
    def evaluation_weights(self, wrapped: W, optimizers: Iterable[Optimizer], restore: bool = True) -> Iterator[None]:
        if self._evaluation is not None:
            yield
            return
        evaluation = modes.Evaluation(optimizers, partial(self.open_optimizer, wrapped), restore)
        self._evaluation = evaluation
        evaluation.begin()
        yield  # after an error no collective is called: a save that follows leaves the evaluation by itself
        if restore:
            evaluation.end()
            self._evaluation = None

    @contextmanager
    def _training_weights(self) -> Iterator[bool]:
        """While it lasts the model holds the weights to train, within `evaluation_weights` too; yields whether it had
        others."""
        evaluation = self._evaluation
        if evaluation is None or not evaluation.returns:
            yield False
            return
        evaluation.end()
        self._evaluation = None
        yield True
        self._evaluation = evaluation
        evaluation.begin()

    def synchronize(self, wrapped: W) -> None:
        if self._edits.watches and self._agreement is not None:  # ranks may differ in whether hooks have run
            self._agreement.check()

    # ---- 2. collectives --------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return collectives.all_reduce(tensor, op) if self._meets("all_reduce") else tensor.detach().clone()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return collectives.all_gather(tensor) if self._meets("all_gather") else tensor.detach().unsqueeze(0)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return collectives.broadcast(value, src) if self._meets("broadcast") else value

    def barrier(self, name: str = "") -> None:
        if self._meets("barrier"):
            dist.barrier()

    def _meets(self, verb: str) -> bool:
        """Whether a collective has a group to run in. Raises `_refusal` if it may not be called now."""
        if self._refusal is not None:
            raise self._refusal(verb)
        return self._in_group

    # ---- 3. sampler seeding ----------------------------------------------------------------------------

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False
    ) -> ShardedLoader:
        if self._compression is not None:
            self._compression.seed_once(seed)
        return ShardedLoader(
            loader,
            rank=self.shares[0] if self.virtual_ranks else self.topology.data_rank,
            size=self.virtual_ranks or self.topology.data_size,
            seed=seed,
            shuffle=shuffle,
            accumulate=accumulate,
            split=split,
            groups=self.data_groups,
            virtual=self.shares,
            sum_over_ranks=lambda n: (
                int(self.all_reduce(torch.tensor(n))) * self.topology.data_size // self.topology.world_size
            ),
            first_of_ranks=collectives.first_held if self._in_group else None,
        )

    # ---- 4. checkpointing ------------------------------------------------------------------------------

    def state_dict(self, wrapped: W, optimizers: dict[str, Optimizer]) -> State:
        scaler = self.precision.scaler
        at_next_step = nullcontext() if scaler is None or not optimizers else scaler.at_next_step()
        with self._training_weights() as for_now, at_next_step:
            state = self._gather_state(wrapped, optimizers, self.local_shard, self._writes_owned)
            self._save_both(wrapped, optimizers, state, for_now)
            if scaler is not None:
                state.meta["scaler"] = scaler.state_dict()
        extra = self.extra_state(wrapped)
        if extra:
            state.meta["extra"] = {self.name: extra}
        if self._compression is not None and optimizers:
            self._compression.save(state)
        return state

    def _save_both(self, wrapped: W, optimizers: dict[str, Optimizer], state: State, for_now: bool) -> None:
        if for_now and any(map(modes.has_modes, optimizers.values())):  # what it refers to is about to change
            state.tensors = {name: replace(shard, tensor=shard.tensor.clone()) for name, shard in state.tensors.items()}
        evaluated = self.evaluation_weights(wrapped, optimizers.values())
        modes.save_both(self.unwrap(wrapped), optimizers, state, evaluated, self.local_shard)

    def _gather_state(
        self, wrapped: W, optimizers: dict[str, Optimizer], shard: LocalShard, writes_owned: bool = True
    ) -> State:
        """What this rank writes of model and optimizers; with `writes_owned` the state of what it steps for others
        too."""
        with described(self._owners, optimizers) as owned:
            state = gather_state(self.unwrap(wrapped), optimizers, shard, owned, writes_owned)
        for optimizer in optimizers.values():
            if id(optimizer) in self._owners:
                self._owners[id(optimizer)].merge(state)
        return state

    def _restore_state(self, wrapped: W, optimizers: dict[str, Optimizer], state: Reader) -> None:
        for key, optimizer in optimizers.items():
            if id(optimizer) in self._owners and key in state.meta["optimizers"]:
                add_saved_groups(self.unwrap(wrapped), optimizer, state.meta["optimizers"][key]["param_groups"])
        with described(self._owners, optimizers) as owned:
            restore_state(self.unwrap(wrapped), optimizers, state, self.read_shard, owned)

    def load_state_dict(self, wrapped: W, optimizers: dict[str, Optimizer], state: Reader) -> None:
        self._restore_state(wrapped, optimizers, state)
        modes.load_training(self.unwrap(wrapped), optimizers, state, self.read_shard)
        self._evaluation = None if optimizers else self._evaluation
        modes.train(optimizers.values(), partial(self.open_optimizer, wrapped))
        if self.precision.scaler is not None and "scaler" in state.meta:
            self.precision.scaler.load_state_dict(state.meta["scaler"])
        if self._compression is not None and optimizers and "learners" not in state.meta:  # theirs are of weights
            self._compression.load(state)
        if optimizers:
            self.load_extra_state(wrapped, state.meta.get("extra", {}).get(self.name, {}))


def _nothing() -> None: ...
