"""Real processes: results and exceptions come home, whatever dies nothing is left, nobody outside can connect."""

import gc
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.strategies.launch import environment, process_group
from lockstep.strategies.launch.failure import RankFailure, RankTraceback
from lockstep.strategies.launch.launcher import launch
from lockstep.strategies.launch.phase import set_phase

pytestmark = pytest.mark.ranks

# ---- helpers -------------------------------------------------------------------------------------------


class Program:
    """A Python program in a process of its own whose descendants can all be found, wherever they went."""

    def __init__(self, folder: Path, source: str, repo_root: Path) -> None:
        self.mark = f"LOCKSTEP_TEST_MARK={uuid.uuid4().hex}"
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        script = folder / "program.py"
        script.write_text(textwrap.dedent(source))
        name, value = self.mark.split("=")
        environ = {**os.environ, name: value, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(repo_root)}
        self.process = subprocess.Popen(
            [sys.executable, script], env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, *names: str, timeout_s: float = 60.0) -> None:
        """Wait until the ranks have made these files."""
        end = time.monotonic() + timeout_s
        while not all((self.folder / name).exists() for name in names):
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{names} did not appear: {self.process.communicate()}")
            time.sleep(0.02)

    def finish(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def left(self) -> list[str]:
        """Command lines of what still runs."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                running = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if running and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_text()[:100]}")
            except OSError:
                pass
        return found

    def wait_until_gone(self, within_s: float) -> float:
        start = time.monotonic()
        while self.left():
            if time.monotonic() - start > within_s:
                pytest.fail(f"after {within_s} s: {self.left()}")
            time.sleep(0.05)
        return time.monotonic() - start


@pytest.fixture
def program(tmp_path: Path, repo_root: Path) -> Iterator[Callable[[str], Program]]:
    started: list[Program] = []

    def start(source: str) -> Program:
        started.append(Program(tmp_path, source, repo_root))
        return started[-1]

    yield start
    for one in started:
        with one.process:  # waits, and closes its pipes
            one.process.kill()


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty: what `launch` leaves there would be seen."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def own_rank() -> int:
    return int(os.environ["RANK"])


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def record_pid(folder: Path) -> None:
    (folder / f"pid{own_rank()}").write_text(str(os.getpid()))


def recorded_pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*")]


def join() -> environment.World:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(world, timeout_s=60)
    return world


def all_ranks(value: float) -> list[float]:
    out = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor([value], dtype=torch.float64))
    return [float(item) for item in out]


# ---- results -------------------------------------------------------------------------------------------


def whereabouts(x: int) -> dict[str, Any]:
    world = join()
    facts = {
        "world": (
            world.rank,
            world.local_rank,
            world.world_size,
            world.local_world_size,
            world.num_nodes,
            world.launcher,
        ),
        "ranks": all_ranks(float(own_rank())),
        "pids": all_ranks(os.getpid()),
        "threads": torch.get_num_threads(),
        "environ": {
            name: os.environ.get(name)
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        },
        "server": os.getppid(),
        "x": x,
    }
    process_group.destroy_process_group()
    assert not dist.is_initialized()
    process_group.destroy_process_group()
    return facts


def test_ranks_know_their_world_and_the_result_of_rank_0_comes_back(private_tmp: Path) -> None:
    facts = launch(whereabouts, (5,), 3)
    assert facts["world"] == (0, 0, 3, 3, 1, "lockstep")
    assert facts["ranks"] == [0.0, 1.0, 2.0]
    assert facts["environ"] == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "1",
    }
    assert facts["x"] == 5
    assert gone([int(pid) for pid in facts["pids"]])
    assert list(private_tmp.iterdir()) == []
    assert environment.detect() is None


def test_a_second_launch_uses_the_same_server() -> None:
    server = launch(os.getppid, (), 2)
    start = time.monotonic()
    assert launch(os.getppid, (), 2) == server
    assert time.monotonic() - start < 5


def test_threads_follow_the_cores_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(torch.get_num_threads, (), 1) == 1  # tests run with OMP_NUM_THREADS=1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch(torch.get_num_threads, (), 1) == len(os.sched_getaffinity(0))


def train(module: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return module


def test_weights_come_back() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    trained = launch(train, (module,), 2)
    assert trained[0].weight is trained[1].weight
    assert not torch.equal(trained[0].weight, module[0].weight)
    assert torch.equal(trained[0].weight, train(module)[0].weight)


def memory(data: torch.Tensor, array: np.ndarray) -> tuple[float, int, int]:
    total = float(data.sum()) + float(array.sum())
    status = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return total, int(status["RssAnon"]) // 1024, int(status["RssShmem"]) // 1024


def test_a_large_dataset_is_not_copied_for_each_rank() -> None:
    total, private_mib, shared_mib = launch(memory, (torch.ones(50_000_000), np.ones(10_000_000)), 2)
    assert total == 60_000_000
    assert shared_mib >= 265  # 200 MB and 80 MB
    assert private_mib < 250


def test_lambdas_and_closures() -> None:
    factor = 3
    assert launch(lambda x: x * factor, (torch.ones(2),), 2).tolist() == [3.0, 3.0]


def draws() -> tuple[Any, ...]:
    filtered = [entry[0] for entry in warnings.filters if entry[2] is EncodingWarning]
    return (
        random.random(),
        float(np.random.rand()),
        torch.rand(1).item(),
        torch.get_default_dtype(),
        filtered,
        sys.argv,
        os.getcwd(),
    )


def test_ranks_continue_the_program_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("always", EncodingWarning)
        there = launch(draws, (), 2)
        assert there == draws()
    assert there[3:6] == (torch.float64, ["always"], ["program", "--flag"])


def precision() -> str:
    return torch.get_float32_matmul_precision()


def test_numeric_flags_travel() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert launch(precision, (), 1) == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def collector() -> tuple[bool, tuple[int, int, int], bool]:
    return gc.isenabled(), gc.get_threshold(), sys.modules["torch"] in gc.get_objects()


def test_ranks_collect_garbage_as_the_program_does_but_pass_over_modules() -> None:
    before = gc.get_threshold()
    assert launch(collector, (), 1) == (True, before, False)
    gc.set_threshold(900, 11, 12)
    gc.disable()
    try:
        assert launch(collector, (), 1) == (False, (900, 11, 12), False)
    finally:
        gc.set_threshold(*before)
        gc.enable()


def test_unpicklable_work_is_refused_before_anything_starts(private_tmp: Path) -> None:
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object: create it on the rank"):
        launch(print, (threading.Lock(),), 2)
    assert list(private_tmp.iterdir()) == []


def test_a_program_that_ends_without_ranks_does_not_wait_for_the_imports_of_its_server(
    program: Callable[[str], Program],
) -> None:
    script = program("""
        import atexit, threading
        from contextlib import suppress
        from lockstep.strategies.launch import forkserver
        from lockstep.strategies.launch.launcher import launch
        atexit.register(lambda: print(server.process.returncode))  # before what the launch registers, so run after it
        with suppress(TypeError):
            launch(print, (threading.Lock(),), 2)
        server = forkserver._idle
    """)
    assert script.finish() == (0, f"{-signal.SIGKILL}\n", "")


@pytest.mark.parametrize("num_ranks", [0, 201])
def test_number_of_ranks_is_checked(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"must be from 1 to 200, but it is {num_ranks}"):
        launch(print, (), num_ranks)


# ---- the user's program --------------------------------------------------------------------------------


def test_script_without_a_guard(program: Callable[[str], Program], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    run = program("""
        import atexit, os, sys
        from dataclasses import dataclass
        import beside
        from lockstep.strategies.launch.launcher import launch

        with open("runs", "a") as file:
            file.write("run\\n")

        @dataclass
        class Point:
            x: int

        class Odd(Exception):
            pass

        OFFSET = 1

        def shift(point):
            return Point(beside.double(point.x) + OFFSET)

        def work(point):
            atexit.register(print, "flushed at exit", end="")
            print("from rank", os.environ["RANK"], sys.argv[0] == __file__)
            sys.stdout.write("no newline")
            return shift(point)

        def fail():
            raise Odd("five")

        result = launch(work, (Point(3),), 2)
        assert type(result) is Point, type(result)
        print("\\nresult", result, flush=True)
        try:
            launch(fail, (), 2)
        except Odd as error:
            print("caught", error)
    """)
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    assert out.count("from rank") == 2
    assert "from rank 1 True" in out
    assert out.count("no newline") == 2
    assert out.count("flushed at exit") == 2
    assert "result Point(x=7)" in out
    assert "caught five" in out
    assert (tmp_path / "runs").read_text() == "run\n"
    run.wait_until_gone(5)
    assert list((tmp_path / "tmp").glob("lockstep*")) == []  # torch keeps a cache there


def test_class_without_a_file(repo_root: Path) -> None:
    code = textwrap.dedent("""
        from torch import nn
        from lockstep.strategies.launch.launcher import launch
        class Net(nn.Linear):
            pass
        print(type(launch(lambda net: net, (Net(2, 2),), 2)) is Net)
    """)
    environ = {**os.environ, "PYTHONPATH": str(repo_root)}
    run = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60, env=environ)
    assert (run.stdout, run.stderr) == ("True\n", "")


def test_output_goes_where_the_launcher_writes_now(capfd: pytest.CaptureFixture[str]) -> None:
    launch(print, ("two words", "in one line"), 3)
    assert capfd.readouterr().out == "two words in one line\n" * 3


def test_import_starts_nothing(repo_root: Path) -> None:
    code = """
        import glob, os, threading
        before = set(os.listdir("/proc/self/fd"))
        import torch
        between = set(os.listdir("/proc/self/fd"))
        import lockstep.strategies.launch.launcher
        sockets = [fd for fd in glob.glob("/proc/self/fd/*") if os.path.exists(fd) and os.readlink(fd).startswith("socket")]
        children = open(f"/proc/self/task/{os.getpid()}/children").read() if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else ""
        print(threading.active_count(), len(os.listdir("/proc/self/task")), children, sockets)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        cwd=repo_root,
    )
    assert run.stdout.split() == ["1", "1", "[]"], run


# ---- failures ------------------------------------------------------------------------------------------


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
    assert printed.startswith(
        "lockstep.strategies.launch.failure.RankTraceback: rank 1, step 3, in training_step\nTraceback (most recent call last):\n"
    )
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
    with pytest.raises(RankFailure, match=r"rank 1 was killed by SIGABRT \(step 3, in training_step\)") as caught:
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


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def die_with_server() -> None:
    if own_rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


def test_ranks_do_not_outlive_the_server() -> None:
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


# ---- signals -------------------------------------------------------------------------------------------


def work_until_signalled(folder: Path, how: str) -> str:
    got: list[int] = []
    if how != "no handler":
        signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))
    (folder / f"ready{own_rank()}").touch()
    while not got or how == "never":
        time.sleep(0.01)
    if how == "exit":
        time.sleep(2.6 * own_rank())  # rank 1 still writes its checkpoint
        (folder / f"saved{own_rank()}").touch()
        raise SystemExit(143)
    return "stopped"


@pytest.fixture
def signal_when_ready(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Send this process a signal when the ranks work; should `launch` leave it to the process, the test fails and not the run."""
    stray: list[int] = []
    over = threading.Event()
    before = {
        signum: signal.signal(signum, lambda signum, frame: stray.append(signum))
        for signum in (signal.SIGTERM, signal.SIGINT)
    }

    def start(signum: int) -> None:
        def send() -> None:
            while not over.wait(0.02):
                if all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
                    os.kill(os.getpid(), signum)
                    return

        threading.Thread(target=send).start()

    yield start
    over.set()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert not stray


def test_ranks_may_return_after_sigterm(tmp_path: Path, signal_when_ready: Callable[[int], None]) -> None:
    signal_when_ready(signal.SIGTERM)
    assert launch(work_until_signalled, (tmp_path, "return"), 2) == "stopped"


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signals_without_a_handler_end_the_launch_as_they_end_a_program(
    signum: int, expected: type[BaseException], tmp_path: Path, signal_when_ready: Callable[[int], None]
) -> None:
    signal_when_ready(signum)
    with pytest.raises(expected) as caught:
        launch(work_until_signalled, (tmp_path, "no handler"), 2)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143


def test_ranks_that_do_not_stop_are_killed_after_the_grace_period(
    tmp_path: Path, signal_when_ready: Callable[[int], None]
) -> None:
    signal_when_ready(signal.SIGTERM)
    with pytest.raises(RankFailure, match=r"rank \d had not ended 1 s after SIGTERM and was killed \(in setting up\)"):
        launch(work_until_signalled, (tmp_path, "never"), 2, grace_s=1.0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_third_signal_kills_ranks_that_do_not_stop_and_keeps_the_exit_code(
    signum: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def send() -> None:
        while len(list(tmp_path.glob("ready*"))) < 2 and not over.wait(0.02):
            pass
        for _ in range(4):  # the first two together are one
            if not over.is_set():
                os.kill(os.getpid(), signum)
            over.wait(0.0 if _ == 0 else 0.4)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
            launch(hold_on, (tmp_path,), 2)
    finally:
        over.set()
        sender.join()
    assert isinstance(caught.value, KeyboardInterrupt) if signum == signal.SIGINT else caught.value.code == 143
    assert (
        f"was killed at the third signal, {signal.Signals(signum).name}, before it had stopped"
        in capfd.readouterr().err
    )


def hold_on(folder: Path) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)
    (folder / f"ready{own_rank()}").touch()
    time.sleep(100)


def test_a_program_that_gets_sigterm_lets_every_rank_save_and_exits_with_143(
    program: Callable[[str], Program], tmp_path: Path
) -> None:
    run = program("""
        from pathlib import Path
        from lockstep.strategies.launch.launcher import launch
        from tests.strategies.launch.test_launcher import work_until_signalled
        launch(work_until_signalled, (Path(), "exit"), 2)
    """)
    run.wait_for("ready0", "ready1")
    run.process.terminate()
    assert run.finish() == (143, "", "")
    assert len(list(tmp_path.glob("saved*"))) == 2
    run.wait_until_gone(5)


def test_handlers_are_back_afterwards() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    launch(own_rank, (), 1)
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_launch_in_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(launch(own_rank, (), 2)))
    thread.start()
    thread.join(60)
    assert results == [0]


# ---- no orphans ----------------------------------------------------------------------------------------


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
    assert set(os.listdir("/dev/shm")) <= shared


def test_a_forked_copy_of_the_launcher_leaves_its_server_alone() -> None:
    server = launch(os.getppid, (), 1)
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


# ---- rendezvous ----------------------------------------------------------------------------------------


def listening() -> list[str]:
    """Local addresses, as hexadecimal, on which this process accepts TCP connections."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
        except OSError:
            pass
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


LOOPBACKS = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}


def meet(init_method: str | None) -> tuple[set[str], float]:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(replace(world, init_method=init_method or world.init_method), timeout_s=60)
    other = dist.new_group([0, 1], backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=other)
    addresses = listening()
    where = [None] * 2
    dist.all_gather_object(where, addresses)
    process_group.destroy_process_group()
    return {address for part in where if part for address in part}, total.item()


@pytest.mark.parametrize("method", [None, "tcp://127.0.0.1", "tcp://localhost", "env://", "file://"])
def test_nothing_listens_beyond_loopback(method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if method == "file://":
        method += str(tmp_path / "store")
    elif method == "env://":
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
    elif method:
        method += f":{port}"
    addresses, total = launch(meet, (method,), 2)
    assert total == 2
    assert addresses, "gloo listens somewhere"
    assert addresses <= LOOPBACKS


def interface() -> str | None:
    join()
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_the_users_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(interface, (), 2) == "lo"
    others = [
        name
        for name in os.listdir("/sys/class/net")
        if name != "lo" and Path(f"/sys/class/net/{name}/operstate").read_text().strip() == "up"
    ]
    if not others:
        pytest.skip("this machine has a loopback interface only")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[0])
    assert launch(interface, (), 2) == others[0]


def wait_for_nobody() -> None:
    world = environment.detect()
    assert world is not None
    if world.rank == 0:
        process_group.init_process_group(world, timeout_s=1.0)
    time.sleep(100)


def test_the_rendezvous_times_out() -> None:
    with pytest.raises((RuntimeError, dist.DistError)):
        launch(wait_for_nobody, (), 2)


WORKER = """
    import os, signal, sys
    import torch, torch.distributed as dist
    from lockstep.strategies.launch import environment, process_group
    world = environment.detect()
    process_group.init_process_group(world, timeout_s=60)
    total = torch.ones(1)
    dist.all_reduce(total)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    os.write(1, f"{world.launcher} {world.rank} of {world.world_size} sum {total.item()} {os.environ['GLOO_SOCKET_IFNAME']}\\n".encode())
    process_group.destroy_process_group()
"""


def run_under(launcher: list[str], tmp_path: Path, repo_root: Path, **environ: str) -> str:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    run = subprocess.run(
        [*launcher, str(script)],
        env={**os.environ, "PYTHONPATH": str(repo_root), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return run.stdout


def test_torchrun_and_its_restart(tmp_path: Path, repo_root: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    out = run_under(torchrun, tmp_path, repo_root)
    assert sorted(out.splitlines()) == ["torchrun 0 of 2 sum 2.0 lo", "torchrun 1 of 2 sum 2.0 lo"]


MPIRUN = shutil.which("mpirun")


@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")
def test_mpirun(tmp_path: Path, repo_root: Path) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    out = run_under([MPIRUN or "", "--oversubscribe", "-n", "2", sys.executable], tmp_path, repo_root, **root)
    assert sorted(out.splitlines()) == ["mpi 0 of 2 sum 2.0 lo", "mpi 1 of 2 sum 2.0 lo"]


def test_the_ranks_of_mpirun_meet_at_a_file_of_this_user_only(private_tmp: Path) -> None:
    assert launch(meet_as_mpi, (), 2) == 2
    (folder,) = private_tmp.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="must be a folder that only this user may enter"):
        launch(meet_as_mpi, (), 2)


def meet_as_mpi() -> float:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(replace(world, init_method=None, launcher="mpi"), timeout_s=30)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_set_phase_is_cheap_enough_for_every_step() -> None:
    start = time.perf_counter()
    for step in range(10_000):
        set_phase(step, "training_step")
    assert time.perf_counter() - start < 1.0
