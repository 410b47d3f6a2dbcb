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
from lockstep.strategies.base import StepHooks
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.losses import split_loss
from lockstep.strategies.modules.absent import is_here
from lockstep.trainer.metrics.model_parts import Parts
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.module import Module
from lockstep.trainer.run.hooks import overrides
from lockstep.trainer.shares.ends import kept_on_client
from lockstep.trainer.shares.user_state import UserState

if TYPE_CHECKING:
    from lockstep.trainer.progress import Progress
    from lockstep.trainer.run.state import RunState


def own_step(
    run: RunState, module: Module, training_step: Callable, closing: set[str]
) -> Callable[[Optimizer, Window], bool] | None:
    """How to step optimizers where the module has its own way, or those in `closing` need a closure."""
    strategy = run.strategy
    own = overrides(module, "optimizer_step", Module)
    if not own and not closing:
        return None

    names = {id(optimizer): name for name, optimizer in run.optimizers.items()}
    handles = dict(zip(names, run.user_optimizers, strict=True))

    def step(optimizer: Optimizer, window: Window) -> bool:
        name = names[id(optimizer)]
        looks = name in closing and not isinstance(optimizer, LBFGS)
        before = (
            _state_of(optimizer) if looks else []
        )  # reads all parameters, for optimizers that move them within a step
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            here = [p for group in optimizer.param_groups for p in group["params"] if is_here(p)]
            again = calls > 1 or all(p.grad is None for p in here)
            if looks:
                changed = torch.tensor(float(again or _state_of(optimizer) != before))
                again = bool(strategy.all_reduce(changed, "max"))
            elif not strategy.capabilities.runs_step_once:  # ranks hold other parameters, or none of this optimizer
                again = bool(strategy.all_reduce(torch.tensor(float(again)), "min"))
            with torch.enable_grad():
                return window_loss(run, window, training_step, name, again)

        if own:
            handles[id(optimizer)].is_open = True
            try:
                module.optimizer_step(
                    run.progress.current_epoch, window.micro_batches[-1].batch_idx, handles[id(optimizer)], closure
                )
            finally:
                handles[id(optimizer)].is_open = False
            return run.manually_stepped
        return handles[id(optimizer)].take(closure if name in closing else None)

    return step


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


def _state_of(optimizer: Optimizer) -> list[int]:
    """A number for each parameter and gradient of this rank, which changes with its bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if is_here(p)]
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    return [fingerprint(t) for t in tensors if getattr(t, "_local_tensor", t).numel()]


def window_loss(run: RunState, window: Window, training_step: Callable, name: str, again: bool) -> Tensor:
    """The loss of a window for the optimizer `name` that asks for it, equal on all ranks; `again` computes it and its
    gradient again."""
    if again:
        logged, run.metrics = run.metrics, MetricStore()
        logged_weight = logged.weight
        try:
            for optimizer in run.optimizers.values():
                optimizer.zero_grad()
            run.strategy.forward_backward(run.wrapped, training_step, window)
        finally:
            run.metrics, run.metrics.weight = logged, logged_weight
    total = torch.zeros((), dtype=torch.float64)
    count = 0.0
    for micro_batch in window.micro_batches:
        output = micro_batch.output
        own = output[name] if isinstance(output, Mapping) and "loss" not in output else output
        value, numerator, counted = split_loss(own, micro_batch.num_samples)
        if value is not None:
            total = total + value.detach().double().cpu() * numerator
            count += float(counted)
    both = run.strategy.all_reduce(torch.stack([total, torch.tensor(count, dtype=torch.float64)]))
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
