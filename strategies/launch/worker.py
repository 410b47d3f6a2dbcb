"""A rank started by `launcher.launch`: take over the program's state, do the work, report the result or what went
wrong."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.strategies.launch import watchdog
from lockstep.strategies.launch.failure import describe
from lockstep.strategies.launch.payload import pack, unpack
from lockstep.strategies.launch.phase import current_phase, open_heartbeat, set_phase
from lockstep.strategies.launch.rng import restore_streams, stream_states

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Blocked in the server, so that none is lost between the fork of a rank and its own handlers."""


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
        "recorded_outputs": dict(_recorded_outputs()),
    }


def _recorded_outputs() -> dict[str, Any]:
    """transformers' table of the layers whose outputs can be recorded (`output_hidden_states`), into which a model is
    entered when it is built, but not when it is unpickled."""
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", {})


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
    dict.update(_recorded_outputs(), state["recorded_outputs"])
    warnings.resetwarnings()  # also forgets what was shown
    warnings.filters.extend(state["warnings"])  # type: ignore[attr-defined]
    # the modules and the work, which stay to the end: the server has turned the collector off for their import
    gc.freeze()
    enabled, thresholds = state["collector"]
    gc.set_threshold(*thresholds)
    if enabled:
        gc.enable()


# ---- the rank ------------------------------------------------------------------------------------------


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
    # Shells start programs with `&` such that SIGINT is ignored; what the launcher passes on must reach the rank.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        fn, args, library = unpack(work_fd)
        os.close(work_fd)
        _take_over_library(library)
        set_phase(None, watchdog.SETTING_UP)
        result = fn(*args)
        set_phase(current_phase()[0], "return of the result")
        outcome = pack(result if rank == 0 else None)
    except BaseException as error:
        if os.getpid() != process:  # a process that the work forked: it answers for itself alone
            raise
        start = error.__traceback__
        while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename == __file__:
            start = start.tb_next
        outcome = pack(describe(rank, error, start, *current_phase()))
    if os.getpid() != process:
        raise RuntimeError(
            "a process forked by a rank reached the end of the rank's work; end it with os._exit or sys.exit"
        )
    socket.send_fds(channel, [b"."], [outcome])
    # What an interpreter does at its end: wait for threads, stop idle executors, flush what registered for it.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
