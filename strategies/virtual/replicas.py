"""What "single" and "ddp" are with virtual ranks: the whole model on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.strategies.base import NO_HOOKS, StepFn, StepHooks, StepResult, Topology
from lockstep.strategies.data.sharded_loader import Window
from lockstep.strategies.hooks import no_output
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.sync.buffers import share_buffers, share_model
from lockstep.strategies.sync.collectives import sum_gradients
from lockstep.strategies.sync.compression.compression import Layout
from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.tree import PartialSums, add_gradients, all_reduce
from lockstep.strategies.virtual.step import VirtualStep


class VirtualReplicas(VirtualStep):
    """A replica of the model on every rank; the gradients of shares are added in one tree over all of them."""

    stays_on_one_rank = True

    def __init__(
        self,
        virtual_ranks: int,
        *,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
        on_one_device: bool = False,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        self.virtual_ranks = virtual_ranks
        self._stands_for = "SingleDevice" if on_one_device else "DDP"
        self.timeout_s = timeout_s
        self.compressor = compressor
        if compressor is not None:
            self.capabilities = replace(self.capabilities, exact=False)
        self._kept: list[list[Tensor | None]] = []
        """The gradients of shares, if they are compressed: they stay apart until it is known what all count."""
        if on_one_device:
            self.single_process, self.max_devices, self.stays_on_one_rank = True, 1, False

    def setup(self) -> Topology:
        super().setup()
        self._has_signed_zeros = not self._in_group or self._compression is not None
        if self._compression is not None:
            writes = self.topology.rank == 0
            self._compression.layout = Layout(self.shares, self.virtual_ranks, writes_memory=writes)
        return self.topology

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.topology.device)
        if self._in_group:
            share_model(model)
        return model

    def forward_backward(
        self, wrapped: nn.Module, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        result = super().forward_backward(wrapped, step_fn, window, hooks)
        if self._in_group:  # those of share 0
            modules = [module for module in wrapped.modules() if module._buffers]
            self._shapes.follow(modules)
            share_buffers(modules)
        return result

    def run_step(self, wrapped: nn.Module, step_fn: StepFn) -> StepFn:
        return self._alone(step_fn, self._agreement)

    def run_padding(self, wrapped: nn.Module, step_fn: StepFn) -> StepFn:
        return no_output  # nothing within a share waits for other ranks

    def keep_gradients(self) -> PartialSums[list[Tensor | None]]:
        self._kept = []
        return super().keep_gradients() if self._compression is None else _Apart(self._kept)

    def reduce_shares(self, num_samples: int, count: float) -> int | None:
        if self._compression is None:
            return super().reduce_shares(num_samples, count)
        self._compression.reduce_into(self._watched, self._kept, num_samples / count)
        self._kept = []
        return None

    def finish_gradients(self, wrapped: nn.Module) -> None:
        if self._compression is not None:
            return
        trained = [p for p in self._watched if p.requires_grad]
        sum_gradients(trained, all_reduce=all_reduce, multiple=self.topology.world_size, write=_write_unsigned)


def _write_unsigned(gradient: Tensor, total: Tensor) -> None:
    torch.add(total, 0.0, out=gradient)  # in the pass that copies it


class _Apart(PartialSums[list[Tensor | None]]):
    """Keeps the gradients of shares apart; of the window there are none yet."""

    def __init__(self, kept: list[list[Tensor | None]]) -> None:
        super().__init__(add_gradients)
        self._kept = kept

    def append(self, value: list[Tensor | None]) -> None:
        self._kept.append(value)

    def total(self) -> list[Tensor | None]:
        return [None] * len(self._kept[0])
