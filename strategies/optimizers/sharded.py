"""Optimizers of parameters that are sharded over ranks: they step shards where that is the same, else whole
parameters, each on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.mesh import mixed_tensors, steps
from lockstep.strategies.mesh.user_code.numbers import UserNumbers
from lockstep.strategies.modules.sharded_errors import explained
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.sync.collectives import clip_by_norm, clip_by_value

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.strategies.mesh.mesh_model import MeshModel


class ShardedOptimizers(SPMDStrategy["MeshModel"]):
    """What `ShardedStrategy` does with optimizers."""

    _mesh: DeviceMesh | None = None
    _engine: dist.ProcessGroup | None = None
    """The ranks over which parameters are sharded, None for all."""
    _compared = True

    def setup_optimizers(self, wrapped: MeshModel, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        from lockstep.strategies.mesh import dtensors
        from lockstep.strategies.optimizers.owners import Owners
        from lockstep.strategies.optimizers.probe import needs_whole, probe

        needs = {
            key: needs_whole(key, optimizer, probe(optimizer), self, dtensors.shard_as, dtensors.groups_by_mesh)
            for key, optimizer in optimizers.items()
        }
        attached = super().setup_optimizers(wrapped, optimizers)
        if self._edits.watches:
            self._edits.numbers = UserNumbers(dict(self.unwrap(wrapped).named_parameters()))
        self._owners = {
            id(attached[key]): Owners(
                key, attached[key], found, self.unwrap(wrapped), self.topology.device, self._engine
            )
            for key, found in needs.items()
            if found is not None
        }
        return attached

    def clip_gradients(
        self, wrapped: MeshModel, optimizer: Optimizer, value: float, algorithm: str = "norm"
    ) -> Tensor | None:
        from lockstep.strategies.mesh import dtensors

        if self.precision.scaler is not None:
            self.precision.scaler.unscale_once(optimizer)
        with wrapped.gradients_apart():  # of what the step drops none is left
            gradients = dtensors.by_groups([p for group in optimizer.param_groups for p in group["params"]])
        if algorithm == "norm":
            return clip_by_norm(gradients, value, self.topology.device)
        clip_by_value(gradients, value)
        return None

    def optimizer_step(
        self, wrapped: MeshModel, optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> bool:
        from lockstep.strategies.mesh import dtensors

        wrapped.writes.take_back()
        if self._looks:
            self._check_written()
            self._edits.end_own()
        wrapped.close()
        mixed_tensors.refuse_assigned(self.unwrap(wrapped), self.name, wrapped.memory() if wrapped.depth else None)
        if wrapped.depth and closure is not None:
            closure = _within_the_step(wrapped, closure)
        self._compare(wrapped)
        if self.precision.scaler is not None:  # the gradients that stay, not an owner's copies
            self.precision.scaler.unscale_once(optimizer)
        with explained(type(optimizer).__name__):
            owners = self._owners.get(id(optimizer))
            if owners is None:
                with dtensors.groups_by_mesh(optimizer), dtensors.computes_with_shards(optimizer):
                    stepped = super().optimizer_step(wrapped, optimizer, closure)
            else:
                with owners.whole(closure) as (held, called):
                    stepped = super().optimizer_step(wrapped, held, called)
        if wrapped.depth:
            wrapped.gather()
        if self._looks:
            self._edits.begin_own()
        return stepped

    def _align(self, wrapped: MeshModel, parameters: Iterable[nn.Parameter]) -> None:
        """Let the ranks of a tensor group step alike what each holds whole. Every rank calls it."""
        if steps.may_differ(self._mesh):
            self._compare(wrapped)
            steps.align(parameters, self._mesh)

    def _compare(self, wrapped: MeshModel) -> None:
        if not self._compared:
            self._compared = steps.compare_whole_gradients(self.unwrap(wrapped), self._mesh)

    @contextmanager
    def open_optimizer(self, wrapped: MeshModel, optimizer: Optimizer) -> Iterator[Any]:
        from lockstep.strategies.mesh import dtensors

        owners = self._owners.get(id(optimizer))
        wrapped.close()
        if owners is None:
            with dtensors.groups_by_mesh(optimizer):
                yield optimizer
        else:
            with owners.whole() as (held, _):
                yield held


def _within_the_step(wrapped: MeshModel, closure: Callable[[], Any]) -> Callable[[], Any]:
    """`closure` of manual optimization, which computes with the parameters as they are now, and leaves gradients where
    the optimizer finds them."""

    def call() -> Any:
        wrapped.gather()
        try:
            return closure()
        finally:
            wrapped.close()

    return call
