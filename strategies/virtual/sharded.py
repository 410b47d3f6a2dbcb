"""What "fsdp" and meshes of ddp and fsdp are with virtual ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, StepFn, StepHooks, StepResult
from lockstep.strategies.data.sharded_loader import Window
from lockstep.strategies.mesh.sharded import ShardedStrategy
from lockstep.strategies.sync.buffers import share_buffers
from lockstep.strategies.sync.collectives import local, sum_gradients
from lockstep.strategies.sync.tree import all_reduce, total_of
from lockstep.strategies.virtual.replicas import VirtualReplicas
from lockstep.strategies.virtual.step import VirtualStep

if TYPE_CHECKING:
    from lockstep.strategies.mesh.mesh_model import MeshModel

_NO_COMPILE = (
    "compile=True builds other graphs where parameters are sharded, so with virtual_ranks the bits would depend on the "
    "ranks; use strategy='ddp', or remove it"
)


class VirtualSharded(ShardedStrategy, VirtualStep["MeshModel"]):
    """Sharded parameters. Ranks along fsdp run neighboring shares at the same time, and torch's FSDP sums these in the
    tree as it cuts them; a rank adds what it has of its shares, and then ranks along ddp add theirs."""

    def __init__(self, strategy: ShardedStrategy, virtual_ranks: int) -> None:
        # Weights are cast where one process casts them, and buffers follow share 0: see forward_backward.
        options = replace(strategy.options, low_precision_gather=False, broadcast_buffers=False)
        super().__init__(options, strategy.timeout_s, strategy.activation_checkpointing)
        self.broadcast_buffers = strategy.options.broadcast_buffers  # which evaluations ask for
        self.virtual_ranks, self._stands_for = virtual_ranks, strategy.name
        self.one_rank = None
        self._axes = dict(strategy.axes)

    @property
    def axes(self) -> Mapping[str, int | None]:
        return self._axes

    def configure(self, **layout: Any) -> Any:
        chosen = super().configure(**layout)
        if max(self._sizes.values()) == 1 and not self.options.cpu_offload:
            alone = VirtualReplicas(self.virtual_ranks, activation_checkpointing=self.activation_checkpointing)
            return alone.configure(**{**layout, "devices": self.num_devices})
        given = VirtualStep.capabilities
        refuses = {**given.refuses, "compile": _NO_COMPILE}
        self.capabilities = replace(given, builds_on_meta=True, preserves_memory_format=False, refuses=refuses)
        return chosen

    @property
    def shares(self) -> tuple[int, ...]:
        along = self._sizes.get("fsdp", 1)
        replica, place = divmod(self.topology.data_rank, along)
        of_replica = self.virtual_ranks * along // self.topology.data_size
        return tuple(range(replica * of_replica + place, (replica + 1) * of_replica, along))

    def forward_backward(
        self, wrapped: MeshModel, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        if hooks.parameters and len(window.micro_batches) > window.num_shares:
            raise ValueError(
                "virtual_ranks with a loss for each optimizer cannot accumulate under sharded parameters, which are "
                "reduced for each loss; set accumulate_grad_batches=1, or use strategy='ddp'"
            )
        result = super().forward_backward(wrapped, step_fn, window, hooks)
        modules = [module for module in self.unwrap(wrapped).modules() if module._buffers]
        self._shapes.follow(modules)
        share_buffers(modules)
        return result

    def evaluate(self, *args: Any, **options: Any) -> Any:
        with self._share():
            return super().evaluate(*args, **options)

    def clip_gradients(
        self, wrapped: MeshModel, optimizer: Optimizer, value: float, algorithm: str = "norm"
    ) -> Tensor | None:
        return VirtualStep.clip_gradients(self, wrapped, optimizer, value, algorithm)

    def finish_gradients(self, wrapped: MeshModel) -> None:
        wrapped.close()
        self._check_used(wrapped)
        if replicas := self._groups("ddp"):
            sum_gradients([p for p in self._watched if p.requires_grad], replicas, all_reduce)
        self._in_step = False

    def take_gradients(self, wrapped: MeshModel) -> list[Tensor | None]:
        whole = [p for p in wrapped.unsharded if p.requires_grad]
        sum_gradients(whole, self._groups("fsdp"), all_reduce)
        return super().take_gradients(wrapped)

    def gradient_part(self, parameter: nn.Parameter) -> Tensor:
        return local(super().gradient_part(parameter))

    def counted_part(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        is_counted = self._is_sharded(parameter) or not self._coordinate().get("fsdp", 0)
        return part if is_counted else part[:0] if part.dim() else part.reshape(-1)[:0]

    def norm_groups(self) -> Sequence[dist.ProcessGroup | None]:
        return self._groups("fsdp")

    def sum_numbers(self, result: StepResult, of_shares: list[tuple[float, float]]) -> StepResult:
        everyone = torch.zeros(2, self.virtual_ranks, dtype=torch.float64)
        everyone[:, list(self.shares)] = torch.tensor(of_shares, dtype=torch.float64).T
        everyone = everyone.to(self.topology.device)
        dist.all_reduce(everyone)
        count, total = (total_of(row) for row in everyone.tolist())
        return result._replace(count=count, loss=total / count if count and math.isfinite(total) else None)

    def _groups(self, axis: str) -> list[dist.ProcessGroup | None]:
        assert self._mesh is not None
        return [self._mesh.get_group(axis)] if axis in self._sizes else []
