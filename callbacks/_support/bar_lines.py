"""Where a progress bar is drawn: one line that tqdm redraws, or the lines of a log file."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, TextIO

MAX_COLUMNS = 100


class Line:
    """One line that tqdm redraws."""

    keeps_epochs = False
    """Whether an epoch that has ended stays visible."""

    def __init__(self, stream: TextIO, interval_s: float) -> None:
        self.interval_s = interval_s
        """Seconds to the next `show` at least."""
        self._stream = stream
        self._bar: Any = None

    def show(self, shown: dict[str, Any], gap_s: float) -> None:
        if self._bar is None:
            self._bar = _bar(self._stream, shown)
            return
        self._bar.shown, self._bar.n, self._bar.total = shown, shown["n"], shown["total"]
        if hasattr(self._bar, "container"):  # the widget of a notebook has a length of its own
            self._bar.container.children[1].max = shown["total"] or 1
        self._bar.refresh()

    def clear(self) -> None:
        if self._bar is not None:
            self._bar.clear()

    def restore(self) -> None:
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Leave the line as it is and continue below."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.close()

    def abandon(self) -> None:
        if self._bar is not None:
            self._bar.disable = True  # else it writes when it is collected


class LogFile:
    """Plain lines, now and then."""

    keeps_epochs = True
    interval_s = 1.0  # a second apart, so that the rate has its samples

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = time.monotonic()

    def show(self, shown: dict[str, Any], gap_s: float) -> None:
        """Write a line, unless less than `gap_s` seconds have passed since the one before."""
        from tqdm import tqdm

        now = time.monotonic()
        if now - self._last >= gap_s:
            self._last = now
            self._stream.write(tqdm.format_meter(**shown, ncols=0) + "\n")
            self._stream.flush()

    def clear(self) -> None:
        pass

    restore = close = abandon = clear


def _bar(stream: TextIO, first: dict[str, Any]) -> Any:
    """A bar of tqdm that shows what it is given; draws `first`."""
    from tqdm.auto import tqdm  # here, as it looks whether this is a notebook

    class Bar(tqdm):
        monitor_interval = 0  # starts no thread
        shown = first

        @property
        def format_dict(self) -> dict[str, Any]:
            known = super().format_dict
            # Two columns stay free: a terminal wraps a full line, and what the user prints begins after a space.
            columns = min(_columns(stream) - 2, MAX_COLUMNS) if known["ncols"] else None
            return {**known, **self.shown, "ncols": columns}

        def __str__(self) -> str:
            return f"{super().__str__()} "

    Bar.set_lock(threading.RLock())  # tqdm's own is shared by processes
    # tqdm hides its bar on a terminal that does not know its size.
    size = {"ncols": MAX_COLUMNS, "nrows": 20} if stream.isatty() else {}
    return Bar(total=first["total"], file=stream, **size)


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
