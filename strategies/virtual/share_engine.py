"""The shares of a step as the microbatches of a pipeline's schedule: their forwards overlap, their gradients do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.strategies.base import StepFn, StepHooks
from lockstep.strategies.data.batch_slices import signature
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import gradient_marks
from lockstep.strategies.pipeline.engine import Engine, Engines, OpenStage
from lockstep.strategies.pipeline.microbatches import Feed, Part, Tally
from lockstep.strategies.pipeline.staged_module import Staged
from lockstep.strategies.virtual.stage_links import Crossing, StageLinks

Numbers = tuple[float, float]


class ShareWindow:
    """One window on one rank: micro-batches as the schedule asks for them, and what each leaves.

    `held` are this rank's parameters; `share_ended()` takes the gradients of a share away from them.
    """

    def __init__(
        self,
        wrapped: Staged,
        step_fn: StepFn,
        window: Window,
        hooks: StepHooks,
        held: Sequence[nn.Parameter],
        share_ended: Callable[[], None],
    ) -> None:
        assert isinstance(wrapped.links, StageLinks)
        self.wrapped, self.step_fn, self.window, self.hooks, self.links = wrapped, step_fn, window, hooks, wrapped.links
        self.pulled: list[MicroBatch] = []
        self._coming = iter(window.micro_batches if hooks.prepare is None else hooks.prepare(window))
        self._held, self._share_ended = held, share_ended
        self.of_a_share = len(window.micro_batches) // window.num_shares
        self._shares_done = 0
        self.crossings: dict[int, Crossing] = {}
        self.tallies: dict[int, Tally] = {}
        self.tied: dict[int, list[Tensor | None]] = {}
        """By micro-batch the gradients of parameters that other stages hold too."""
        self._buffers = [
            (module, name)
            for module in wrapped.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and is_here(buffer)
        ]

    def pull(self, number: int) -> MicroBatch:
        """The micro-batch `number`, prepared when it is asked for first, in order."""
        while len(self.pulled) <= number:
            i = len(self.pulled)
            self._note_output()
            micro_batch = next(self._coming)
            self.crossings[i] = self.links.crossing = Crossing()
            self.pulled.append(micro_batch)
        return self.pulled[number]

    def finish(self) -> None:
        """All that is still to be prepared, which is padding, and the end of the last share."""
        self._note_output()
        for _ in self._coming:
            pass
        self._end_shares(len(self.window.micro_batches))

    def _note_output(self) -> None:
        """Keep what the step returned for the latest micro-batch, on the rank of the last stage."""
        tally = self.tallies.get(len(self.pulled) - 1)
        if tally is not None:
            self.pulled[-1].output = tally.outputs[0][0] if tally.outputs else None

    def numbers(self) -> list[Numbers]:
        """Of each own share what its losses count, and their weighted sum."""
        found = []
        for start in range(0, len(self.window.micro_batches), self.of_a_share):
            count = total = 0.0
            for number in range(start, start + self.of_a_share):
                if number in self.tallies:
                    count, total = count + self.tallies[number].count, total + self.tallies[number].total
            found.append((count, total * self.window.num_samples))
        return found

    @contextmanager
    def backward(self, number: int, has_loss: bool) -> Iterator[None]:
        """Around the backward of a micro-batch, which come in order: keeps shares apart, drops what is of no loss."""
        self._end_shares(number)
        before = self.links.streams.state(), self._versions()
        kept = None if has_loss else [p.grad for p in self._held]
        if kept is not None:
            for parameter in self._held:
                parameter.grad = None
        yield
        if kept is not None:
            for parameter, gradient in zip(self._held, kept, strict=True):
                parameter.grad = gradient
        marks = gradient_marks(self.links.tied_here)
        if has_loss and self.hooks.after_backward is not None and (number + 1) % self.of_a_share:
            self.hooks.after_backward()
        if marks != gradient_marks(self.links.tied_here):
            raise RuntimeError(
                "on_after_backward changes the gradient of a parameter that stages of a pipeline share, of which each "
                "stage has a part until the step ends; change it in on_before_optimizer_step"
            )
        self.tied[number] = []
        for parameter in self.links.tied_here:
            self.tied[number].append(parameter.grad if has_loss else None)
            parameter.grad = None
        if not torch.equal(before[0], self.links.streams.state()):
            raise RuntimeError(
                "a backward, or on_after_backward, draws random numbers, but a pipeline with virtual_ranks runs "
                "backward after the forward of other shares; draw them in the forward, or use strategy='ddp' or 'fsdp'"
            )
        if before[1] != self._versions():
            raise RuntimeError(
                "a backward changes a buffer of the model, but a pipeline with virtual_ranks runs backward after the "
                "forward of other shares; change it in the forward, or use strategy='ddp' or 'fsdp'"
            )

    def _end_shares(self, number: int) -> None:
        """End the shares before that of micro-batch `number`."""
        while self._shares_done < number // self.of_a_share:
            self._share_ended()
            self._shares_done += 1

    def _versions(self) -> list[tuple[int, int]]:
        held = [module._buffers[name] for module, name in self._buffers]
        return [(id(buffer), -1 if buffer is None else buffer._version) for buffer in held]


class _Parts(Sequence[Part]):
    """The parts of a run of the schedule, each prepared when it is asked for."""

    def __init__(self, shares: ShareWindow, start: int, number: int) -> None:
        self._shares, self._start, self._number = shares, start, number
        self._expected = signature(self[0].batch)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> Any:
        number = self._start + index
        is_new = number == len(self._shares.pulled)
        micro_batch = self._shares.pull(number)
        if is_new and index and signature(micro_batch.batch) != self._expected:
            raise RuntimeError(
                "the hooks of a batch gave two batches of one shape different shapes, but a pipeline with "
                "virtual_ranks needs to know them before; shape batches in the dataset or in collate_fn"
            )
        return Part(micro_batch.batch, micro_batch.num_samples)


class ShareFeed(Feed):
    """Micro-batches of a window, from `start` on, of one shape: each is a microbatch of the schedule."""

    def __init__(self, shares: ShareWindow, start: int, number: int) -> None:
        self.shares, self.start = shares, start
        self._begin: Tensor | None = None
        """The random streams with which the step of the first begins."""
        self.all_prepared: Callable[[], None] | None = None
        """Called once the hooks of all batches have run."""
        parts: Any = _Parts(shares, start, number)
        scale = 1 / shares.window.num_samples
        super().__init__(shares.step_fn, 0, parts, 0, scale, shares.hooks, None, Tally())

    def step(self, index: int) -> Any:
        shares, number = self.shares, self.start + index
        if index == 0:  # it may run for its shapes before
            if self._begin is None:
                self._begin = shares.links.streams.state()
            else:
                shares.links.streams.restore(self._begin)
        shares.crossings[number].drawn = None
        self.tally = shares.tallies[number] = Tally()
        micro_batch = shares.pulled[number]
        return shares.step_fn(micro_batch.batch, micro_batch.batch_idx)

    def holder(self, index: int) -> Any:
        return self.shares.pulled[self.start + index]

    def prepare(self, index: int) -> None:
        _ = self.parts[index]
        if index == len(self.parts) - 1 and self.all_prepared is not None:
            self.all_prepared()

    def seed(self, index: int) -> None:
        return None

    @property
    def known(self) -> Sequence[int]:
        return range(1)


class ShareStage(OpenStage):
    """A stage that keeps the gradients of shares apart, and says of each what they are like."""

    feed: ShareFeed
    layout: Any

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        shares, number = self.feed.shares, self.feed.start + bwd_chunk_id
        crossing, stage = shares.crossings[number], self.stage_index
        if self.is_last:
            has_loss = shares.tallies[number].has_loss
        else:
            has_loss = shares.links.receive_gradient(self.layout.messages[stage], crossing, stage + 1)
        with shares.backward(number, has_loss):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.is_first:
            shares.links.send_gradient(self.layout.messages[stage - 1], crossing, has_loss, stage - 1)
        del shares.crossings[number]


class ShareEngine(Engine):
    """A schedule whose microbatches are shares."""

    def stage_kind(self, wrapped: Staged) -> type[OpenStage]:
        return ShareStage

    def run(self, feed: Feed) -> None:
        assert isinstance(feed, ShareFeed)
        for stage in self.stages:
            assert isinstance(stage, ShareStage)
            stage.feed, stage.layout = feed, self._layout
        if not self._is_last:  # whose message says what hooks of all batches have changed
            feed.all_prepared, feed.before_last_backward = feed.before_last_backward, None
        super().run(feed)
        feed.shares.links.settle()


class ShareEngines(Engines):
    """The schedules of a run with virtual ranks."""

    engine = ShareEngine

    def run_shares(self, shares: ShareWindow, send: Callable[[], None]) -> None:
        """Forward and backward of a window; `send` is called before the last backward, or at the end."""
        wrapped, micro_batches = shares.wrapped, shares.window.micro_batches
        assert wrapped.state is not None
        sent, start = False, 0
        kinds = [(m.num_samples > 0, signature(m.batch)) for m in micro_batches]
        for (is_real, _), same in groupby(kinds):
            end = start + len([*same])
            while is_real and start < end:
                feed = ShareFeed(shares, start, end - start)
                if end == len(micro_batches):
                    feed.before_last_backward, sent = send, True
                with wrapped.state.micro_batch((0, 0)):  # at least two: no share may see what another has left
                    start += self._run_shares(wrapped, feed)
            start = end
        shares.finish()
        if not sent:
            send()

    def _run_shares(self, wrapped: Staged, feed: ShareFeed) -> int:
        """Run what `feed` has, or its first micro-batch if the step returns None for it; how many that was."""
        self.is_running = True
        try:
            with self._named_errors():
                engine = self._engine(wrapped, feed)
                if engine is not None:
                    engine.run(feed)
                    return len(feed.parts)
                last = wrapped.here[-1] == wrapped.num_stages - 1
                number = feed.parts[0].num_samples if last else 0
                with self._precision.autocast(wrapped.device), feed.hooks.log_scope(number):
                    wrapped.run_stage(wrapped.here[-1], (), _nothing, None, None, functools.partial(feed.step, 0))
            if len(feed.parts) == 1 and feed.before_last_backward is not None:
                feed.before_last_backward()
            return 1
        finally:
            self.is_running = False


def _nothing() -> None: ...
