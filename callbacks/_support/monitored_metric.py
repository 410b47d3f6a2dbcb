"""A metric that a callback decides by: when it is fresh, and the error when it never comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import Trainer


class MonitoredMetric:
    """The metric `name` of `trainer.callback_metrics`, for the callback class `owner`.

    It is fresh after each validation or at the end of each training epoch: `at_epoch_end` False or
    True; None finds out which of the two brings it first and keeps to that, so that a validation metric
    is not checked twice and one of the training epoch not before it is there.
    """

    def __init__(self, name: str, owner: str, at_epoch_end: bool | None) -> None:
        self.name = name
        self.owner = owner
        self.at_epoch_end = at_epoch_end
        self.restart()

    def restart(self) -> None:
        """Forget what this fit has seen so far. Call it when a fit starts."""
        self._validated = self._epoch_ended = False

    def fresh(self, trainer: Trainer, *, epoch_end: bool) -> bool:
        """Whether to check it now. Call it after every validation of fit and at every end of a training epoch."""
        self._validated |= not epoch_end
        self._epoch_ended |= epoch_end
        if self.at_epoch_end is None and self.name in trainer.callback_metrics:
            self.at_epoch_end = epoch_end
        return self.at_epoch_end == epoch_end

    def overdue(self, trainer: Trainer) -> str | None:
        """None where the metric is there or may still come, else the sentence that says what is wrong."""
        if self.at_epoch_end is False:
            due = self._validated
        else:
            due = self._epoch_ended and (self._validated or not trainer.num_val_batches)
        if self.name in trainer.callback_metrics or not due:
            return None
        available = ", ".join(sorted(trainer.callback_metrics)) or "none"
        return (
            f"{self.owner} monitors {self.name!r}, which was not logged: log it, or monitor one of the logged metrics: "
            f"{available}"
        )


def check_keys(owner: str, state: dict[str, Any], expected: set[str]) -> None:
    """Raise ValueError where a saved state of `owner` lacks something or has more."""
    if state.keys() != expected:
        raise ValueError(
            f"the saved state of {owner} must have the keys {sorted(expected)}, but it has {sorted(state)}: it comes "
            "from another version"
        )
