"""The process that forks ranks: torch is imported once, and a rank starts in milliseconds.

Not `multiprocessing`'s fork server: its children first run the user's script again (which cannot be switched off for
one process without patching it), write to the files that were open when the server started, and outlive a launcher that
was killed.

Who ends whom: the server sees the launcher's end (a socket, and its parent's process id once a second, as processes
that the launcher forked may hold the socket open) and sends SIGKILL to every rank's process group. Ranks die with the
server by PR_SET_PDEATHSIG (Linux). Neither needs anything from the rank, so code that holds the GIL forever ends as
well.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.strategies.launch import worker

PRELOAD = ("torch._dynamo", "torch.distributed", "torch.nn.parallel.distributed", "torch.optim")
"""Imported beside torch: the first optimizer and the first DDP of a process would import dynamo, 1 to 2 s a rank."""
MAX_RANKS = 200
"""Ranks of one launch: a message carries a socket for each, and the kernel takes 253."""
END = struct.Struct("ii")
"""What the server says when a rank has ended: rank, exit code (negative for a signal)."""

# Of the environment, what libraries read while they are imported, which for a running server was in the past.
_IMPORT_TIME = ("ATEN_", "CUDA_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH")
_LATER = "TORCHINDUCTOR_CACHE_DIR"
"""Read where code is compiled, and set by torch as soon as its compiler is loaded."""


class Server:
    """The launcher's handle of a server, which serves one launch at a time."""

    def __init__(self, key: tuple[Any, ...], num_threads: str) -> None:
        self.key = key
        self.owner = os.getpid()
        self.used = False
        self.control, theirs = socket.socketpair()
        # First the folder that this very package came from, whatever the user's path holds under the same name.
        path = [str(Path(__file__).absolute().parents[3]), *(entry for entry in sys.path if isinstance(entry, str))]
        # Passes of the collector over modules while they are imported find next to nothing and take a fifth of the
        # time.
        code = (
            f"import gc, sys; gc.disable(); sys.path[:] = {path!r}; from {__name__} import serve; "
            f"serve({theirs.fileno()}, {[*PRELOAD, *_own_modules()]!r})"
        )
        # Blocked from its first instruction on: a signal to every process of a job must not cut the ranks' own ending
        # short.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, worker.SIGNALS)
        try:
            with theirs:
                flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
                self.process = subprocess.Popen(
                    [sys.executable, *flags, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": num_threads},
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def start(self, folder: str, fds: list[int]) -> None:
        """Fork ranks. `fds`: a socket for signals and ends, standard output and error, program, work, a socket for each
        rank.

        Raises OSError where the server is gone.
        """
        socket.send_fds(self.control, [folder.encode()], fds)
        self.used = True

    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP keeps it from running, where the system tells."""
        with suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def close(self) -> None:
        self.control.close()
        if self.owner != os.getpid():  # a copy in a process that the launcher forked
            self.process.returncode = 0
            return
        if not self.used:  # it has no ranks, and may be far from done with its imports
            self.process.kill()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _own_modules() -> list[str]:
    """The modules of this package that the program has imported: every rank unpickles objects of them."""
    return [name for name in sys.modules if name.partition(".")[0] == "lockstep"]


_idle: Server | None = None
_lock = threading.Lock()


def take(num_ranks: int) -> Server:
    """The idle server where it still fits, or a new one; `give_back` it."""
    num_threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, _num_cores() // num_ranks))
    read = {name for name in os.environ if name.startswith(_IMPORT_TIME) and name != _LATER}
    key = (num_threads, *((name, os.environ[name]) for name in sorted(read)))
    server = _swap(None)
    if server is not None and (server.owner != os.getpid() or server.key != key or server.process.poll() is not None):
        server.close()
        server = None
    return server or Server(key, num_threads)


def give_back(server: Server) -> None:
    """Keep the server for the next launch of this process."""
    other = _swap(server)
    if other is not None:
        other.close()
    atexit.unregister(_close_idle)
    atexit.register(_close_idle)


def _close_idle() -> None:
    server = _swap(None)
    if server is not None:
        server.close()


def _swap(server: Server | None) -> Server | None:
    global _idle
    with _lock:
        server, _idle = _idle, server
    return server


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def readable(sources: Iterable[Any], timeout_s: float) -> list[Any]:
    """Those of some sockets or descriptors that can be read, or have come to their end, within a time; by `poll`, as
    `select` takes no descriptor above 1023."""
    poller = select.poll()
    by_descriptor = {source if isinstance(source, int) else source.fileno(): source for source in sources}
    for descriptor in by_descriptor:
        poller.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poller.poll(max(0, math.ceil(timeout_s * 1000)))]


# ---- in the server -------------------------------------------------------------------------------------


def serve(control_fd: int, preload: list[str]) -> None:
    """Main of the server: import modules, then fork ranks on request until the launcher is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, worker.SIGNALS)  # as it started, whoever started it
    launcher = os.getppid()
    for name in preload:
        importlib.import_module(name)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the libraries' own, which every rank would run at its end, 35 ms each time
    wake, wake_writer = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.freeze()  # a collection in a rank would write to every page that it shares with the others
    with socket.socket(fileno=control_fd) as control:
        while True:
            while not readable([control], 1.0):
                if os.getppid() != launcher:
                    return
            message, fds, _, _ = socket.recv_fds(control, 4096, 253)
            if not message:
                return
            folder = message.decode()
            importlib.invalidate_caches()  # folders may have changed; here, as each rank would copy what it touches
            with socket.socket(fileno=fds[0]) as ranks:
                pids = {_fork(rank, folder, fds, [control_fd, wake, wake_writer]): rank for rank in range(len(fds) - 5)}
                for fd in fds[1:]:
                    os.close(fd)
                alone = _watch(ranks, pids, launcher, wake)
            if alone:
                shutil.rmtree(folder, ignore_errors=True)


def _watch(ranks: socket.socket, pids: dict[int, int], launcher: int, wake: int) -> bool:
    """Pass signals on to the ranks and their ends to the launcher until all have ended; kill them when it is gone,
    which is returned."""
    alone = False
    while pids:
        sources: list[Any] = [wake] if alone else [wake, ranks]
        ready = readable(sources, 1.0)
        signals = ranks.recv(64) if ranks in ready else b""
        if not alone and (os.getppid() != launcher or (ranks in ready and not signals)):
            alone = True
            signals = bytes([signal.SIGKILL])
        for signum in signals:
            for pid in pids:
                with suppress(OSError):
                    # Loader workers and other children of a rank get the last signal only: before it they end with
                    # their rank.
                    (os.killpg if signum == signal.SIGKILL else os.kill)(pid, signum)
        with suppress(BlockingIOError):
            os.read(wake, 4096)
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            exitcode = os.waitstatus_to_exitcode(status)
            if exitcode:
                with suppress(OSError):  # what a failed rank left running; while anything does, the group keeps its id
                    os.killpg(pid, signal.SIGKILL)
            with suppress(OSError):
                ranks.sendall(END.pack(pids[pid], exitcode))
            del pids[pid]
    return alone


def _fork(rank: int, folder: str, fds: list[int], servers: list[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)  # here and there, as either may come first
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != server:  # it died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, stdout, stderr, program, work, *channels = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd in (*servers, connection, stdout, stderr, *channels[:rank], *channels[rank + 1 :]):
            os.close(fd)
        for stream in (sys.stdout, sys.stderr):  # lines of several ranks must not mix, PYTHONUNBUFFERED or not
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
        with socket.socket(fileno=channels[rank]) as channel:
            worker.run(rank, len(channels), folder, program, work, channel)
        code = 0
    except SystemExit as error:  # of a process that the rank forked: a rank reports its own
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)  # no interpreter shutdown: engines with threads of their own abort in it now and then
