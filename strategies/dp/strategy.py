"""One process, the batch split over devices: replicas of the model run in threads, gradients add up on the first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.strategies.devices import nth_device
from lockstep.strategies.dp.replicas import (
    check_hooks,
    holds_generators,
    join_state,
    metrics_of,
    parameters_of,
    rebind,
    refuse_returned,
    refusing_in_threads,
    replica,
)
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.program.contexts import refuse_contexts
from lockstep.strategies.launch.rng import has_drawn, stream_states
from lockstep.strategies.losses import detach, own_backward_refused, split_loss
from lockstep.strategies.modules.blocks import Rule, join_states
from lockstep.strategies.modules.model_changes import gradient_marks, own_backward, refuse_embeddings, remarked
from lockstep.strategies.pipeline.microbatches import merged
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.step import weighted_losses
from lockstep.strategies.sync.buffers import kept_buffers, refusing_counts
from lockstep.strategies.sync.counts import PartialCounts

_INSTEAD = "count in on_train_batch_start or on_train_batch_end, or self.log it"


class DataParallel(SPMDStrategy):
    """Each micro-batch is cut into one slice a device, and the step runs on all slices at once, in threads.

    Replicas are made again for each micro-batch. Prefer `ddp`: it needs no copies of the parameters in a step and no
    lock of the interpreter is shared.

    The model is the first replica. What the step changes alike on all slices (a counter, a target network that it
    moves) changes once. An attribute that it sets by its samples cannot be read after the step, a buffer is refused;
    statistics of BatchNorm are those of the first slice, as in torch's DataParallel, and torchmetrics objects are
    merged. If the first window draws random numbers, slices run one after the other, since threads would share one
    random stream; a step that begins to draw later is refused. Evaluation runs on the first device. The samples of a
    batch must be certain: see `SampleCutter`.

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
        self._threads: ThreadPoolExecutor | None = None
        self._draws = True
        """Whether slices run one after the other, as steps draw random numbers."""
        self._has_drawn = False
        self._suspects: dict[str, float] = {}
        """Buffers that may count samples."""
        self._counts: PartialCounts | None = None
        self._cutter: SampleCutter | None = None

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
        self._draws, self._has_drawn = True, False  # until the first window has shown that it does not
        self._suspects.clear()
        self._counts = None
        self._threads = ThreadPoolExecutor(self.num_devices, thread_name_prefix="replica")
        return self.topology

    def teardown(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        super().teardown()

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
        check_hooks(wrapped)
        if not environment.in_plan():
            refuse_contexts("the threads of strategy 'dp'")
        self._cutter = self._cutter or SampleCutter()
        count, weighted, last = 0.0, 0.0, len(window.micro_batches) - 1
        for number, micro_batch in enumerate(window.micro_batches if hooks.prepare is None else hooks.prepare(window)):
            if not micro_batch.num_samples:  # a collate function has kept none
                continue
            slices = self._cutter.cut(micro_batch.batch, micro_batch.num_samples, self.num_devices)
            replicas = [wrapped, *(replica(wrapped, self._device_of(i)) for i in range(1, len(slices)))]
            steps = [step_fn, *(rebind(step_fn, wrapped, other) for other in replicas[1:])]
            contexts, rates = [hooks.log_scope(n) for _, n in slices], hooks.vote().rates
            forward = functools.partial(self._forward, micro_batch.batch_idx)
            held, own = functools.partial(kept_buffers, wrapped), slices[0][1]
            counts = refusing_counts(held, own, micro_batch.num_samples, self.name, [slices[0][0]], self._suspects)
            self._counts = self._counts or PartialCounts({"": wrapped}, len(slices), self.name, _INSTEAD)
            self._counts.begin()
            with counts, refusing_in_threads(replicas[1:]):
                outputs = self._run(
                    forward, range(len(slices)), replicas, steps, [part for part, _ in slices], contexts
                )
            self._counts.end(own, slices[0][0], outputs[0])
            if hooks.vote().rates != rates:
                raise RuntimeError(
                    "training_step changed a learning rate, momentum or weight decay, and strategy 'dp' runs it on "
                    "slices; change it in on_train_batch_start, or use strategy='single'"
                )
            join_state(wrapped, replicas[1:])
            whole = merged(
                [(move(output, self.topology.device, None), n) for output, (_, n) in zip(outputs, slices, strict=True)]
            )
            losses: list[Tensor] = []
            for output, (_, num_samples) in zip(outputs, slices, strict=True):
                found, counted = weighted_losses(output, num_samples, 1 / window.num_samples, None)
                losses += [value for value, *_ in found]
                count += counted
            weighted += sum(value.item() for value in losses) if self.topology.device.type == "cpu" else 0.0
            if losses and hooks.before_backward is not None:
                hooks.before_backward(split_loss(whole, micro_batch.num_samples)[0])  # type: ignore[arg-type]
            if self.precision.scaler is not None:  # before threads ask for the scale
                self.precision.scaler.end_step()
            self._run(self._backward, losses)
            self._join(wrapped, replicas)
            micro_batch.output = detach(whole)
            if losses and hooks.after_backward is not None and number < last:
                hooks.after_backward()
        self._draws = self._draws and (self._has_drawn or holds_generators(wrapped))
        bad = None if math.isfinite(weighted) else "the loss of rank 0"
        loss = weighted * window.num_samples / count if count and self.topology.device.type == "cpu" else None
        result = StepResult(count, hooks.vote().stop, bad, loss)
        return self._conclude(wrapped, result, hooks, window.num_samples)

    def _forward(
        self,
        batch_idx: int,
        index: int,
        replica: nn.Module,
        step: StepFn,
        part: Any,
        context: AbstractContextManager[Any],
    ) -> Any:
        """What the step returns for a slice, in its thread."""
        device, autocast = self._device_of(index), self.precision.autocast_dtype
        parameters = [*parameters_of(replica)]
        marks = gradient_marks(parameters)
        # a thread begins on the first device
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with context, current, torch.autocast(device.type, autocast, autocast is not None):
            output = step(move(part, device, None, kept=None if self._on_cpu else "cpu"), batch_idx)
        if marks != gradient_marks(parameters):
            raise own_backward(remarked(replica.named_parameters(), marks))
        if type(output) is not Tensor:
            refuse_returned(output, parameters)
        return output

    def _backward(self, loss: Tensor) -> None:
        (loss if self.precision.scaler is None else self.precision.scaler.scale(loss)).backward()

    def _run(self, work: Callable[..., Any], *slices: Iterable[Any]) -> list[Any]:
        """`work` with what each slice has, in threads. Raises RuntimeError if it has drawn random numbers in them."""
        assert self._threads is not None
        streams = stream_states()
        results = list((map if self._draws or environment.in_plan() else self._threads.map)(work, *slices))
        apart = {"cuda"} if torch.cuda.device_count() >= self.num_devices else ()  # each slice has its device's own
        self._has_drawn = self._has_drawn or has_drawn(streams, apart)
        if self._has_drawn and not self._draws:
            raise RuntimeError(
                "training_step drew random numbers, but none in the first step, so strategy 'dp' ran slices in threads "
                "that share one random stream, and no run could repeat this one; draw one in the first step too (such "
                "as torch.rand(1)), or use strategy='ddp'"
            )
        return results

    def _device_of(self, index: int) -> torch.device:
        num_devices = torch.cuda.device_count() if self.topology.device.type == "cuda" else self.num_devices
        return self.topology.device if num_devices == 1 else nth_device(self._accelerator, index % num_devices)

    def _join(self, model: nn.Module, replicas: list[nn.Module]) -> None:
        """Add up gradients and metrics, in the order of the replicas."""
        for other in replicas[1:]:
            for own, theirs in zip(parameters_of(model), parameters_of(other), strict=False):
                if theirs.grad is not None:
                    added = theirs.grad.to(own.device)
                    own.grad = added if own.grad is None else own.grad.add_(added)
            for metric, copied in zip(metrics_of(model), metrics_of(other), strict=True):
                if copied._update_count:
                    join_states(metric, copied.to(metric.device), "use strategy='ddp'")
