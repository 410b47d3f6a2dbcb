"""What goes through a pipeline: micro-batches cut into parts, and what comes back for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.base import Loss, StepFn, StepHooks
from lockstep.strategies.data.batch_slices import Rows, copied, cut, rebuilt, tensors_of
from lockstep.strategies.data.permutation import mix
from lockstep.strategies.data.sharded_loader import MicroBatch
from lockstep.strategies.launch.rng import seed_streams
from lockstep.strategies.losses import own_backward_refused
from lockstep.strategies.sync.collective_fingerprint import refusing


@dataclass(slots=True)
class Part:
    """What one pass through the stages works on."""

    batch: Any
    num_samples: int


@dataclass(slots=True)
class Tally:
    """What the losses of a window came to, on the rank of the last stage."""

    count: float = 0.0
    total: float = 0.0
    """Sum of the weighted losses; NaN on an accelerator, where it would cost a host synchronization."""
    has_loss: bool = False
    outputs: list[tuple[Any, int]] = field(default_factory=list)
    """What the step returned for each part of the running micro-batch, and its number of samples."""


PARTS = "a pipeline runs a step in parts, on each stage another one; call it in a hook, or use another strategy"
OWN_BACKWARD = own_backward_refused("the schedule of a pipeline runs it stage by stage")
BY_SCHEDULE = (
    "a pipeline runs backward by its schedule, so it needs automatic optimization; "
    "remove automatic_optimization = False, or use another strategy"
)


@dataclass(slots=True)
class Feed:
    """One run of a schedule: parts of equal size, and what to do with them."""

    step_fn: StepFn
    batch_idx: int
    parts: list[Part]
    noise: int
    scale: float
    """Turns a sum of losses into a share of the global mean."""
    hooks: StepHooks
    before_last_backward: Callable[[], None] | None
    tally: Tally
    shared: frozenset[int] = frozenset()
    """The ids of tensors that all parts of the micro-batch are given whole."""
    written: list[Tensor] = field(default_factory=list)
    """Tensors of the last part that ran which the step has changed in place."""
    is_copied: bool = True
    """Whether `learn` ran on a copy, if it ran."""

    def learn(self, index: int) -> Any:
        """`step` on a copy of a part, to find out what travels."""
        holder = self.holder(index)
        batch, holder.batch = holder.batch, copied(holder.batch)
        self.is_copied = holder.batch is not batch
        try:
            return self.step(index)
        finally:
            holder.batch = batch

    def learn_whole(self, micro_batch: MicroBatch) -> None:
        """`step` on a copy of a micro-batch that is not cut."""
        whole = replace(self, parts=[Part(micro_batch.batch, micro_batch.num_samples)], shared=frozenset())
        try:
            whole.learn(0)
        finally:
            whole.check_written(1)

    def holder(self, index: int) -> Any:
        """What holds the batch that `step` gives to the user's step."""
        return self.parts[index]

    def step(self, index: int) -> Any:
        """The user's step on a part, from random streams that begin alike on all stages."""
        seed_streams(mix(self.noise, index, 0))
        with refusing(PARTS, every=True):
            part = self.parts[index]
            batch = rebuilt(part.batch)  # which a step may change
            before = [(tensor, tensor._version) for tensor in tensors_of(batch)]
            try:
                return self.step_fn(batch, self.batch_idx)
            finally:
                self.written = [tensor for tensor, version in before if tensor._version != version]

    def check_written(self, num_stages: int) -> None:
        """Raise RuntimeError if a step has changed a tensor that another run of it is given too; this rank has
        `num_stages`."""
        if any(id(tensor) in self.shared for tensor in self.written):
            raise RuntimeError(
                "training_step changes a tensor of the batch in place that has no row a sample, so that all parts of a "
                "micro-batch, for each of which a pipeline runs it, share it; compute a new tensor"
            )
        if self.written and not self.is_copied:
            raise RuntimeError(
                "training_step changes a tensor of the batch in place, but copy.deepcopy cannot copy the batch, on "
                "which a pipeline runs it once more to find out what travels; compute a new tensor"
            )
        if self.written and num_stages > 1:
            raise RuntimeError(
                f"training_step changes a tensor of the batch in place, but a rank runs it for each of its {num_stages}"
                " stages of the pipeline; compute a new tensor, or choose schedule='1f1b'"
            )

    def prepare(self, index: int) -> None:
        """Called before a stage of this rank runs a part."""

    def seed(self, index: int) -> int | None:
        """Of what layers draw for a part; None if that continues what the step has drawn."""
        return mix(self.noise, index)

    @property
    def known(self) -> Sequence[int]:
        """Parts that may run for their shapes before the schedule does."""
        return range(len(self.parts))


@dataclass(slots=True)
class Cutter:
    """How the micro-batches of a run are cut."""

    num_parts: int
    rows: Rows


def runs(micro_batch: MicroBatch, cutter: Cutter) -> list[list[Part]]:
    """A micro-batch as runs of parts of equal size; a second run for the rest."""
    n = micro_batch.num_samples
    if not n:
        return []
    if min(cutter.num_parts, n) > 1 and not cutter.rows.any_in(micro_batch.batch, n):
        raise ValueError(
            f"a pipeline cuts batches along the first dimension of their tensors, "
            f"but none in this {type(micro_batch.batch).__name__} has the batch's {n} samples there; "
            "let the loader make tensors, or lists, dicts and dataclasses of them, or give "
            "Pipeline(num_micro_batches=1)"
        )
    parts = [Part(batch, size) for batch, size in cut(micro_batch.batch, n, cutter.num_parts, cutter.rows)]
    return [list(run) for _, run in groupby(parts, key=lambda part: part.num_samples)]


def merged(outputs: list[tuple[Any, int]]) -> Any:
    """What a step has returned for the parts as what it would have returned for the whole: losses and other numbers
    averaged, numbers of samples added, tensors and lists joined, and so for what dicts, tuples, and lists of tensors
    with a row a sample, hold. What a key holds that some parts lack is that of the others. Of anything else it is what
    the last part returned."""
    outputs = [(value, n) for value, n in outputs if value is not None]
    if len(outputs) <= 1:
        return outputs[0][0] if outputs else None
    first = outputs[0][0]
    if isinstance(first, Loss):
        return Loss(sum(value.total for value, _ in outputs), sum(value.count for value, _ in outputs))
    if isinstance(first, Tensor) and first.dim():
        return torch.cat([value for value, _ in outputs])
    if isinstance(first, int) and not isinstance(first, bool) and all(value == n for value, n in outputs):
        return sum(value for value, _ in outputs)
    if isinstance(first, Tensor | float | int) and not isinstance(first, bool):
        if not isinstance(first, Tensor) and all(value == first for value, _ in outputs):
            return first
        return sum(value * n for value, n in outputs) / sum(n for _, n in outputs)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value, _ in outputs for key in value)  # a part may lack what others have
        return {key: merged([(value[key], n) for value, n in outputs if key in value]) for key in keys}
    if isinstance(first, list | tuple):
        return _merged_items(outputs)
    return outputs[-1][0]


def _merged_items(outputs: list[tuple[Any, int]]) -> Any:
    first = outputs[0][0]
    of_rows = all(isinstance(t, Tensor) and t.dim() and len(t) == n for value, n in outputs for t in value)
    if (of_rows or isinstance(first, tuple)) and all(len(value) == len(first) for value, _ in outputs):
        items = [merged([(value[i], n) for value, n in outputs]) for i in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return type(first)(item for value, _ in outputs for item in value)


def feeds_of(
    micro_batch: MicroBatch,
    cutter: Cutter,
    step_fn: StepFn,
    scale: float,
    noise: Sequence[int],
    hooks: StepHooks,
    before_last_backward: Callable[[], None] | None,
    tally: Tally,
) -> list[Feed]:
    """The runs of a micro-batch; `before_last_backward` is called in the last of them."""
    found = runs(micro_batch, cutter)
    shared = frozenset(map(id, tensors_of(micro_batch.batch) if sum(map(len, found)) > 1 else ()))
    feeds = [
        Feed(step_fn, micro_batch.batch_idx, parts, mix(*noise, k), scale, hooks, None, tally, shared)
        for k, parts in enumerate(found)
    ]
    if feeds:
        feeds[-1].before_last_backward = before_last_backward
    return feeds


def without_weight(like: Tensor, received: tuple[Tensor, ...], device: torch.device) -> Tensor:
    """Zeros whose gradient is zero for all that was received: a part without weight."""
    zeros = torch.zeros(like.shape, dtype=like.dtype, device=device)
    if not like.requires_grad:
        return zeros
    empty = [t.flatten()[:0].sum().to(zeros.dtype) for t in received if t.requires_grad]  # no NaN comes through
    return zeros + sum(empty, torch.zeros((), dtype=zeros.dtype, device=device, requires_grad=True))
