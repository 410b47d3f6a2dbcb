"""One optimizer step in shares, whose bits do not depend on how many ranks the shares are on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import (
    NO_HOOKS,
    Capabilities,
    StepFn,
    StepHooks,
    StepResult,
    StepVote,
    Strategy,
    Topology,
    W,
)
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch import environment, fault_injection
from lockstep.strategies.losses import detach, run_own
from lockstep.strategies.modules.model_changes import (
    gradient_marks,
    own_backward,
    partial_gradient,
    refuse_sync_batch_norm,
    remarked,
    shortened,
)
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.step import weighted_losses
from lockstep.strategies.sync.buffers import FollowedShapes
from lockstep.strategies.sync.collectives import clip_values, holders
from lockstep.strategies.sync.contents import checksum
from lockstep.strategies.sync.step_agreement import StepAgreement
from lockstep.strategies.sync.tree import PartialSums
from lockstep.strategies.virtual.hooks import ShareHooks
from lockstep.strategies.virtual.norm import total_norm

_APART = "the gradients of shares are kept apart until the step ends"
_REFUSES = {
    "manual_optimization": "virtual_ranks adds the gradients of shares itself, so it needs automatic optimization; "
    "train without virtual_ranks",
    "closures": "virtual_ranks runs the shares of a step once, so an optimizer that calls its closure again is "
    "refused; train without virtual_ranks",
    "16-mixed": "precision='16-mixed' scales losses by what overflowed on a rank; with virtual_ranks use 'bf16-mixed'",
}
LOOKS = 10
"""Windows in which the bits of parameters are compared."""


class VirtualStep(ShareHooks[W], SPMDStrategy[W]):
    """Base of the strategies that run `virtual_ranks` shares of each step, on any number of ranks.

    The gradient of a step is the sum over shares in a fixed tree (`strategies/sync/tree.py`), and so are what the
    losses count and their sum. Within a share nothing may depend on the ranks, so collectives raise RuntimeError.
    """

    capabilities = Capabilities(bitwise=True, refuses=_REFUSES)
    virtual_ranks = 1
    _num_windows = 0
    _shapes: FollowedShapes
    _threads: int | None = None
    """What torch had before `setup`."""

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        chosen = super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        world = environment.detect()
        num_ranks = self.num_devices * num_nodes if world is None else world.world_size
        data_size = self.data_size_of(num_ranks)
        if self.virtual_ranks % data_size:
            fitting = [str(2**i) for i in range(self.virtual_ranks.bit_length())]
            some = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if len(fitting) > 1 else "1"
            what = "ranks" if data_size == num_ranks else "pipelines"
            raise ValueError(f"virtual_ranks={self.virtual_ranks} does not spread over {data_size} {what}; use {some}")
        return chosen

    def setup(self) -> Topology:
        self._shapes = FollowedShapes()
        super().setup()
        if self.topology.device.type == "cpu" and self._threads is None:  # a sum's order follows their number
            self._threads = torch.get_num_threads()
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.virtual_ranks))
        return self.topology

    def check(self, model: nn.Module) -> None:
        refuse_sync_batch_norm(model, f"{self.argument} compute each share by itself")
        super().check(model)

    def teardown(self) -> None:
        super().teardown()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None

    def forward_backward(self, wrapped: W, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS) -> StepResult:
        if not hooks.automatic:
            self._refuse("manual_optimization")
        refuse_parts(window, hooks)
        self._step_hooks = hooks
        run = self.run_step(wrapped, step_fn)
        last, of_a_share = len(window.micro_batches) - 1, len(window.micro_batches) // window.num_shares
        gradients, numbers, part = self.keep_gradients(), PartialSums(add_numbers), 1 / window.num_samples
        counted, total, of_shares, before = 0.0, 0.0, [], self._weights(begins=True)
        with self._share():
            for i, micro_batch in enumerate(window.micro_batches if hooks.prepare is None else hooks.prepare(window)):
                ends = (i + 1) % of_a_share == 0
                if self._in_group:
                    self.set_gradient_sync(wrapped, ends)
                call = run if micro_batch.num_samples else self.run_padding(wrapped, step_fn)
                if not i:  # hooks of the batch may freeze; weights that they change would be other ones on each rank
                    before = before._replace(trained=[*map(_TRAINED, self._watched)])
                marks = gradient_marks(self._watched)
                with self.precision.autocast(self.topology.device):
                    output = call(micro_batch.batch, micro_batch.batch_idx)
                if before != self._weights() or marks != gradient_marks(self._watched):
                    raise self._changed(wrapped, before, marks)
                losses, count = weighted_losses(output, micro_batch.num_samples, part, hooks.parameters)
                counted += count
                total += sum(value.item() for value, *_ in losses) if self._on_cpu else math.nan  # no host sync
                micro_batch.output = detach(output)
                if ends:
                    of_shares.append((counted, total * window.num_samples))
                    numbers.append(of_shares[-1])
                    counted = total = 0.0
                if i == last:
                    vote, (counted, total) = vote_of(window, hooks), numbers.total()
                    if self._agreement is not None:
                        finite = not self._on_cpu or math.isfinite(total)
                        self._agreement.send(vote, window.num_samples, counted, finite, total)
                if fault_injection.plan is not None:
                    fault_injection.fault("backward")
                for j, loss in enumerate(losses):
                    (value, inputs, returned, _), more = loss, j < len(losses) - 1
                    if hooks.before_backward is not None:
                        hooks.before_backward(returned)
                    if (own := self._own(wrapped, hooks, micro_batch, output)) is not None:
                        run_own(own, loss, more)
                    elif inputs is None or inputs:
                        value.backward(retain_graph=more, inputs=inputs)
                    _after_loss(hooks, more, ends)
                if i == last and before != self._weights():  # by a hook of the backward
                    raise self._changed(wrapped, before, marks)
                if ends:
                    gradients.append(self.take_gradients(wrapped))
        self.put_gradients(gradients.total())
        if self._agreement is None:
            bad = None if math.isfinite(total) or not self._on_cpu else f"the loss of rank {self.topology.rank}"
            result = StepResult(counted, vote.stop, bad, total / counted if counted and self._on_cpu else None)
        else:
            result = self.sum_numbers(self._receive(wrapped, self._agreement, in_tree=True), of_shares)
        weighed_by = self.reduce_shares(window.num_samples, result.count) if result.count else None
        return self._conclude(wrapped, result, hooks, weighed_by)

    def evaluate(
        self,
        wrapped: W,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        hooks: StepHooks = NO_HOOKS,
    ) -> Any:
        with self._share():
            return super().evaluate(wrapped, step_fn, micro_batch, *args, hooks=hooks)

    def clip_gradients(self, wrapped: W, optimizer: Optimizer, value: float, algorithm: str = "norm") -> Tensor | None:
        parameters = self._in_model_order(optimizer)
        parts = [self.gradient_part(p) for p in parameters]
        if algorithm != "norm":
            clip_values(holders(parts), value)
            return None
        rows, dtype = self.norm_facts(
            sum(map(self.counted_rows, parameters)),
            torch.promote_types(
                torch.float32,
                max((p.dtype.to_real() for p in parts), key=attrgetter("itemsize"), default=torch.float32),
            ),
        )
        counted = [self.counted_part(p, part) for p, part in zip(parameters, parts, strict=True)]
        norm = total_norm(counted, rows, self.topology.device, self.norm_groups()).to(dtype)
        torch.nn.utils.clip_grads_with_norm_(holders(parts), value, norm)
        return norm

    # ---- helpers -------------------------------------------------------------------------------------

    @contextmanager
    def _share(self) -> Iterator[None]:
        """While it lasts collectives are refused, within a learner's turn as they were."""
        before = self._refusal
        self._refusal = before or self._within_share
        try:
            yield
        finally:
            self._refusal = before

    def _weights(self, begins: bool = False) -> _Weights:
        """What tells whether parameters were changed, also by assigning to `data`, frozen or unfrozen. In the first
        windows, each of which `begins` with a call, that is their bits too: writes through numpy leave no other trace.
        """
        self._num_windows += begins
        held = self._watched
        bits = [*map(_bits, held)] if self._num_windows <= LOOKS else [0] * len(held)
        places = [p.data_ptr() if type(p) is nn.Parameter else _place(p) for p in held]
        return _Weights([*map(_VERSION, held)], places, bits, [*map(_TRAINED, held)])

    def _changed(self, wrapped: W, before: _Weights, marks: Any) -> RuntimeError:
        """What to raise for a step that changed parameters or their gradients by itself."""
        names = {id(p): name for name, p in self.unwrap(wrapped).named_parameters()}
        pairs = zip(self._watched, zip(*before, strict=True), zip(*self._weights(), strict=True), strict=True)
        changed = [names.get(id(p), "?") for p, was, now in pairs if was != now]
        if not changed:
            return own_backward(remarked(self.unwrap(wrapped).named_parameters(), marks))
        return RuntimeError(
            f"training_step changed the parameters {shortened(changed)} or their requires_grad, or a hook of a batch "
            f"did between shares, but with {self.argument} all shares of a step see the same ones; change them in a "
            "hook such as on_before_zero_grad"
        )

    def _alone(self, step_fn: StepFn, agreement: StepAgreement | None) -> StepFn:
        return alone(
            step_fn,
            agreement,
            "training_step called a collective of torch.distributed, whose result depends on the number of ranks, "
            f"within a share of {self.argument}={self.virtual_ranks}; call it in a hook, or train without "
            f"{self.argument}",
        )

    def _within_share(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what} was called within a share of {self.argument}={self.virtual_ranks}, where its result would depend "
            f"on the number of ranks; call it in a hook, or train without {self.argument}"
        )


def _after_loss(hooks: StepHooks, more: bool, ends: bool) -> None:
    if hooks.after_loss is not None:
        hooks.after_loss()
    if more and hooks.whole_gradients:
        raise partial_gradient(_APART)
    if hooks.after_backward is not None and (more or not ends):  # at a share's end once, as on a rank of its own
        hooks.after_backward()


def refuse_parts(window: Window, hooks: StepHooks) -> None:
    """Raise RuntimeError for a user's `on_after_backward` that would be called with a part of a share's gradient."""
    if hooks.whole_gradients and len(window.micro_batches) > window.num_shares:
        raise partial_gradient(_APART)


def vote_of(window: Window, hooks: StepHooks) -> StepVote:
    """This rank's vote; without samples, which no step has run on, not for the names of what others have logged."""
    vote = hooks.vote()
    return vote if any(batch.num_samples for batch in window.micro_batches) else vote._replace(keys=0)


def add_numbers(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def alone(step_fn: StepFn, agreement: StepAgreement | None, refusal: str) -> StepFn:
    """A step that raises RuntimeError if user code within it calls a collective of torch.distributed."""
    if agreement is None:
        return step_fn

    def run(batch: Any, batch_idx: int) -> Any:
        before = agreement.num_calls()
        output = step_fn(batch, batch_idx)
        if agreement.num_calls() != before:
            raise RuntimeError(refusal)
        return output

    return run


class _Weights(NamedTuple):
    """What tells of each parameter whether it was changed."""

    versions: list[int]
    places: list[int]
    bits: list[int]
    trained: list[bool]


_VERSION, _TRAINED = attrgetter("_version"), attrgetter("requires_grad")


def _place(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "_local_tensor", parameter).untyped_storage()._cdata)


def _bits(parameter: nn.Parameter) -> int:
    own = getattr(parameter, "_local_tensor", parameter)
    return checksum(own) if own.is_cpu and type(own) in (Tensor, nn.Parameter) else 0
