"""How far a run is, how fast it goes and when it will end: on a terminal, in a notebook, in a log file."""

from __future__ import annotations

import math
import os
import sys
import time
import unicodedata
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

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
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 5, 25
NEVER = math.inf


class ProgressBar(Callback):
    """Shows epoch, batches, rate, elapsed time, time left and the metrics logged with `prog_bar=True`, on rank 0, on
    stderr.

    On a terminal one line is redrawn in place; in a notebook one output is updated; elsewhere a plain line
    is written every 30 seconds and at the end of each epoch. The time left of the epoch counts its training
    batches at the rate of the last 30 seconds; that of the run adds the pauses of the epochs before (validation,
    checkpoints) in proportion. If stderr cannot be written to, the bar falls silent.

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
        self._screen: _Screen | None = None
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

    def print(self, *values: Any, **options: Any) -> None:
        """The builtin `print`, above the bar instead of into it; does nothing on ranks other than 0."""
        if self._screen is not None:
            try:
                self._screen.clear()
            except (OSError, ValueError):  # stderr is gone; what is printed may go elsewhere
                self._screen, self._next_draw = None, NEVER
        if self._is_rank_zero:
            safe_print(*values, **options)
        if self._screen is not None:
            try:
                self._screen.restore()
            except (OSError, ValueError):
                self._screen, self._next_draw = None, NEVER

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._reset()
        self._is_rank_zero = trainer.is_global_zero
        if self._is_rank_zero and sys.stderr is not None:
            try:
                self._screen = _screen(sys.stderr, 1.0 / self.refresh_per_second)
                self._next_draw = 0.0
            except (OSError, ValueError):  # stderr is closed
                pass

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._close()
        self._reset()

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._close()
        self._next_draw = NEVER

    # ---- training --------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._start_epoch(trainer)  # a run that is resumed within an epoch does not start that again

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

    def on_test_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated += 1
        if time.monotonic() >= self._next_draw:
            self._draw_evaluation(trainer)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._finish_evaluation(trainer)

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._start_evaluation(trainer, "Predict", trainer._run.evaluation_batches["predict"])

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated += 1
        if time.monotonic() >= self._next_draw:
            self._draw_evaluation(trainer)

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self._finish_evaluation(trainer)

    # ---- drawing ---------------------------------------------------------------------------------

    def _start_epoch(self, trainer: Trainer) -> None:
        first = self._epoch is None or not self._done
        last_epoch = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
        label = f"Epoch {trainer.current_epoch + 1}" + (f"/{last_epoch}" if last_epoch else "")
        # A resumed run may begin within an epoch, at a batch that the first draw tells.
        self._epoch = _Meter(label, trainer.num_training_batches, None if first else 0)
        self._epoch_index = trainer.current_epoch
        self._done = 0
        if time.monotonic() >= self._next_draw:
            self._show(self._epoch, trainer)  # the first batch may take minutes
        if first and self._screen is not None:
            self._next_draw = 0.0  # that batch tells where the epoch began

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
        metrics = trainer.progress_bar_metrics if is_epoch or not gap_s else {}
        try:
            self._screen.show(
                _parts(meter, self._run_seconds(trainer) if is_epoch else None, metrics), meter.fraction, gap_s
            )
        except (OSError, ValueError):  # stderr is full, gone or closed: no reason to end a run
            self._screen, self._next_draw = None, NEVER
        else:
            self._last_shown, self._next_draw = now, now + self._screen.interval_s

    def _run_seconds(self, trainer: Trainer) -> float | None:
        """Seconds to the end of the run; None if they are not known, or if it ends with the epoch."""
        meter, left = self._epoch, []
        if meter is None or meter.first is None or not meter.rate:
            return None
        if trainer.max_steps is not None and trainer.max_steps >= 0:
            left.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        if meter.total is not None and trainer.max_epochs is not None and trainer.max_epochs >= 0:
            left.append((trainer.max_epochs - self._epoch_index) * meter.total - meter.done)
        if not left or min(left) <= 0 or (meter.total is not None and min(left) <= meter.total - meter.done):
            return None
        return min(left) * (1 / meter.rate + self._paused_s_a_batch)

    def _start_evaluation(self, trainer: Trainer, label: str, totals: Sequence[float] | float) -> None:
        self._evaluation = _Meter(label, sum(totals) if isinstance(totals, Sequence) else totals, 0)
        self._evaluated = 0
        if time.monotonic() >= self._next_draw:
            self._draw_evaluation(trainer)

    def _finish_evaluation(self, trainer: Trainer) -> None:
        self._draw_evaluation(trainer, gap_s=0.0)
        self._close()

    def _finish_epoch(self, trainer: Trainer, last: bool = False) -> None:
        """Count the epoch that has ended, and show it with its last metrics where that stays to be seen."""
        if self._epoch is None or not self._done:
            return
        if last or (self._screen is not None and self._screen.keeps_epochs):
            self._draw_epoch(trainer, gap_s=0.0 if last else LOG_EPOCH_INTERVAL_S)
        self._run_done += self._done - (self._epoch.first or 0)
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
        if self._screen is not None:
            try:
                self._screen.close()
            except (OSError, ValueError):
                self._screen = None


class _Meter:
    """Batches done of one loop, and their rate over the last `RATE_WINDOW_S` seconds."""

    def __init__(self, label: str, total: float, first: int | None) -> None:
        self.label = label
        self.total = int(total) if math.isfinite(total) else None
        self.first = first  # batches done before; None: the one before the first `update`
        self.done = first or 0
        self.began = time.monotonic()
        self._points: deque[tuple[float, int]] = deque()
        if first is not None:
            self._points.append((self.began, first))

    def update(self, done: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = max(0, done - 1)
            self._points.append((self.began, self.first))
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
        if not self._points:
            return None
        (began, first), (ended, last) = self._points[0], self._points[-1]
        return (last - first) / (ended - began) if last > first and ended > began else None

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None


class _Screen(ABC):
    """Where progress is shown."""

    interval_s: float
    """Seconds to the next `show` at least."""
    keeps_epochs = False
    """Whether an epoch that has ended stays visible."""

    @abstractmethod
    def show(self, parts: list[str], fraction: float | None, gap_s: float) -> None:
        """Show the parts of the line; where lines stay, only `gap_s` seconds after the one before. Raises OSError or
        ValueError."""

    def clear(self) -> None:  # noqa: B027 - lines that stay need nothing
        """Make room for what the user wants to print. Raises OSError or ValueError."""

    def restore(self) -> None:  # noqa: B027
        """Show again what `clear` removed. Raises OSError or ValueError."""

    @abstractmethod
    def close(self) -> None:
        """Leave the line as it is and continue below."""


class _Terminal(_Screen):
    """One line, drawn over itself."""

    def __init__(self, stream: TextIO, interval_s: float) -> None:
        self.interval_s = interval_s
        self._stream = stream
        self._line = self._cleared = ""
        self._blocks = ("█", "░") if "utf" in (getattr(stream, "encoding", None) or "").lower() else ("#", ".")

    def show(self, parts: list[str], fraction: float | None, gap_s: float) -> None:
        # Two columns stay free: a terminal wraps a line that fills it, and what the user prints begins after a space.
        self._draw(_fit(parts, fraction, _columns(self._stream) - 2, self._blocks))

    def clear(self) -> None:
        self._cleared = self._line
        if self._line:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()

    def restore(self) -> None:
        if self._cleared:
            self._draw(self._cleared)

    def close(self) -> None:
        if self._line:
            self._line = ""
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, line: str) -> None:
        rest = " " * max(0, _width(self._line) - _width(line))
        self._line = line
        self._stream.write(f"\r{line}{rest} ")
        self._stream.flush()


class _Notebook(_Screen):
    """One output of a cell, updated in place."""

    def __init__(self, display: Any, interval_s: float) -> None:
        self.interval_s = interval_s
        self._display = display
        self._handle: Any = None

    def show(self, parts: list[str], fraction: float | None, gap_s: float) -> None:
        data = {"text/plain": _fit(parts, fraction, 100, ("█", "░"))}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        self._handle = None


class _LogFile(_Screen):
    """Plain lines, now and then."""

    keeps_epochs = True
    interval_s = 1.0  # a second apart, so that the rate has its samples

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = time.monotonic()

    def show(self, parts: list[str], fraction: float | None, gap_s: float) -> None:
        now = time.monotonic()
        if now - self._last < gap_s:
            return
        self._last = now
        self._stream.write(_joined(parts, fraction) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


def _screen(stream: TextIO, interval_s: float) -> _Screen:
    if "IPython" in sys.modules:
        from IPython import get_ipython
        from IPython.display import display

        if getattr(get_ipython(), "kernel", None) is not None:
            return _Notebook(display, interval_s)
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return _Terminal(stream, interval_s) if is_terminal else _LogFile(stream)


def _parts(meter: _Meter, run_s: float | None, metrics: Mapping[str, Any]) -> list[str]:
    """Return label, batches, rate, times and metrics; parts that are not known are empty."""
    rate, left = meter.rate, ""
    if rate and meter.total is not None and meter.total > meter.done:
        left = f" ETA {_clock((meter.total - meter.done) / rate)}"
    if run_s is not None:
        left += f" (run {_clock(run_s)})"
    return [
        meter.label,
        "" if meter.first is None else f"{meter.done}/{'?' if meter.total is None else meter.total}",
        "" if not rate else f"{rate:.1f} it/s" if rate >= 1 else f"{1 / rate:.1f} s/it",
        f"{_clock(time.monotonic() - meter.began)}{left}",
        " ".join(f"{name}={_short(value)}" for name, value in metrics.items()),
    ]


def _fit(parts: list[str], fraction: float | None, columns: int, blocks: tuple[str, str]) -> str:
    """Return the parts as one line of at most `columns`, with a bar behind the label if there is room, else with a
    percentage."""
    label, *rest = parts
    text = "  ".join(filter(None, rest))
    room = min(MAX_BAR_WIDTH, columns - _width(f"{label}    {text}"))
    if fraction is not None and room >= MIN_BAR_WIDTH:
        filled = int(fraction * room)
        line = f"{label}  {blocks[0] * filled}{blocks[1] * (room - filled)}  {text}"
    else:
        line = _joined(parts, fraction)
    while _width(line) > columns:
        line = line[:-1]
    return line


def _joined(parts: list[str], fraction: float | None) -> str:
    label, *rest = parts
    return "  ".join(filter(None, (label, "" if fraction is None else f"{math.floor(100 * fraction)}%", *rest)))


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _width(text: str) -> int:
    """Columns that a terminal gives `text`."""
    return (
        len(text)
        if text.isascii()
        else sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _short(value: Any) -> str:
    if isinstance(value, int | str):
        return str(value)
    return f"{float(value):.4g}"  # waits for the device if the value is on one; only when drawn
