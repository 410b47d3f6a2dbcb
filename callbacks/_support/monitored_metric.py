"""A metric that a callback decides by: when it is fresh, and the error when it never comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

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
        self.value: Tensor | None = None
        """What `read` has found."""
        self.is_of_now = False
        """Whether that was measured with the weights of now."""
        self.restart()

    def restart(self) -> None:
        """Forget what this fit has seen so far. Call it when a fit starts."""
        self._validated = self._epoch_ended = False

    def read(self, trainer: Trainer) -> None:
        """Take what rank 0 has, so that all ranks decide alike: values of one rank alone, and what user code puts into
        `callback_metrics`, need not be the same on others. Every rank calls it."""
        value, now = trainer.callback_metrics.get(self.name), trainer.global_step
        mine = None if value is None else [float(value), trainer._run.measured_at.get(self.name, now)]
        found = trainer.strategy.broadcast(mine)
        self.value = None if found is None else torch.tensor(found[0], dtype=torch.float64)
        self.is_of_now = found is not None and found[1] == now

    def fresh(self, trainer: Trainer, *, epoch_end: bool) -> bool:
        """Read it, and tell whether to check it now. Every rank calls it after each validation of fit and at each end
        of a training epoch."""
        self._validated |= not epoch_end
        self._epoch_ended |= epoch_end
        self.read(trainer)
        if self.at_epoch_end is None and self.value is not None:
            self.at_epoch_end = epoch_end
        return self.at_epoch_end == epoch_end

    def overdue(self, trainer: Trainer) -> str | None:
        """None where the metric was read or may still come, else the sentence that says what is wrong."""
        if self.at_epoch_end is False:
            due = self._validated
        else:
            due = self._epoch_ended and (self._validated or not trainer.num_val_batches)
        if self.value is not None or not due:
            return None
        available = ", ".join(sorted(trainer.callback_metrics)) or "none"
        return (
            f"{self.owner} monitors {self.name!r}, which was not logged: log it, or monitor one of the logged metrics: "
            f"{available}"
        )


Checks = Mapping[str, Callable[[Any], bool]]


def is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def is_count_or_none(value: Any) -> bool:
    return value is None or is_count(value)


def is_number(value: Any) -> bool:
    """An int or a float, or one of numpy, which an argument may have been; NaN and infinities among them; no bool."""
    is_large = isinstance(value, Integral) and abs(int(value)) >= 1 << 1023
    return isinstance(value, Real) and not isinstance(value, bool) and not is_large


def is_time(value: Any) -> bool:
    """Seconds, none of which are before zero."""
    return is_number(value) and 0 <= value < math.inf


def is_moment(value: Any) -> bool:
    """What `MonitoredMetric.at_epoch_end` may be."""
    return value in (None, True, False)


def check_state(owner: str, state: dict[str, Any], checks: Checks) -> None:
    """Raise ValueError where a saved state of `owner` lacks something, or has what `checks` does not take. What it has
    beside these is of a subclass."""
    if not checks.keys() <= state.keys():
        raise ValueError(
            f"the saved state of {owner} must have the keys {sorted(checks)}, but it has {sorted(state)}: it comes "
            "from another version"
        )
    for name, is_valid in checks.items():
        if not is_valid(state[name]):
            raise ValueError(
                f"the saved state of {owner} has no valid {name}, but {state[name]!r:.60}; load another checkpoint"
            )
