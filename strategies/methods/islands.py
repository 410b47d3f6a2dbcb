"""Learners that are islands of ranks: each is sharded over a mesh of its own, as by FSDP, and trains by itself."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.strategies.base import Capabilities, StepFn, Strategy, Topology
from lockstep.strategies.devices import resolve_accelerator, resolve_devices
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.process_group import backend_of
from lockstep.strategies.mesh import steps
from lockstep.strategies.mesh.mesh import devices_of, parse, resolve
from lockstep.strategies.mesh.mesh_parallel import MeshParallel
from lockstep.strategies.mesh.sharded import ShardedStrategy
from lockstep.strategies.methods.outer import Counterparts
from lockstep.strategies.methods.rounds import REFUSES, LearnerRounds
from lockstep.strategies.sync.collectives import own_group, sum_gradients
from lockstep.strategies.sync.step_agreement import StepAgreement
from lockstep.strategies.virtual.step import alone

if TYPE_CHECKING:
    from lockstep.strategies.mesh.mesh_model import MeshModel
    from lockstep.strategies.methods.local_updates import LocalUpdates

_OVER_ALL = (
    "training_step called a collective of torch.distributed over all ranks, but the learners of local updates meet at "
    "the end of a round only; call it at the end of an epoch, or give it a group of its own"
)
_WHOLE = "the mean of sharded learners is sharded; use one that is elementwise, or learners of one rank each"


def configured(given: LocalUpdates, devices: int | str, accelerator: str, num_nodes: int, precision: str) -> Strategy:
    """What `given` is with learners that are sharded as its `inner` says, configured; with one rank each, the same
    without `inner`. Raises TypeError or ValueError by name."""
    inner = given.inner
    if isinstance(inner, str):
        if "pipeline" in parse(inner):
            raise ValueError(
                f"inner={inner!r} has the axis pipeline, whose ranks hold different layers; learners have the axes "
                "ddp, fsdp and tensor"
            )
        inner = MeshParallel(inner)
    if not isinstance(inner, ShardedStrategy) or isinstance(inner, LearnerRounds):
        raise TypeError(
            f"inner={inner!r} cannot be a learner; give a mesh such as 'fsdp=2' or 'fsdp=2,tensor=2', or FSDP(…), "
            "TensorParallel(…) or MeshParallel(…)"
        )
    if inner.compressor is not None:
        raise ValueError(
            f"inner has compress={inner.compressor!r}, which is for gradients within a learner; give compress to "
            f"{type(given).__name__}, for what learners send each other"
        )
    if given.learners is None and None in inner.axes.values():
        raise ValueError(
            f"learners and the axes of inner ({', '.join(inner.axes)}) cannot both take the ranks that are left; give "
            "learners=2"
        )
    axes = {given.axis: given.learners, **inner.axes}
    devices = devices_of(axes, devices, num_nodes)
    on_node = resolve_devices(devices, resolve_accelerator(accelerator))
    learners, *others = resolve(axes, environment.num_ranks(on_node * num_nodes)).values()
    strategy: Strategy
    if math.prod(others) > 1 or inner.options.cpu_offload:
        strategy = Islands(given, inner, {**axes, given.axis: learners})
    else:
        strategy = alone = copy.copy(given)
        alone.inner, alone.learners = None, learners
    return strategy.configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)


class Islands(LearnerRounds["MeshModel"], ShardedStrategy):
    """Local updates whose learners are the outermost axis of a mesh; torch shards a learner over the other axes.

    Within a round a rank exchanges with the ranks of its island alone, and at its end each shard with the ranks that
    hold the same shard of other learners.
    """

    capabilities = Capabilities(exact=False, synchronous=False, refuses=REFUSES)

    def __init__(self, given: LocalUpdates, inner: ShardedStrategy, axes: Mapping[str, int | None]) -> None:
        recomputed = inner.activation_checkpointing or given.activation_checkpointing
        super().__init__(given.rounds, given.outer, inner.options, given.timeout_s, recomputed)
        self._axes, self._axis, self._stands_for = dict(axes), given.axis, given.name
        self._number = self.data_groups = axes[given.axis] or 1
        self._synchronous = given.capabilities.synchronous
        self._across: dist.ProcessGroup | None = None

    @property
    def axes(self) -> Mapping[str, int | None]:
        return self._axes

    def configure(self, **layout: Any) -> Strategy:
        chosen = super().configure(**layout)
        self.capabilities = replace(
            self.capabilities,
            bitwise=False,
            exact=False,
            synchronous=self._synchronous,
            refuses={**self.capabilities.refuses, **REFUSES},
        )
        return chosen

    def setup(self) -> Topology:
        super().setup()
        world, rank = self.topology.world_size, self.topology.rank
        size = world // self._number
        self._writes_owned = rank < size  # the others' state is that of other learners
        self._own_peers = self._engine
        self._own_agreement = StepAgreement(rank % size, size, self.timeout_s, self._engine)
        everyone = [range(world)[place::size] for place in range(size)]
        self._across = own_group(everyone, backend_of(self.topology.device))
        return self.topology

    def teardown(self) -> None:
        self._end_turns()
        if self._own_agreement is not None:  # before that of all ranks, which it has been made after
            self._own_agreement.close()
        self._own_agreement = self._own_peers = self._across = None
        super().teardown()

    def wrap(self, model: nn.Module) -> MeshModel:
        from lockstep.strategies.mesh import dtensors

        self._forget()
        assert self._mesh is not None
        within = {axis: place for axis, place in self._coordinate().items() if axis != self._axis}
        self._counterparts = Counterparts(
            [range(number, number + 1) for number in range(self._number)],
            self.topology.rank * self._number // self.topology.world_size,
            self._across,
            shard=functools.partial(dtensors.piece, coordinate=within),
            layout=steps.layout_of_replicas(self._mesh, self._coordinate(), self._axis),
        )
        return super().wrap(model)

    def setup_optimizers(self, wrapped: MeshModel, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        from lockstep.strategies.mesh import dtensors
        from lockstep.strategies.optimizers.probe import needs_whole, probe

        optimizers = super().setup_optimizers(wrapped, optimizers)
        assert self._outer is not None
        outer = self._outer.optimizer
        if needs_whole("outer", outer, probe(outer), self, dtensors.shard_as, dtensors.groups_by_mesh) is not None:
            raise ValueError(f"outer={type(outer).__name__} needs whole parameters, but {_WHOLE}")
        return optimizers

    # ---- the step of a learner ------------------------------------------------------------------------

    def run_step(self, wrapped: MeshModel, step_fn: StepFn) -> StepFn:
        run = super().run_step(wrapped, step_fn)
        return run if self._held is None or self._number == 1 else alone(run, self._held, _OVER_ALL)

    def finish_gradients(self, wrapped: MeshModel) -> None:
        if self._turn is not None:
            super().finish_gradients(wrapped)
            return
        of_all, self._agreement = self._agreement, self._own_agreement  # islands may use other parameters
        try:
            super().finish_gradients(wrapped)
        finally:
            self._agreement = of_all
        sum_gradients([p for p in self._watched if p.requires_grad], [self._across])
