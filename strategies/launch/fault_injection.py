"""Faults on purpose: a rank that is killed, stopped, slowed or lied to at a stated place, to see a run survive it.

    LOCKSTEP_FAULTS="rank=1,step=3,point=backward,action=sigkill" lockstep fit ...

The places are in the product code, as what is tested must be what runs. How to add one, at a place that is not in every
step:

    from lockstep.strategies.launch.fault_injection import fault

    fault("save.write")  # returns at once where no plan is on

In a step call `set_phase(step, phase)` (`strategies/launch/phase.py`), which reaches the point of that phase, or spare
the call:

    if fault_injection.plan is not None:
        fault_injection.fault("backward")

A plan is read once, when a strategy sets its rank up, and ends with the strategy's teardown.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VARIABLE = "LOCKSTEP_FAULTS"
"""The environment variable that holds the plan."""

POINTS = (
    "setup",
    "next_batch",
    "forward",
    "backward",
    "collective",
    "before_step",
    "after_step",
    "callback",
    "save.snapshot",
    "save.open",
    "save.write",
    "save.fsync",
    "save.rename",
    "save.manifest",
    "verify",
    "teardown",
)
"""Where a strategy sets its rank up, before a batch is fetched, before the first forward and the backward of a step,
between the two halves of its control message, before and after the optimizers step, before `on_train_batch_end`, at the
stages of a save, while the bytes of a checkpoint are verified, and where a strategy leaves."""

_PHASES = {
    "loading data": "next_batch",
    "training step": "forward",
    "optimizer step": "before_step",
    "end of the step": "after_step",
    "callbacks": "callback",
}
"""The phases of the loop that are points."""

_SIGNALS = ("sigkill", "sigstop", "sigterm")
_ERRNOS = ("enospc", "eio", "erofs")
ACTIONS = ("raise", *_SIGNALS, "sleep", "hold_gil", *_ERRNOS, "nan")
"""RuntimeError; a signal to this process; a pause of `seconds` without and with the GIL held; OSError; a loss that is
NaN (at forward)."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    point: str
    action: str
    rank: int | None = None
    """The rank that it happens on, None for every rank."""
    step: int | None = None
    """The `global_step` in which it happens, None for the first time that the point is reached."""
    times: int = 1
    """How often it happens, over all ranks and restarts where `file` is given, else in each process."""
    seconds: float = 3600.0
    """Of sleep and hold_gil."""
    file: str | None = None
    """Where the times are counted, so that a fault does not come back after a restart."""


class FaultPlan:
    """The faults of one rank, and how often each has happened."""

    def __init__(self, faults: list[Fault], rank: int) -> None:
        self._faults = [(i, fault) for i, fault in enumerate(faults) if fault.rank in (None, rank)]
        self._happened = [0] * len(faults)
        self._poisons = False
        self.step: int | None = None
        """The step that `set_phase` got last."""

    def enter(self, step: int | None, phase: str) -> None:
        """What `set_phase` got; without a step the last one stays."""
        self.step = self.step if step is None else step
        if phase in _PHASES:
            self.reach(_PHASES[phase])

    def reach(self, point: str) -> None:
        """Do what is planned for `point` in this step."""
        for i, fault in self._faults:
            if fault.point == point and fault.step in (None, self.step) and self._claim(i, fault):
                self._act(fault)

    def poison(self, value: Any) -> Any:
        """The loss, or NaN in its place where that is planned."""
        if not self._poisons:
            return value
        self._poisons = False
        return value * math.nan

    def _claim(self, i: int, fault: Fault) -> bool:
        """Whether it is to happen once more; counted on the disk before it does."""
        if fault.file is None:
            self._happened[i] += 1
            return self._happened[i] <= fault.times
        with open(fault.file, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if file.read().split().count(str(i).encode()) >= fault.times:
                return False
            file.write(f"{i}\n".encode())
            return True

    def _act(self, fault: Fault) -> None:
        where = f"at {fault.point}" + (f" of step {self.step}" if self.step is not None else "")
        if fault.action in _SIGNALS:
            os.kill(os.getpid(), getattr(signal, fault.action.upper()))
        elif fault.action in _ERRNOS:
            number = getattr(errno, fault.action.upper())
            raise OSError(number, f"{os.strerror(number)} (planned by {VARIABLE} {where})")
        elif fault.action == "sleep":
            time.sleep(fault.seconds)
        elif fault.action == "hold_gil":
            end = time.monotonic() + fault.seconds
            while (left := end - time.monotonic()) > 0:  # a signal ends the call, not the fault
                ctypes.PyDLL(None).usleep(int(left * 1e6))
        elif fault.action == "nan":
            self._poisons = True
        else:
            raise RuntimeError(f"planned by {VARIABLE} {where}")


plan: FaultPlan | None = None
"""The plan that is on in this process, mostly None."""
beat: Callable[[], None] | None = None
"""Called by `fault`: a heartbeat from what takes long, such as a large save. `strategies/launch/phase.py` sets it."""


def fault(point: str) -> None:
    """Say that this process is at `point`, one of `POINTS`; any thread of any rank calls it. Raises what the plan
    wants."""
    if beat is not None:
        beat()
    if plan is not None:
        plan.reach(point)


def load(rank: int) -> None:
    """Turn the plan of the environment on for this rank. Raises ValueError for one that cannot be read."""
    global plan
    faults = parse(os.environ)
    plan = FaultPlan(faults, rank) if faults else None
    fault("setup")


def unload() -> None:
    """Turn the plan off."""
    global plan
    plan = None


def parse(environ: Mapping[str, str]) -> list[Fault]:
    """The faults in `LOCKSTEP_FAULTS`: JSON objects in a list, or `key=value,...` with `;` between faults. Raises
    ValueError."""
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return []
    try:
        if text.startswith(("[", "{")):
            found = json.loads(text)
            entries = found if isinstance(found, list) else [found]
        else:
            entries = [
                dict(item.split("=", 1) for item in entry.split(",")) for entry in text.split(";") if entry.strip()
            ]
        return [_fault({str(key).strip(): value for key, value in entry.items()}) for entry in entries]
    except (ValueError, TypeError, AttributeError) as error:
        example = "rank=1,step=3,point=backward,action=sigkill"
        raise ValueError(
            f"{VARIABLE} must hold faults such as {example}, but it is {text!r} ({error}): correct it or unset it"
        ) from None


def _fault(entry: dict[str, Any]) -> Fault:
    unknown = set(entry) - set(Fault.__annotations__)
    if unknown:
        raise ValueError(f"it has no {', '.join(sorted(unknown))}, only {', '.join(Fault.__annotations__)}")
    for name, known in (("point", POINTS), ("action", ACTIONS)):
        entry[name] = str(entry.get(name, "")).strip().lower()
        if entry[name] not in known:
            raise ValueError(f"{name}={entry[name]!r} is not one of {', '.join(known)}")
    if entry["action"] == "nan" and entry["point"] != "forward":
        raise ValueError("action=nan needs point=forward, where the loss is made")
    for name, kind, least in (("rank", int, 0), ("step", int, 0), ("times", int, 1), ("seconds", float, 0)):
        if name in entry:
            entry[name] = kind(entry[name])
            if not least <= entry[name] < 1e9:
                raise ValueError(f"{name}={entry[name]} must be at least {least}")
    if "file" in entry and not os.path.isdir(os.path.dirname(os.path.abspath(entry["file"]))):
        raise ValueError(f"file={entry['file']!r} is in no folder")
    return Fault(**entry)
