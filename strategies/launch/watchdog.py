"""A run that stands still is found from outside of the ranks, where neither the GIL nor SIGSTOP can keep the watcher
from it.

Each rank keeps a heartbeat file in shared memory: its process, step and phase, and when it last said so (`set_phase` in
`strategies/launch/phase.py`). A watcher checks the heartbeat files: the launcher for the ranks that it started, a
small process beside each rank that torchrun, Slurm or MPI started (`strategies/launch/sidecar.py`), for which this file
is also a program (`python watchdog.py`), so it imports nothing but the standard library.

In steps time without a heartbeat counts. Set-up has no steps, so there a rank is also taken to live while it computes,
unless that is a collective that looks for the other ranks without a pause, and while it is in `prepare_data`, the place
of downloads; after the last step nothing counts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VARIABLE = "LOCKSTEP_WATCHDOG_S"
"""The environment variable with the seconds without a heartbeat after which a run is ended; 0 for never."""
DEFAULT_S = 300.0

FORMAT = struct.Struct("qqq120s")
"""Process id, global_step or -1, time.monotonic_ns() of the last heartbeat, phase."""
STACKS = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Asks a rank for the stacks of its threads: a signal that no program uses."""

STARTING, SETTING_UP = "starting", "setting up"
"""Phases without a step in which time counts."""

_WAITS = re.compile(
    r'File ".*(torch/distributed/|torch/autograd/graph\.py|strategies/(sync/|launch/process_group\.py))'
)
"""Innermost frames of a rank that waits for the others: it is not the one that hangs."""
_PREPARES = re.compile(r" in prepare_data$", re.MULTILINE)
"""A frame of a rank that may take any time."""
_COMPUTES = 0.05
"""The share of a core from which on a rank that is setting up computes; one that waits, and looks for what it waits
for, takes 0.01."""
_PATIENCE_S = 10.0
"""A rank that only waits for others is ended this much later, so that the one that hangs is reported first."""


class Heartbeat(NamedTuple):
    """What a rank said last: its heartbeat file."""

    pid: int
    step: int | None
    time_ns: int
    phase: str


def limit_s() -> float:
    """The seconds that a run may stand still; infinity for any time. Raises ValueError for a variable that is not a
    number of seconds."""
    text = os.environ.get(VARIABLE) or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(
            f"{VARIABLE} must be a number of seconds, or 0 for no watchdog, but it is {text!r}: correct it or unset it"
        )
    return seconds or float("inf")


def write(file: mmap.mmap, step: int | None, phase: str) -> None:
    """Say what this process does."""
    FORMAT.pack_into(file, 0, os.getpid(), -1 if step is None else step, time.monotonic_ns(), phase.encode()[:120])


def beat(file: mmap.mmap) -> None:
    """Say that this process lives, in the middle of a phase; any thread calls it."""
    struct.pack_into("q", file, _TIME, time.monotonic_ns())


_TIME = struct.calcsize("qq")


def read(path: Path | str) -> Heartbeat:
    """What a rank said last, also of one that is gone."""
    pid, step, time_ns, phase = FORMAT.unpack(Path(path).read_bytes())
    return Heartbeat(pid, None if step < 0 else step, time_ns, phase.rstrip(b"\0").decode(errors="replace"))


def where(rank: int, step: int | None, phase: str) -> str:
    return f"rank {rank}" + (f", step {step}" if step is not None else "") + (f", in {phase}" if phase else "")


class Watchdog:
    """Detects that all of some ranks have stopped. One that waits for another that works does not count as stopped."""

    def __init__(self) -> None:
        self.limit_s = limit_s()
        self.interval_s = min(1.0, self.limit_s / 4)
        """How often to look."""
        self._begin = self._looked = time.monotonic_ns()
        self._used: dict[int, float] = {}
        self._set_up: dict[int, tuple[int, int, bool]] = {}

    def stalled(self, files: Iterable[Path | str]) -> bool:
        """Whether none of these ranks has sent a heartbeat within the limit."""
        now = time.monotonic_ns()
        elapsed_s = (now - self._looked) / 1e9
        if elapsed_s < self.interval_s:
            return False
        if elapsed_s > self.interval_s + 5:
            self._begin = now  # this process stood still itself, as a suspended job does: begin to count again
        self._looked = now
        silent = [self._is_silent(file, read(file), now, elapsed_s) for file in files]
        return bool(silent) and all(silent)

    def _is_silent(self, file: Path | str, heartbeat: Heartbeat, now: int, elapsed_s: float) -> bool:
        if heartbeat.step is None:
            if heartbeat.phase not in (STARTING, SETTING_UP):
                return False
            used, before = _cpu_s(heartbeat.pid), self._used.get(heartbeat.pid, 0.0)
            self._used[heartbeat.pid] = used
            if used - before > _COMPUTES * elapsed_s and not self._spins(file, heartbeat.pid, now):
                _beat_for(file)
                return False
        return now - max(heartbeat.time_ns, self._begin) > self.limit_s * 1e9

    def _spins(self, file: Path | str, pid: int, now: int) -> bool:
        """Whether a rank that computes in a long set-up only waits for the others: NCCL looks for them without a
        pause."""
        limit_ns = self.limit_s * 1e9
        since, asked, spins = self._set_up.get(pid, (now, now, False))
        if now - since > 2 * limit_ns and now - asked > limit_ns / 4:  # seldom, as it costs a signal and half a second
            reports = examine({0: file}, {0: Path(file).with_suffix(".stacks")})
            asked, spins = now, bool(reports) and reports[0].waits
        self._set_up[pid] = since, asked, spins
        return spins


def _beat_for(path: Path | str) -> None:
    """A heartbeat in the name of a rank, for every watcher that reads its file."""
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), struct.pack("q", time.monotonic_ns()), _TIME)


def _cpu_s(pid: int) -> float:
    """Time of the CPU that a process and what it has started have used."""
    used = 0.0
    with suppress(OSError):  # it ends
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for child in _children(pid):
            used += _cpu_s(child) if child != os.getpid() else 0.0
    return used


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


class Report(NamedTuple):
    """What a rank does that stands still."""

    rank: int
    last: Heartbeat
    state: str
    """In words, from the kernel."""
    stacks: str
    """Of its threads, the main one first, and of what it forked; empty where it could not answer."""

    @property
    def order(self) -> tuple[int, int]:
        """The rank that hangs has the lowest: one that is stopped, else one that does not wait for others, else the
        first to fall silent."""
        return 0 if self.state.startswith("stopped") else 2 if self.waits else 1, self.last.time_ns

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, or is gone."""
        frames = [
            line for line in self.stacks.splitlines()[1:] if "/torch/_ops.py" not in line
        ]  # under functional collectives
        return bool(frames and _WAITS.search(frames[0])) or self.state in ("gone", "dead")

    def headline(self, limit_s: float) -> str:
        place = where(self.rank, self.last.step, self.last.phase).partition(", ")[2]
        return f"rank {self.rank} hangs ({place}): no heartbeat for {limit_s:g} s, and it is {self.state}"

    def text(self, num_lines: int) -> str:
        lines = [f"{where(self.rank, self.last.step, self.last.phase)}: {self.state}", *self.stacks.splitlines()]
        return "\n".join(
            lines
            if len(lines) <= num_lines
            else [*lines[: num_lines - 1], f"  ... {len(lines) - num_lines + 1} lines cut ..."]
        )


def examine(files: Mapping[int, Path | str], answers: Mapping[int, Path | str]) -> list[Report]:
    """What each of the ranks that stand still does; the one that hangs comes first. `answers`: the files that stacks
    are written to.

    Empty where one is in `prepare_data`, which counts as its heartbeat then.
    """
    heartbeats = {rank: read(file) for rank, file in files.items()}
    ends = {rank: os.path.getsize(answers[rank]) for rank in files}  # of what they have answered before
    asked = {rank: _ask(heartbeat.pid) for rank, heartbeat in heartbeats.items()}
    if any(asked.values()):
        time.sleep(0.3)  # the handlers are C and write at once; a process in the kernel answers later or never
    reports, preparing = [], []
    for rank, heartbeat in heartbeats.items():
        answer = Path(answers[rank]).read_bytes()[ends[rank] :].decode(errors="replace") if asked[rank] else ""
        if _PREPARES.search(answer):
            preparing.append(files[rank])
        reports.append(Report(rank, heartbeat, _state(heartbeat.pid), _main_first(answer)))
    for file in preparing:
        _beat_for(file)
    return [] if preparing else sorted(reports, key=lambda report: report.order)


def _ask(pid: int) -> bool:
    """Ask a process, and the workers that it forked, for their stacks; False where it has no handler or cannot run."""
    if not _answers(pid):
        return False
    with suppress(OSError):
        os.kill(pid, STACKS)
        time.sleep(0.1)  # its own come first in the file
        for child in _children(pid):
            if _answers(child):
                os.kill(child, STACKS)
    return True


def _status(pid: int) -> dict[str, str]:
    with suppress(OSError):
        return dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
    return {}


def _answers(pid: int) -> bool:
    status = _status(pid)
    return _handles(status) and not status["State"].startswith(("T", "t", "Z", "D"))


def _handles(status: dict[str, str]) -> bool:
    return bool(int(status.get("SigCgt", "0"), 16) >> (STACKS - 1) & 1)


def _state(pid: int) -> str:
    state = _status(pid).get("State", "gone")[:1]
    words = {
        "T": "stopped by a signal (SIGSTOP)",
        "t": "stopped by a debugger",
        "R": "computing",
        "S": "waiting",
        "D": "waiting in the kernel",
        "Z": "dead",
    }
    with suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text().strip()
        if state in "SD" and place not in ("", "0"):
            return f"{words[state]} (in {place})"
    return words.get(state, "gone")


def _main_first(dump: str) -> str:
    """Faulthandler's dumps of a process and its children, each from its newest thread to its main one: main threads
    first, cut to size."""
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


def _is_ours(file: int) -> bool:
    """Whether an open file is one that this user alone can have written."""
    status = os.fstat(file)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def remove(path: Path) -> None:
    """Delete the files of a rank that has a watchdog beside it."""
    for suffix in (".heartbeat", ".stacks"):
        with suppress(OSError):
            path.with_suffix(suffix).unlink()


def holder(file: int) -> int | None:
    """The process that holds the record lock of an open file, None for none; 0 for one that this machine or container
    does not see."""
    lock = struct.Struct("hhqqi")  # struct flock of Linux on machines of 64 bits
    kind, _, _, _, pid = lock.unpack(fcntl.fcntl(file, fcntl.F_GETLK, lock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _living(folder: Path, job: str) -> dict[int, Path]:
    """The files of a job's ranks that run."""
    found = {}
    for path in folder.glob(f"{job}-*.heartbeat"):
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            if _is_ours(file.fileno()) and holder(file.fileno()) == read(path).pid:
                found[int(path.stem.rpartition("-")[2])] = path
    return found


def main(folder: Path, name: str, num_local: int, num_nodes: int) -> None:
    """Watch the parent process, a rank, and its fellows until it ends; report and kill the one that hangs.

    The watcher of the first rank does so for all; another one only kills its own rank, later, where nobody has ended
    what is left.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(
            signum, signal.SIG_IGN
        )  # to all processes of a job: the rank continues until it is at the end of its step
    job, _, number = name.rpartition("-")
    rank, parent, watchdog = int(number), os.getppid(), Watchdog()
    elsewhere_s = (
        0.0 if num_nodes == 1 else watchdog.limit_s
    )  # more for what cannot be seen: ranks of other machines that work
    act_at, has_waited = 0.0, False
    while os.getppid() == parent:
        time.sleep(watchdog.interval_s)
        files = _living(folder, job)
        try:
            stalled = watchdog.stalled(files.values())
        except FileNotFoundError:  # a fellow has ended since
            continue
        if not stalled:
            act_at, has_waited = 0.0, False
            continue
        leads, now = rank == min(files), time.monotonic()
        act_at = act_at or (now if leads else now + elsewhere_s + 3 * _PATIENCE_S)
        if now < act_at:
            continue
        watched = files if leads else {rank: folder / f"{name}.heartbeat"}
        reports = examine(watched, {rank: file.with_suffix(".stacks") for rank, file in watched.items()})
        if not reports:
            continue
        num_missing = num_local - len(files)
        if leads and reports[0].waits and not has_waited and (elsewhere_s or num_missing):
            act_at, has_waited = now + (elsewhere_s or _PATIENCE_S), True
            continue
        with suppress(OSError, ValueError):  # a terminal that is gone must not keep the hang alive
            print(_report(reports, watchdog.limit_s, num_missing, num_local), file=sys.stderr, flush=True)
        _kill(reports[0].last.pid)
        if reports[0].rank == rank:
            break
        act_at = now + 3 * _PATIENCE_S
    remove(folder / name)


def _kill(pid: int) -> None:
    """A rank, and the workers that it forked, which would continue alone and hold its output open."""
    with suppress(OSError):
        workers = [child for child in _children(pid) if _handles(_status(child))]
        for each in (pid, *workers):
            os.kill(each, signal.SIGKILL)


def _report(reports: list[Report], limit_s: float, num_missing: int, num_local: int) -> str:
    first, *others = reports
    lines = [first.headline(limit_s)]
    if num_missing:
        lines.append(
            f"{num_missing} of the {num_local} ranks that were started with it have not reached the set-up of their "
            "strategy, or have ended"
        )
    return "\n".join([*lines, first.text(30), *(f"beside it {report.text(10)}" for report in others[:1])])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
