"""One name that is logged: its flags, and its sums and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.trainer.metrics.exact import ExactSum

COMBINE: dict[str, Callable[[list[float]], float]] = {"mean": sum, "sum": sum, "max": max, "min": min}
"""How a reduction puts the ranks' values together."""

MOST_WAITING = 1024
"""Values of an accelerator that a name keeps there before the host reads them."""


class Entry:
    """One logged name."""

    __slots__ = (
        "_number",
        "_waiting",
        "by_hand",
        "count",
        "epoch_count",
        "epoch_value",
        "logger",
        "metric",
        "name",
        "no_count",
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
        self._number: Any = self.start
        self._waiting: list[tuple[Tensor, float]] = []
        self.count: Any = self.no_count  # of this rank, since the last reduction
        self.seen = 0.0  # 1 where `metric` was logged on this rank since the last reduction
        self.epoch_value = float(self.start)  # over all ranks, since the epoch began
        self.epoch_count = 0.0

    @property
    def number(self) -> Any:
        """What was added on the host since the last reduction: a float, or for sums with virtual ranks an
        `ExactSum`."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for value, (_, weight) in zip(_on_host([value for value, _ in waiting]), waiting, strict=True):
                self.add(value, weight)
        return self._number

    @number.setter
    def number(self, value: Any) -> None:
        self._number, self._waiting = value, []

    def sums(self) -> tuple[Any, ...]:
        """What was added since the last reduction, without waiting for a device; for `put_sums`."""
        return self._number, [*self._waiting], None if self.total is None else self.total.clone(), self.count

    def put_sums(self, sums: tuple[Any, ...]) -> None:
        self._number, self._waiting, self.total, self.count = sums

    def forget(self) -> None:
        """Be as before anything was added."""
        self.put_sums((self.start, [], None, self.no_count))

    def add(self, value: float, weight: float) -> None:
        """Add one value to the sum. Padding, of no weight, must not bring in its NaN."""
        if not weight:
            return
        if self.reduce_fx in ("mean", "sum"):
            self._number += value * weight
        else:
            self._number = (max if self.reduce_fx == "max" else min)(self._number, value)

    def add_later(self, value: Tensor, weight: float) -> None:
        """The same for a tensor of an accelerator, which the host reads with others once the number is asked for."""
        self._waiting.append((value.detach().reshape(()), weight))
        if len(self._waiting) >= MOST_WAITING:
            _ = self.number

    def flags(self) -> list[Any]:
        return [self.reduce_fx, self.on_step, self.on_epoch, self.prog_bar, self.logger, self.rank_zero_only]


def _on_host(values: list[Tensor]) -> list[float]:
    """Waits for the device once."""
    return torch.stack([value.double() for value in values]).tolist()


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
