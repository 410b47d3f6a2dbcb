"""What `Module.optimizers()` hands to a step that optimizes by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class ManualOptimizer:
    """An optimizer whose `step` first brings the gradients of all ranks together."""

    def __init__(self, optimizer: Optimizer, trainer: Trainer) -> None:
        self.optimizer = optimizer
        self._trainer = trainer

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> None:
        """Step with the gradients that `manual_backward` has accumulated. Every rank calls it."""
        trainer = self._trainer
        for hook in trainer.hooks.on_before_optimizer_step:
            hook(self.optimizer)
        if trainer.strategy.optimizer_step(trainer.placed, self.optimizer, closure):
            trainer.manually_stepped = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for hook in self._trainer.hooks.on_before_zero_grad:
            hook(self.optimizer)
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
