"""How optimizers step if the strategy alone does not know: by the module's `optimizer_step`, with a closure, or within
a window; and batches that a rank computes after their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lockstep.callbacks.guard import fingerprint
from lockstep.strategies.base import NO_HOOKS, StepHooks, StepVote
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.losses import split_loss
from lockstep.strategies.modules.absent import is_here
from lockstep.trainer.metrics.model_parts import Parts
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.module import Module
from lockstep.trainer.run.hooks import is_users, overrides
from lockstep.trainer.shares.ends import kept_on_client
from lockstep.trainer.shares.user_state import UserState

if TYPE_CHECKING:
    from lockstep.trainer.progress import Progress
    from lockstep.trainer.run.state import RunState


class OwnStep:
    """How an optimizer steps by the module's `optimizer_step`, or with a closure that evaluates the window again."""

    hooks = NO_HOOKS
    """What the strategy calls in a step of this run, once that is known."""
    clip: Callable[[Optimizer], Any] | None = None
    """Clips gradients as the loop does."""

    def __init__(self, run: RunState, module: Module, training_step: Callable, closing: set[str]) -> None:
        self._run, self._module, self._training_step, self._closing = run, module, training_step, closing
        self._names = {id(optimizer): name for name, optimizer in run.optimizers.items()}
        self._handles = dict(zip(self._names, run.user_optimizers, strict=True))
        self._overrides = overrides(module, "optimizer_step", Module)
        self._before_step = [hook for hook in run.hooks.on_before_optimizer_step if is_users(hook)]

    def __call__(self, optimizer: Optimizer, window: Window) -> bool:
        """Step `optimizer` with the gradients of `window`, which are ready; whether it did."""
        run, name, handle = self._run, self._names[id(optimizer)], self._handles[id(optimizer)]
        looks = name in self._closing and not isinstance(optimizer, LBFGS)
        before = (
            _state_of(optimizer) if looks else []
        )  # reads all parameters, for optimizers that move them within a step
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            again = calls > 1 or all(p.grad is None for p in _held_by(optimizer))
            if looks:
                changed = torch.tensor(float(again or _state_of(optimizer) != before))
                again = bool(run.strategy.all_reduce(changed, "max"))
            elif not run.strategy.capabilities.runs_step_once:  # ranks hold other parameters, or none of this optimizer
                again = bool(run.strategy.all_reduce(torch.tensor(float(again)), "min"))
            with torch.enable_grad(), handle.apart():
                if again:
                    self._evaluate_again(optimizer, window)
                return window_loss(run, window, name)

        if not self._overrides:
            return handle.take(closure if name in self._closing else None)
        handle.closure = closure
        try:
            batch_idx = window.micro_batches[-1].batch_idx
            with handle.watched():
                self._module.optimizer_step(run.progress.current_epoch, batch_idx, handle, closure)
        finally:
            handle.closure = None
        return run.manually_stepped

    def _evaluate_again(self, optimizer: Optimizer, window: Window) -> None:
        """Evaluate the window and its gradient for `optimizer` where the weights are now, with all that users do to
        gradients. Those of other optimizers stay as they are, and what is logged is forgotten.

        Raises FloatingPointError for a gradient that is not finite, but for LBFGS, whose line search asks for it.
        """
        run, hooks = self._run, self.hooks
        logged, run.metrics = run.metrics, MetricStore()
        logged_weight = logged.weight
        optimizer.zero_grad()
        others = [p for other in run.optimizers.values() if other is not optimizer for p in _held_by(other)]
        kept = [None if p.grad is None else p.grad.clone() for p in others]  # not views of what is summed over ranks
        for parameter in others:
            parameter.grad = None
        try:
            result = run.strategy.forward_backward(
                run.wrapped,
                self._training_step,
                window,
                hooks._replace(vote=StepVote, log_scope=NO_HOOKS.log_scope, prepare=None, log=None),
            )
            bad = result.non_finite if result.later is None else result.later()
            if bad is not None and not isinstance(optimizer, LBFGS):
                raise FloatingPointError(
                    f"{bad} is NaN or infinite in step {run.progress.global_step} where {type(optimizer).__name__}, "
                    "which moves the weights within its step, evaluates the batch again; lower the learning rate, or "
                    "how far it moves them"
                )
            for parameter, gradient in zip(others, kept, strict=True):
                parameter.grad = gradient
            for hook in self._before_step:
                hook(optimizer)
            if self.clip is not None:
                self.clip(optimizer)
        finally:
            run.metrics, run.metrics.weight = logged, logged_weight


def own_step(run: RunState, module: Module, training_step: Callable, closing: set[str]) -> OwnStep | None:
    """How to step optimizers where the module has its own way, or those in `closing` need a closure."""
    if not closing and not overrides(module, "optimizer_step", Module):
        return None
    return OwnStep(run, module, training_step, closing)


def with_local_steps(run: RunState, hooks: StepHooks, clip: Callable[[Optimizer], Any] | None) -> StepHooks:
    """`hooks` for a strategy whose `forward_backward` steps optimizers itself, on parts of a window."""

    assert run.module is not None
    state = UserState(run, Parts(run.module))

    def prepare(window: Window) -> Iterator[MicroBatch]:
        assert hooks.prepare is not None
        # Of a part that fails, or is closed, nothing that was logged stays.
        with run.metrics.undone_after_errors(), kept_on_client(state):
            yield from hooks.prepare(window)

    def step(optimizer: Optimizer) -> None:
        if clip is not None:
            clip(optimizer)
        next(handle for handle in run.user_optimizers if handle.optimizer is optimizer).take()

    return hooks._replace(prepare=prepare, step=step)


def _held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer that this rank has."""
    return [p for group in optimizer.param_groups for p in group["params"] if is_here(p)]


def _state_of(optimizer: Optimizer) -> list[int]:
    """A number for each parameter and gradient of this rank, which changes with its bits."""
    parameters = _held_by(optimizer)
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    return [fingerprint(t) for t in tensors if getattr(t, "_local_tensor", t).numel()]


def window_loss(run: RunState, window: Window, name: str) -> Tensor:
    """The loss of a computed window for the optimizer `name` that asks for it, equal on all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0.0
    for micro_batch in window.micro_batches:
        output = micro_batch.output
        if isinstance(output, Mapping) and "loss" not in output:
            output = {str(key): value for key, value in output.items()}[name]
        value, numerator, counted = split_loss(output, micro_batch.num_samples)
        if value is not None:
            total = total + value.detach().double().cpu() * numerator
            count += float(counted)
    both = torch.stack([total, torch.tensor(count, dtype=torch.float64)])
    both = both if run.strategy.in_turn else run.strategy.all_reduce(both)  # a learner's loss is its own
    return both[0] / both[1]


Prepare = Callable[[Window], Iterator[MicroBatch]]


def in_its_place(run: RunState, prepare: Prepare) -> Prepare:
    """`prepare`, whose windows are computed with the progress that there was when it was called, whenever that is."""

    def prepare_here(window: Window) -> Iterator[MicroBatch]:
        return _prepared(run, replace(run.progress), prepare(window))

    return prepare_here


def _prepared(run: RunState, then: Progress, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    now, metrics = replace(run.progress), run.metrics
    if now == then:
        yield from batches
        return
    of_run = run.window_is_open, run.batch_idx, run.batch_share
    of_metrics = metrics.in_batch, metrics.weight, metrics.is_ambiguous
    run.progress.load_state_dict(then.state_dict())
    try:
        yield from batches
    finally:
        run.progress.load_state_dict(now.state_dict())
        run.window_is_open, run.batch_idx, run.batch_share = of_run
        metrics.in_batch, metrics.weight, metrics.is_ambiguous = of_metrics
