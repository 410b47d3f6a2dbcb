"""A run that stands still is found from outside of the ranks, where neither the GIL nor SIGSTOP can keep the watcher from it.

Each rank keeps a board in shared memory: its process, step and phase, and when it last said so (`set_phase` in
`strategies/rank.py`). A watcher looks at the boards: the launcher for the ranks that it started, a small process beside each rank
that torchrun, Slurm or MPI started, for which this file is also a program (`python watchdog.py`), so it imports no torch.

Time without a sign counts once steps have begun, and not while a rank says that it has no step: set-up may take as long as it does.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VARIABLE = "LOCKSTEP_WATCHDOG_S"
"""The environment variable with the seconds without a sign of life after which a run is ended; 0 for never."""
DEFAULT_S = 300.0

BOARD = struct.Struct("qqq120s")
"""Process id, global_step or -1, time.monotonic_ns() of the last sign, phase."""
STACKS = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Asks a rank for the stacks of its threads: a signal that no program uses."""

_WAITS = re.compile(r'File ".*(torch/distributed/|torch/autograd/graph\.py|strategies/control\.py)')
"""Innermost frames of a rank that waits for the others: it is not the one that hangs."""
_PATIENCE_S = 10.0
"""A rank that only waits for the others is ended this much later, so that the one that hangs is reported first."""


class Sign(NamedTuple):
    """What is on a rank's board."""

    pid: int
    step: int | None
    time_ns: int
    phase: str


def limit_s() -> float:
    """The seconds that a run may stand still; infinity for any time. Raises ValueError for a variable that is no number of seconds."""
    text = os.environ.get(VARIABLE) or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{VARIABLE} must be a number of seconds, or 0 for no watchdog, but it is {text!r}: correct it or unset it")
    return seconds or float("inf")


def write(board: mmap.mmap, step: int | None, phase: str) -> None:
    """Say what this process does."""
    BOARD.pack_into(board, 0, os.getpid(), -1 if step is None else step, time.monotonic_ns(), phase.encode()[:120])


def beat(board: mmap.mmap) -> None:
    """Say that this process lives, in the middle of a phase; any thread calls it."""
    struct.pack_into("q", board, 16, time.monotonic_ns())


def read(path: Path | str) -> Sign:
    """What a rank said last, also of one that is gone."""
    pid, step, time_ns, phase = BOARD.unpack(Path(path).read_bytes())
    return Sign(pid, None if step < 0 else step, time_ns, phase.rstrip(b"\0").decode(errors="replace"))


def where(rank: int, step: int | None, phase: str) -> str:
    return f"rank {rank}" + (f", step {step}" if step is not None else "") + (f", in {phase}" if phase else "")


class Watchdog:
    """Tells when all of some ranks stand still. One that waits for another that works is no reason for an alarm."""

    def __init__(self) -> None:
        self.limit_s = limit_s()
        self.interval_s = min(1.0, self.limit_s / 4)
        """How often to look."""
        self._begin = self._looked = time.monotonic_ns()

    def stalled(self, boards: Iterable[Path | str]) -> bool:
        """Whether none of these ranks has given a sign within the limit."""
        now = time.monotonic_ns()
        if now - self._looked < self.interval_s * 1e9:
            return False
        if now - self._looked > (self.interval_s + 5) * 1e9:
            self._begin = now  # this process stood still itself, as a suspended job does: begin to count again
        self._looked = now
        signs = [read(board) for board in boards]
        return bool(signs) and all(sign.step is not None and now - max(sign.time_ns, self._begin) > self.limit_s * 1e9 for sign in signs)


class Report(NamedTuple):
    """What a rank does that stands still."""

    rank: int
    sign: Sign
    state: str
    """In words, from the kernel."""
    stacks: str
    """Of its threads, the main one first, and of what it forked; empty where it could not answer."""

    @property
    def order(self) -> tuple[int, int]:
        """The rank that hangs has the lowest: one that is stopped, else one that does not wait for others, else the first to fall silent."""
        innermost = self.stacks.splitlines()[1:2]
        return (0 if self.state.startswith("stopped") else 2 if not innermost or _WAITS.search(innermost[0]) else 1), self.sign.time_ns

    def headline(self, limit_s: float) -> str:
        place = where(self.rank, self.sign.step, self.sign.phase).partition(", ")[2]
        return f"rank {self.rank} hangs ({place}): no sign of life for {limit_s:g} s, and it is {self.state}"

    def text(self, num_lines: int) -> str:
        lines = [f"{where(self.rank, self.sign.step, self.sign.phase)}: {self.state}", *self.stacks.splitlines()]
        return "\n".join(lines if len(lines) <= num_lines else [*lines[: num_lines - 1], f"  ... {len(lines) - num_lines + 1} lines cut ..."])


def examine(boards: Mapping[int, Path | str], answers: Mapping[int, Path | str]) -> list[Report]:
    """What each of the ranks that stand still does; the one that hangs comes first. `answers`: the files that stacks are written to."""
    signs = {rank: read(board) for rank, board in boards.items()}
    asked = {rank: _ask(sign.pid) for rank, sign in signs.items()}
    if any(asked.values()):
        time.sleep(0.3)  # the handlers are C and write at once; a process in the kernel answers later or never
    reports = []
    for rank, sign in signs.items():
        stacks = _main_first(Path(answers[rank]).read_text(errors="replace")) if asked[rank] else ""
        reports.append(Report(rank, sign, _state(sign.pid), stacks))
    return sorted(reports, key=lambda report: report.order)


def _ask(pid: int) -> bool:
    """Ask a process, and the workers that it forked, for their stacks; False where it has no handler or cannot run."""
    if not _answers(pid):
        return False
    with suppress(OSError):
        os.kill(pid, STACKS)
        time.sleep(0.1)  # its own come first in the file
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if _answers(int(child)):
                    os.kill(int(child), STACKS)
    return True


def _status(pid: int) -> dict[str, str]:
    with suppress(OSError):
        return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return {}


def _answers(pid: int) -> bool:
    status = _status(pid)
    return bool(status) and not status["State"].startswith(("T", "t", "Z", "D")) and bool(int(status["SigCgt"], 16) >> (STACKS - 1) & 1)


def _state(pid: int) -> str:
    state = _status(pid).get("State", "gone")[:1]
    words = {"T": "stopped by a signal (SIGSTOP)", "t": "stopped by a debugger", "R": "computing", "S": "waiting", "D": "waiting in the kernel", "Z": "dead"}
    with suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text().strip()
        if state in "SD" and place not in ("", "0"):
            return f"{words[state]} (in {place})"
    return words.get(state, "gone")


def _main_first(dump: str) -> str:
    """Faulthandler's dumps of a process and its children, each from its newest thread to its main one: main threads first, cut to size."""
    dumps: list[list[str]] = [[]]
    for thread in re.findall(r"^(?:Current t|T)hread .*\n(?: .*\n?)*", dump, re.MULTILINE):
        if any(_ident(other) == _ident(thread) for other in dumps[-1]):  # a fork keeps the ids of threads
            dumps.append([])
        dumps[-1].append("\n".join(thread.splitlines()[: 7 if len(dumps) > 1 else 10]) + "\n")
    mains = [found.pop() for found in dumps if found]
    return "".join([*mains, *(thread for found in dumps for thread in reversed(found))])


def _ident(thread: str) -> str:
    match = re.search(r"0x\w+", thread)
    return match[0] if match else ""


# ---- beside a rank that another launcher started ---------------------------------------------------------


def main(rank: int, board: int, answer: int) -> None:
    """Watch the parent process until it ends; report and kill it when it stands still. `board`, `answer`: its open files."""
    parent, watchdog = os.getppid(), Watchdog()
    path, stacks = f"/proc/self/fd/{board}", f"/proc/self/fd/{answer}"
    patience = 0.0
    while os.getppid() == parent:
        time.sleep(watchdog.interval_s)
        if not watchdog.stalled([path]):
            continue
        (report,) = examine({rank: path}, {rank: stacks})
        if report.order[0] == 2 and not patience:
            patience = _PATIENCE_S
            watchdog.limit_s += patience
            os.ftruncate(answer, 0)
            continue
        print(f"{report.headline(watchdog.limit_s)}\n{report.text(30)}", file=sys.stderr, flush=True)
        os.kill(parent, signal.SIGKILL)
        return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
