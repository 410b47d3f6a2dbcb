"""What this process does: for the report of a failure, the watchdog and fault injection."""

from __future__ import annotations

import faulthandler
import functools
import mmap
import os
from typing import Any

from lockstep.strategies.launch import fault_injection, watchdog

AFTER_BACKWARD, OPTIMIZER_STEP, END_OF_STEP, CALLBACKS = (
    "on_after_backward",
    "optimizer step",
    "end of the step",
    "callbacks",
)
"""Phases of a step in which users' hooks run, and the model does not."""
TRAINING_STEP = "training step"
_phase: tuple[int | None, str] = (None, "")
_heartbeat: mmap.mmap | None = None  # the same where the launcher can read it after this process was killed


def set_phase(step: int | None, phase: str) -> None:
    """Note what this process does, for the report of a failure and the watchdog: `set_phase(3, "training step")`.

    Costs half a microsecond. The watchdog counts the time since the last call in set-up and while `step` is a number.
    """
    global _phase
    _phase = step, phase
    if _heartbeat is not None:
        watchdog.write(_heartbeat, step, phase)
    if fault_injection.plan is not None:
        fault_injection.plan.enter(step, phase)


def current_phase() -> tuple[int | None, str]:
    """What this process gave to `set_phase` last."""
    return _phase


def _forget_heartbeat() -> None:
    """In a process that a rank forked: what it does is not what the rank does."""
    global _heartbeat
    _heartbeat = fault_injection.beat = None


os.register_at_fork(after_in_child=_forget_heartbeat)


def open_heartbeat(file: int, answers: Any, phase: str) -> None:
    """Show what this process does in `file` (a descriptor), and write stacks to the file `answers` when a watchdog
    asks."""
    global _heartbeat
    _heartbeat = mmap.mmap(file, watchdog.FORMAT.size)
    set_phase(None, phase)
    fault_injection.beat = functools.partial(watchdog.beat, _heartbeat)
    faulthandler.register(watchdog.STACKS, answers, all_threads=True)


def close_heartbeat() -> None:
    """Undo `open_heartbeat`."""
    _forget_heartbeat()
    faulthandler.unregister(watchdog.STACKS)
