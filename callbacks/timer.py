"""A budget of training time that holds across restarts."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from lockstep.callbacks._support.monitored_metric import check_state, is_time
from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

Stage = Literal["train", "validate", "test", "predict"]


class Timer(Callback):
    """Measures the time spent in each stage and ends training when `duration` is used up.

    Training time runs from `on_train_start` to `on_train_end`, validation within it included, and continues
    from the checkpoint's value when a run is resumed, or from that of the fit before in a second `fit` of one Trainer.
    In another Trainer it begins at zero. Ranks whose clocks differ still stop at the same
    step: the Trainer stops all of them as soon as `should_stop` is set on one.

    Args:
        duration: training time as `"DD:HH:MM:SS"`, a timedelta, or a dict of timedelta's arguments such as
            `{"hours": 1, "minutes": 30}`; None only measures, 0 trains only what `min_epochs` and `min_steps` ask for.
        interval: when to check the clock: "step", after each batch, or "epoch", after each training epoch.
        verbose: print when the time is used up.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, float] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f"interval must be 'step' or 'epoch', but it is {interval!r}")
        self.interval = interval
        self.verbose = verbose
        self.duration_s = None if duration is None else seconds(duration, "duration")
        self._elapsed_s = dict.fromkeys(("train", "validate", "test", "predict"), 0.0)  # of spans that have ended
        self._began: dict[str, float] = {}  # by the monotonic clock, of the last span of each stage
        self._ended: dict[str, float] = {}  # the same; not there while it runs
        self._deadline = float("inf")  # by the monotonic clock

    def time_elapsed(self, stage: Stage = "train") -> float:
        """Seconds spent in `stage` so far: "train", "validate", "test" or "predict"."""
        if stage not in self._elapsed_s:
            raise ValueError(f"stage must be one of {', '.join(self._elapsed_s)}, but it is {stage!r}")
        return self._elapsed_s[stage] + (time.monotonic() - self._began[stage] if self._runs(stage) else 0.0)

    def start_time(self, stage: Stage = "train") -> float | None:
        """When `stage` last began, by `time.monotonic()`; None before that, and after a run on started ranks."""
        return self._began.get(stage)

    def end_time(self, stage: Stage = "train") -> float | None:
        """When `stage` last ended, by `time.monotonic()`; None before that, and after a run on started ranks."""
        return self._ended.get(stage)

    def time_remaining(self, stage: Stage = "train") -> float | None:
        """Seconds that training, or another stage, leaves of the `duration`, never below 0; None without one."""
        return None if self.duration_s is None else max(0.0, self.duration_s - self.time_elapsed(stage))

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in ("train", "validate", "test", "predict")}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state("Timer", state_dict, {"time_elapsed": _are_times})
        self._elapsed_s.update(state_dict["time_elapsed"])

    def roll_back(self, state_dict: dict[str, Any]) -> None: ...  # the time since then was spent all the same

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:  # a run of its own, perhaps the second with this callback
            self._elapsed_s = dict.fromkeys(self._elapsed_s, 0.0)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("train")
        remaining = self.time_remaining()
        if remaining is not None:
            self._deadline = time.monotonic() + remaining
            self._stop_if_due(trainer)  # a resumed run may have nothing left

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.interval == "step" and time.monotonic() >= self._deadline:
            self._stop_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        self._stop_if_due(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._end("train")

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._end("validate")

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._end("test")

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self._end("predict")

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        for running in self._began:  # an exception left them open
            self._end(running)

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self.teardown(trainer, module, "")

    def _runs(self, stage: str) -> bool:
        return stage in self._began and stage not in self._ended

    def _begin(self, stage: str) -> None:
        self._began[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _end(self, stage: str) -> None:
        if self._runs(stage):
            self._ended[stage] = time.monotonic()
            self._elapsed_s[stage] += self._ended[stage] - self._began[stage]

    def _stop_if_due(self, trainer: Trainer) -> None:
        if time.monotonic() >= self._deadline and not trainer.should_stop:
            trainer.should_stop = True
            if self.verbose and trainer.is_global_zero:
                safe_print(
                    f"Timer: {timedelta(seconds=round(self.time_elapsed('train')))} of training time used, stopping at "
                    f"step {trainer.global_step}"
                )

    def __getstate__(self) -> dict[str, Any]:
        # Another process has another monotonic clock.
        return super().__getstate__() | {
            "_elapsed_s": self.state_dict()["time_elapsed"],
            "_began": {},
            "_ended": {},
            "_deadline": float("inf"),
        }


class MaxTime(Timer):
    """The Timer of `Trainer(max_time=…)`, beside which there may be one of the user's."""

    former_state_key = "Timer"


def _are_times(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= {*get_args(Stage)} and all(map(is_time, value.values()))


def seconds(duration: str | timedelta | dict[str, float], name: str) -> float:
    """The seconds of a duration; errors call it `name`."""
    if isinstance(duration, str):
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
        if match is None:
            raise ValueError(
                f"{name} must read DD:HH:MM:SS, for example '00:12:00:00' for 12 hours, but it is {duration!r}"
            )
        days, hours, minutes, rest = map(int, match.groups())
        length = timedelta(days=days, hours=hours, minutes=minutes, seconds=rest)
    elif isinstance(duration, dict):
        try:
            length = timedelta(**duration)
        except (TypeError, ValueError, OverflowError):
            names = "weeks, days, hours, minutes, seconds"
            raise ValueError(f"{name} as a dict takes numbers for {names}, but it is {duration}") from None
    elif isinstance(duration, timedelta):
        length = duration
    else:
        raise TypeError(f"{name} must be a str 'DD:HH:MM:SS', a timedelta or a dict, but it is {duration!r}")
    if length < timedelta(0):
        raise ValueError(f"{name} must not be below zero, but it is {duration!r}")
    return length.total_seconds()
