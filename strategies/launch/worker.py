"""A rank started by `launcher.launch`: take over the program's state, do the work, report the result or what went
wrong."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import threading
from pathlib import Path

import torch

from lockstep.strategies.launch import watchdog
from lockstep.strategies.launch.failure import describe
from lockstep.strategies.launch.payload import pack, unpack
from lockstep.strategies.launch.phase import current_phase, open_heartbeat, set_phase
from lockstep.strategies.launch.program.state import take_over_library, take_over_program

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Blocked in the server, so that none is lost between the fork of a rank and its own handlers."""


def run(rank: int, num_ranks: int, folder: str, program_fd: int, work_fd: int, channel: socket.socket) -> None:
    """Main of a rank, entered with `SIGNALS` blocked. Sends one file over `channel`: the result (of rank 0) or a
    `Failure`."""
    process = os.getpid()
    take_over_program(unpack(program_fd))
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
        take_over_library(library)
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
