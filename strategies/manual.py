"""Backwards of the user's own: their gradients are summed over ranks, users' hooks run on them, and checked."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import StepHooks, W
from lockstep.strategies.data.sharded_loader import MicroBatch
from lockstep.strategies.hooks import SPMDHooks
from lockstep.strategies.launch.rng import HookDraws
from lockstep.strategies.losses import OwnBackward, StandIn, replaced_backward
from lockstep.strategies.modules import finite
from lockstep.strategies.modules.casts import take_casts
from lockstep.strategies.modules.model_changes import ModelChanges, late_hooks, replaced, shortened, written_gradient
from lockstep.strategies.modules.parameter_hooks import ParameterHooks
from lockstep.strategies.modules.user_edits import UserEdits
from lockstep.strategies.precision import Precision
from lockstep.strategies.sync import collectives
from lockstep.strategies.sync.buffers import SharedBuffers
from lockstep.strategies.sync.collectives import local
from lockstep.strategies.sync.step_agreement import StepAgreement


class UserChanges(SPMDHooks[W]):
    """Gradient hooks and what is trained are taken over at once, unless ranks meet for it. All changes are compared
    over ranks in a step."""

    meets_to_retrain = False
    """Whether ranks meet, or exchange other things in a step, once `requires_grad` was changed. It is then taken over
    as the next step begins, and all are known to have changed the same."""
    sees_whole_gradients = False
    """True if each backward leaves the whole gradient of its loss in whole parameters, as a plain loop does."""

    def __init__(self) -> None:
        self._trained: set[str] = set()
        self._agreement: StepAgreement | None = None
        self._parameter_hooks = ParameterHooks()
        self._changes: ModelChanges | None = None
        self._edits = UserEdits()
        self._buffers: SharedBuffers | None = None
        self._hook_draws: HookDraws | None = None

    def _watch_changes(self, wrapped: W) -> None:
        """From here on `adopt_changes` takes over what user code changes."""
        if self._changes is not None:
            self._changes.close()
        self._changes = ModelChanges(self.unwrap(wrapped), self._trained)
        if self.meets_to_retrain and self._agreement is not None and self.capabilities.steps_together:
            self._changes.begin_step = functools.partial(self._begin_step, wrapped)
        self._changes.in_step = getattr(wrapped, "unsharded_by_name", tuple)
        self._changes.gradients_apart = getattr(wrapped, "gradients_apart", nullcontext)
        if getattr(wrapped, "puts_back", False):
            self._changes.hold_places()
        self.adopt_changes(wrapped)

    def adopt_changes(self, wrapped: W, after: bool = True) -> None:
        if not after:
            self._edits.begin()
            if self._changes is not None:
                self._changes.set_buffers.clear()  # those of a step
            return
        self._edits.end()
        if self._changes is None:
            return
        if self._changes.set_buffers and self._buffers is not None:
            self._edits.add(self._buffers.adopt(self._changes.set_buffers))
        self._refuse_added(self._changes.added())
        self._parameter_hooks.take(self._changes.parameters.items())
        self._changes.retrained += self._changes.trainability() + take_casts(self._changes.parameters.items)
        if self._changes.in_step_hooks or self._changes.begin_step is None:
            self._adopt_trainability(wrapped)

    def _begin_step(self, wrapped: W) -> None:
        assert self._changes is not None and self._agreement is not None
        self._agreement.begin([f"requires_grad or dtype of {name}" for name in self._changes.retrained])
        self._adopt_trainability(wrapped)

    def _adopt_trainability(self, wrapped: W) -> None:
        assert self._changes is not None
        if self._changes.retrained:
            names, self._changes.retrained = self._changes.retrained, []
            self.trainability_changed(wrapped, names)

    def _refuse_added(self, names: list[str]) -> None:
        """Raise RuntimeError for parameters that came during the run and would not be trained as on one process."""
        if names and not self.sees_whole_gradients:
            raise replaced(names, self.name)


class ManualOptimization(UserChanges[W]):
    """What `SPMDStrategy` does between `backward` and `optimizer_step` if the step itself calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = Precision()
        self._peers: dist.ProcessGroup | None = None
        """The ranks with which this one steps; None for all."""
        self._watched: list[nn.Parameter] = []
        """The wrapped model's parameters."""
        self._forward_writes = False
        """Whether the engine writes to gradients in a forward, so that a change tells nothing of the user's code."""
        self._by_hand: list[nn.Parameter] = []
        """Parameters to whose gradients a backward of this rank alone has added since the last check."""
        self._sums = False
        """Whether a backward runs whose gradients are summed over ranks."""

    def _refuse(self, what: str) -> None:
        """Raise ValueError if the strategy says that it refuses this."""
        if what in self.capabilities.refuses:
            raise ValueError(self.capabilities.refuses[what])

    def _own(
        self, wrapped: W, hooks: StepHooks, micro_batch: MicroBatch, output: Any, alone: bool = False
    ) -> OwnBackward | None:
        """The user's backward for what the step returned. None for what counts nothing and only keeps ranks together:
        what the step left in the module for it is gone (see `reached_by`)."""
        if hooks.backward is None or not micro_batch.num_samples or isinstance(output, StandIn):
            return None
        if alone and not self._in_group and self.precision.scaler is None:
            return OwnBackward(hooks.backward, False, None)
        changes = self._changes
        watched = self.unwrap(wrapped).named_parameters if changes is None else changes.hookable
        return OwnBackward(hooks.backward, self._in_group, watched)

    def _check_changes(self) -> None:
        """Raise RuntimeError for what the step has changed in the model that is not as on one process."""
        if self._changes is None:
            return
        self._refuse_added(self._changes.added())
        if late := self._parameter_hooks.added(self._changes.hookable()):
            raise late_hooks(late, self.name)
        if self.topology.data_size > 1 and (cast := take_casts(self._changes.hookable)):
            raise RuntimeError(
                f"a step cast {shortened(cast)}, but {self.name} has made ready what they were before; "
                "cast in a hook such as on_train_batch_start, or compute under torch.autocast"
            )

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

    @contextmanager
    def _watching_backward(self) -> Iterator[None]:
        """Manual optimization: while it lasts, remember what a backward adds to gradients besides `_one_backward`."""
        has_whole = self._changes is not None and any(True for _ in self._changes.in_step())
        if self.topology.data_size == 1 and not has_whole and self.precision.scaler is None:
            yield
            return
        backward = torch.autograd.backward

        def watched(*args: Any, **options: Any) -> None:
            if self._sums:
                return backward(*args, **options)
            with nullcontext() if self._changes is None else self._changes.gradients_apart():
                before = self._marks()
                backward(*args, **options)
                after = self._marks()
            if len(after) > len(self._watched) and after != before:  # zero_grad of an optimizer would not undo it
                raise self._own_backward()
            self._by_hand += [p for p, one, other in zip(self._watched, before, after, strict=False) if one != other]

        with replaced_backward(watched):
            yield

    def _marks(self) -> list[int | None]:
        """What a backward changes: of the gradients of the model's parameters, and of those that it has whole."""
        whole = [] if self._changes is None else [p for _, p in self._changes.in_step()]
        gradients = (p.grad for p in [*self._watched, *whole])
        return [None if gradient is None else local(gradient)._version for gradient in gradients]

    def _check_own_backward(self) -> None:
        """Raise RuntimeError where a gradient that is this rank's alone would be summed or stepped along."""
        if any(p.grad is not None and p.grad.any() for p in self._by_hand):
            raise self._own_backward()
        self._by_hand = []
        self._check_written()

    def _check_written(self) -> None:
        """Raise RuntimeError if a parameter that is whole for the step alone has a gradient, which would be lost."""
        known = {id(p.grad) for p in self._watched}
        for name, parameter in () if self._changes is None else self._changes.in_step():
            if parameter.grad is not None and id(parameter.grad) not in known and local(parameter.grad).any():
                raise written_gradient(name, self.name)

    def _own_backward(self) -> RuntimeError:
        return RuntimeError(
            "training_step called backward, which has added gradients of this rank's samples to those of parameters; "
            "call self.manual_backward(loss), or torch.autograd.grad for gradients of other tensors"
        )

    @contextmanager
    def _one_backward(self, wrapped: W) -> Iterator[None]:
        """Manual optimization: a backward within leaves in `.grad` what it leaves on one process, on top of what was
        there. Every rank calls it."""
        if self.sees_whole_gradients:
            self._sums = True
            try:
                yield
            finally:
                self._sums = False
            return
        if self._changes is not None and self._parameter_hooks.added(self._changes.hookable()):
            self._parameter_hooks.take(self._changes.hookable())
        self._check_own_backward()
        self._edits.end_own()
        before = {id(p): p.grad for p in self._watched if p.grad is not None}
        for parameter in self._watched:
            parameter.grad = None
        self._sums = True
        try:
            yield
        finally:
            self._sums = False
        reached = self._reached()
        if self._in_group:
            self.sum_gradients(wrapped, reached)

        def add(parameter: nn.Parameter) -> None:
            if (gradient := before.pop(id(parameter), None)) is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

        if self._parameter_hooks.taken:
            self._run_parameter_hooks(wrapped, set(map(id, reached)), add)
        for parameter in self._watched:
            add(parameter)
        self._edits.begin_own()

    def _reached(self) -> list[nn.Parameter]:
        """The parameters that have a gradient on any rank."""
        mask = bytes(p.grad is not None for p in self._watched)
        if self._agreement is not None and not self._agreement.is_equal(zlib.crc32(mask)):
            mask = bytes(collectives.all_gather(torch.tensor([*mask]), self._peers).amax(0).tolist())
        return [*compress(self._watched, mask)]

    def _run_parameter_hooks(
        self,
        wrapped: W,
        only: set[int] | None = None,
        after: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        known = self._changes.parameters if self._changes is not None else dict(self.unwrap(wrapped).named_parameters())
        if self._hook_draws is not None:
            self._hook_draws.refused = self._why_not_shared(only is not None)

        def write(parameter: nn.Parameter, gradient: Tensor) -> None:
            self.write_gradient(wrapped, parameter, gradient)
            if after is not None:
                after(parameter)

        self._parameter_hooks.run(
            [(name, p) for name, p in known.items() if only is None or id(p) in only],
            functools.partial(self.read_gradient, wrapped),
            write,
        )

    def _why_not_shared(self, in_backward: bool) -> str:
        """Why ranks cannot draw in hooks on parameters what one process draws; empty if they can."""
        if in_backward:
            return "in manual optimization, where one process calls it within the backward, in another order"
        if not self.capabilities.steps_together:
            return "in a step that not all ranks make together"
        return "" if self._agreement is None or self._agreement.hooks_alike else "and is not on all ranks"
