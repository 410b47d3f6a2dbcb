"""Any program may start ranks: without a `__main__` guard, from standard input, with output of its own."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.strategies.launch.launcher import launch
from tests.strategies.launch.programs import Program

pytestmark = pytest.mark.ranks


@pytest.mark.long
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


@pytest.mark.slow  # the notebook of two devices, in tests/examples, has such a class too
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
        files = [os.readlink(fd) for fd in glob.glob("/proc/self/fd/*") if os.path.exists(fd)]
        sockets = [name for name in files if name.startswith("socket")]
        listed = f"/proc/self/task/{os.getpid()}/children"
        children = open(listed).read() if os.path.exists(listed) else ""
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
