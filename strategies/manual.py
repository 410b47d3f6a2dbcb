"""Gradients that backwards of the user's own have left on one rank: sum them, run users' hooks on them, check them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.strategies.hooks import SPMDHooks
from lockstep.strategies.modules import finite
from lockstep.strategies.modules.model_changes import ModelChanges
from lockstep.strategies.modules.parameter_hooks import ParameterHooks
from lockstep.strategies.precision import Precision
from lockstep.strategies.sync.step_agreement import StepAgreement


class ManualOptimization(SPMDHooks):
    """What `SPMDStrategy` does between `backward` and `optimizer_step` if the step itself calls them."""

    sees_whole_gradients = False
    """True if each backward leaves the whole gradient of its loss in whole parameters, as a plain loop does."""

    def __init__(self) -> None:
        self.precision = Precision()
        self._agreement: StepAgreement | None = None
        self._peers: dist.ProcessGroup | None = None
        """The ranks with which this one steps; None for all."""
        self._parameter_hooks = ParameterHooks()
        self._changes: ModelChanges | None = None
        self._watched: list[nn.Parameter] = []
        """The wrapped model's parameters."""
        self._local: set[int] = set()
        """Parameters whose gradient is this rank's part of it."""
        self._reduced: set[int] = set()
        """Parameters whose gradient is summed over data ranks."""

    def _refuse(self, what: str) -> None:
        """Raise ValueError if the strategy says that it refuses this."""
        if what in self.capabilities.refuses:
            raise ValueError(self.capabilities.refuses[what])

    def _check_finite(self, optimizer: Optimizer) -> None:
        """Manual optimization: raise FloatingPointError, on all ranks alike, for a gradient that is not finite."""
        if self.precision.scaler is not None:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        bad = bool(finite.found(gradients, self.topology.device))  # a host synchronization on accelerators
        if self._agreement is not None:
            bad = self._agreement.first_rank(bad) is not None
        if bad:
            raise FloatingPointError(
                f"a gradient that {type(optimizer).__name__} is to apply is NaN or infinite; no parameter was changed "
                "by it. "
                "Look for the first operation that gives such a value with torch.autograd.set_detect_anomaly(True)"
            )

    def _completed(self, wrapped: nn.Module, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call `closure`, which may have run a backward on this rank only."""
        loss = closure()
        self._complete_local_gradients(wrapped, optimizer)
        return loss

    def _begin_local_gradients(self) -> None:
        """Manual optimization: what the next backward adds is this rank's part of the gradient."""
        if self.sees_whole_gradients:
            return
        for parameter in self._watched:
            if id(parameter) in self._reduced and parameter.grad is not None and self.topology.data_size > 1:
                parameter.grad.div_(self.topology.data_size)  # so that the next sum over ranks counts it once
        self._reduced.clear()
        self._local.update(map(id, self._watched))

    def _complete_local_gradients(self, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """Manual optimization: sum over data ranks what backwards have added since the last time, and run users'
        hooks."""
        if not self._local:
            return
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._local]
        if not mine:
            return
        self._local.difference_update(map(id, mine))
        if self._in_group:
            self._reduced.update(map(id, self.sum_gradients(wrapped, [p for p in mine if p.requires_grad])))
        if self._parameter_hooks.taken:
            self._run_parameter_hooks(wrapped, set(map(id, mine)))

    def _run_parameter_hooks(self, wrapped: nn.Module, only: set[int] | None = None) -> None:
        known = self._changes.parameters if self._changes is not None else dict(self.unwrap(wrapped).named_parameters())
        self._parameter_hooks.run(
            [(name, p) for name, p in known.items() if only is None or id(p) in only],
            functools.partial(self.read_gradient, wrapped),
            functools.partial(self.write_gradient, wrapped),
        )
