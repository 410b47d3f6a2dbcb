"""A run that fails ends: every process within 5 s, the culprit's own error first; and a launcher that is killed
leaves nothing behind.

Two trials by default, one of them a kill; `-m slow` does a hundred at every place. Programs run as a user runs them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.faults

POINTS = ("next_batch", "forward", "backward", "collective", "before_step", "after_step", "callback", "save.write")
LIMIT_S = 5.0
STEP = 3
PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep.callbacks import ModelCheckpoint
from lockstep import Module, Trainer


class Digits(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


dataset = TensorDataset(torch.randn(4000, 8), torch.randint(0, 3, (4000,)))
data = DataLoader(dataset, batch_size=2, num_workers=int(sys.argv[3]))
often = ModelCheckpoint(every_n_train_steps=3)
options = dict(accelerator="cpu", max_epochs=1000, enable_progress_bar=False, callbacks=often)
trainer = Trainer(strategy=sys.argv[1], devices=int(sys.argv[2]), **options)
trainer.fit(Digits(), data)
"""


class Run:
    """The program in a process, and what of it is still there: all that inherited the marker in its environment."""

    def __init__(self, folder: Path, strategy: str, ranks: int, workers: int = 0, plan: str = "") -> None:
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir()
        self.marker = f"LOCKSTEP_TEST_MARKER={folder}"
        environ = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "LOCKSTEP_FAULTS": plan, "TMPDIR": str(self.temporary)}
        environ |= dict([self.marker.split("=", 1)])
        self.error = folder / "error"
        with self.error.open("w") as error:
            command = [sys.executable, "program.py", strategy, str(ranks), str(workers)]
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=error)

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                with suppress(OSError):
                    if self.marker.encode() in (path / "environ").read_bytes().split(b"\0") and not dead(path):
                        found.append(int(path.name))
        return found

    def gone(self, since: float, limit_s: float) -> float:
        """Seconds from `since` (time.time) until no process is left; raises where it takes longer."""
        while left := self.processes():
            assert time.time() - since < limit_s, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
            self.process.poll()
            time.sleep(0.005)
        return time.time() - since

    def wait_for_steps(self) -> None:
        """Until the run has saved once."""
        end = time.monotonic() + 60
        while not list(self.folder.glob("runs/*/*/checkpoints/*step=*")):
            assert time.monotonic() < end and self.process.poll() is None, self.error.read_text()
            time.sleep(0.01)


def dead(path: Path) -> bool:
    return (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def fail(folder: Path, point: str, action: str, strategy: str, ranks: int) -> float:
    """One rank fails at `point`: how long until all is gone, after a check of what was said."""
    rank = 0 if point == "save.write" else ranks - 1
    count = folder.parent / f"{folder.name}-count"  # written when the fault happens
    plan = f"rank={rank},step={STEP},point={point},action={action},file={count}"
    run = Run(folder, strategy, ranks, plan=plan)
    end = time.monotonic() + 90
    while not count.exists() or not count.stat().st_size:
        assert time.monotonic() < end and run.process.poll() is None, run.error.read_text()
        time.sleep(0.002)
    assert run.processes(), "nothing of it was there to see"
    took = run.gone(count.stat().st_mtime, 30.0)
    assert run.process.wait() == 1
    said = run.error.read_text()
    assert len(said.splitlines()) <= 60, said
    check_first_block(said, rank, action)
    return took


def check_first_block(said: str, rank: int, action: str) -> None:
    """The first error in `said` is the culprit's, and tells rank, step and phase."""
    if action == "raise":
        first = said[: said.index("RuntimeError: planned by LOCKSTEP_FAULTS")]
        assert re.search(
            rf"rank {rank}, step {STEP}, in [a-z ]+\n+(.*\n)*?Traceback \(most recent call last\):\n", first
        ), said
        assert first.count("Traceback (most recent call last)") <= 2, said  # torch's cause of it is not an error
        assert "Error:" not in first, said
    else:
        assert re.search(rf"RankFailure: rank {rank} was killed by SIGKILL \(step {STEP}, in [a-z ]+\)", said), said
        assert said.count("Error:") == 0 and said.count("RankFailure:") == 1, said
    others = [other for other in range(4) if other != rank]
    assert not re.search(rf"rank ({'|'.join(map(str, others))})\b", said), said


def trials(tmp_path: Path, number: int, points: Sequence[str] = POINTS) -> Iterator[float]:
    chance = random.Random(5)
    for i in range(number):
        point, action = points[i % len(points)], ("raise", "sigkill")[(i + i // len(points)) % 2]
        ranks = 4 if i % 4 == 3 else 2
        strategy = "ddp" if number <= 2 else chance.choice(["ddp", "fsdp"])
        yield fail(tmp_path / str(i), point, action, strategy, ranks)


def report(what: str, times: list[float]) -> None:
    times = sorted(times)
    print(
        json.dumps(
            {
                "what": what,
                "trials": len(times),
                "p50_s": times[len(times) // 2],
                "p99_s": times[int(len(times) * 0.99) - 1],
                "max_s": times[-1],
            }
        )
    )


@pytest.mark.long
def test_a_failing_rank_ends_the_run(tmp_path: Path) -> None:
    times = list(trials(tmp_path, 2, ("save.write", "collective")))
    report("failing rank", times)
    assert max(times) < LIMIT_S


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_failing_ranks_end_their_runs(tmp_path: Path) -> None:
    times: list[float] = []
    try:
        for took in trials(tmp_path, 100):
            times.append(took)  # kept where a later one fails
    finally:
        report("failing rank", times)
    times.sort()
    assert times[98] < LIMIT_S


def kill_launcher(tmp_path: Path, number: int) -> list[float]:
    chance = random.Random(6)
    times = []
    for i in range(number):
        shared = set(os.listdir("/dev/shm"))
        run = Run(tmp_path / str(i), ("ddp", "fsdp")[i % 2], 2, workers=1 if i % 3 == 1 else 0)
        run.wait_for_steps()
        time.sleep(chance.random() * 0.3)
        assert len(run.processes()) >= 4, "the launcher, the server and two ranks"
        os.kill(run.process.pid, signal.SIGKILL)
        begin = time.time()
        run.process.wait()
        times.append(run.gone(begin, LIMIT_S))
        mine = [name for name in set(os.listdir("/dev/shm")) - shared if is_of(name, run)]
        assert not mine, mine
        assert not held(run), "a lock is held"
    return times


def is_of(name: str, run: Run) -> bool:
    """Whether a segment that has appeared may be this run's: another program's are named by a process that lives."""
    with suppress(OSError):
        found = re.match(r"torch_(\d+)_", name)
        return found is None or not Path(f"/proc/{found[1]}").exists()
    return False


def held(run: Run) -> list[str]:
    """The locks in the run's folders that somebody still holds."""
    inodes = {str(path.stat().st_ino) for path in run.folder.rglob("*") if path.is_file()}
    return [line for line in Path("/proc/locks").read_text().splitlines() if line.split()[-3].split(":")[-1] in inodes]


@pytest.mark.slow  # tests/strategies/launch/test_orphans.py kills a launcher every day
@pytest.mark.timeout(1200)
def test_fifty_launchers_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    times = kill_launcher(tmp_path, 50)
    report("killed launcher", times)
