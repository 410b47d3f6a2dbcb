"""Start the ranks of one node, watch them, and bring rank 0's result home.

    launcher   the user's program: sends the work and supervises; never runs what the ranks run
    └─ server  torch is imported; forks the ranks and kills them when the launcher is gone
    (`strategies/launch/forkserver.py`)
       ├─ rank 0
       └─ rank 1 ...  each leads a process group, so that its data loader workers go with it
       (`strategies/launch/worker.py`)

A rank never imports the user's `__main__`: what is defined there arrives by value (`strategies/launch/payload.py`).
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lockstep.strategies.launch import forkserver, watchdog
from lockstep.strategies.launch.failure import (
    SAME_S,
    Failure,
    RankFailure,
    cut,
    raise_failure,
    signal_name,
    stop_error,
)
from lockstep.strategies.launch.payload import dumps, pack, unpack
from lockstep.strategies.launch.program.contexts import refuse_contexts, refuse_hooks_on_all
from lockstep.strategies.launch.program.state import library_state, program_state

T = TypeVar("T")
_log = logging.getLogger("lockstep")

_SETTLE_S = (
    0.2  # after a failure: others that failed at the same moment may still report, and the earliest is the one to name
)
_SETTLE_SECONDARY_S = (
    1.5  # while only consequences (a peer closed the connection) are known, the cause may be on its way out
)
_TERMINATE_S = (
    2.0  # from SIGTERM to SIGKILL for what is left; with the line above everything is gone within 4 s of a failure
)
_held: list[int] | None = None
"""Signals that wait for the end of `late_signals_held`."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to stop."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: "; if you did not send it, this was probably the kernel's out-of-memory killer",
    signal.SIGABRT: (
        "; gloo does so where ranks call different collectives, and NCCL's watchdog when one takes too long: if their "
        "error is above, look for code that one rank alone runs, as after `if trainer.is_global_zero`, and that calls "
        "one or reads a part of a sharded weight"
    ),
}
"""What a rank most likely died of."""
_STOPPED_S = 3.0  # after which a server that stands still by SIGSTOP is continued, and after twice as long given up


def launch(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    num_ranks: int,
    *,
    grace_s: float = 60.0,
    spare: Container[int] = (),
) -> T:
    """Run `fn(*args)` in `num_ranks` new processes on this node and return what it returned on rank 0.

    Each rank gets its own copy of `fn` and `args` (cloudpickle, so classes and functions of a notebook or an unguarded
    script work); the bytes of CPU tensors and numpy arrays are shared until written to. Ranks start with this process's
    working folder, environment, import path, warning filters, random number generators, garbage collector, default
    dtype, torch's numeric flags and what the program has changed in its modules, with cores / num_ranks threads each
    unless OMP_NUM_THREADS is set, without standard input, and find their place by `environment.detect()`.

    The exception of a rank is raised here as itself, its traceback there as the cause; a rank that was killed or just
    exited raises RankFailure. The other ranks then get SIGTERM and after 2 s SIGKILL, and so do processes that failed
    ranks have started. Called in the main thread, SIGINT, SIGTERM and SIGUSR1 are passed on to the ranks, which may
    finish their way within `grace_s` seconds; a third signal kills them. One that comes once rank 0 has reported
    reaches the program afterwards. Where a rank of `spare` is killed in a step, one line names it and the others
    continue; if they then fail for want of it, its RankFailure is raised.

    Raises TypeError for what cannot be pickled or holds the `id()` of a parameter, ValueError for `num_ranks` out of 1
    to 200, and within a context (autocast, a torch function mode, a default device) or with hooks on all modules, which
    ranks would not have.
    """
    if not 1 <= num_ranks <= forkserver.MAX_RANKS:
        raise ValueError(
            f"devices must be from 1 to {forkserver.MAX_RANKS}, the ranks that one node can start, but "
            f"devices={num_ranks}"
        )
    refuse_contexts("ranks")
    refuse_hooks_on_all()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, as in some daemons; gone; closed
            stream.flush()
    with ExitStack() as stack:
        server = forkserver.take(num_ranks)  # first: one that is new imports torch while the work is packed
        stack.callback(forkserver.give_back, server)
        program = pack(program_state())
        work = pack((fn, args, library_state()), refuse_ids=True)
        stack.callback(os.close, program)
        stack.callback(os.close, work)
        folder = tempfile.mkdtemp(prefix="lockstep-")  # only this user may enter it
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ranks = _Ranks(server, num_ranks, folder, program, work, spare)
        stack.callback(ranks.close)
        result: T = ranks.supervise(grace_s)
    if ranks.late and _held is not None:
        _held.append(ranks.late[0])
    elif ranks.late:
        signal.raise_signal(ranks.late[0])
    return result


@contextmanager
def late_signals_held() -> Iterator[None]:
    """While it lasts, a signal that came after the work of ranks waits: it reaches the program at the end, when the
    result is taken."""
    global _held
    before, _held = _held, []
    try:
        yield
    finally:
        held, _held = _held, before
        for number in held:
            signal.raise_signal(number)


class _Ranks:
    """The ranks of one launch, as the launcher sees them."""

    def __init__(
        self, server: forkserver.Server, num_ranks: int, folder: str, program: int, work: int, spare: Container[int]
    ) -> None:
        self.server, self.spare = server, spare
        self.folder = Path(folder)
        self.running = set(range(num_ranks))
        self.silent = set(self.running)  # have not reported how their work went
        self.open = set(self.running)  # may still report
        self.result: Any = None
        self.failures: list[Failure] = []
        self.lost: list[Failure] = []  # ranks that the others do without
        self.passed_on: list[int] = []  # signals that the launcher got
        self.late: list[int] = []  # those of them that came once rank 0 had reported
        self.requests: list[float] = []  # when: those close together once
        self.sent: list[int] = []  # signals to clean up
        self.stopped_since = math.inf  # the server, time.monotonic()
        self.watchdog = watchdog.Watchdog()
        self.terminate_at = self.kill_at = math.inf  # time.monotonic()
        for rank in self.running:
            Path(folder, f"{rank}.heartbeat").write_bytes(watchdog.FORMAT.pack(0, -1, 0, b""))
            for name in ("fatal", "stacks"):
                Path(folder, f"{rank}.{name}").touch()
        pairs = [socket.socketpair() for _ in range(1 + num_ranks)]
        self.control, *self.channels = (ours for ours, _ in pairs)
        for channel in self.channels:
            channel.setblocking(False)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            outputs = [fd if _is_open(fd) else null for fd in (1, 2)]
            server.start(
                folder, [pairs[0][1].fileno(), *outputs, program, work, *(theirs.fileno() for _, theirs in pairs[1:])]
            )
        except OSError as error:
            self.close()
            raise RankFailure(_server_died(server)) from error
        finally:
            os.close(null)
            for _, theirs in pairs:
                theirs.close()

    def supervise(self, grace_s: float) -> Any:
        """Wait until every rank has ended; return the result of rank 0 or raise what went wrong first."""
        with self._passing_on_signals(grace_s):
            while self.running:
                now = time.monotonic()
                self._wait_for_the_living(now, grace_s)
                for due, cleanup in ((self.terminate_at, signal.SIGTERM), (self.kill_at, signal.SIGKILL)):
                    if now >= due and cleanup not in self.sent:
                        self.sent.append(cleanup)
                        self._send(cleanup)
                self._look_for_hangs(grace_s)
                self._continue_server(now)
                timeout = min(
                    at - now for at in (now + self.watchdog.interval_s, self.terminate_at, self.kill_at) if at > now
                )
                ready = forkserver.readable([self.control, *(self.channels[rank] for rank in self.open)], timeout)
                for rank in [rank for rank in self.open if self.channels[rank] in ready]:
                    self._hear(rank, grace_s)
                if self.control in ready:
                    self._hear_ends(grace_s)
        if not self.failures:
            return self.result
        first = min(self.failures, key=lambda failure: (failure.secondary, failure.time))
        raise_failure(self.lost[-1] if self.lost and first.secondary else first, bool(self.passed_on))

    def close(self) -> None:
        """Leave no rank behind: the server kills what still runs when this end is shut, and shuts its own when all are
        gone."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
            self.control.settimeout(5.0)
            while self.control.recv(4096):
                pass
        for end in (self.control, *self.channels):
            end.close()

    @contextmanager
    def _passing_on_signals(self, grace_s: float) -> Iterator[None]:
        process = os.getpid()

        def pass_on(signum: int, frame: Any) -> None:
            if os.getpid() != process:  # a process that the launcher forked
                signal.signal(signum, previous[signum])
                signal.raise_signal(signum)
                return
            now = time.monotonic()
            if not self.passed_on or now - self.requests[-1] > SAME_S:
                self.requests.append(now)
            self.passed_on.append(signum)
            if 0 not in self.silent:
                self.late.append(signum)
            self._send(signum)
            self.kill_at = now if len(self.requests) >= 3 else min(self.kill_at, now + grace_s)

        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                    previous[signum] = signal.signal(signum, pass_on)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _send(self, signum: int) -> None:
        with suppress(OSError):  # the server is gone, and the ranks with it
            self.control.send(bytes([signum]))

    def _hear(self, rank: int, grace_s: float) -> None:
        """Take the report of a rank. Where its channel closes without one, its end will tell."""
        self.open.discard(rank)
        fds: list[int] = []
        with suppress(OSError):  # nothing there: processes that the rank forked may hold its channel open
            _, fds, _, _ = socket.recv_fds(self.channels[rank], 1, 1)
        if not fds:
            return
        self.silent.discard(rank)
        try:
            outcome = unpack(fds[0])
        except Exception as error:
            outcome = Failure(rank, time.monotonic(), *self._place(rank), message="")
            outcome.message = (
                f"rank {rank} returned what cannot be unpickled in the launcher ({type(error).__name__}: {error}): "
                "return data"
            )
        finally:
            os.close(fds[0])
        if isinstance(outcome, Failure):
            self._note(outcome, grace_s)
        elif rank == 0:
            self.result = outcome

    def _hear_ends(self, grace_s: float) -> None:
        data = self.control.recv(4096)
        while len(data) % forkserver.END.size:
            data += self.control.recv(forkserver.END.size - len(data) % forkserver.END.size)
        if not data:
            step, phase = self._place(0)
            raise RankFailure(_server_died(self.server), step=step, phase=phase)
        for rank, exitcode in forkserver.END.iter_unpack(data):
            self.running.discard(rank)
            if rank in self.open:
                self._hear(rank, grace_s)  # a report may have come just before the end
            if rank in self.silent:
                self.silent.discard(rank)
                self._died(rank, exitcode, grace_s)

    def _died(self, rank: int, exitcode: int, grace_s: float) -> None:
        if self.failures and -exitcode in self.sent:
            return  # by our hand, after what the failures tell
        step, phase = self._place(rank)
        place = watchdog.where(rank, step, phase).partition(", ")[2]
        place = f" ({place})" if place else ""
        failure = Failure(rank, time.monotonic(), step, phase, "", exitcode=exitcode)
        if -exitcode in self.sent and len(self.requests) >= 3:
            name = signal_name(self.passed_on[0])
            _log.warning("rank %d was killed at the third signal, %s, before it had stopped%s", rank, name, place)
            failure.stop, failure.error = True, dumps(stop_error(self.passed_on[0]))
        elif -exitcode in self.sent:
            failure.message = (
                f"rank {rank} had not ended {grace_s:g} s after {signal_name(self.passed_on[0])} and was killed{place}"
            )
        elif -exitcode in _STOPS:  # whoever sent it: the rank has no handler, or none yet, which is a way to end
            failure.stop, failure.error = True, dumps(stop_error(-exitcode))
        elif exitcode < 0:
            failure.text = cut((self.folder / f"{rank}.fatal").read_text(errors="replace"))
            failure.message = f"rank {rank} was killed by {signal_name(-exitcode)}{place}{_HINTS.get(-exitcode, '')}"
            if rank in self.spare and step is not None and not self.failures:
                self.lost.append(failure)
                _log.warning("%s", failure.message)
                return
        else:
            failure.message = f"rank {rank} exited with code {exitcode} before its work was done{place}"
        self._note(failure, grace_s)
        if failure.stop and not self.passed_on:  # it alone was signalled, so the others wait for it
            self._end_in(_SETTLE_S)

    def _wait_for_the_living(self, now: float, grace_s: float) -> None:
        """Put off the kill after a signal while a rank sends heartbeats: it ends a validation or writes a
        checkpoint."""
        if now < self.kill_at or self.failures or self.sent or len(self.requests) >= 3:
            return
        heartbeats = [watchdog.read(self.folder / f"{rank}.heartbeat") for rank in self.running]
        times = [heartbeat.time_ns / 1e9 for heartbeat in heartbeats if heartbeat.step is not None]
        self.kill_at = max([self.kill_at, *(time_s + grace_s for time_s in times)])

    def _continue_server(self, now: float) -> None:
        """Let the server run where something has stopped it: without it no signal reaches a rank, and no end of a rank
        the launcher."""
        if not self.server.is_stopped():
            self.stopped_since = math.inf
            return
        self.stopped_since = min(self.stopped_since, now)
        who = f"the process that starts the ranks (process {self.server.process.pid})"
        if now - self.stopped_since > 2 * _STOPPED_S:
            self.server.process.kill()
            raise RankFailure(
                f"{who} is stopped and does not continue at SIGCONT, so its ranks were ended: start again"
            )
        if now - self.stopped_since > _STOPPED_S:
            _log.warning("%s was stopped by a signal (SIGSTOP), and is continued", who)
            self.server.process.send_signal(signal.SIGCONT)

    def _place(self, rank: int) -> tuple[int | None, str]:
        heartbeat = watchdog.read(self.folder / f"{rank}.heartbeat")
        return heartbeat.step, heartbeat.phase

    def _look_for_hangs(self, grace_s: float) -> None:
        """Where no rank has sent a heartbeat for too long, the one that hangs has failed."""
        files = {rank: self.folder / f"{rank}.heartbeat" for rank in self.running}
        if self.failures or not self.watchdog.stalled(files.values()):
            return
        reports = watchdog.examine(files, {rank: self.folder / f"{rank}.stacks" for rank in files})
        if not reports:
            return
        first, *others = reports
        text = first.text(18) + "".join(f"\nbeside it {report.text(10)}" for report in others[:1])
        hint = f"the run was ended; if it is only slow, set {watchdog.VARIABLE} to more seconds"
        message = f"{first.headline(self.watchdog.limit_s)}; {hint}"
        self._note(Failure(first.rank, time.monotonic(), first.last.step, first.last.phase, message, text), grace_s)

    def _note(self, failure: Failure, grace_s: float) -> None:
        now = time.monotonic()
        if failure.stop and not self.sent:
            self.kill_at = min(self.kill_at, now + grace_s)
        else:
            failure.secondary |= failure.stop  # what our own SIGTERM brought about
            self._end_in(_SETTLE_SECONDARY_S if failure.secondary else _SETTLE_S)
        self.failures.append(failure)

    def _end_in(self, seconds: float) -> None:
        self.terminate_at = min(self.terminate_at, time.monotonic() + seconds)
        self.kill_at = min(self.kill_at, self.terminate_at + _TERMINATE_S)


def _server_died(server: forkserver.Server) -> str:
    code = server.process.wait()  # it has closed its sockets, so it is at its end
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    return (
        f"The process that starts the ranks {how}, and its ranks ended with it: see what it printed above, and start "
        "again"
    )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
