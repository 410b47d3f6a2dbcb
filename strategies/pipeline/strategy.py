"""Layers over ranks: torch.distributed.pipelining around a training step that stays as it is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Capabilities, StepFn, StepHooks, StepResult, Strategy, Topology
from lockstep.strategies.checkpoint_state import Reader, State, TensorShard, gather_whole
from lockstep.strategies.data.batch_slices import Rows
from lockstep.strategies.data.permutation import mix
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.rng import kept_streams, seed_streams
from lockstep.strategies.mesh.mesh import PipelineRanks, devices_of, parse, pipeline_ranks, resolve
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.model_changes import changed_within_window, prepared
from lockstep.strategies.pipeline import partition
from lockstep.strategies.pipeline.microbatches import BY_SCHEDULE, OWN_BACKWARD, PARTS, Cutter, Tally
from lockstep.strategies.pipeline.optimizers import (
    clip,
    find_needs,
    held_here,
    make_owners,
    numbers_alike,
    show,
    shown,
    sum_ranks,
)
from lockstep.strategies.pipeline.schedules import check_options
from lockstep.strategies.pipeline.schedules import schedule as find_schedule
from lockstep.strategies.pipeline.stage_tensors import Tied, merge_meta, shard_like, whole
from lockstep.strategies.pipeline.staged_module import Staged
from lockstep.strategies.single import SingleDevice
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.sync.buffers import share_model
from lockstep.strategies.sync.collective_fingerprint import refusing
from lockstep.strategies.sync.collectives import local

if TYPE_CHECKING:
    from lockstep.strategies.pipeline.engine import Engines


class StagedStrategy(SPMDStrategy[Staged]):
    """Base of the strategies that cut a model into stages; `Pipeline` says what the arguments are."""

    cuts_gradients = meets_to_retrain = True

    def __init__(
        self,
        *,
        schedule: str = "1f1b",
        num_micro_batches: int | None = None,
        stages_per_rank: int | None = None,
        module: str | None = None,
        split: Sequence[str] | None = None,
        sample: Any = None,
        mesh: str | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        self.schedule = find_schedule(schedule, stages_per_rank)
        check_options(self.schedule, num_micro_batches, activation_checkpointing is not False)
        if split is not None and sample is not None:
            raise ValueError("split says where stages begin, and sample how to balance them; give one of them")
        self.num_micro_batches = num_micro_batches
        self.module, self.split, self.sample = module, split, sample
        self.timeout_s = timeout_s
        self.axes = {"pipeline": None} if mesh is None else parse(mesh)
        if "pipeline" not in self.axes or set(self.axes) - {"pipeline", "ddp", "fsdp"}:
            known = "the mesh of a pipeline has the axes pipeline, ddp and fsdp"
            raise ValueError(f"{known}, but mesh={mesh!r}; name pipeline, and remove tensor")
        self.num_stage_ranks = 1
        """Ranks of one pipeline, valid after `configure`."""
        self._ranks, self.rank_of_layer = PipelineRanks(), {}
        self._seed: int | None = None
        self._rows = Rows()
        self._steps_seen = 0
        self._engines: Engines | None = None
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._keeps_numbers: set[int] = set()
        """The `id` of those whose steps change numbers in their groups."""

    @property
    def num_parts(self) -> int:
        """Parts that a micro-batch is cut into, valid after `configure`."""
        return self.num_micro_batches or self.num_stage_ranks * self.schedule.stages_per_rank

    # ---- 1. processes and devices ----------------------------------------------------------------

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        devices = devices_of(self.axes, devices, num_nodes)
        chosen = super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        self.num_stage_ranks = resolve(self.axes, environment.num_ranks(self.num_devices))["pipeline"]
        if chosen is self:
            self.schedule.check(self.num_stage_ranks, self.num_parts)
            self.capabilities = replace(self.capabilities, preserves_memory_format="fsdp" not in self.axes)
        return chosen

    def data_size_of(self, num_ranks: int) -> int:
        return num_ranks // resolve(self.axes, num_ranks)["pipeline"]

    def check(self, model: nn.Module) -> None:
        num_stages, rule = len(self.schedule.rank_of(self.num_stage_ranks)), self.activation_checkpointing
        partition.check(model, self.module, num_stages, self.split, self.sample, rule)
        super().check(model)

    def setup(self) -> Topology:
        super().setup()
        self._seed = None
        self._ranks = pipeline_ranks(self.axes, self.topology)
        self.num_stage_ranks = self._ranks.num_stage_ranks
        self.topology = replace(
            self.topology,
            data_rank=self._ranks.data_rank,
            data_size=self._ranks.data_size,
            is_reporting_rank=self.schedule.rank_of(self.num_stage_ranks)[-1] == self._ranks.stage_rank,
        )
        return self.topology

    def teardown(self) -> None:
        super().teardown()
        for optimizer in self._optimizers:
            show(optimizer)
        self._optimizers.clear()
        self._keeps_numbers = set()
        self._engines, self._ranks, self.rank_of_layer = None, PipelineRanks(), {}

    def wrap(self, model: nn.Module) -> Staged:
        if not environment.started_by_lockstep():  # each rank has drawn initial weights of its own
            share_model(model)
        parts, costs, device = partition.cut(model, self.module), None, self.topology.device
        if self.sample is not None:  # one rank's times for all
            costs = self.broadcast(None if self.topology.rank else partition.measure(parts, self.sample, device))
        rank_of, group = self.schedule.rank_of(self.num_stage_ranks), self._ranks.group
        stage_of = partition.stages(parts, len(rank_of), self.split, costs)
        staged = Staged(model, parts, stage_of, rank_of, self._ranks.stage_rank, device, group)
        staged.splits_backward = self.schedule.splits_backward
        place = self.topology
        self.rank_of_layer = {
            layer.name: rank_of[stage] * place.data_size + place.data_rank
            for layer, stage in zip(parts.layers, stage_of, strict=True)
        }
        staged.tied = Tied(staged.tensors, self._ranks, self.topology)
        if self._ranks.mesh is not None:
            from lockstep.strategies.pipeline.sharded_stages import Shards

            staged.shards = Shards(staged, self._ranks.mesh)
        self._parameter_hooks.around = staged.watch_state().parameter_hooks
        self._steps_seen = 0
        return staged

    def teardown_module(self, wrapped: Staged) -> None:
        keeps = environment.outlives_run(self.topology.rank)
        tensors = gather_whole(self, self.state_dict(wrapped, {}), keep=keeps).tensors
        own = wrapped.tensors.changed_caches() if self.topology.data_rank == 0 else {}
        caches = gather_whole(self, State({n: TensorShard.whole(c) for n, c in own.items()}), keep=keeps).tensors
        if keeps:
            wrapped.restore({name.removeprefix("model/"): tensor for name, tensor in tensors.items()} | caches)
        super().teardown_module(wrapped)

    def setup_optimizers(self, wrapped: Staged, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Take optimizers that hold the model's parameters; each steps those of this rank.

        Their groups continue listing all, so that hooks find none missing silently.
        """
        needs, self._keeps_numbers = find_needs(wrapped, optimizers, self, self.num_stage_ranks)
        self._optimizers.update(optimizers.values())
        with shown(optimizers.values()):
            optimizers = super().setup_optimizers(wrapped, optimizers)
            self._owners = make_owners(wrapped, optimizers, needs, self._ranks.data_group)
        return optimizers

    # ---- 2. gradient sync ------------------------------------------------------------------------

    @property
    @abstractmethod
    def engines(self) -> type[Engines]:
        """What runs the schedules. torch.distributed.pipelining takes a second to import, so not before a step."""

    def _make_engines(self) -> Engines:
        return self.engines(
            self.schedule,
            (self.num_stage_ranks, Cutter(self.num_parts, self._rows)),
            self.topology,
            self.precision,
            lambda: [] if self._changes is None else self._changes.trainability(),
        )

    def optimizer_step(self, wrapped: Staged, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if id(optimizer) in self._owners:
            self._owners[id(optimizer)].check_closure(closure)
        around = numbers_alike(optimizer, id(optimizer) in self._keeps_numbers, self._ranks.group)
        with around, self.open_optimizer(wrapped, optimizer) as held:
            return super().optimizer_step(wrapped, held, closure)

    def open_optimizer(self, wrapped: Staged, optimizer: Optimizer) -> AbstractContextManager[Optimizer]:
        return held_here(optimizer, self._ranks.mesh is not None, self._owners.get(id(optimizer)))

    @contextmanager
    def whole(self, wrapped: Staged) -> Iterator[None]:
        is_running = self._engines is not None and self._engines.is_running
        if is_running or (wrapped.shards is not None and wrapped.shards.gathered):
            raise RuntimeError(
                "whole() was called within a step, which a pipeline's ranks do not run alike; call it in a hook"
            )
        with self._edits.paused(), whole(wrapped, self._ranks.group, self._optimizers):
            yield

    # ---- 3. sampler seeding ----------------------------------------------------------------------

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False
    ) -> Any:
        sharded = super().shard_loader(loader, seed=seed, shuffle=shuffle, accumulate=accumulate, split=split)
        if self._seed is None:  # of the first loader, the one to train on: equal on all ranks
            self._seed, self._rows = seed, Rows(sharded.learn_samples())
        return sharded

    # ---- 4. checkpointing ------------------------------------------------------------------------

    def state_dict(self, wrapped: Staged, optimizers: dict[str, Optimizer]) -> State:
        with self._training_weights() as for_now:
            with shown(optimizers.values(), self._owners):
                state = self._gather_state(wrapped, optimizers, self.local_shard)
            self._save_both(wrapped, optimizers, state, for_now)
        own = wrapped.tensors.keep_own(state, self._ranks.stage_rank == 0)
        merge_meta(state, [self.broadcast(own, i) for i in range(0, self.topology.world_size, self.topology.data_size)])
        state.meta["extra"] = {self.name: self.extra_state(wrapped)}
        return state

    def load_state_dict(self, wrapped: Staged, optimizers: dict[str, Optimizer], state: Reader) -> None:
        with shown(optimizers.values(), self._owners):
            super().load_state_dict(wrapped, optimizers, state)

    # ---- what SPMDStrategy asks -------------------------------------------------------------------

    def extra_state(self, wrapped: Staged) -> dict[str, Any]:
        return {"steps_seen": self._steps_seen}

    def load_extra_state(self, wrapped: Staged, saved: dict[str, Any]) -> None:
        self._steps_seen = saved.get("steps_seen", 0)

    def local_shard(self, tensor: Tensor) -> TensorShard | None:
        if not is_here(tensor):
            return None
        if self._ranks.mesh is None:
            return TensorShard.whole(tensor) if self.topology.data_rank == 0 else None
        from lockstep.strategies.mesh import dtensors

        return dtensors.piece(tensor, self._ranks.coordinate())

    def read_shard(self, reader: Reader, name: str, like: Tensor | None) -> Tensor:
        if self._ranks.mesh is None:
            return super().read_shard(reader, name, like)
        from lockstep.strategies.mesh import dtensors

        return dtensors.take(reader, name, like)

    def local_gradients(self, wrapped: Staged) -> list[Tensor]:
        return [local(gradient) for p in self._watched or wrapped.parameters() if (gradient := p.grad) is not None]

    def read_gradient(self, wrapped: Staged, parameter: nn.Parameter) -> Tensor | None:
        if not is_here(parameter) or parameter.grad is None:
            return None
        return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad

    def write_gradient(self, wrapped: Staged, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        sharded = hasattr(parameter, "device_mesh")
        parameter.grad = shard_like(gradient, parameter) if gradient is not None and sharded else gradient

    def adopt_changes(self, wrapped: Staged, after: bool = True) -> None:
        if wrapped.shards is not None and after:
            wrapped.shards.follow_trainability()
        super().adopt_changes(wrapped, after)

    def trainability_changed(self, wrapped: Staged, names: list[str]) -> None:
        wrapped.forget_layouts()
        if self._engines is not None:
            if self._engines.num_done and self.topology.data_size > 1:  # ranks without samples do not call the hook
                raise changed_within_window(names, self.name)
            self._engines.clear()

    def unwrap(self, wrapped: Staged) -> nn.Module:
        return wrapped.model


class Pipeline(StagedStrategy):
    """Pipeline parallelism: each rank holds some layers, and parts of a micro-batch follow each other through them.

    One module holds every trainable parameter and is called once a step. `training_step` stays as it is: it runs
    on every rank, for each part of the batch, as far as the layers of that rank go; on the rank of the last stage
    it runs to its end, and what it logs and returns there counts. Tensors of a batch whose first dimension is the
    number of samples are cut into parts, as are lists of that length; the rest is given to each part whole.
    `on_before_backward` is called there for each part; `on_train_batch_end` and the like that use their `outputs` get
    them on every rank.

    `schedule`: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv" or "dualpipev".
    `num_micro_batches`: parts of a micro-batch; None takes as many as there are stages.
    `stages_per_rank`: for the interleaved and looped schedules; None takes 2. "gpipe" and "1f1b" have 1, "zbv" and
    "dualpipev" 2.
    `module`: name of the pipelined module; None finds it.
    `split`: names of the layers with which stages 1, 2, ... begin; None balances the stages.
    `sample`: an input of the pipelined module (a tensor or a tuple of arguments): stages are balanced by the seconds
        that layers take on it instead of by their numbers of parameters.
    `mesh`: `"ddp=2,pipeline=2"` runs two pipelines of two ranks on different samples and sums their gradients after
        the schedule; `"fsdp=2,pipeline=2"` shards parameters, gradients and optimizer state of each stage over two
        ranks as well.
    `activation_checkpointing`: recompute blocks in the backward; True, or which blocks.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    one_rank = SingleDevice
    capabilities = Capabilities(
        bitwise=True,
        runs_step_once=False,
        refuses={
            "manual_optimization": BY_SCHEDULE,
            "backward": OWN_BACKWARD,
            "16-mixed": "precision='16-mixed' scales losses, which stages of a pipeline cannot agree on; "
            "use 'bf16-mixed'",
        },
    )

    @property
    def engines(self) -> type[Engines]:
        from lockstep.strategies.pipeline.engine import Engines

        return Engines

    def forward_backward(
        self, wrapped: Staged, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        assert wrapped.state is not None
        if not hooks.automatic:
            self._refuse("manual_optimization")
        if wrapped.shards is not None:
            wrapped.shards.gather()
        engines = self._engines = self._engines or self._make_engines()
        self._steps_seen += 1
        tally, noise = Tally(), (self._seed or 0, self.topology.data_rank, self._steps_seen)
        hooks = hooks._replace(prepare=partial(prepared, hooks=hooks, changes=self._changes))
        send = partial(self._send_vote, window, hooks, tally)
        engines.run_window(wrapped, step_fn, window, hooks, noise, tally, send)
        return self._reduce_gradients(wrapped, window, hooks)

    def _send_vote(self, window: Window, hooks: StepHooks, tally: Tally) -> None:
        """Send this rank's part of the step agreement, before the last backward of a window."""
        finite = self.topology.device.type != "cpu" or math.isfinite(tally.total)
        vote = hooks.vote() if self.topology.is_reporting_rank else hooks.vote()._replace(keys=0)
        total = tally.total * window.num_samples
        self._agreement.send(vote, window.num_samples, tally.count, finite, total)  # type: ignore[union-attr]

    def _reduce_gradients(self, wrapped: Staged, window: Window, hooks: StepHooks) -> StepResult:
        result = self._agreement.receive()  # type: ignore[union-attr]
        if result.count and self._ranks.data_group is not None:
            sum_ranks(wrapped, self._ranks.data_group)
        elif wrapped.shards is not None:
            wrapped.shards.scatter()
        if result.count:
            wrapped.tied.sum_gradients()
        return self._conclude(wrapped, result, hooks, window.num_samples)

    def evaluate(
        self,
        wrapped: Staged,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        hooks: StepHooks = NO_HOOKS,
    ) -> Any:
        if not micro_batch.num_samples:
            with wrapped.gathered():  # with the ranks that run the step
                return None
        noise = mix(self._seed or 0, self.topology.data_rank, *(arg for arg in args if isinstance(arg, int)))
        with kept_streams(), self.precision.autocast(self.topology.device), wrapped.gathered(), refusing(PARTS, True):
            seed_streams(noise)  # the step begins alike on all ranks
            output = wrapped.run_evaluation(noise, lambda: step_fn(micro_batch.batch, *args), hooks.log_scope)
        return wrapped.links.shared(output, wrapped.rank_of[-1]) if hooks.shares_outputs else output

    def clip_gradients(
        self, wrapped: Staged, optimizer: Optimizer, value: float, algorithm: str = "norm"
    ) -> Tensor | None:
        shard_group = None if self._ranks.mesh is None else self._ranks.mesh.get_group("fsdp")
        return clip(wrapped, optimizer, value, algorithm, (self._ranks.group, shard_group))
