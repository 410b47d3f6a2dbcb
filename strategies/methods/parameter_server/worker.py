"""A rank as a worker: it computes the batches that it gets, those of a rank that died too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import StepFn, StepHooks
from lockstep.strategies.data.order import other_indices
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch import fault_injection
from lockstep.strategies.losses import detach
from lockstep.strategies.methods.parameter_server.data import Later
from lockstep.strategies.methods.parameter_server.engine import Engine
from lockstep.strategies.modules.model_changes import gradient_marks, own_backward, remarked, shortened
from lockstep.strategies.optimizers.numbers import changes, numbers_of
from lockstep.strategies.step import weighted_losses


class _Part(NamedTuple):
    """The batch of one worker in a clock."""

    window: Window
    prepared: Iterator[MicroBatch]
    step_fn: StepFn
    hooks: StepHooks


class Worker:
    """Until its engine ends. `forward` is the context of a forward pass; `check` raises for what it changed."""

    def __init__(
        self,
        engine: Engine,
        wrapped: nn.Module,
        optimizers: Mapping[str, Optimizer],
        workers: int,
        place: str,
        forward: Callable[[], Any],
        check: Callable[[], None],
    ) -> None:
        self._engine, self._wrapped, self._optimizers = engine, wrapped, optimizers
        self._workers, self._place, self._forward, self._check = workers, place, forward, check
        self._watched = list(wrapped.parameters())
        self._metrics = [m for m in wrapped.modules() if hasattr(m, "metric_state") and hasattr(m, "_update_count")]
        self.computes = False
        """Whether a batch is computed now."""
        self._clock = -1
        self._parts: dict[int, list[_Part]] = {}
        """By clock, of those that may lack a gradient, the batches of all workers."""
        self._open: _Part | None = None
        """The batch computed last, whose end has not been called yet."""
        self._last_batch: Any = None

    def clock(self, clock: int, window: Window, step_fn: StepFn, hooks: StepHooks) -> int:
        """Compute those batches of a clock that this rank gets; returns what all ranks conclude of their votes to
        stop. `window` has those of all workers, and afterwards the micro-batches of the last one here."""
        self._clock, self.computes = clock, True
        self._parts[clock] = self._divide(window, step_fn, hooks)
        window.num_shares = 1
        while True:
            vote = hooks.vote()
            batch, stop = self._engine.take(clock, vote.stop, vote.order[0])
            if stop < 0:
                raise other_indices(vote.order[1], "training", self._place, -1 - stop)
            if batch is None:
                break
            if batch // self._workers == clock:
                self._compute(batch)
            else:
                self._compute_late(batch)
        if not self._engine.spares_ranks:
            del self._parts[clock]
        if self._open is not None:
            window.micro_batches = self._open.window.micro_batches
            self._end(more=False)
        else:
            window.micro_batches = [MicroBatch(self._last_batch, 0)]
            for _ in window.micro_batches if hooks.prepare is None else hooks.prepare(window):
                pass
        self.computes = False
        return stop

    def help(self) -> None:
        """Compute a batch that a rank which died has left, if there is one."""
        if self._engine.spares_ranks:
            batch, _ = self._engine.take(self._clock, 0, late=True)
            if batch is not None:
                self._compute_late(batch)

    def _divide(self, window: Window, step_fn: StepFn, hooks: StepHooks) -> list[_Part]:
        """A window for each worker, whose hooks see the run as it is now, whenever they are called."""
        number, parts = len(window.micro_batches) // self._workers, []
        for share in range(self._workers):
            mine = [m for m in window.micro_batches[share * number : (share + 1) * number] if m.num_samples]
            part = Window(mine, window.num_samples, 1, window.num_batches)
            prepared = iter(mine if hooks.prepare is None else hooks.prepare(part))
            parts.append(_Part(part, prepared, step_fn, hooks))
        return parts

    def _compute(self, batch: int) -> None:
        clock, share = divmod(batch, self._workers)
        part = self._parts[clock][share]
        versions = self._engine.read(batch, self.help)
        for done in [c for c in self._parts if c < min(versions)]:
            del self._parts[done]
        count = 0.0
        if part.window.micro_batches:
            self._end(more=True)
            self._open = part
            for micro_batch in part.window.micro_batches:
                if isinstance(micro_batch.batch, Later):
                    micro_batch.batch = micro_batch.batch()
            self._last_batch = part.window.micro_batches[-1].batch
            count = self._backward(part, clock)
        self._engine.push(batch, versions, count, bool(part.window.micro_batches))
        if part.hooks.log is not None:
            for name, how in (("staleness", "mean"), ("staleness_max", "max")):
                part.hooks.log(name, float(clock - min(versions)), how, float(bool(part.window.micro_batches)))

    @torch.enable_grad()
    def _compute_late(self, batch: int) -> None:
        """Compute a batch of an earlier clock, of which the gradient and what it logs remain."""
        self._end(more=True)
        if not self._wrapped.training:
            raise RuntimeError(
                "a rank has died, and its batch cannot be computed here, as the module is in evaluation mode; leave it "
                "in training mode outside of validation"
            )
        computes, self.computes = self.computes, True
        self._compute(batch)
        self._end(more=False)
        self.computes = computes

    def _end(self, more: bool) -> None:
        """Call what follows the batch computed last: its `on_train_batch_end` if `more` of this rank follow."""
        part, self._open = self._open, None
        if part is not None:
            part.window.more = more
            before = self._numbers()
            for _ in part.prepared:
                pass
            self._refuse_numbers(before)

    def _numbers(self) -> list[dict[str, Any]]:
        return [numbers_of(group) for optimizer in self._optimizers.values() for group in optimizer.param_groups]

    def _refuse_numbers(self, before: list[dict[str, Any]]) -> None:
        changed = {key for now, then in zip(self._numbers(), before, strict=False) for key in changes(now, then)}
        if changed:
            raise RuntimeError(
                f"{shortened(sorted(changed))} of param_groups changed while a batch was computed, by a hook or "
                "training_step, which a rank of a parameter server calls for as many batches of a step as it gets; use "
                "a scheduler, or a hook such as on_train_epoch_start"
            )

    def _backward(self, part: _Part, clock: int) -> float:
        """Leave the gradient of a batch in `.grad`; return what its losses count."""
        hooks, wrapped = part.hooks, self._wrapped
        for parameter in self._watched:
            parameter.grad = None
        counted = 0.0
        for _ in range(len(part.window.micro_batches)):
            before = self._numbers()
            micro_batch = next(part.prepared)
            self._engine.refuse_changed_buffers()
            updates = [metric._update_count for metric in self._metrics]
            marks = gradient_marks(self._watched)
            with self._forward():
                output = part.step_fn(micro_batch.batch, micro_batch.batch_idx)
            self._check()
            self._refuse_numbers(before)
            if marks != gradient_marks(self._watched):
                raise own_backward(remarked(wrapped.named_parameters(), marks))
            if updates != [metric._update_count for metric in self._metrics]:
                raise RuntimeError(
                    "training_step updates a torchmetrics object, whose state cannot be put together where batches are "
                    "handed out to whoever is free; log values with self.log, or update it in validation"
                )
            losses, count = weighted_losses(
                output, micro_batch.num_samples, 1 / part.window.num_samples, hooks.parameters
            )
            counted += count
            micro_batch.output = detach(output)
            if fault_injection.plan is not None:
                fault_injection.fault("backward")
            for j, (value, inputs, returned, _) in enumerate(losses):
                if not bool(value.isfinite()):
                    raise self._not_finite("the loss", clock)
                if hooks.before_backward is not None:
                    hooks.before_backward(returned)
                if inputs is None or inputs:
                    value.backward(retain_graph=j < len(losses) - 1, inputs=inputs)
            self._engine.note_buffers()
        for name, parameter in wrapped.named_parameters():
            if parameter.grad is not None and not _is_finite(parameter.grad):
                raise self._not_finite(f"the gradient of {name}", clock)
        return counted

    def _not_finite(self, what: str, clock: int) -> FloatingPointError:
        return FloatingPointError(
            f"{what} is NaN or infinite in a batch of step {clock} on {self._place}; no parameter was changed by it"
        )


def _is_finite(gradient: Tensor) -> bool:
    """A sum is not finite if a value is not; the other way round it may have overflowed."""
    return bool(gradient.sum().isfinite()) or bool(gradient.isfinite().all())
