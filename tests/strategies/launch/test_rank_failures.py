"""Exceptions of ranks are raised in the launcher, killed ranks are named, and the others are ended."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.strategies.launch import process_group
from lockstep.strategies.launch.failure import RankFailure, RankTraceback
from lockstep.strategies.launch.launcher import launch
from lockstep.strategies.launch.phase import set_phase
from tests.strategies.launch.programs import another_server, gone, join, own_rank, wait_until

pytestmark = pytest.mark.ranks


def record_pid(folder: Path) -> None:
    (folder / f"pid{own_rank()}").write_text(str(os.getpid()))


def recorded_pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*")]


class Custom(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


class Unreadable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def fail_in_step(folder: Path, kind: str) -> None:
    record_pid(folder)
    join()
    set_phase(3, "training_step")
    if own_rank() == 1:
        if kind == "value":
            raise ValueError("the culprit's own words")
        if kind == "custom":
            raise Custom(1, 2)
        if kind == "unreadable":
            raise Unreadable("gone on the way")
        if kind == "deep":
            ping(300)
        if kind == "late":  # the others see a closed connection long before this rank has said anything
            try:
                raise ValueError("after a slow clean-up")
            finally:
                process_group.destroy_process_group()
                time.sleep(0.8)
        if kind == "exit":
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()  # holds what the rank had open
            (folder / "pid_child").write_text(str(child.pid))
            os._exit(0)
        if kind == "abort":
            os.abort()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise KeyError("what came after a lost peer") from error


def ping(depth: int) -> None:  # two functions, or the traceback would count the repeated line by itself
    pong(depth - 1)


def pong(depth: int) -> None:
    if depth < 0:
        raise LookupError("at the bottom")
    ping(depth - 1)


@pytest.mark.parametrize(
    ("kind", "expected", "message"),
    [
        ("value", ValueError, "the culprit's own words"),
        ("custom", Custom, "1 and 2"),
        ("unreadable", RankFailure, "Unreadable in rank 1, step 3, in training_step: gone on the way"),
        ("deep", LookupError, "at the bottom"),
        ("late", ValueError, "after a slow clean-up"),
    ],
)
def test_the_exception_of_the_culprit_comes_out(
    kind: str,
    expected: type[Exception],
    message: str,
    private_tmp: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = time.monotonic()
    with pytest.raises(expected) as caught:
        launch(fail_in_step, (tmp_path, kind), 2)
    assert time.monotonic() - start < 5 + 10  # the start of a server, where this is the first test
    assert type(caught.value) is expected
    assert message in str(caught.value)
    assert gone(recorded_pids(tmp_path))
    assert list(private_tmp.iterdir()) == []
    assert isinstance(caught.value.__cause__, RankTraceback)
    printed = "".join(traceback.format_exception(caught.value))
    first, second = printed.splitlines()[:2]
    function = "pong" if kind == "deep" else "fail_in_step"
    begin = "lockstep.strategies.launch.failure.RankTraceback: rank 1, step 3, in training_step"
    assert re.fullmatch(rf"{re.escape(begin)}, at {function} \(test_rank_failures\.py, line \d+\)", first), first
    assert second == "Traceback (most recent call last):"
    assert printed.index("in fail_in_step") < printed.index("direct cause of the following exception")
    assert len(printed.splitlines()) + len(capfd.readouterr().err.splitlines()) <= 60
    if kind == "custom":
        assert caught.value.first == 1
    if kind == "unreadable":
        assert (caught.value.rank, caught.value.step, caught.value.phase) == (1, 3, "training_step")


def test_a_rank_that_just_exits(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"rank 1 exited with code 0 before its work was done \(step 3, in training_step\)"
    ) as caught:
        launch(fail_in_step, (tmp_path, "exit"), 2)
    assert time.monotonic() - start < 30
    os.kill(int((tmp_path / "pid_child").read_text()), signal.SIGKILL)
    assert (caught.value.rank, caught.value.exitcode, caught.value.signal) == (1, 0, None)


def test_a_rank_that_aborts_shows_where(tmp_path: Path) -> None:
    with pytest.raises(
        RankFailure, match=r"by SIGABRT \(step 3, in training_step\); gloo does so where ranks"
    ) as caught:
        launch(fail_in_step, (tmp_path, "abort"), 2)
    assert "in fail_in_step" in str(caught.value.__cause__)


def stubborn(folder: Path) -> None:
    """Rank 0 holds on against SIGTERM, with a child of its own; rank 1 waits to be killed."""
    record_pid(folder)
    set_phase(7, "validation_step")
    if own_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)",
            ]
        )
        (folder / "pid_child").write_text(str(child.pid))
        (folder / "ready").touch()
        time.sleep(100)
    while not (folder / "ready").exists():
        time.sleep(0.01)
    (folder / "killed_at").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_killed_rank_is_named_and_the_others_are_gone(tmp_path: Path, private_tmp: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 was killed by SIGKILL \(step 7, in validation_step\)") as caught:
        launch(stubborn, (tmp_path,), 2)
    assert time.monotonic() - float((tmp_path / "killed_at").read_text()) < 5
    assert (caught.value.rank, caught.value.signal, caught.value.exitcode, caught.value.step, caught.value.phase) == (
        1,
        "SIGKILL",
        None,
        7,
        "validation_step",
    )
    assert gone([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)])
    wait_until(lambda: gone([int((tmp_path / "pid_child").read_text())]))  # once init has reaped it
    assert list(private_tmp.iterdir()) == []


def die_with_server() -> None:
    if own_rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.long
def test_ranks_do_not_outlive_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with another_server(monkeypatch):
        with pytest.raises(
            RankFailure, match="The process that starts the ranks was killed by SIGKILL, and its ranks ended with it"
        ):
            launch(die_with_server, (), 2)
        assert launch(own_rank, (), 2) == 0  # a new server


def missing() -> None:
    import a_module_that_is_not_there  # noqa: F401


def test_the_import_error_of_a_rank() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        launch(missing, (), 2)


def unreturnable() -> Any:
    return threading.Lock()


def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="returned from ranks must be picklable") as caught:
        launch(unreturnable, (), 2)
    assert "in return of the result" in str(caught.value.__cause__)


def hang_in_flight() -> float:
    join()
    dist.all_reduce(torch.ones(1))
    if own_rank() == 1:
        time.sleep(4)
        os._exit(0)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    start = time.monotonic()
    process_group.destroy_process_group(timeout_s=1.0)
    elapsed = time.monotonic() - start
    del work
    raise RuntimeError(f"left after {elapsed:.1f} s")


def test_leaving_the_group_does_not_wait_for_a_peer_that_hangs() -> None:
    with pytest.raises(RuntimeError, match=r"left after [01]\.\d s"):
        launch(hang_in_flight, (), 2)


def drop_a_ddp_last() -> None:
    for _ in range(15):
        join()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        ddp(torch.ones(1, 2)).sum().backward()
        kept = torch.ones(4)
        dist.broadcast(kept, 0)
        process_group.destroy_process_group()
        del ddp


def test_a_ddp_that_is_dropped_after_its_group_waits_for_nobody() -> None:
    """Its end would wait with the GIL held for gloo's thread, which needs it to drop the tensor of the last call."""
    launch(drop_a_ddp_last, (), 2)
