"""A watchdog process beside each rank that another launcher (torchrun, Slurm, MPI) started."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.strategies.launch import environment, phase, watchdog


def guard(rank: int) -> Callable[[], None]:
    """Start a watchdog beside this process, a rank that another launcher started; return what ends it."""
    if watchdog.limit_s() == math.inf or sys.platform != "linux":
        return lambda: None
    world = environment.detect()
    assert world is not None
    sidecar = Sidecar(rank, _job(world), world.local_world_size, world.num_nodes)
    file, answers = sidecar.files
    phase.open_heartbeat(file, answers, watchdog.SETTING_UP)

    def end() -> None:
        phase.close_heartbeat()
        sidecar.end()

    return end


def _job(world: environment.World) -> str:
    """A name that the ranks of `world` on this machine have, which one process has started, and no others."""
    parent = os.getppid()
    started = ""
    with suppress(OSError):  # it is outside of this container, or /proc shows other processes
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    meeting = world.init_method, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), world.world_size
    return hashlib.sha256(repr((os.readlink("/proc/self/ns/pid"), parent, started, *meeting)).encode()).hexdigest()[:16]


class Sidecar:
    """A watcher beside this process, one of `num_local` ranks of this machine that one launcher started.

    The watchers read the heartbeat files of all these ranks, which they find by `job`, a name that only they know.
    """

    def __init__(self, rank: int, job: str, num_local: int, num_nodes: int) -> None:
        shared = private_folder()
        self.path = shared / f"{job}-{rank}"
        watchdog.remove(self.path)
        _remove_dead(shared)
        self.files = [
            os.open(self.path.with_suffix(suffix), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            for suffix in (".heartbeat", ".stacks")
        ]
        os.truncate(self.files[0], watchdog.FORMAT.size)
        fcntl.lockf(self.files[0], fcntl.LOCK_EX)  # its holder is the process on it, alive
        command = [
            sys.executable,
            "-I",
            "-S",
            watchdog.__file__,
            str(self.path.parent),
            self.path.name,
            str(num_local),
            str(num_nodes),
        ]
        # A session of its own: what torchrun sends to the rank's process group would end it before it has tidied up.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in self.files:
            os.close(file)
        watchdog.remove(self.path)


def private_folder() -> Path:
    """The folder in which the ranks of this user on this machine find each other's files: nobody else may write or look
    there.

    Raises RuntimeError where another user has taken its name, for the heartbeat files tell whom to kill.
    """
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp", f"lockstep-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RuntimeError(
            f"the watchdog keeps heartbeats in {folder}, which must be a folder that only this user may enter: "
            f"remove it, or set {watchdog.VARIABLE}=0 for no watchdog"
        )
    return folder


def _remove_dead(folder: Path) -> None:
    """What ranks have left that were killed together with their watchers."""
    for path in folder.glob("*.heartbeat"):
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            if time.time() - path.stat().st_mtime <= 60:  # one that is just made has no holder yet
                continue
            if watchdog.holder(file.fileno()) is None:
                watchdog.remove(path.with_suffix(""))
