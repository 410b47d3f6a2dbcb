"""GradientAccumulationScheduler: another number of micro-batches in a step from given epochs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class GradientAccumulationScheduler(Callback):
    """Accumulate over another number of micro-batches from given epochs on.

    `GradientAccumulationScheduler({4: 2, 8: 4})` steps after each micro-batch of the Trainer's
    `accumulate_grad_batches` until epoch 4 begins, then after two, and from epoch 8 on after four. The weights are
    those of that number of micro-batches on one process, under every strategy but DeepSpeed, which refuses it.
    `trainer.estimated_stepping_batches` knows the schedule; a run that is resumed continues it.

    Args:
        scheduling: Micro-batches of a step by the epoch, from 0, from which they hold.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, dict) or not scheduling:
            raise ValueError(
                f"scheduling must be a dict of epochs and their numbers of micro-batches, got {scheduling!r}"
            )
        for epoch, number in scheduling.items():
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
                raise ValueError(f"scheduling must have epochs from 0 as keys, got {epoch!r}")
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"scheduling must have numbers of at least 1, got {number!r} for epoch {epoch}")
        self.scheduling = dict(sorted(scheduling.items()))

    def accumulation_at(self, epoch: int, default: int) -> int:
        """Micro-batches of a step in `epoch`; `default` before the first epoch of the schedule."""
        return next((number for first, number in reversed(self.scheduling.items()) if first <= epoch), default)

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        refused = trainer.strategy.capabilities.refuses.get("accumulation_schedule")
        if refused is not None:
            raise ValueError(f"GradientAccumulationScheduler cannot be used here: {refused}")
        if not module.automatic_optimization:
            raise ValueError(
                f"GradientAccumulationScheduler would have no effect, as {type(module).__name__} sets "
                "automatic_optimization = False and steps by hand; remove the callback, and step every so many "
                "batches in training_step"
            )

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        now = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self.accumulation_at(trainer.current_epoch, now)
