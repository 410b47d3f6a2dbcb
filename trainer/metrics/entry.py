"""One name that is logged: its flags, and its sums and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.trainer.metrics.exact import ExactSum

COMBINE: dict[str, Callable[[list[float]], float]] = {
    "mean": sum,
    "sum": sum,
    "max": lambda values: max(values, key=lambda value: (value != value, value)),
    "min": lambda values: min(values, key=lambda value: (value == value, value)),
}
"""How a reduction puts the ranks' values together; a NaN is the result, as in torch."""

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
        "given",
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
        *,
        exact: bool = False,
    ) -> None:
        self.name, self.reduce_fx, self.on_step, self.on_epoch = name, reduce_fx, on_step, on_epoch
        self.prog_bar, self.logger, self.rank_zero_only = prog_bar, logger, rank_zero_only
        self.start: Any = -float("inf") if reduce_fx == "max" else float("inf")
        if reduce_fx in ("mean", "sum"):
            self.start = ExactSum() if exact else 0.0
        self.no_count: Any = ExactSum() if exact else 0.0
        self.given: tuple[Any, ...] | None = None  # the flags of `self.log` as they were given last
        self.metric: Any = None
        # Whether it was logged outside of batches, where a rank's value weighs its samples; None: a checkpoint of old
        # does not say.
        self.by_hand: bool | None = False
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

    def put_saved(self, number: Any, count: Any) -> None:
        """Take back a number and a count that are JSON data."""
        self.number = ExactSum.of(number) if isinstance(number, list) else number
        self.count = self.no_count + (ExactSum.of(count) if isinstance(count, list) else count)

    def forget(self) -> None:
        """Be as before anything was added."""
        self.put_sums((self.start, [], None, self.no_count))

    def add(self, value: float, weight: float) -> None:
        """Add one value to the sum. Padding, of no weight, must not bring in its NaN."""
        if not weight:
            return
        if self.reduce_fx in ("mean", "sum"):
            exact = isinstance(self._number, ExactSum)
            self._number = self._number.plus_product(value, weight) if exact else self._number + value * weight
        else:
            extreme = max if self.reduce_fx == "max" else min  # which keep a first NaN
            self._number = extreme(self._number, value) if value == value else value

    def add_later(self, value: Tensor, weight: float) -> None:
        """The same for a tensor of an accelerator, which the host reads with others once the number is asked for."""
        self._waiting.append((value.detach().reshape(()), weight))
        if len(self._waiting) >= MOST_WAITING:
            _ = self.number

    def add_on_device(self, value: Tensor, weight: float) -> None:
        """The same where the value is: no host synchronization."""
        if self.total is not None:
            value = value.to(self.total.device, non_blocking=True)
        else:
            start = self.number if self.reduce_fx in ("max", "min") else 0.0
            self.total = torch.full(
                (), start, dtype=torch.float64 if value.device.type != "mps" else torch.float32, device=value.device
            )
        if self.reduce_fx in ("mean", "sum"):
            if weight:  # padding must not bring in its NaN
                self.total.add_(value, alpha=weight)
        elif not weight:
            pass
        elif self.reduce_fx == "max":
            torch.maximum(self.total, value, out=self.total)
        else:
            torch.minimum(self.total, value, out=self.total)

    def settle(self) -> None:
        """Add to the number what is still on a device."""
        if self.total is not None:
            self.take_total(float(self.total))  # host sync: only when state is saved or a value changes its device

    def take_total(self, total: float) -> None:
        """The same with the total that was read from the device. The number may have values of the host since."""
        self.number = COMBINE[self.reduce_fx]([self.number, total])
        self.total = None

    def check_flags(self, given: tuple[Any, ...], by_hand: bool, several: bool) -> None:
        """Raise ValueError where `self.log` is given other flags for this name than before, or with `several` ranks
        weights of another kind; in a resumed run the first ones stand for those of the saved one."""
        names = ("reduce_fx", "on_step", "on_epoch", "prog_bar", "logger", "rank_zero_only")
        for name, now, held in zip(names, given, self.flags(), strict=False) if self.given is not None else ():
            now = reduction_of(self.name, now) if name == "reduce_fx" else now
            if now is not None and bool(now != held):
                raise ValueError(
                    f"self.log({self.name!r}) was given {name}={now!r}, but {name}={held!r} before, and a name has one "
                    "of each; log it alike each time, or under another name"
                )
        if self.by_hand is None:  # a checkpoint of old does not say it
            self.by_hand = by_hand
        is_mean = self.reduce_fx == "mean" and self.metric is None and not self.rank_zero_only
        if by_hand != self.by_hand and is_mean and several:
            raise ValueError(
                f"self.log({self.name!r}) was called both in a batch, where a mean counts samples, and outside of one, "
                "where it counts once over all ranks; log it under another name in one of them"
            )
        self.given = given

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


def reduction_of(name: str, reduce_fx: Any) -> str:
    """The key in `COMBINE` of what `self.log` was given. Raises ValueError for another one."""
    reduction = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    reduction = "mean" if reduction == "avg" else reduction
    if reduction not in COMBINE:
        raise ValueError(
            f"reduce_fx of self.log({name!r}) must be 'mean', 'sum', 'max' or 'min', but reduce_fx={reduce_fx!r}"
        )
    return reduction


def weight_of(name: str, batch_size: Any) -> float:
    """`batch_size` of `self.log`, which may be a tensor. Raises ValueError for other values."""
    try:
        weight = math.nan if isinstance(batch_size, str) else float(batch_size)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        weight = math.nan
    if not 0.0 <= weight < math.inf:
        raise ValueError(
            f"batch_size of self.log({name!r}) must be a finite number from 0, as the weight of the value in its mean, "
            f"but batch_size={batch_size!r:.60}"
        )
    return weight


def number_of(name: str, value: Any) -> float:
    """A number as a float. Raises TypeError or ValueError for other values."""
    if not isinstance(value, (float, int, Number)):
        raise not_a_number(name, value)
    if isinstance(value, complex):
        raise is_complex(name)
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(
            f"self.log({name!r}) got a number that is too large for a float; log its logarithm, as by math.log2"
        ) from None


def not_a_number(name: str, value: Any) -> TypeError:
    instead = "; log what its compute() returns, or a torchmetrics Metric" if hasattr(value, "compute") else ""
    instead = "; log what is in it by self.log_dict" if type(value).__name__ == "MetricCollection" else instead
    return TypeError(
        f"self.log({name!r}) takes a number, a tensor of one element or a torchmetrics Metric, but got "
        f"{type(value).__name__}{instead}"
    )


def is_complex(name: str) -> TypeError:
    return TypeError(
        f"self.log({name!r}) takes a real number, but got a complex one; log its abs(), or its real and imaginary part "
        "under names of their own"
    )


def is_metric(value: Any) -> bool:
    """Whether `value` is a torchmetrics Metric, and no collection of them. Evaluates none of its properties."""
    return hasattr(type(value), "metric_state") and hasattr(value, "_update_count") and not hasattr(value, "items")


def of_two_kinds(name: str) -> ValueError:
    return ValueError(
        f"self.log({name!r}) was given both numbers and a torchmetrics Metric, in this run or the one that it resumes; "
        "log them under names of their own"
    )


def added_by_rank(name: str) -> ValueError:
    return ValueError(
        f"self.log({name!r}, reduce_fx='sum') was called where a rank has all of its shares or learners in common, as "
        "at the end of a step or an epoch, so that it would depend on the number of ranks, which each add to it; "
        "log it in the step or the batch hooks, or its mean"
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
