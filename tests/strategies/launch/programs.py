"""Programs that start ranks, and what ranks say about themselves."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.strategies.launch import environment, forkserver, process_group


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


@contextmanager
def another_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it ranks are forked by a server of its own; the one before, whose imports take seconds, is kept."""
    before = forkserver._swap(None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(forkserver, "PRELOAD", ("torch",))
            yield
    finally:
        own = forkserver._swap(before)
        if own is not None:
            own.close()


def own_rank() -> int:
    return int(os.environ["RANK"])


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def join() -> environment.World:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(world, timeout_s=60)
    return world


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


LOOPBACKS = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
