"""SIGTERM, SIGINT and SIGUSR1 during a run: at once before its first step, with a checkpoint once one is under way."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.strategies.launch import environment
from lockstep.strategies.launch.failure import SAME_S, stop_error


def end_in_one_line(error: KeyboardInterrupt) -> None:
    """Let a script in which nothing catches `error` end with one line, not a traceback; its exit code stays 130."""
    error.ends_in_one_line = True  # type: ignore[attr-defined]
    if getattr(sys.excepthook, "__func__", None) is not _Hook.show:
        sys.excepthook = _Hook(sys.excepthook).show


@dataclass
class _Hook:
    before: Callable[..., Any]

    def show(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if getattr(value, "ends_in_one_line", False):
            print("lockstep: interrupted", file=sys.stderr)
        else:
            self.before(kind, value, trace)


class Signals:
    """What signals do to this process from the start of a run to its end. Only the main thread can catch them.

    Before the first step a signal ends the run at once: there is nothing to save. From the first step on it is only
    noted in `number`, and the loop stops where all ranks agree to. A process that is not one of the launcher's ranks
    ends at once at a second SIGINT or a third signal of any kind; the launcher does that for its ranks.
    """

    def __init__(self) -> None:
        self.number = 0
        """The first signal that asked the run to stop; 0 for none."""
        self.deferred = False
        """Whether a signal waits for the loop."""
        self._previous: dict[int, Any] = {}
        self.launched = False
        """Whether this process is a rank of the launcher."""
        self._pid = 0
        self._count = 0
        self._last = 0.0

    def catch(self) -> None:
        """A run begins: from here on a signal ends it at once. Within the run of another Trainer that run's rules
        stay."""
        if threading.current_thread() is not threading.main_thread():
            self.number = 0
            return
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Signals):
            return
        self.number = self._count = 0
        self.deferred = False
        self._pid = os.getpid()
        self.launched = environment.started_by_lockstep()
        own = signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL  # the program's, which means something else by it
        numbers = (signal.SIGTERM, signal.SIGINT) if own else (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        for number in numbers:
            # A rank of the launcher dies of it, even where it waits for other ranks in native code; the launcher knows
            # why.
            self._previous[number] = signal.signal(number, signal.SIG_DFL if self.launched else self._on_signal)

    def defer(self) -> None:
        """From here on a signal is only noted."""
        self.deferred = True
        if self.launched:
            for number in self._previous:
                signal.signal(number, self._on_signal)

    def give_back(self) -> None:
        """The run is over: the handlers from before it count again."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def error(self) -> BaseException:
        """What ends the program with 130 after SIGINT, else with 143."""
        return stop_error(self.number)

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a process that this one forked, such as a worker of the user's
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
            return
        now = time.monotonic()
        first, again = not self.number, now - self._last > SAME_S
        self._last = now
        if first:
            self.number = number
        self._count += first or again
        if first and not self.deferred:
            raise self.error()
        if not self.launched and self._count >= (2 if number == signal.SIGINT else 3):
            raise self.error()

    def __getstate__(self) -> dict[str, Any]:
        """A copy that travels to a rank has caught nothing."""
        return vars(Signals())
