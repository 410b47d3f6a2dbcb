"""One pass of a pipeline stage through the user's code, and what torch's schedules call for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from lockstep.strategies.pipeline.shape_inference import Layout


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
    calls: Counter[int] = field(default_factory=Counter)


class Stage(nn.Module):
    """What torch's PipelineStage runs: one stage, whose forward is the user's step as far as the stage goes."""

    def __init__(self, index: int, layers: list[nn.Module], own: list[nn.Parameter]) -> None:
        super().__init__()
        self.layers, self.own = nn.ModuleList(layers), nn.ParameterList(own)
        self.index = index
        self.run: Callable[[int, tuple[Tensor, ...]], Any] | None = None
        """What the forward calls; the schedule that runs sets it."""

    def forward(self, *received: Tensor) -> Any:
        return self.run(self.index, received)  # type: ignore[misc]
