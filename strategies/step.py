"""One optimizer step of a strategy whose ranks all run the user's step: forward, backward, clip, step."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, StepFn, StepHooks, StepResult, StepVote, W
from lockstep.strategies.data.batch_slices import move
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch import fault_injection
from lockstep.strategies.losses import Weighted, detach, run_own, split_loss, trained
from lockstep.strategies.manual import ManualOptimization
from lockstep.strategies.modules import finite
from lockstep.strategies.modules.model_changes import gradient_marks, own_backward, remarked
from lockstep.strategies.modules.side_effect_free import metrics_uncounted, side_effect_free
from lockstep.strategies.optimizers.fused import prepare, skips_on_device
from lockstep.strategies.sync import collectives
from lockstep.strategies.sync.collective_fingerprint import once_a_sample
from lockstep.strategies.sync.compression.compression import Compression
from lockstep.strategies.sync.step_agreement import StepAgreement

NO_VOTE = StepVote()
_GRADIENT, _EXISTS = operator.attrgetter("grad"), functools.partial(operator.is_not, None)
_NO_CAST = nullcontext()


class SPMDStep(ManualOptimization[W]):
    """The step of `SPMDStrategy`. The weights of the mean, clipping, loss scaling, and the check that all is finite are
    here."""

    cuts_gradients = False
    """True if ranks hold different parts of the gradient, so that one cannot see whether all of it is finite."""

    def __init__(self) -> None:
        super().__init__()
        self._on_cpu = True
        self._found = self._one = torch.zeros(())
        self._trained_by: Collection[Optimizer] = ()
        self._copies: torch.cuda.Stream | None = None
        """The stream on which batches come to a GPU, beside what that still computes of the step before."""
        self._steps_on_host = False
        self._has_signed_zeros = True
        """Whether `finish_gradients` leaves zeros a sign, on which with virtual ranks bits would depend."""
        self._looks = False
        self._non_finite: Tensor | None = None
        self._compression: Compression | None = None

    @property
    def shares(self) -> tuple[int, ...]:
        """The virtual ranks that this rank runs, in this order."""
        number = self.virtual_ranks // self.topology.data_size
        return tuple(range(self.topology.data_rank * number, (self.topology.data_rank + 1) * number))

    def to_device(self, batch: Any) -> Any:
        dtype = self.precision.dtype
        if self._on_cpu and dtype == torch.float32 and type(batch) is list:
            for item in batch:  # tensors that stay are not worth a call each in every step
                if type(item) is not Tensor or not item.is_cpu:
                    break
            else:
                return [*batch]
        moved = move(batch, self.topology.device, None if dtype == torch.float32 else dtype, self._copies)
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)
        return moved

    def forward_backward(self, wrapped: W, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS) -> StepResult:
        self._step_hooks, self._looks = hooks, not hooks.automatic
        if not hooks.automatic:
            return self._run_manual(wrapped, step_fn, window, hooks)
        last, alone = len(window.micro_batches) - 1, len(window.micro_batches) == 1 == self.topology.data_size
        weight = None if alone else 1 / window.num_samples  # of a sum over data ranks, as one process has it
        run, scaler, autocast = self.run_step(wrapped, step_fn), self.precision.scaler, self.precision.autocast_dtype
        count: Any = 0.0  # a tensor if losses count on an accelerator
        weighted, vote, counting, send = 0.0, NO_VOTE, None, None
        for i, micro_batch in enumerate(window.micro_batches if hooks.prepare is None else hooks.prepare(window)):
            if scaler is not None:
                scaler.end_step()  # before what is there is put aside
            if self._in_group:
                self.set_gradient_sync(wrapped, i == last)
            call = run if micro_batch.num_samples else self.run_padding(wrapped, step_fn)
            marks = None if alone or self._forward_writes else gradient_marks(self._watched)
            with _NO_CAST if autocast is None else torch.autocast(self.topology.device.type, dtype=autocast):
                output = call(micro_batch.batch, micro_batch.batch_idx)
            if marks is not None and marks != gradient_marks(self._watched):
                raise own_backward(remarked(self.unwrap(wrapped).named_parameters(), marks))
            losses, counted = weighted_losses(output, micro_batch.num_samples, weight, hooks.parameters, self._on_cpu)
            count += counted
            for value, *_ in losses:
                weighted += value.item() if self._on_cpu else math.nan  # no host sync on an accelerator
            micro_batch.output = output.detach() if isinstance(output, Tensor) else detach(output)
            if i == last:
                vote = hooks.vote()
                counting = finite.to_host(count) if isinstance(count, Tensor) else None
                if self._agreement is not None:
                    send = self._agreement.prepare(vote, window.num_samples, not window.has_samples)
                    if counting is None:
                        self._send(send, count, weighted * (count if alone else window.num_samples))
            if fault_injection.plan is not None:
                fault_injection.fault("backward")
            own = None if hooks.backward is None else self._own(wrapped, hooks, micro_batch, output, alone)
            for j, loss in enumerate(losses):
                (value, inputs, returned, _), more = loss, j < len(losses) - 1
                if hooks.before_backward is not None:
                    hooks.before_backward(returned)
                if own is not None:
                    run_own(own, loss, more, scaler)
                elif inputs is None or inputs:
                    (value if scaler is None else scaler.scale(value)).backward(retain_graph=more, inputs=inputs)
                if hooks.after_loss is not None:
                    hooks.after_loss()
                if hooks.after_backward is not None and (i < last or more):
                    hooks.after_backward()
        count = count if counting is None else counting()  # the host waits for the forward, the device runs backward
        if self._agreement is None:
            mean = weighted * (1 if alone else window.num_samples / count) if count and self._on_cpu else None
            bad = None if math.isfinite(weighted) or not self._on_cpu else "the loss of rank 0"
            result = StepResult(count, vote.stop, bad, mean)
        else:
            if counting is not None and send is not None:
                self._send(send, count, math.nan)
            result = self._receive(wrapped, self._agreement)
            window.may_lack &= result.some_lack
        return self._conclude(wrapped, result, hooks, None if alone else window.num_samples)

    def _run_manual(self, wrapped: W, step_fn: StepFn, window: Window, hooks: StepHooks) -> StepResult:
        """Only call the step, on padding too: it runs backward and steps by itself. Returns what the ranks conclude."""
        self._refuse("manual_optimization")
        if self.precision.scaler is not None:
            self.precision.scaler.end_step()
            self.precision.scaler.begin_step()
        if self.sees_whole_gradients and self._changes is not None:
            self._parameter_hooks.put_back(self._changes.parameters.items())  # each backward is a plain one
        step_fn = once_a_sample(step_fn, self.topology)
        samples, vote, last = 0, StepVote(), len(window.micro_batches) - 1
        for i, micro_batch in enumerate(window.micro_batches if hooks.prepare is None else hooks.prepare(window)):
            if self._in_group:
                self.set_gradient_sync(wrapped, i == last)
            uncounted = nullcontext() if micro_batch.num_samples else metrics_uncounted(self.unwrap(wrapped))
            with self.precision.autocast(self.topology.device, steps=True), self._watching_backward(), uncounted:
                nothing = micro_batch.batch is None and not micro_batch.num_samples  # on all ranks
                output = None if nothing else step_fn(micro_batch.batch, micro_batch.batch_idx)
            micro_batch.output = detach(output)
            samples += micro_batch.num_samples
            if i == last:
                vote = hooks.vote()
                if self._agreement is not None:
                    said = self._agreement.prepare(vote, window.num_samples, not window.has_samples)
                    self._send(said, samples, 0.0)
            if fault_injection.plan is not None:
                fault_injection.fault("backward")
        if self._agreement is None:
            return StepResult(samples, vote.stop, None, 0.0 if self._on_cpu else None)
        result = self._agreement.receive()
        window.may_lack &= result.some_lack
        return result

    def _receive(self, wrapped: W, agreement: StepAgreement, in_tree: bool = False) -> StepResult:
        """What the ranks conclude, once this one has run backward."""
        if not self.sees_whole_gradients:
            self._check_changes()
        self.end_backward(wrapped)
        return agreement.receive(in_tree)

    def evaluate(
        self,
        wrapped: W,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        hooks: StepHooks = NO_HOOKS,
    ) -> Any:
        if micro_batch.num_samples and self.precision.autocast_dtype is None:
            return step_fn(micro_batch.batch, *args)
        with self.precision.autocast(self.topology.device):
            if micro_batch.num_samples:
                return step_fn(micro_batch.batch, *args)
            if self._in_group and micro_batch.batch is not None:  # padding, for the collectives that the step calls
                with side_effect_free(self.unwrap(wrapped)), hooks.log_scope(0):
                    step_fn(micro_batch.batch, *args)
        return None

    def backward(self, wrapped: W, loss: Tensor, weight: float = 1.0, retain_graph: bool = False) -> None:
        self._refuse("manual_optimization")
        loss = loss if weight == 1.0 else loss * weight
        loss = loss if self.precision.scaler is None else self.precision.scaler.scale(loss)
        with self._one_backward(wrapped):
            loss.backward(retain_graph=retain_graph)

    def clip_gradients(self, wrapped: W, optimizer: Optimizer, value: float, algorithm: str = "norm") -> Tensor | None:
        parameters = self._in_model_order(optimizer)
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_once(optimizer)
        if algorithm == "norm":
            return torch.nn.utils.clip_grad_norm_(parameters, value)
        collectives.clip_values(parameters, value)
        return None

    def optimizer_step(self, wrapped: W, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if closure is not None:
            self._refuse("closures")
        if self._looks:
            self._check_own_backward()
            self._check_finite(optimizer)
        elif self._agreement is not None and self._on_cpu:
            self._agreement.check()  # what hooks have called since the gradients were final
        if not self._on_cpu:
            prepare(optimizer)
        if self._non_finite is not None and not self._may_step(optimizer):
            return False
        if self.precision.scaler is None:
            optimizer.step() if closure is None else optimizer.step(closure)
            if self._compression is not None:
                self._compression.commit(optimizer, self._non_finite)
            return True
        if closure is not None:
            raise ValueError("precision='16-mixed' scales gradients, with which a closure would step; use 'bf16-mixed'")
        if self.precision.scaler.unscale_once(optimizer):
            return self.precision.scaler.has_stepped(optimizer)
        optimizer.step()  # the scaler would raise
        return True

    # ---- helpers -----------------------------------------------------------------------------------

    def _drop_gradients(self, wrapped: W) -> None:
        """Leave the optimizer nothing of this window."""
        for parameter in self._watched or wrapped.parameters():  # an engine may hold others while a step is open
            self.write_gradient(wrapped, parameter, None)

    def _conclude(self, wrapped: W, result: StepResult, hooks: StepHooks, weighed_by: int | None) -> StepResult:
        """What `forward_backward` returns: completes gradients, runs users' hooks and checks that all is finite.

        `weighed_by` is the number that losses were divided by until all ranks' counts were known; None if it was
        theirs. `after_backward` is called here for the last backward, with the gradient that the optimizer gets. On an
        accelerator the answer is left on the device, where a step can be skipped without the host waiting for it.
        Of a window that counts nothing no gradient is left.
        """
        if not result.count:  # the next window must not add these to its own
            self._drop_gradients(wrapped)
            return result
        scale = 1.0 if weighed_by is None else weighed_by / result.count
        if scale != 1.0 and not self.virtual_ranks and (mine := self.local_gradients(wrapped)):
            torch._foreach_mul_(mine, scale)
        if self._in_group:
            self.finish_gradients(wrapped)
        if self.virtual_ranks and (mine := self.local_gradients(wrapped)):  # after the sum, which would round otherwise
            if scale != 1.0:
                torch._foreach_mul_(mine, scale)
            if self._has_signed_zeros or scale != 1.0:
                torch._foreach_add_(mine, 0.0)  # zero loses its sign
        if not self.sees_whole_gradients:
            self._check_changes()
        if self._parameter_hooks.taken:
            self._run_parameter_hooks(wrapped)
        if hooks.after_backward is not None:
            self._edits.begin()
            hooks.after_backward()
            self._edits.end()
        if self.precision.scaler is not None:
            for optimizer in self._trained_by:  # hooks see from here on what is stepped with
                self.precision.scaler.unscale_once(optimizer)
            return result._replace(non_finite=None)  # the scaler skips such a step
        if result.non_finite is None:
            gradients = (
                self.local_gradients(wrapped)
                if self.cuts_gradients
                else [*filter(_EXISTS, map(_GRADIENT, self._watched or wrapped.parameters()))]
            )
            found = self._found
            try:  # GradScaler's pass with a scale of one: changes no bit of what is finite
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self._one)
            except RuntimeError:  # none, or such as that pass does not take
                found = finite.found(gradients, self.topology.device)
            if not self._on_cpu:
                if self.cuts_gradients and self._in_group:
                    dist.all_reduce(found, dist.ReduceOp.MAX, group=self._peers)
                # the copy to the host and the optimizer read it later
                self._non_finite, self._found = found, torch.zeros_like(found)
                return result._replace(later=finite.later(found, functools.partial(self._drop_gradients, wrapped)))
            is_bad = bool(found)
            name = self._name_of_first(wrapped, is_bad) if is_bad or self._agreement is not None else None
            if name is None:
                return result
            self._found.zero_()
            result = result._replace(non_finite=name)
        self._drop_gradients(wrapped)
        return result

    def _name_of_first(self, wrapped: W, is_bad: bool) -> str | None:
        """The parameter whose gradient is not finite on the first rank that says so. Every rank calls it."""
        if self._agreement is None:
            return finite.name(self.unwrap(wrapped))
        first = self._agreement.first_rank(is_bad)
        if first is None:
            return None
        name = finite.name(self.unwrap(wrapped)) if self.topology.rank == first else None
        return collectives.broadcast(name, first, self._peers)

    def _send(self, send: Callable[[float, bool, float], None], count: float, total: float) -> None:
        """Tell the other ranks what this one has computed; the sum of its losses is not known on accelerators."""
        finite = not self._on_cpu or math.isfinite(total)
        send(*((count, finite, total) if self.topology.is_reporting_rank else (0.0, finite, 0.0)))

    def _may_step(self, optimizer: Optimizer) -> bool:
        """Whether to call `optimizer`: one that can skips a step with bad gradients on the device, else the host
        waits."""
        if skips_on_device(optimizer) and not self._steps_on_host:
            optimizer.found_inf = self._non_finite  # type: ignore[attr-defined]
            return True
        return not bool(self._non_finite)

    def _in_model_order(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """What `optimizer` steps and has a gradient, in the order of the model's parameters: a norm depends on it in
        its last bits."""
        own = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        ordered = [parameter for p in self._watched if (parameter := own.pop(id(p), None)) is not None]
        return ordered + list(own.values())


def weighted_losses(
    output: Any,
    num_samples: int,
    scale: float | None,
    parameters: Mapping[str, Sequence[nn.Parameter]] | None,
    reads_counts: bool = True,
) -> tuple[list[Weighted], Any]:
    """What to run backward from, and what it counts.

    `scale` turns a sum into this rank's part of the global mean; None means that the micro-batch is the
    whole of it. Without `reads_counts` a count that is a tensor stays one, on its device, in float64.
    """
    losses: list[Weighted]
    count: Any
    weight: Any
    if parameters and isinstance(output, Mapping) and "loss" not in output:
        output = {str(name): value for name, value in output.items()}
        wrong = sorted(set(map(str, output)) ^ set(parameters)) + [
            name for name, value in output.items() if not isinstance(value, Tensor)
        ]
        if wrong:
            raise ValueError(
                f"training_step must return one mean loss (a tensor) for each optimizer ({', '.join(parameters)}), or "
                f"None, but {', '.join(wrong)} is not; "
                "name the losses after the optimizers"
            )
        losses = [(output[name], trained(group), output[name], 1.0) for name, group in parameters.items()]
        numerator, count = float(num_samples), num_samples
    else:
        value, numerator, count = (
            (output, num_samples, num_samples) if isinstance(output, Tensor) else split_loss(output, num_samples)
        )
        losses = [] if value is None else [(value, None, value, 1.0)]
    if reads_counts or not isinstance(count, Tensor):
        count = float(count)
        weight = numerator * scale if scale is not None else numerator / count if count else 0.0
    else:
        count = count.detach().double().reshape(())
        weight = numerator * scale if scale is not None else torch.where(count != 0, numerator / count, 0.0)
    for i, (value, inputs, returned, _) in enumerate(losses):
        if fault_injection.plan is not None:
            value = returned = fault_injection.plan.poison(value)
            losses[i] = value, inputs, value, 1.0
        if value.numel() != 1 or value.is_complex():
            raise _no_real_number(value)
        if not value.requires_grad and (inputs is None or inputs):
            raise ValueError(
                "training_step returned a loss without gradient: it does not depend on a trainable parameter, or was "
                "detached or computed under no_grad"
            )
        if isinstance(weight, Tensor):
            losses[i] = value * weight.to(value.dtype), inputs, returned, weight
        elif weight != 1.0:
            losses[i] = value * weight, inputs, returned, weight
    return losses, count


def _no_real_number(loss: Tensor) -> ValueError:
    if loss.is_complex():
        return ValueError(
            f"training_step must return a real loss, but its loss is {loss.dtype}; return its absolute value or real "
            "part"
        )
    return ValueError(
        f"training_step must return a scalar loss, but its loss has shape {list(loss.shape)}; return its mean or "
        "Loss(total, count)"
    )
