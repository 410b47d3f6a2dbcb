"""How a rank ended that did not return: described on the rank, raised in the launcher."""

from __future__ import annotations

import functools
import os
import pickle
import re
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

from lockstep.strategies.launch import watchdog
from lockstep.strategies.launch.payload import dumps

_MAX_TRACEBACK_LINES = 30  # the launcher's own frames and the message come on top, 60 together


_MAX_MESSAGE_LINES = 8


_MAX_LINE_LENGTH = 1000

SAME_S = 0.2
"""Signals this close together are one request: GNU timeout signals its child and then the child's whole group."""

_ROOT = Path(__file__).resolve().parents[2]
FRAMEWORK = tuple(f"{_ROOT / name}{os.sep}" for name in ("trainer", "strategies", "callbacks"))
"""Folders of Lockstep's own code."""


class RankFailure(RuntimeError):
    """A rank ended without an exception that could be handed on: killed, exited, or with one that cannot be
    unpickled."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        signal: str | None = None,
        exitcode: int | None = None,
        step: int | None = None,
        phase: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank, or None where it was the server."""
        self.signal = signal
        """Name of the signal that killed it, such as SIGKILL, or None."""
        self.exitcode = exitcode
        """Its exit code, where it exited by itself."""
        self.step = step
        """The `global_step` that it gave to `set_phase` last."""
        self.phase = phase
        """The phase that it gave to `set_phase` last."""


class Place(NamedTuple):
    """Where a launch failed."""

    rank: int
    step: int | None
    phase: str
    stopping: bool
    """The launcher had been asked to stop."""


def place_of(error: BaseException) -> Place | None:
    """Where on the ranks an exception of `launch` comes from; None for one of the launcher's own."""
    if isinstance(error, RankFailure) and error.rank is None:  # the server, and the ranks with it
        return Place(0, error.step, error.phase, False)
    return getattr(error, "_lockstep_place", None)


class RankTraceback(Exception):
    """The traceback of another process as text: the cause of what `launch` raises, so it is printed first."""


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
    place: str = ""
    """The user's method and line that it came through last."""
    error: bytes | None = None
    """The exception, pickled."""
    exitcode: int | None = None
    """Where it died without an exception; negative for a signal."""
    stop: bool = False
    """SystemExit or KeyboardInterrupt: the rank chose to end, and the others may be ending as well."""
    secondary: bool = False
    """What happens to a rank when another one ends."""


# ---- on the rank ----


def ends_well(error: SystemExit) -> bool:
    """Whether a program that ends with it has exit code 0."""
    return error.code is None or (isinstance(error.code, int) and error.code % 256 == 0)


# A peer that failed, in the words of a save, or is gone, in those of gloo, NCCL and torch's stores.
_CONSEQUENCE = re.compile(
    r"see its own error|gloo/|ProcessGroup(Gloo|NCCL|MPI)|NCCL|Connection (closed|reset) by peer|Broken pipe|"
    r"Socket (closed|[Tt]imeout)|TCPStore|FileStore"
)


def describe(rank: int, error: BaseException, start: TracebackType | None, step: int | None, phase: str) -> Failure:
    """What to report of an exception that ended a rank's work; its traceback begins at `start`."""
    if isinstance(error, SystemExit) and ends_well(error):
        place = watchdog.where(rank, step, phase)
        message = f"sys.exit({'' if error.code is None else error.code}) was called on {place} before its work was done"
        return Failure(rank, time.monotonic(), step, phase, message, exitcode=0)
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
        place=_place(start),
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


@functools.cache
def libraries() -> tuple[str, ...]:
    """Folders of code that is not the user's: Python's, installed packages and this one."""
    import sysconfig  # here, as it reads a file that no other import needs

    installed = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    return (*(f"{folder}{os.sep}" for folder in installed), *FRAMEWORK)


def is_of_user(trace: TracebackType | None) -> bool:
    """Whether the user's code has raised an exception, or what it called in a package that is not this one."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return next((_is_users(frame) for frame in reversed(frames) if _is_users(frame) or _is_ours(frame)), False)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.endswith((".pyx", ".pxd", ".pxi")):  # compiled, as in numpy: a path where it was built
        file = frame.f_globals.get("__file__") or file
    return not os.path.realpath(file).startswith(libraries()) and not file.startswith("<frozen")


def _is_ours(frame: FrameType) -> bool:
    return os.path.realpath(frame.f_code.co_filename).startswith(FRAMEWORK)


def _place(trace: TracebackType | None) -> str:
    """ ", at Net.training_step (net.py, line 4)": the innermost frame of the user's own code; else nothing."""
    found = ""
    for frame, line in traceback.walk_tb(trace):
        code, owner = frame.f_code, frame.f_locals.get("self")
        if _is_users(frame):
            name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
            found = f", at {name} ({os.path.basename(code.co_filename)}, line {line})"
    return found


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


# ---- in the launcher ----


def raise_failure(failure: Failure, stopping: bool) -> NoReturn:
    """Raise the exception of a rank as itself, or RankFailure; `stopping`: the launcher had been asked to stop."""
    error: BaseException | None = None
    if failure.error is not None:
        with suppress(Exception):  # whatever its constructor does here: the text says what it was
            error = pickle.loads(failure.error)
    if error is None:
        code = failure.exitcode
        killed = code is not None and code < 0
        error = RankFailure(
            failure.message,
            rank=failure.rank,
            signal=signal_name(-code) if code is not None and killed else None,
            exitcode=None if killed else code,
            step=failure.step,
            phase=failure.phase,
        )
    shortened(error)
    with suppress(Exception):  # where its class allows attributes
        error._lockstep_place = Place(failure.rank, failure.step, failure.phase, stopping)  # type: ignore[attr-defined]
    raise error from (
        RankTraceback(f"{watchdog.where(failure.rank, failure.step, failure.phase)}{failure.place}\n{failure.text}")
        if failure.text
        else None
    )


class Terminated(SystemExit):
    """A signal such as SIGTERM has ended the run, once a checkpoint was committed; ends the program with 143."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args or (128 + signal.SIGTERM,))


def stop_error(signum: int) -> BaseException:
    """What ends a program with 130 after SIGINT, else with 143."""
    return KeyboardInterrupt() if signum == signal.SIGINT else Terminated()


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"
