"""One name that is logged: its flags, and its sums and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.trainer.metrics.exact import ExactSum

COMBINE: dict[str, Callable[[list[float]], float]] = {"mean": sum, "sum": sum, "max": max, "min": min}
"""How a reduction puts the ranks' values together."""


class Entry:
    """One logged name."""

    __slots__ = (
        "by_hand",
        "count",
        "epoch_count",
        "epoch_value",
        "logger",
        "metric",
        "name",
        "no_count",
        "number",
        "on_epoch",
        "on_step",
        "prog_bar",
        "rank_zero_only",
        "reduce_fx",
        "seen",
        "start",
        "total",
    )

    def __init__(
        self,
        name: str,
        reduce_fx: str,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        rank_zero_only: bool,
        exact: bool = False,
    ) -> None:
        self.name, self.reduce_fx, self.on_step, self.on_epoch = name, reduce_fx, on_step, on_epoch
        self.prog_bar, self.logger, self.rank_zero_only = prog_bar, logger, rank_zero_only
        self.start: Any = -float("inf") if reduce_fx == "max" else float("inf")
        if reduce_fx in ("mean", "sum"):
            self.start = ExactSum() if exact else 0.0
        self.no_count: Any = ExactSum() if exact else 0.0
        self.metric: Any = None
        self.by_hand = False  # logged outside of batches: a rank's value weighs the samples that it has seen
        self.total: Tensor | None = None  # what tensors added since the last reduction, on their device
        self.number: Any = self.start  # an ExactSum with virtual ranks
        self.count: Any = self.no_count  # of this rank, since the last reduction
        self.seen = 0.0  # 1 where `metric` was logged on this rank since the last reduction
        self.epoch_value = float(self.start)  # over all ranks, since the epoch began
        self.epoch_count = 0.0

    def flags(self) -> list[Any]:
        return [self.reduce_fx, self.on_step, self.on_epoch, self.prog_bar, self.logger, self.rank_zero_only]


class Reduced(NamedTuple):
    """A value over all ranks, to be shown."""

    name: str
    """The final name, such as `loss_step` for `loss`."""
    value: float
    entry: Entry
    """What it was logged as."""


def is_metric(value: Any) -> bool:
    """Whether `value` is a torchmetrics Metric or counts as one."""
    return hasattr(value, "compute") and hasattr(value, "reset")


def of_two_kinds(name: str) -> ValueError:
    return ValueError(
        f"self.log({name!r}) was given both numbers and a torchmetrics Metric, in this run or the one that it resumes; "
        "log them under names of their own"
    )


def nowhere(name: str, *_: Any) -> None:
    """`MetricStore.log` while nothing is measured."""
    raise RuntimeError(
        f"self.log({name!r}) would be seen by nobody here; log in training_step, validation_step, test_step, or in "
        "hooks from the start of training, validation or test to the end of an epoch"
    )


def too_late(name: str, *_: Any) -> None:
    """`MetricStore.log` once the metrics were reduced."""
    raise RuntimeError(
        f"self.log({name!r}) came after the metrics were reduced, so nobody would see it; log in a step, or in a hook "
        "up to the end of the epoch"
    )
