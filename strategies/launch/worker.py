"""A rank started by `launcher.launch`: take over the program's state, do the work, report the result or what went
wrong."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import hashlib
import importlib
import logging
import math
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lockstep.strategies.launch import environment, fault_injection, watchdog
from lockstep.strategies.launch.payload import dumps, pack, unpack
from lockstep.strategies.launch.rng import restore_streams, stream_states

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Blocked in the server, so that none is lost between the fork of a rank and its own handlers."""

_MAX_TRACEBACK_LINES = 30  # the launcher's own frames and the message come on top, 60 together
_MAX_MESSAGE_LINES = 8
_MAX_LINE_LENGTH = 1000

# ---- what this process is doing ------------------------------------------------------------------------

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


def guard(rank: int) -> Callable[[], None]:
    """Start a watchdog beside this process, a rank that another launcher started; return what ends it."""
    if watchdog.limit_s() == math.inf or sys.platform != "linux":
        return lambda: None
    world = environment.detect()
    assert world is not None
    sidecar = watchdog.Sidecar(rank, _job(world), world.local_world_size, world.num_nodes)
    file, answers = sidecar.files
    open_heartbeat(file, answers, watchdog.SETTING_UP)

    def end() -> None:
        global _heartbeat
        _heartbeat = fault_injection.beat = None
        faulthandler.unregister(watchdog.STACKS)
        sidecar.end()

    return end


def _job(world: environment.World) -> str:
    """A name that the ranks of `world` on this machine have, which one process has started, and no others."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    meeting = world.init_method, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), world.world_size
    return hashlib.sha256(repr((os.readlink("/proc/self/ns/pid"), parent, started, *meeting)).encode()).hexdigest()[:16]


# ---- what the launcher hands over ----------------------------------------------------------------------


def program_state() -> dict[str, Any]:
    """What a rank takes over from the launcher before it imports anything of the user's."""
    return {
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "argv": list(sys.argv),
        "temporary": tempfile.gettempdir(),
        "log_level": logging.getLogger("lockstep").level,
        "start_method": multiprocessing.get_start_method(allow_none=True),
    }


def library_state() -> dict[str, Any]:
    """What a program sets once for its process, and ranks would lack because they do not run it."""
    precision = None
    with suppress(RuntimeError):  # raised where the program has set torch.backends...fp32_precision
        precision = torch.get_float32_matmul_precision()
    return {
        "streams": stream_states(),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "matmul": precision,
        "precisions": [owner.fp32_precision for owner in _precisions()],
        "warnings": list(warnings.filters),
        "collector": (gc.isenabled(), gc.get_threshold()),
    }


def _precisions() -> list[Any]:
    backends: Any = torch.backends
    return [
        backends,
        backends.cuda.matmul,
        backends.cudnn,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn,
        backends.mkldnn.matmul,
    ]


def _take_over_program(state: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(state["environ"])
    os.chdir(state["folder"])
    sys.path[:] = state["path"]
    importlib.invalidate_caches()  # folders may have changed since the server looked
    sys.argv[:] = state["argv"]
    tempfile.tempdir = state["temporary"]
    logging.getLogger("lockstep").setLevel(state["log_level"])
    if state["start_method"] is not None:
        multiprocessing.set_start_method(state["start_method"], force=True)


def _take_over_library(state: dict[str, Any]) -> None:
    restore_streams(state["streams"])
    torch.set_default_dtype(state["dtype"])
    torch.use_deterministic_algorithms(state["deterministic"][0], warn_only=state["deterministic"][1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = state["cudnn"]
    if state["matmul"] is not None:
        torch.set_float32_matmul_precision(state["matmul"])
    for owner, precision in zip(_precisions(), state["precisions"], strict=True):
        if owner.fp32_precision != precision:
            owner.fp32_precision = precision
    warnings.resetwarnings()  # also forgets what was shown
    warnings.filters.extend(state["warnings"])  # type: ignore[attr-defined]
    # the modules and the work, which stay to the end: the server has turned the collector off for their import
    gc.freeze()
    enabled, thresholds = state["collector"]
    gc.set_threshold(*thresholds)
    if enabled:
        gc.enable()


# ---- the rank ------------------------------------------------------------------------------------------


@dataclass
class Failure:
    """How a rank ended that did not return."""

    rank: int
    time: float
    """time.monotonic(), which all processes of a machine share."""
    step: int | None
    phase: str
    message: str
    """One line for a RankFailure, where there is no exception to raise."""
    text: str = ""
    """Its traceback, cut to size."""
    error: bytes | None = None
    """The exception, pickled."""
    exitcode: int | None = None
    """Where it died without an exception; negative for a signal."""
    stop: bool = False
    """SystemExit or KeyboardInterrupt: the rank chose to end, and the others may be ending as well."""
    secondary: bool = False
    """What happens to a rank when another one ends."""


def run(rank: int, num_ranks: int, folder: str, program_fd: int, work_fd: int, channel: socket.socket) -> None:
    """Main of a rank, entered with `SIGNALS` blocked. Sends one file over `channel`: the result (of rank 0) or a
    `Failure`."""
    process = os.getpid()
    _take_over_program(unpack(program_fd))
    os.close(program_fd)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # for what it starts
    os.environ.update(LOCKSTEP_LAUNCHER="lockstep", LOCKSTEP_INIT_METHOD=f"file://{folder}/store")
    # open for the life of the process
    answers, fatal = (open(Path(folder, f"{rank}.{name}"), "w") for name in ("stacks", "fatal"))  # noqa: SIM115
    with open(Path(folder, f"{rank}.heartbeat"), "r+b") as file:
        open_heartbeat(file.fileno(), answers, watchdog.STARTING)
    faulthandler.enable(fatal, all_threads=False)
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as shells start programs with `&`; what the launcher passes on must reach the rank
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        fn, args, library = unpack(work_fd)
        os.close(work_fd)
        _take_over_library(library)
        set_phase(None, watchdog.SETTING_UP)
        result = fn(*args)
        set_phase(_phase[0], "return of the result")
        outcome = pack(result if rank == 0 else None)
    except BaseException as error:
        if os.getpid() != process:  # a process that the work forked: it answers for itself alone
            raise
        outcome = pack(_describe(rank, error))
    if os.getpid() != process:
        raise RuntimeError(
            "a process forked by a rank reached the end of the rank's work; end it with os._exit or sys.exit"
        )
    socket.send_fds(channel, [b"."], [outcome])
    # What an interpreter does at its end: wait for threads, stop idle executors, flush what registered for it.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def ends_well(error: SystemExit) -> bool:
    """Whether a program that ends with it has exit code 0."""
    return error.code is None or (isinstance(error.code, int) and error.code % 256 == 0)


# A peer that failed, in the words of a save, or is gone, in those of gloo, NCCL and torch's stores.
_CONSEQUENCE = re.compile(
    r"see its own error|gloo/|ProcessGroup(Gloo|NCCL|MPI)|NCCL|Connection (closed|reset) by peer|Broken pipe|"
    r"Socket (closed|[Tt]imeout)|TCPStore|FileStore"
)


def _describe(rank: int, error: BaseException) -> Failure:
    step, phase = _phase
    if isinstance(error, SystemExit) and ends_well(error):
        place = watchdog.where(rank, step, phase)
        message = f"sys.exit({'' if error.code is None else error.code}) was called on {place} before its work was done"
        return Failure(rank, time.monotonic(), step, phase, message, exitcode=0)
    start = error.__traceback__
    while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename == __file__:
        start = start.tb_next
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return Failure(
        rank=rank,
        time=time.monotonic(),
        step=step,
        phase=phase,
        message=cut(f"{type(error).__name__} in {watchdog.where(rank, step, phase)}: {error}", _MAX_MESSAGE_LINES),
        text=_text(error, start),
        error=_pickle_error(error),
        stop=isinstance(error, SystemExit | KeyboardInterrupt),
        secondary=any(
            isinstance(link, RuntimeError | OSError) and _CONSEQUENCE.search(str(link)) is not None for link in chain
        ),
    )


def _text(error: BaseException, start: TracebackType | None) -> str:
    """The traceback, cut to size; of an exception with a long message both are cut, so that neither hides the other."""
    whole = cut("".join(traceback.format_exception(type(error), error, start)))
    message = "".join(traceback.format_exception_only(type(error), error))
    if "lines cut" not in whole or len(message.splitlines()) <= _MAX_MESSAGE_LINES:
        return whole
    return cut("".join(traceback.format_tb(start)), _MAX_MESSAGE_LINES + 2) + "\n" + cut(message, _MAX_MESSAGE_LINES)


def _pickle_error(error: BaseException) -> bytes | None:
    """The exception pickled such that it can be unpickled; None where nothing helps."""
    for candidate in (error, _Bare(error)):
        with suppress(Exception):
            data = dumps(candidate)
            if type(pickle.loads(data)) is type(error):
                return data
    return None


class _Bare:
    """An exception whose constructor takes other arguments than `args`: rebuilt without a call of the constructor."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self.error), self.error.args, dict(vars(self.error)))


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def cut(text: str, max_lines: int = _MAX_TRACEBACK_LINES) -> str:
    """The text without its middle if it is long."""
    lines = [
        line if len(line) <= _MAX_LINE_LENGTH else line[:_MAX_LINE_LENGTH] + " ..."
        for line in text.rstrip().splitlines()
    ]
    if len(lines) > max_lines:
        lines = [line for line in lines if line.strip(" ^~")]  # the markers under the code go first
    if len(lines) > max_lines:
        head = min(6, max_lines // 2)
        tail = max_lines - head - 1
        lines = [*lines[:head], f"  ... {len(lines) - head - tail} lines cut ...", *lines[-tail:]]
    return "\n".join(lines)


def shortened(error: BaseException) -> None:
    """Cut the message of an exception, in place, if it is long; the whole text is its `full_message` then."""
    with suppress(Exception):  # of a class of the user's, whose text and attributes may be anything
        text = str(error)
        short = cut(text, _MAX_MESSAGE_LINES)
        if len(short) >= len(text.rstrip()):
            return
        error.full_message = text  # type: ignore[attr-defined]
        args, error.args = error.args, (short,)
        if len(str(error)) > 2 * len(short):  # its class writes the text from something else
            error.args = args
            kind = type(error)
            names = {"__str__": lambda self: short, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
            error.__class__ = type(kind.__name__, (kind,), names)


__all__ = [
    "SIGNALS",
    "Failure",
    "current_phase",
    "cut",
    "ends_well",
    "guard",
    "library_state",
    "open_heartbeat",
    "program_state",
    "run",
    "set_phase",
    "shortened",
]
