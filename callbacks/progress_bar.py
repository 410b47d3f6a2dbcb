"""How far a run is, how fast it goes and when it will end: on a terminal, in a notebook, in a log file."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.callbacks._support.bar_lines import Line, LogFile
from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

RATE_WINDOW_S = 30.0
"""The rate is that of the last half minute, so that it follows a change and still does not jump."""
LOG_INTERVAL_S = 30.0
"""Seconds between two lines of a log file within an epoch."""
LOG_EPOCH_INTERVAL_S = 0.1
"""Seconds from the line before to that at the end of an epoch, so that epochs of milliseconds do not fill a disk."""
NEVER = math.inf


class ProgressBar(Callback):
    """Shows epoch, batches, rate, elapsed time, time left and the metrics logged with `prog_bar=True`, on rank 0, on
    stderr.

    `tqdm.auto` draws the bar, on a terminal or as a widget of a notebook; elsewhere a plain line is written every 30
    seconds and at the end of each epoch. An epoch counts its training batches, up to the one at which `max_steps` ends
    the run. The rate is that of the last 30 seconds. `run<03:20` is the time left of the run: it adds the pauses
    of the epochs before (validation, checkpoints) in proportion. If stderr cannot be written to, the bar falls silent.

    Args:
        refresh_per_second: how often the line is redrawn at most, in times a second.
    """

    def __init__(self, refresh_per_second: float = 10.0) -> None:
        if not refresh_per_second > 0:
            raise ValueError(f"refresh_per_second must be above 0, but it is {refresh_per_second}")
        self.refresh_per_second = refresh_per_second
        self._is_rank_zero = True
        self._reset()

    def _reset(self) -> None:
        self._screen: Line | LogFile | None = None
        self._failed = False  # get_metrics
        self._next_draw = NEVER  # by the monotonic clock
        self._last_shown = -NEVER
        self._epoch: _Meter | None = None  # of the training epoch
        self._evaluation: _Meter | None = None
        self._epoch_index = 0
        self._done = 0  # batches of the epoch
        self._evaluated = 0  # batches of the evaluation
        self._run_done = 0  # batches of the epochs before it, in this process
        self._run_paused_s = 0.0  # time of this run that no training batch took
        self._paused_s_a_batch = 0.0  # over the epochs that have ended
        self._pause_began: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_screen": None, "_next_draw": NEVER}  # a copy shows nothing until its own run

    def hide(self) -> None:
        """Show nothing until the next `setup`."""
        self._close()
        self._screen, self._next_draw = None, NEVER

    def get_metrics(self, trainer: Trainer, module: Module) -> dict[str, Any]:
        """What the bar shows after its counts, on rank 0 when it is drawn; override it to show other values."""
        return dict(trainer.progress_bar_metrics)

    def print(self, *values: Any, **options: Any) -> None:
        """The builtin `print`, above the bar instead of into it; does nothing on ranks other than 0."""
        with self._or_silent():
            if self._screen is not None:
                self._screen.clear()
        if self._is_rank_zero:
            safe_print(*values, **options)
        with self._or_silent():
            if self._screen is not None:
                self._screen.restore()

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._reset()
        self._is_rank_zero = trainer.is_global_zero
        if self._is_rank_zero and sys.stderr is not None:
            with self._or_silent():
                redraws = "ipykernel.zmqshell" in sys.modules or (
                    sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
                )
                self._screen = Line(sys.stderr, 1.0 / self.refresh_per_second) if redraws else LogFile(sys.stderr)
                self._next_draw = 0.0

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._close()
        self._reset()

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._close()
        self._next_draw = NEVER

    # ---- training --------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        # Here, as a run that is resumed within an epoch does not start that again.
        self._start_epoch(trainer, trainer._run.progress.batches_seen)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._resume()
        self._finish_epoch(trainer)  # here, since what was logged at its end has been reduced by now
        self._start_epoch(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._done = batch_idx + 1
        if time.monotonic() >= self._next_draw:
            self._draw_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        self._pause()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._resume()
        self._finish_epoch(trainer, last=True)
        self._close()

    # ---- evaluation ------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._pause()
        if trainer.sanity_checking:
            self._start_evaluation(trainer, "Sanity check", math.inf)
        else:
            self._start_evaluation(trainer, "Validation", trainer.num_val_batches)

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated += 1
        if time.monotonic() >= self._next_draw:
            self._draw_evaluation(trainer)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._resume()
        if self._epoch is None and not trainer.sanity_checking:
            self._finish_evaluation(trainer)

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._start_evaluation(trainer, "Test", trainer._run.evaluation_batches["test"])

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._start_evaluation(trainer, "Predict", trainer._run.evaluation_batches["predict"])

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self._finish_evaluation(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end

    # ---- drawing ---------------------------------------------------------------------------------

    def _start_epoch(self, trainer: Trainer, first: int = 0) -> None:
        last_epoch = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
        label = f"Epoch {trainer.current_epoch + 1}" + (f"/{last_epoch}" if last_epoch else "")
        total = trainer.num_training_batches
        if trainer.max_steps is not None and trainer.max_steps >= 0:
            total = min(total, first + (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        self._epoch = _Meter(label, total, first)
        self._epoch_index, self._done = trainer.current_epoch, first
        if time.monotonic() >= self._next_draw:
            self._show(self._epoch, trainer)  # the first batch may take minutes

    def _draw_epoch(self, trainer: Trainer, gap_s: float = LOG_INTERVAL_S) -> None:
        if self._epoch is not None:
            self._epoch.update(self._done)
            self._show(self._epoch, trainer, gap_s)

    def _draw_evaluation(self, trainer: Trainer, gap_s: float = LOG_INTERVAL_S) -> None:
        if self._evaluation is not None:
            self._evaluation.update(self._evaluated)
            self._show(self._evaluation, trainer, gap_s)

    def _show(self, meter: _Meter, trainer: Trainer, gap_s: float = LOG_INTERVAL_S) -> None:
        now = time.monotonic()
        if self._screen is None or (gap_s == LOG_INTERVAL_S and now - self._last_shown < self._screen.interval_s):
            return
        is_epoch = meter is self._epoch
        metrics = self._metrics(trainer) if is_epoch or not gap_s else {}
        shown = meter.shown(self._run_seconds(trainer) if is_epoch else None, metrics)
        with self._or_silent():
            self._screen.show(shown, gap_s)
            self._last_shown, self._next_draw = now, now + self._screen.interval_s

    def _metrics(self, trainer: Trainer) -> dict[str, str]:
        """What `get_metrics` returns, as text; if that fails, none from then on, and one warning."""
        try:
            if trainer.lightning_module is None or self._failed:
                return {}
            return {n: _short(v) for n, v in self.get_metrics(trainer, trainer.lightning_module).items()}
        except Exception as error:
            self._failed = True
            what = f"{type(self).__name__}.get_metrics failed, and the bar shows no metrics"
            warnings.warn(f"{what}, training continues: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
            return {}

    @contextmanager
    def _or_silent(self) -> Iterator[None]:
        """Show nothing more if stderr is full, gone or closed: no reason to end a run."""
        try:
            yield
        except (OSError, ValueError):
            if self._screen is not None:
                self._screen.abandon()
            self._screen, self._next_draw = None, NEVER

    def _run_seconds(self, trainer: Trainer) -> float | None:
        """Seconds to the end of the run; None if they are not known, or if it ends with the epoch."""
        meter, left = self._epoch, []
        if meter is None or not meter.rate:
            return None
        if trainer.max_steps is not None and trainer.max_steps >= 0:
            left.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        if meter.total is not None and trainer.max_epochs is not None and trainer.max_epochs >= 0:
            left.append((trainer.max_epochs - self._epoch_index) * meter.total - meter.done)
        if not left or min(left) <= 0 or (meter.total is not None and min(left) <= meter.total - meter.done):
            return None
        return min(left) * (1 / meter.rate + self._paused_s_a_batch)

    def _start_evaluation(self, trainer: Trainer, label: str, totals: Sequence[float] | float) -> None:
        self._evaluation = _Meter(label, sum(totals) if isinstance(totals, Sequence) else totals)
        self._evaluated = 0
        if time.monotonic() >= self._next_draw:
            self._draw_evaluation(trainer)

    def _finish_evaluation(self, trainer: Trainer) -> None:
        self._draw_evaluation(trainer, gap_s=0.0)
        self._close()

    def _finish_epoch(self, trainer: Trainer, last: bool = False) -> None:
        """Count the epoch that has ended, and show it with its last metrics where that stays to be seen."""
        if self._epoch is None or self._done == self._epoch.first:
            return
        if last or (self._screen is not None and self._screen.keeps_epochs):
            self._draw_epoch(trainer, gap_s=0.0 if last else LOG_EPOCH_INTERVAL_S)
        self._run_done += self._done - self._epoch.first
        self._paused_s_a_batch = self._run_paused_s / max(1, self._run_done)

    def _pause(self) -> None:
        if self._epoch is not None and self._pause_began is None:
            self._pause_began = time.monotonic()

    def _resume(self) -> None:
        if self._epoch is not None and self._pause_began is not None:
            paused_s, self._pause_began = time.monotonic() - self._pause_began, None
            self._run_paused_s += paused_s
            self._epoch.skip(paused_s)

    def _close(self) -> None:
        with self._or_silent():
            if self._screen is not None:
                self._screen.close()


class _Meter:
    """Batches done of one loop, and their rate over the last `RATE_WINDOW_S` seconds."""

    def __init__(self, label: str, total: float, first: int = 0) -> None:
        self.label = label
        self.total = int(total) if math.isfinite(total) else None
        self.first = self.done = first  # batches done before
        self.began = time.monotonic()
        self._points: deque[tuple[float, int]] = deque([(self.began, first)])

    def update(self, done: int) -> None:
        now = time.monotonic()
        self.done = done
        self._points.append((now, done))
        while len(self._points) > 2 and now - self._points[1][0] > RATE_WINDOW_S:
            self._points.popleft()

    def skip(self, seconds: float) -> None:
        """Leave the last `seconds` out of the rate."""
        self._points = deque((when + seconds, done) for when, done in self._points)

    @property
    def rate(self) -> float | None:
        """Batches a second; None until one has been seen."""
        (began, first), (ended, last) = self._points[0], self._points[-1]
        return (last - first) / (ended - began) if last > first and ended > began else None

    def shown(self, run_s: float | None, metrics: Mapping[str, str]) -> dict[str, Any]:
        """What tqdm formats."""
        minutes, seconds = divmod(round(run_s or 0), 60)
        run = [] if run_s is None else [f"run<{minutes:02d}:{seconds:02d}"]
        return {
            "n": self.done,
            "total": self.total,
            "initial": self.first,
            "elapsed": time.monotonic() - self.began,
            "rate": self.rate,
            "prefix": self.label,
            "postfix": ", ".join([*run, *map("=".join, metrics.items())]),
        }


def _short(value: Any) -> str:
    if isinstance(value, int | str):
        return str(value)
    return f"{float(value):.4g}"  # waits for the device if the value is on one; only when drawn
