"""Nothing is left of a launcher that was killed, and a forked copy of it ends nothing."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.strategies.launch import forkserver
from lockstep.strategies.launch.launcher import launch
from tests.strategies.launch.programs import Program, wait_until

pytestmark = pytest.mark.ranks


@pytest.mark.long
def test_nothing_is_left_of_a_killed_launcher(program: Callable[[str], Program], tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    run = program("""
        import multiprocessing, os, signal, time
        from pathlib import Path
        import torch
        from lockstep.strategies.launch import environment, process_group
        from lockstep.strategies.launch.launcher import launch

        def idle():
            Path("idle" + os.environ.get("RANK", "")).touch()
            time.sleep(100)

        def work(data):
            process_group.init_process_group(environment.detect())
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            multiprocessing.get_context("fork").Process(target=idle).start()  # as a data loader worker
            Path("ready" + os.environ["RANK"]).touch()
            if os.environ["RANK"] == "1":
                import ctypes
                ctypes.PyDLL(None).sleep(100)  # holds the GIL: no thread of this rank can act
            time.sleep(100)

        keeper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
        keeper.start()  # started after the server, it would hold the launcher's end of the socket open
        launch(os.getppid, (), 2)
        late = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
        late.start()
        Path("keepers").write_text(f"{keeper.pid} {late.pid}")
        launch(work, (torch.ones(1000),), 2)
    """)
    run.wait_for("ready0", "ready1", "idle0", "idle1", "keepers")
    assert len(run.left()) >= 8
    run.process.kill()
    run.process.wait()
    keepers = [int(pid) for pid in (tmp_path / "keepers").read_text().split()]
    wait_until(lambda: all(int(line.split(":")[0]) in keepers for line in run.left()))
    for pid in keepers:
        os.kill(pid, signal.SIGKILL)
    run.wait_until_gone(5)
    assert list((tmp_path / "tmp").glob("lockstep*")) == []  # torch keeps a cache there
    left = set(os.listdir("/dev/shm")) - shared
    assert {name for name in left if not name.startswith("tmp")} == set()  # folders of tests that run beside this one


@pytest.mark.long
def test_a_forked_copy_of_the_launcher_leaves_its_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = launch(os.getppid, (), 1)
    monkeypatch.setattr(forkserver, "PRELOAD", ("torch",))  # of the copy's own server
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # fork of a process with threads, where another test started some
        child = multiprocessing.get_context("fork").Process(target=relaunch, args=(server,))
        child.start()
    child.join(60)
    assert child.exitcode == 0
    assert launch(os.getppid, (), 1) == server


def relaunch(server: int) -> None:
    assert launch(os.getppid, (), 1) != server
