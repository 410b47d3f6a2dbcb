"""Learners that each run on one rank: local SGD and DiLoCo with the whole model on every rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Capabilities, StepFn, StepHooks, StepResult, Strategy
from lockstep.strategies.data.sharded_loader import Window
from lockstep.strategies.devices import resolve_accelerator, resolve_devices
from lockstep.strategies.hooks import no_output
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.process_group import new_group
from lockstep.strategies.methods.options import Rounds, assign, check_learners
from lockstep.strategies.methods.outer import Counterparts
from lockstep.strategies.methods.rounds import REFUSES, LearnerRounds
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.sync.buffers import share_buffers, share_model
from lockstep.strategies.sync.collectives import sum_gradients
from lockstep.strategies.sync.tree import all_reduce
from lockstep.strategies.virtual.step import VirtualStep


class LocalUpdates(LearnerRounds, VirtualStep):
    """Base of the strategies whose learners, one a share of the global batch, train by themselves for a round.

    A rank runs its learners one after the other. Those that are sharded over several ranks are `Islands`.
    """

    axis: str
    """What it is called as an axis of a mesh."""
    stays_on_one_rank = True
    argument = "learners"
    capabilities = Capabilities(exact=False, synchronous=False, refuses=REFUSES)

    @abstractmethod
    def __init__(
        self,
        *,
        outer: Callable[[list[nn.Parameter]], Optimizer],
        learners: int | None,
        learners_per_rank: Sequence[int] | None,
        inner: str | Strategy | None,
        rounds: Rounds,
        activation_checkpointing: bool | Rule,
        timeout_s: float,
    ) -> None:
        super().__init__(rounds, outer, activation_checkpointing=activation_checkpointing)
        check_learners(learners, learners_per_rank)
        self.learners, self.learners_per_rank, self.inner = learners, learners_per_rank, inner
        if inner is not None and learners_per_rank is not None:
            raise ValueError(
                f"learners_per_rank={list(learners_per_rank)} says how many learners a rank runs, but with "
                f"inner={inner!r} several ranks run one; remove one of them"
            )
        self.timeout_s = timeout_s
        self._assignment: list[range] = [range(1)]
        self._group: dist.ProcessGroup | None = None

    # ---- processes and data ---------------------------------------------------------------------------

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self._turn is not None

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        if self.inner is not None:
            from lockstep.strategies.methods.islands import configured

            return configured(self, devices, accelerator, num_nodes, precision)
        self._outer = None  # of a fit before, which ranks that are started do not take
        self._forget()
        world = environment.detect()
        kind = resolve_accelerator(accelerator)
        ranks = resolve_devices(devices, kind) * num_nodes if world is None else world.world_size
        self._assignment = assign(self.learners, self.learners_per_rank, ranks)
        self.rounds.check(self._assignment)
        self.virtual_ranks = self.data_groups = self._assignment[-1].stop
        return SPMDStrategy.configure(
            self, devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision
        )

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(self._assignment[self.topology.rank])

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.topology.device)
        self._forget()
        if self._in_group:
            share_model(model)
            if self.rounds.delay:  # what is sent while steps run must not meet the collectives of steps
                self._group = new_group()
        self._counterparts = Counterparts(self._assignment, self.topology.rank, self._group)
        return model

    def teardown(self) -> None:
        self._group = None
        super().teardown()

    # ---- the step of a learner ------------------------------------------------------------------------

    def forward_backward(
        self, wrapped: nn.Module, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        result = super().forward_backward(wrapped, step_fn, window, hooks)
        if self._turn is None and self._in_group:  # those of share 0
            share_buffers(wrapped.modules())
        return result

    def run_step(self, wrapped: nn.Module, step_fn: StepFn) -> StepFn:
        return self._alone(step_fn, self._held or self._agreement)

    def run_padding(self, wrapped: nn.Module, step_fn: StepFn) -> StepFn:
        return no_output

    def finish_gradients(self, wrapped: nn.Module) -> None:
        if self._turn is None:
            trained = [p for p in self._watched if p.requires_grad]
            sum_gradients(trained, all_reduce=all_reduce, multiple=self.topology.world_size)

    def optimizer_step(
        self, wrapped: nn.Module, optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> bool:
        if self._turn is None or len(self._learners) == 1:
            return super().optimizer_step(wrapped, optimizer, closure)
        key = self._names[id(optimizer)]
        before = self._numbers.before(key, optimizer)
        stepped = super().optimizer_step(wrapped, optimizer, closure)
        self._numbers.after(key, optimizer, before, self._turn, self._learners)
        return stepped
