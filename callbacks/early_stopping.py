"""EarlyStopping: end the run when a metric no longer improves."""

from __future__ import annotations

import math
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.callbacks._support.monitored_metric import (
    Checks,
    MonitoredMetric,
    check_state,
    is_count,
    is_moment,
    is_number,
)
from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Callback, check_number

if TYPE_CHECKING:
    from lockstep import Module, Trainer

_SAVED: Checks = {
    "wait_count": is_count,
    "stopped_epoch": is_count,
    "stopping_reason": lambda value: value is None or isinstance(value, str),
    "best_score": is_number,
    "last_score": is_number,
    "check_on_train_epoch_end": is_moment,
}


class EarlyStoppingReason(Enum):
    """Why `EarlyStopping` stopped a run."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4

    def __bool__(self) -> bool:
        return self is not EarlyStoppingReason.NOT_STOPPED


class EarlyStopping(Callback):
    """Set `trainer.should_stop` when a metric has not improved for `patience` checks, or has left its bounds.

    All ranks take the value that rank 0 has, in one small broadcast a check, so they decide alike. Skipped in the
    sanity check and with `fast_dev_run`. The reason to stop is printed on rank 0. A run that is resumed
    where it had stopped stops again at once, unless the arguments now allow more.

    Args:
        monitor: Name of the metric in `trainer.callback_metrics`.
        min_delta: The least change, in the metric's unit, that counts as improvement; its sign does not matter.
        patience: Stop at the check that is this many without improvement, counted in checks, not epochs.
        mode: "min" where lower is better, "max" where higher is.
        strict: Raise ValueError when the metric should be there and is not; False warns once and continues.
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop once the metric is better than this: good enough.
        divergence_threshold: Stop once the metric is worse than this: beyond hope.
        check_on_train_epoch_end: True checks at the end of each training epoch, False after each
            validation. None takes whichever brings the metric first.
        verbose: Print every improvement.
        log_rank_zero_only: Print improvements on rank 0 only; False prints on every rank, with its number.
    """

    best_score: Tensor
    """The best value so far, 0-dim on CPU; infinitely bad before the first check."""
    wait_count: int
    """Checks since the last improvement."""
    stopped_epoch: int
    """Index of the epoch in which it stopped the run; 0 where it has not, see `stopping_reason`."""
    stopping_reason: EarlyStoppingReason
    """Why it stopped the run."""
    stopping_reason_message: str | None
    """The same in one sentence; None where it has not stopped the run."""

    def __init__(
        self,
        monitor: str,
        *,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        verbose: bool = False,
        log_rank_zero_only: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode of EarlyStopping must be 'min' or 'max', got {mode!r}")
        check_number("EarlyStopping", "patience", patience, 0)
        check_number("EarlyStopping", "min_delta", min_delta)
        check_number("EarlyStopping", "stopping_threshold", stopping_threshold, optional=True)
        check_number("EarlyStopping", "divergence_threshold", divergence_threshold, optional=True)
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.verbose = verbose
        self.log_rank_zero_only = log_rank_zero_only
        self._metric = MonitoredMetric(monitor, "EarlyStopping", check_on_train_epoch_end)
        self._reset()
        self._fitting = False
        self._warned = False

    @property
    def state_key(self) -> str:
        return f"EarlyStopping[monitor={self.monitor}, mode={self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason": self.stopping_reason_message,
            "best_score": float(self.best_score),
            "last_score": self._last,
            "check_on_train_epoch_end": self._metric.at_epoch_end,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state("EarlyStopping", state_dict, _SAVED)
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.stopping_reason_message = state_dict["stopping_reason"]
        self.best_score = torch.tensor(state_dict["best_score"], dtype=torch.float64)
        self._last = state_dict["last_score"]
        self.stopping_reason = self._reason()[0] if self.stopping_reason_message else EarlyStoppingReason.NOT_STOPPED
        if self._metric.at_epoch_end is None:
            self._metric.at_epoch_end = state_dict["check_on_train_epoch_end"]

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.arguments.fast_dev_run

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self._metric.restart()
        if trainer.global_step == 0:  # a run of its own, perhaps the second with this callback
            self._reset()

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if (
            self._fitting and self.stopping_reason_message and self._reason()[1]
        ):  # resumed where it had stopped: stop there again, unless the options allow more now
            trainer.should_stop = True
            trainer.print(f"EarlyStopping: the resumed run had already stopped: {self.stopping_reason_message}")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._fitting and not trainer.sanity_checking:
            self._check(trainer, epoch_end=False)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._fitting:
            self._check(trainer, epoch_end=True)

    def _reset(self) -> None:
        self.best_score = torch.tensor(math.inf if self.mode == "min" else -math.inf, dtype=torch.float64)
        self.wait_count = self.stopped_epoch = 0
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None
        self._last = math.nan

    def _check(self, trainer: Trainer, *, epoch_end: bool) -> None:
        fresh = self._metric.fresh(trainer, epoch_end=epoch_end)
        problem = self._metric.overdue(trainer)
        if problem and self.strict:
            raise ValueError(problem)
        if problem and not self._warned and trainer.is_global_zero:
            self._warned = True
            warnings.warn(problem, stacklevel=2)
        current = self._metric.value
        if not fresh or current is None:
            return
        self._last = float(current)
        usable = math.isfinite(self._last) or not self.check_finite
        if usable and self._better(self._last, self._with_delta(float(self.best_score))):
            self._say(trainer, f"{self.monitor} improved from {float(self.best_score):.6g} to {self._last:.6g}")
            self.best_score = current
            self.wait_count = 0
        else:
            self.wait_count += 1
        self.stopping_reason, self.stopping_reason_message = self._reason()
        if self.stopping_reason_message:
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
            trainer.print(f"EarlyStopping: {self.stopping_reason_message}")

    def _reason(self) -> tuple[EarlyStoppingReason, str | None]:
        """Why the last check must end the run, by the options of now."""
        shown = f"{self.monitor} = {self._last:.6g}"
        best = f"{float(self.best_score):.6g}"
        if self.check_finite and not math.isfinite(self._last):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{shown} is not finite; the best was {best}"
        if self.stopping_threshold is not None and self._better(self._last, self.stopping_threshold):
            threshold = f"the stopping threshold {self.stopping_threshold:.6g}"
            return EarlyStoppingReason.STOPPING_THRESHOLD, f"{shown} is better than {threshold}"
        if self.divergence_threshold is not None and self._better(self.divergence_threshold, self._last):
            threshold = f"the divergence threshold {self.divergence_threshold:.6g}"
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, f"{shown} is worse than {threshold}"
        if self.wait_count and self.wait_count >= self.patience:
            checks = "1 check" if self.wait_count == 1 else f"{self.wait_count} checks in a row"
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, f"{shown}: {checks} without improvement over {best}"
        return EarlyStoppingReason.NOT_STOPPED, None

    def _better(self, value: float, than: float) -> bool:
        return value < than if self.mode == "min" else value > than

    def _with_delta(self, score: float) -> float:
        return score - self.min_delta if self.mode == "min" else score + self.min_delta

    def _say(self, trainer: Trainer, text: str) -> None:
        if not self.verbose:
            return
        name = "EarlyStopping" if trainer.world_size == 1 else f"EarlyStopping on rank {trainer.global_rank}"
        if trainer.is_global_zero:
            trainer.print(f"{name}: {text}")
        elif not self.log_rank_zero_only:
            safe_print(f"{name}: {text}")
