"""One pass of a pipeline stage through the user's code, and what torch's schedules call for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.strategies.pipeline.fake_tensors import Blank, Returned, Source, containers
from lockstep.strategies.pipeline.shape_inference import Layout, Message


class Leave(BaseException):
    """Leaves the user's code where this stage's part of it ends. No `Exception`, so that user code does not catch
    it."""

    def __init__(self, tensors: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(slots=True)
class Run:
    """One pass of a stage, or of shape inference, through the user's code."""

    stage: int = 0
    received: tuple[Tensor, ...] = ()
    arrive: Callable[[], None] | None = None
    """Waits until `received` is there, where it may be on its way."""
    layout: Layout | None = None
    noise: int | None = None
    """Seed of the random numbers that layers draw."""
    wants: Literal["stage", "inputs", "evaluation", "shapes"] = "stage"
    """"stage", "inputs" (leave as soon as they are known), "evaluation" (all stages of this rank) or "shapes"."""
    entered: bool = False
    inside: bool = False
    started: bool = False
    """Whether a layer of this stage has been called."""
    calls: Counter[int] = field(default_factory=Counter)
    skips: dict[Source, Tensor] | None = None
    """What has arrived for later stages or as skip connections, and what layers of this stage add to it; None before
    `received` is there."""
    links: Links | None = None
    """Called where this stage begins and ends."""

    def arrived(self) -> dict[Source, Tensor]:
        """Wait until `received` is there, and return `skips`."""
        assert self.layout is not None
        if self.skips is None:
            if self.arrive is not None:
                self.arrive()
            self.skips = {}
            if self.stage:
                message = self.layout.messages[self.stage - 1]
                self.skips.update(zip(message.sources, self.received[len(message.leaves) :], strict=True))
        return self.skips

    def output(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What stands for the output of a layer of an earlier stage: tensors without data, but for skip connections."""
        found = self._blank(index)
        if not isinstance(found, Returned):
            return found
        held = containers(args, kwargs)
        return found.give(held, tree_leaves(held))

    def _blank(self, index: int) -> Any:
        assert self.layout is not None and self.links is not None
        self.links.passing(self)
        call = index, self.calls[index]
        self.calls[index] += 1
        blank = self.layout.outputs[call]  # new objects a call: those of another micro-batch are others
        if call not in self.layout.skips:
            return blank.tensor() if isinstance(blank, Blank) else tree_map_only(Blank, Blank.tensor, blank)
        leaves, spec = tree_flatten(blank)
        received = self.arrived()
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Blank):
                skip = received.get(Source(*call, i))
                leaves[i] = leaf.tensor() if skip is None else skip.clone()  # which user code may change in place
        return tree_unflatten(leaves, spec)

    def keep(self, index: int, output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep what a layer of this stage returned, if a later stage needs it."""
        assert self.layout is not None
        call = index, self.calls[index]
        self.calls[index] += 1
        for source in self.layout.skips.get(call, ()):
            expected = self.layout.outputs[call]
            if isinstance(expected, Returned):
                output = Returned.of(output, containers(args, kwargs), expected.contents, {})
            self.arrived()[source] = tree_leaves(output)[source.leaf].clone()

    def beside(self) -> dict[Source, Tensor]:
        """The received parameters of modules around the layers."""
        assert self.layout is not None
        if not any(layer < 0 for layer, _ in self.layout.skips):
            return {}
        return {source: tensor for source, tensor in self.arrived().items() if source.layer < 0}


class Links:
    """Sends between the ranks of a pipeline, where no schedule does it: one batch ahead at most.

    What is to travel beside the tensors overrides `passing`, `starting` and `leaving`, which each run of a stage calls.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: tuple[Tensor, ...], rank: int) -> None:
        for work, _ in self._sent:
            work.wait()  # type: ignore[union-attr]
        self._sent = [(dist.isend(t, group=self._group, group_dst=rank), t) for t in tensors]

    def receive(self, message: Message, rank: int) -> tuple[Tensor, ...]:
        tensors = tuple(torch.empty_like(t, device=self._device) for t in message.tensors)
        for tensor in tensors:
            dist.recv(tensor, group=self._group, group_src=rank)
        return tensors

    def outside(self) -> None:
        """The pipelined module is called outside of a step, by every rank."""

    def finished(self, rank: int) -> None:
        """It has run, and ended on `rank`."""

    def passing(self, run: Run) -> None:
        """A layer of an earlier stage is called, and computes nothing."""

    def starting(self, run: Run) -> None:
        """The first layer of this stage is called, and what it needs has arrived."""

    def leaving(self, run: Run, tensors: Sequence[Tensor], sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first layer of the next stage is called with `tensors`; returns what to send in place of `sent`."""
        return sent


class Stage(nn.Module):
    """What torch's PipelineStage runs: one stage, whose forward is the user's step as far as the stage goes."""

    def __init__(self, index: int, layers: list[nn.Module], own: list[nn.Parameter]) -> None:
        super().__init__()
        self.layers, self.own = nn.ModuleList(layers), nn.ParameterList(own)
        self.index = index
        self.run: Callable[[int, tuple[Tensor, ...]], Any] | None = None
        """What the forward calls; the schedule that runs sets it."""

    def __call__(self, *received: Tensor) -> Any:
        return super().__call__(*received, nothing=None)  # without any argument FSDP fails on CUDA before torch 2.13

    def forward(self, *received: Tensor, nothing: None) -> Any:
        return self.run(self.index, received)  # type: ignore[misc]


UNREACHED = "appears to not have been used in the graph"
"""In torch's error for a gradient that stages before this one would have to compute."""


@contextmanager
def explained(step: str) -> Iterator[None]:
    """While it lasts that error is one that says what to do; `step` is what asks for the gradient."""
    try:
        yield
    except RuntimeError as error:
        if UNREACHED not in str(error):
            raise
        raise RuntimeError(
            f"{step} asks for a gradient by torch.autograd.grad, which in a pipeline ends at the layers of this rank; "
            "use strategy='ddp' or 'fsdp' for penalties on gradients and gradients of inputs"
        ) from error
