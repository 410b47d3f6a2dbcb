"""LRWarmup: raise the learning rate slowly at the start, on top of any scheduler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.callbacks._support.lr_factor import LRFactor

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class LRWarmup(LRFactor):
    """Multiply the learning rate of every optimizer by a factor that grows to 1 over the first optimizer steps.

    The step that follows `t` completed ones (`trainer.global_step`) runs at `factor_at(t)`: with
    p = (t + 1) / (steps + 1) and s = start_factor, s + (1 - s) p for "linear" and
    s + (1 - s) (1 - cos πp) / 2 for "cosine". So exactly `steps` steps run below the full rate, and the
    first of them already above `start_factor`: no step is wasted at rate 0.

    The factor multiplies whatever the schedulers ask for, inside `optimizer.step` only: schedulers,
    also recursive ones and ReduceLROnPlateau, and `group["lr"]` are what they would be without warmup.
    As a function of `global_step` it needs no state, and a resumed run continues where it was.

    Args:
        steps: Length in optimizer steps, however many micro-batches and ranks one has; 0 disables it.
        epochs: Length in epochs instead, fractions allowed: that many times the optimizer steps of one
            epoch of this run, rounded. Needs a loader with a length.
        start_factor: Where the factor starts from, 0 to 1, as a fraction of the full rate.
        shape: "linear" or "cosine".
    """

    def __init__(
        self, *, steps: int | None = None, epochs: float | None = None, start_factor: float = 0.0, shape: str = "linear"
    ) -> None:
        super().__init__()
        if (steps is None) == (epochs is None):
            raise ValueError(f"LRWarmup needs either steps or epochs, got steps={steps} and epochs={epochs}")
        length = steps if steps is not None else epochs
        if length is None or length < 0 or not math.isfinite(length) or (steps is not None and steps != int(steps)):
            raise ValueError(
                "the length of LRWarmup must be at least 0, and a whole number of steps, got "
                f"{'epochs' if steps is None else 'steps'}={length}"
            )
        if not 0 <= start_factor <= 1:
            raise ValueError(f"start_factor of LRWarmup must be from 0 to 1, got {start_factor}")
        if shape not in ("linear", "cosine"):
            raise ValueError(f"shape of LRWarmup must be 'linear' or 'cosine', got {shape!r}")
        self.steps = steps
        self.epochs = epochs
        self.start_factor = start_factor
        self.shape = shape

    def factor_at(self, step: int) -> float:
        """The factor of the optimizer step that follows `step` completed ones. With `epochs`, known from `on_fit_start`
        on."""
        if self.steps is None:
            raise RuntimeError("the length of LRWarmup(epochs=...) in steps is unknown until fit has started")
        if step >= self.steps:
            return 1.0
        progress = (step + 1) / (self.steps + 1)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start_factor + (1 - self.start_factor) * progress

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if self.epochs is not None:
            windows = trainer._run.windows_at_start
            if windows is None:
                raise ValueError(
                    f"LRWarmup(epochs={self.epochs}) needs the length of an epoch, which this loader does not report: "
                    "set steps=... instead"
                )
            self.steps = round(self.epochs * windows)
        self._multiply(trainer, lambda: self.factor_at(trainer.global_step))
