"""Callbacks and modules that several tests of modules use."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from torch.optim import SGD

from lockstep.callbacks import Callback


class Lrs(Callback):
    """Learning rates as they were when each step was taken."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if optimizer is trainer.optimizers[0]:
            self.seen.append([float(o.param_groups[0]["lr"]) for o in trainer.optimizers])


class Warm:
    """A scheduler as some packages have them: no LRScheduler, stepped with a counter."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer, self.last = optimizer, 0

    def step_update(self, num_updates: int) -> None:
        self.last = num_updates
        self.optimizer.param_groups[0]["lr"] = 1.0 / (1 + num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


Both = namedtuple("Both", ["x", "y"])
