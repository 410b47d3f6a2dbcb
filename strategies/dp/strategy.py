"""One process, the batch split over devices: slices run one after the other, gradients add up on the first device."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lockstep.strategies.base import (
    NO_HOOKS,
    Capabilities,
    StepFn,
    StepHooks,
    StepResult,
    Strategy,
    Topology,
)
from lockstep.strategies.data.batch_slices import move
from lockstep.strategies.data.sample_axis import SampleCutter
from lockstep.strategies.data.sharded_loader import MicroBatch, ShardedLoader, Window
from lockstep.strategies.devices import nth_device
from lockstep.strategies.dp.copies import (
    Copies,
    Gradients,
    followed,
    join_metrics,
    large_values,
    refuse_returned,
    unchanged,
)
from lockstep.strategies.dp.ends import in_turn, refuse_differing
from lockstep.strategies.dp.held import Held, check_hooks
from lockstep.strategies.dp.parts import Replaced
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.program.contexts import refuse_contexts
from lockstep.strategies.losses import detach, own_backward_refused, split_loss
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.model_changes import gradient_marks, own_backward, refuse_embeddings, remarked
from lockstep.strategies.pipeline.microbatches import merged
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.step import weighted_losses
from lockstep.strategies.sync.buffers import kept_buffers_of, refusing_counts
from lockstep.strategies.sync.counts import PartialCounts


@dataclass
class Slices:
    """Those of a micro-batch: `parts` of it, each with its number of samples, and what belongs to them."""

    parts: list[tuple[Any, int]]
    held: Held
    large: list[tuple[str, Any]]
    first: Replaced
    copies: list[Copies]
    gradients: Gradients
    losses: list[tuple[list[Tensor], float]] = field(default_factory=list)
    """Of each slice that has run, with what they count."""

    def parameters(self, index: int) -> list[nn.Parameter]:
        """Those of the model as a slice finds them."""
        return [*self.copies[index - 1].of_each(self.held.parameters)] if index else self.held.parameters


_INSTEAD = "count in on_train_batch_start or on_train_batch_end, or self.log it"


class DataParallel(SPMDStrategy):
    """Each micro-batch is cut into one slice a device, and the step runs on one slice after the other, in one thread.

    Slices share all objects of the user's, and each begins with what the micro-batch found in them; tensors, arrays
    and torchmetrics objects are copied for each, on its device. GPUs compute at the same time as long as a step does
    not wait for one. Prefer `ddp`: it copies no parameters in a step, and no device waits for another's Python.

    What the step changes alike on all slices (a counter, a target network that it moves) changes once. An attribute
    that it sets by its samples cannot be read after the step, a buffer is refused; statistics of BatchNorm are those of
    the first slice, as in torch's DataParallel, and torchmetrics objects are merged. Random numbers are drawn slice
    after slice. Evaluation runs on the first device. The samples of a batch must be certain: see `SampleCutter`.

    `activation_checkpointing`: recompute the blocks' activations in the backward; True, or which blocks.
    """

    single_process = True
    max_devices = None
    capabilities = Capabilities(
        runs_step_once=False,
        refuses=dict.fromkeys(
            ("manual_optimization", "several_optimizers"),
            "strategy 'dp' needs automatic optimization with one optimizer; use strategy='ddp' for others",
        )
        | {"backward": own_backward_refused("strategy 'dp' runs one on each slice of a batch")},
    )

    def __init__(self, *, activation_checkpointing: bool | Rule = False) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        self._suspects: dict[str, float] = {}
        """Buffers that may count samples."""
        self._counts: PartialCounts | None = None
        self._cutter: SampleCutter | None = None
        self._held: Held | None = None
        """What the model held as the last micro-batch began."""

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        chosen = super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        if self.num_devices == 1:
            self.capabilities = Capabilities()
        return chosen

    def setup(self) -> Topology:
        super().setup()
        if self._accelerator == "cuda":
            self.topology = replace(self.topology, device=torch.device("cuda", 0))
        self._cutter = None
        self._suspects.clear()
        self._counts = None
        return self.topology

    def teardown(self) -> None:
        self._held = None
        super().teardown()

    def synchronize(self, wrapped: nn.Module) -> None:
        self._held = None  # an evaluation may need the memory of what was replaced since
        super().synchronize(wrapped)

    def check(self, model: nn.Module) -> None:
        refuse_embeddings(model, self.num_devices, self.name)
        super().check(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model.to(self.topology.device)

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False
    ) -> ShardedLoader:
        sharded = super().shard_loader(loader, seed=seed, shuffle=shuffle, accumulate=accumulate, split=split)
        if self._cutter is None:  # the first loader is the one to train on
            stacks = isinstance(loader, DataLoader) and loader.collate_fn is default_collate
            self._cutter = SampleCutter(stacks, sharded.learn_samples())
        return sharded

    def forward_backward(
        self, wrapped: nn.Module, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        if self.num_devices == 1:
            return super().forward_backward(wrapped, step_fn, window, hooks)
        if not hooks.automatic:
            self._refuse("manual_optimization")
        return self._in_slices(wrapped, step_fn, window, hooks)

    def _in_slices(self, wrapped: nn.Module, step_fn: StepFn, window: Window, hooks: StepHooks) -> StepResult:
        if self.precision.scaler is not None:
            self.precision.scaler.end_step()
        if not environment.in_plan():
            refuse_contexts("the slices of strategy 'dp'")
        self._cutter = self._cutter or SampleCutter()
        count, weighted, last = 0.0, 0.0, len(window.micro_batches) - 1
        for number, micro_batch in enumerate(window.micro_batches if hooks.prepare is None else hooks.prepare(window)):
            if not micro_batch.num_samples:  # a collate function has kept none
                continue
            slices = self._cut(wrapped, micro_batch)
            with unchanged(slices.large):
                outputs = self._run(slices, step_fn, micro_batch, 1 / window.num_samples, hooks)
                refuse_differing(slices.copies, self._on_cpu)
            join_metrics(slices.held, slices.copies)
            slices.gradients.add_up()
            losses = [value for found, _ in slices.losses for value in found]
            count += sum(counted for _, counted in slices.losses)
            weighted += sum(value.item() for value in losses) if self._on_cpu else 0.0
            micro_batch.output = detach(outputs)
            if losses and hooks.after_backward is not None and number < last:
                hooks.after_backward()
        bad = None if math.isfinite(weighted) else "the loss of rank 0"
        loss = weighted * window.num_samples / count if count and self.topology.device.type == "cpu" else None
        result = StepResult(count, hooks.vote().stop, bad, loss)
        return self._conclude(wrapped, result, hooks, window.num_samples)

    def _cut(self, wrapped: nn.Module, micro_batch: MicroBatch) -> Slices:
        assert self._cutter is not None
        parts = self._cutter.cut(micro_batch.batch, micro_batch.num_samples, self.num_devices)
        devices = [self._device_of(index) for index in range(len(parts))]
        held = self._read(wrapped)
        check_hooks(held)
        large = large_values(held, devices)
        copies = [Copies(held, device, large) for device in devices[1:]]
        return Slices(parts, held, large, Replaced(), copies, Gradients(copies))

    def _read(self, wrapped: nn.Module) -> Held:
        """What the model holds now."""
        if self._held is None or not self._held.is_of(wrapped):
            self._held = Held(wrapped)
        return self._held

    def _run(self, slices: Slices, step_fn: StepFn, micro_batch: MicroBatch, scale: float, hooks: StepHooks) -> Any:
        """What the step returns for the micro-batch, joined from slices, after their backwards."""
        parts, held = slices.parts, slices.held
        own = parts[0][1]
        kept = functools.partial(kept_buffers_of, held.buffered)
        refusing = refusing_counts(kept, own, micro_batch.num_samples, self.name, [parts[0][0]], self._suspects)
        counts = self._counts = self._counts or PartialCounts({"": held.model}, len(parts), self.name, _INSTEAD)
        counts.begin()
        contexts, rates = [hooks.log_scope(n) for _, n in parts], hooks.vote().rates
        later = step_fn.of_slice() if hasattr(step_fn, "of_slice") else step_fn

        def forward(index: int) -> Any:
            part, num_samples = parts[index]
            with nullcontext() if index else refusing:
                output = self._step(slices, later if index else step_fn, micro_batch.batch_idx, index)
            if not index:
                counts.end(own, part, output)
            found, counted = weighted_losses(output, num_samples, scale, None)
            slices.losses.append(([value for value, *_ in found], counted))
            return output

        def forward_and_backward(index: int) -> Any:
            with contexts[index] if index else nullcontext():
                output = forward(index)
                if hooks.before_backward is None:
                    backward(index)
                    losses, counted = slices.losses[index]
                    slices.losses[index] = [loss.detach() for loss in losses], counted
                    output = detach(output)  # so that the memory of its graph is free for the next slice
            if index == len(parts) - 1 and hooks.vote().rates != rates:
                raise RuntimeError(
                    "training_step changed a learning rate, momentum or weight decay, and strategy 'dp' runs it on "
                    "slices; change it in on_train_batch_start, or use strategy='single'"
                )
            return output

        def backward(index: int) -> None:
            scaler = self.precision.scaler
            losses = slices.losses[index][0]
            slices.gradients.backward(index, losses if scaler is None else [*map(scaler.scale, losses)])

        with contexts[0]:  # which counts what all have logged, once metrics are in their places again
            outputs = in_turn(held, slices.first, slices.copies, forward_and_backward)
        moved = [(move(output, self.topology.device, None), n) for output, (_, n) in zip(outputs, parts, strict=True)]
        whole = merged(moved)
        if hooks.before_backward is not None:
            if any(losses for losses, _ in slices.losses):
                refuse_differing(slices.copies, self._on_cpu)
                with followed(slices.copies):
                    hooks.before_backward(split_loss(whole, micro_batch.num_samples)[0])  # type: ignore[arg-type]
            in_turn(self._read(held.model), slices.first, slices.copies, backward)
        return whole

    def _step(self, slices: Slices, step_fn: StepFn, batch_idx: int, index: int) -> Any:
        """What the step returns for a slice, on its device."""
        parameters = slices.parameters(index)
        marks = gradient_marks(parameters)
        with self._on(self._device_of(index)) as device, self.precision.autocast(device):
            part = move(slices.parts[index][0], device, None, kept=None if self._on_cpu else "cpu")
            output = step_fn(part, batch_idx)
        if marks != gradient_marks(parameters):
            names = [name for name, _ in slices.held.model.named_parameters()]
            raise own_backward(remarked(zip(names, parameters, strict=False), marks))
        if type(output) is not Tensor:
            refuse_returned(output, parameters)
        return output

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[torch.device]:
        """Let steps run on a device, which is that of the module while it lasts."""
        whole = self.topology
        self.topology = replace(whole, device=device)
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                yield device
        finally:
            self.topology = whole

    def _device_of(self, index: int) -> torch.device:
        num_devices = torch.cuda.device_count() if self.topology.device.type == "cuda" else self.num_devices
        return self.topology.device if num_devices == 1 else nth_device(self._accelerator, index % num_devices)
