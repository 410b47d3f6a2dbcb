"""A schedule of torch.distributed.pipelining around the user's step.

The stages are torch's, with the shapes of shape inference; the forward of each is the user's step as far as the stage
goes, and that of the last returns the weighted loss.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks as SavedHooks
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves

from lockstep.strategies.base import StepFn, StepHooks, Topology
from lockstep.strategies.data.batch_slices import signature
from lockstep.strategies.data.sharded_loader import Window
from lockstep.strategies.launch import fault_injection
from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.losses import detach
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import (
    gradient_marks,
    own_backward,
    partial_gradient,
    remarked,
    shortened,
)
from lockstep.strategies.pipeline.microbatches import Cutter, Feed, Tally, feeds_of, merged, without_weight
from lockstep.strategies.pipeline.schedules import Schedule
from lockstep.strategies.pipeline.stage_run import SENDS_ALL_GRADIENTS, SPLITS_EXACTLY, Layout, explained
from lockstep.strategies.pipeline.staged_module import Staged
from lockstep.strategies.precision import Precision
from lockstep.strategies.step import weighted_losses


class Engine:
    """A schedule of torch's, built for one shape and number of parts."""

    def __init__(
        self, wrapped: Staged, layout: Layout, schedule: Schedule, num_parts: int, precision: Precision
    ) -> None:
        self._wrapped, self._layout, self._precision, self._num_parts = wrapped, layout, precision, num_parts
        self._loss_shape = (torch.empty((), device="meta", requires_grad=True),)
        self.stages: list[OpenStage] = [
            self.stage_kind(wrapped)(
                wrapped.stages[stage],
                stage,
                wrapped.num_stages,
                wrapped.device,
                input_args=layout.messages[stage - 1].tensors if stage else (),
                output_args=layout.messages[stage].tensors if stage < wrapped.num_stages - 1 else self._loss_shape,
                group=wrapped.group,
            )
            for stage in wrapped.here
        ]
        self._is_last = wrapped.here[-1] == wrapped.num_stages - 1
        self._schedule = schedule.build(self.stages, num_parts, self._loss)
        self._own = {name: p for name, p in wrapped.model.named_parameters() if is_here(p)}
        self._feed: Feed | None = None
        self._passes: Counter[int] = Counter()
        self._error: Exception | None = None

    def stage_kind(self, wrapped: Staged) -> type[OpenStage]:
        return OpenStage if wrapped.shards is None else WindowStage

    def run(self, feed: Feed) -> None:
        """Forward and backward of all parts; gradients are added to those of the parameters."""
        self._feed, self._error = feed, None
        for stage, held in zip(self.stages, self._wrapped.stages.values(), strict=True):
            held.run = functools.partial(self._forward, stage)
            if self._wrapped.splits_backward:
                stage.hooked = any(m._backward_hooks or m._backward_pre_hooks for m in held.modules())
                stage.unsplit.clear()
        self._passes.clear()
        try:
            if self._is_last:
                self._schedule.step(target=torch.arange(self._num_parts), losses=[], return_outputs=False)
            else:
                if fault_injection.plan is not None:
                    fault_injection.fault("backward")
                if feed.before_last_backward is not None:
                    feed.before_last_backward()
                self._schedule.step(return_outputs=False)
        except RuntimeError:
            if self._error is None:
                raise
            raise self._error from self._error.__cause__  # the user's own, which torch wraps
        finally:
            self._feed = None

    def _forward(self, open_stage: OpenStage, stage: int, received: tuple[Tensor, ...]) -> Any:
        """Every stage takes the parts in order."""
        feed, wrapped, index = self._feed, self._wrapped, self._passes[stage]
        self._passes[stage] += 1
        last = stage == wrapped.num_stages - 1
        assert feed is not None
        if stage:  # before torch 2.12 all that arrives has a gradient
            expected = zip(received, self._layout.messages[stage - 1].tensors, strict=True)
            received = tuple(t if like.requires_grad == t.requires_grad else t.detach() for t, like in expected)
        step = self._checked_step if last else feed.step
        try:
            feed.prepare(index)
            with (
                self._precision.autocast(wrapped.device),
                feed.hooks.log_scope(feed.parts[index].num_samples if last else 0) as logged,
            ):
                arrive, call = functools.partial(open_stage.arrive, index), functools.partial(step, index)
                where = stage, received, arrive, self._layout, feed.seed(index)
                with open_stage.noting_hooks(index) if wrapped.splits_backward else nullcontext():
                    output, sent = wrapped.run_stage(*where, call, None if last else logged)
                arrive()  # where the step has not come to a layer of this stage
            feed.check_written(len(self.stages))
            if last:
                return self._weighed(feed, feed.parts[index].num_samples, output, received)
            return (
                sent
                if sent is not None
                else tuple(without_weight(t, received, wrapped.device) for t in self._layout.messages[stage].tensors)
            )
        except Exception as error:
            self._error = error
            raise

    def _checked_step(self, index: int) -> Any:
        """The user's step where it runs to its end. Raises RuntimeError if it ran a backward of its own."""
        marks = gradient_marks(self._own.values())
        output = self._feed.step(index)  # type: ignore[union-attr]
        if marks != gradient_marks(self._own.values()):
            raise own_backward(remarked(self._own.items(), marks))
        return output

    def _weighed(self, feed: Feed, num_samples: int, output: Any, received: tuple[Tensor, ...]) -> Tensor:
        """The part of the global mean that this part's loss makes."""
        if feed.hooks.parameters is not None and isinstance(output, Mapping) and "loss" not in output:
            raise ValueError(
                "a pipeline runs backward once a step, so training_step must return one loss for all optimizers; join "
                "the losses, or use another strategy"
            )
        losses, count = weighted_losses(output, num_samples, feed.scale, None)
        feed.tally.count += count
        feed.tally.outputs.append((detach(output), num_samples))
        if not losses:
            return without_weight(self._loss_shape[0], received, self._wrapped.device)
        ((loss, _, returned, _),) = losses
        feed.tally.has_loss = True
        feed.tally.total += loss.item() if loss.device.type == "cpu" else math.nan
        if feed.hooks.before_backward is not None:
            with nullcontext() if self._wrapped.state is None else self._wrapped.state.before_backward():
                feed.hooks.before_backward(returned)
        return loss.reshape(()).clone()  # no view: torch detaches it in place

    def _loss(self, output: Tensor, index: Tensor) -> Tensor:
        """The last stage has computed the loss already."""
        if int(index) == self._num_parts - 1 and fault_injection.plan is not None:
            fault_injection.fault("backward")
        if int(index) == self._num_parts - 1 and self._feed is not None and self._feed.before_last_backward is not None:
            self._feed.before_last_backward()
        return output


class Engines:
    """The schedules of a run: one is built for each shape of parts, and the last two are kept.

    `sizes` are the ranks of a pipeline and what cuts micro-batches. `changed` returns the names of parameters whose
    `requires_grad` is not what it was.
    """

    engine = Engine

    def __init__(
        self,
        schedule: Schedule,
        sizes: tuple[int, Cutter],
        topology: Topology,
        precision: Precision,
        changed: Callable[[], list[str]],
    ) -> None:
        self._schedule, self._topology = schedule, topology
        self._num_stage_ranks, self._cutter = sizes
        self._precision, self._changed = precision, changed
        self._known: dict[Any, Engine | None] = {}
        self.is_running = False
        self.num_done = 0
        """Micro-batches of the window of now that have run backward."""

    def clear(self) -> None:
        self._known.clear()

    def run_window(
        self,
        wrapped: Staged,
        step_fn: StepFn,
        window: Window,
        hooks: StepHooks,
        noise: tuple[int, ...],
        tally: Tally,
        send: Callable[[], None],
    ) -> None:
        """Forward and backward of all micro-batches; `send` is called before the last backward."""
        assert wrapped.state is not None
        wrapped.inference.unlogged = unlogged = functools.partial(hooks.log_scope, 0)
        last = len(window.micro_batches) - 1
        if last and hooks.whole_gradients and (self._topology.data_size > 1 or wrapped.tied.by_group):
            raise partial_gradient("what ranks of a pipeline have in common is summed once a step")
        for i, micro_batch in enumerate(window.micro_batches if hooks.prepare is None else hooks.prepare(window)):
            how = 1 / window.num_samples, (*noise, i), hooks, send if i == last else None, tally
            feeds = feeds_of(micro_batch, self._cutter, step_fn, *how)
            tally.outputs = []
            wrapped.state.refuse_apart()
            with kept_streams(), wrapped.state.micro_batch([p.num_samples for feed in feeds for p in feed.parts]):
                for feed in feeds:
                    self._run(wrapped, feed)
                if wrapped.state.asks_whole:
                    with self._running(), self._named_errors(), self._precision.autocast(wrapped.device), unlogged():
                        wrapped.run_before(functools.partial(feeds[0].learn_whole, micro_batch))
            if not feeds and self._topology.data_size > 1:
                with kept_streams(), wrapped.state.padding(), self._precision.autocast(wrapped.device), unlogged():
                    wrapped.layout_of(functools.partial(step_fn, micro_batch.batch, micro_batch.batch_idx))
            if i == last and not feeds:
                send()
            if feeds and hooks.after_backward is not None and i < last:
                hooks.after_backward()
            micro_batch.output = merged(tally.outputs) if self._topology.is_reporting_rank else None
            if hooks.shares_outputs and feeds:
                micro_batch.output = wrapped.links.shared(micro_batch.output, wrapped.rank_of[-1])
            self.num_done = i + 1 if i < last else 0

    def _run(self, wrapped: Staged, feed: Feed) -> None:
        """Forward and backward of all parts of `feed`; nothing if the step returns None for each."""
        with self._running():
            with self._named_errors():
                engine = self._engine(wrapped, feed)
                if engine is not None:
                    engine.run(feed)
            if engine is None and feed.before_last_backward is not None:
                feed.before_last_backward()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def _engine(self, wrapped: Staged, feed: Feed) -> Engine | None:
        key = (signature(feed.parts[0].batch), len(feed.parts), wrapped.inference.hooks())
        engine = self._known.pop(key, None)
        if engine is None:
            with self._precision.autocast(wrapped.device), feed.hooks.log_scope(0):
                layouts = (wrapped.layout_of(functools.partial(feed.learn, i)) for i in feed.known)
                layout = next(filter(None, layouts), None)
            if layout is None:
                return None
            fitting = self._schedule.fitting(self._num_stage_ranks, len(feed.parts))
            engine = self.engine(wrapped, layout, fitting, len(feed.parts), self._precision)
        self._known[key] = engine
        while len(self._known) > 2:  # each has buffers for what it receives
            self._known.pop(next(iter(self._known)))
        return engine

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Say of torch's errors in a schedule what user code made them."""
        try:
            yield
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise RuntimeError(
                f"shapes within a pipelined module must follow from those of the batch, but {error} gives one that "
                "follows from values; compute with a mask instead, or use strategy='ddp' or 'fsdp'"
            ) from None
        except RuntimeError as error:
            text, changed = str(error), self._changed()
            if "Failed to run stage backward" in text and changed:
                raise RuntimeError(
                    f"requires_grad was changed within a step ({shortened(changed)}), after the pipeline had learned "
                    "what its stages send; change it in a hook such as on_train_batch_start"
                ) from error
            if "Failed to run stage backward" in text:
                raise RuntimeError(
                    "the backward of a stage found no gradient for what the stage sent, as happens where training_step "
                    "or a model calls torch.utils.checkpoint around layers of a pipeline; call them without it, and "
                    "give Pipeline(activation_checkpointing=True)"
                ) from error
            with explained("training_step"):
                raise


class OpenStage(PipelineStage):
    """A stage that waits for what the one before sends where its first layer is called: what lies before that runs
    meanwhile."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.arriving: dict[int, list[dist.Work]] = {}
        self.hooked = False
        """Whether modules of this stage have backward hooks."""
        self.unsplit: set[int] = set()
        """Microbatches whose forward hooked tensors."""
        self._done: set[int] = set()
        """Microbatches whose backward ran whole, and has not been asked for weights."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Before torch 2.12: gloo has no connection of a rank, which may hold two neighbors, to itself."""
        return [operation for operation in super()._get_init_p2p_neighbors_ops() if operation.peer != dist.get_rank()]

    def _validate_fwd_outputs(self, outputs: Any) -> None: ...  # before torch 2.12: a loss may have any dtype

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        if self.device.type != "cpu" or not operations:  # an accelerator's wait holds up its stream, not the host
            return operations
        self.arriving[fwd_chunk_id] = dist.batch_isend_irecv(operations)
        return []

    def arrive(self, fwd_chunk_id: int) -> None:
        """Wait until what this part receives is there."""
        for work in self.arriving.pop(fwd_chunk_id, ()):
            work.wait()

    @contextmanager
    def noting_hooks(self, fwd_chunk_id: int) -> Iterator[None]:
        """Note a forward with hooks on tensors, or on what autograd saves: a split backward calls, recomputes twice."""
        register, enter = Tensor.register_hook, SavedHooks.__enter__

        def noting(call: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any) -> Any:
                self.unsplit.add(fwd_chunk_id)
                return call(*args)

            return noted

        Tensor.register_hook, SavedHooks.__enter__ = noting(register), noting(enter)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Tensor.register_hook, SavedHooks.__enter__ = register, enter  # type: ignore[method-assign]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        _, inputs = self.fwd_cache[bwd_chunk_id]
        whole = full_backward or not self._splits(bwd_chunk_id, loss)
        if whole and not full_backward:
            self._done.add(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        if not self.is_first and SENDS_ALL_GRADIENTS:
            given = zip(self.bwd_cache[bwd_chunk_id], inputs, strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(torch.zeros_like(t) if g is None else g for g, t in given)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._done:
            self._done.remove(bwd_chunk_id)
        else:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _splits(self, bwd_chunk_id: int, loss: Any) -> bool:
        """Whether gradients of inputs and weights may be computed apart.

        Torch then finds only weights on the way from an input that has a gradient, and only those of this stage; before
        torch 2.13 the gradient of a weight that is used twice is wrong.
        """
        if self.is_first:  # torch does both at once
            return True
        if not SPLITS_EXACTLY:
            return False
        outputs, inputs = self.fwd_cache[bwd_chunk_id]
        if self.hooked or bwd_chunk_id in self.unsplit or not any(t.requires_grad for t in inputs):
            return False
        known = {*map(id, self.submod.parameters()), *map(id, inputs)}
        roots = [loss] if self.is_last else tree_leaves(outputs)
        seen = {t.grad_fn for t in roots if isinstance(t, Tensor) and t.grad_fn is not None}
        waiting = list(seen)
        while waiting:
            node = waiting.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                return False
            found = {follower for follower, _ in node.next_functions if follower is not None} - seen
            seen |= found
            waiting += found
        return True


class WindowStage(OpenStage):
    """A stage of a window that may have several runs of several schedules: each leaves parameters whole and gradients
    in place."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None: ...
    def _post_metadata_inference_cleanup(self) -> None: ...  # shapes are inferred: nothing has run that leaves traces
