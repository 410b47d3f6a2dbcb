"""Ranks and launchers killed at random, again and again: what the training ends with is, bit by bit, what it would have
been.

Five kills in twelve steps by default, forty in four times 24 steps for each strategy in the slow run (`-m slow`), which
also kills once in each of fifty trainings, at any instant from the start of the launcher to its end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.conftest import REPO_ROOT
from tests.faults.outcome import outcome
from tests.faults.processes import descendants, is_alive

pytestmark = pytest.mark.faults

STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "pipeline": 2, "tensor": 2, "ddp topk=0.1": 2, "fsdp=2,pipeline=2": 4}
DAILY = ("ddp", "pipeline")
TARGETS = ("launcher", "rank", "all")
POINTS = ("next_batch", "forward", "backward", "before_step", "after_step", "callback", "teardown")
SAVE_POINTS = ("save.snapshot", "save.open", "save.write", "save.fsync", "save.manifest", "save.rename")


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen]:
    environ = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.nursery"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


class Training:
    """One training in a folder, over as many launchers as it takes."""

    def __init__(self, nursery: subprocess.Popen, folder: Path, strategy: str, steps: int, plan: str = "") -> None:
        self.nursery, self.folder, self.strategy, self.num_steps, self.plan = nursery, folder, strategy, steps, plan
        self.launcher = 0
        self.launchers = 0
        folder.mkdir()
        (folder.parent / "undisturbed").mkdir(exist_ok=True)

    def start(self) -> None:
        devices = STRATEGIES[self.strategy]
        order = {
            "folder": str(self.folder),
            "undisturbed": str(self.folder.parent / "undisturbed"),
            "strategy": self.strategy,
            "devices": devices,
            "steps": self.num_steps,
            "restarts": 50,
            "faults": self.plan,
        }
        assert self.nursery.stdin is not None and self.nursery.stdout is not None
        self.nursery.stdin.write(json.dumps(order) + "\n")
        self.nursery.stdin.flush()
        self.launcher = int(self.nursery.stdout.readline())
        self.launchers += 1

    def finished(self) -> bool:
        return (self.folder / "done.json").exists()

    def steps(self) -> int:
        """Rows of the log that have been written in this and earlier lives."""
        log = self.folder / "runs/Slow/version_0/metrics.csv"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def processes(self) -> list[int]:
        """The launcher, the server and the ranks that still run."""
        return [int(path.name) for path in (self.folder / "pids").glob("*") if is_alive(int(path.name))]

    def ranks(self) -> list[int]:
        """Those of the processes that the server has forked."""
        found = []
        for pid in self.processes():
            with suppress(OSError):
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if pid != self.launcher and int(parent) != self.launcher:
                    found.append(pid)
        return sorted(found)

    def wait(self, seconds: float = 100.0) -> None:
        """Until it has finished; a launcher that gave up, or was killed, is started again once its ranks are gone."""
        end = time.monotonic() + seconds
        while not self.finished() or is_alive(self.launcher):
            assert time.monotonic() < end, self.log()
            if not is_alive(self.launcher):
                self.wait_until_gone()
                if not self.finished():
                    assert self.launchers < 15, self.log()
                    self.start()
            time.sleep(0.02)

    def wait_until_gone(self) -> None:
        end = time.monotonic() + 5
        while self.processes():
            assert time.monotonic() < end, f"{self.processes()} are left 5 s after their launcher"
            time.sleep(0.02)

    def log(self) -> str:
        return (self.folder / "log").read_text()[-5000:]


def planned(kills: int, strategy: str, steps: int, folder: Path, chance: random.Random) -> str:
    """Kills of one rank at points of the product, each in a step of its own."""
    points = [*POINTS, *SAVE_POINTS, *(["collective"] if STRATEGIES[strategy] > 1 else [])]
    entries = []
    for step in sorted(chance.sample(range(1, steps), min(kills, steps - 1))):
        point = chance.choice(points)
        step = steps if point == "teardown" else step + step % 2 if point in SAVE_POINTS else step
        rank = 0 if point in ("save.rename", "save.manifest") else chance.randrange(STRATEGIES[strategy])
        entries.append(f"rank={rank},step={step},point={point},action=sigkill,file={folder / 'count'}")
    return ";".join(entries)


def crash(
    nursery: subprocess.Popen, tmp_path: Path, strategy: str, kills: int, steps: int, seed: int
) -> tuple[Training, int]:
    """Train `strategy` for `steps` under `kills` kills, three of five at points of the product; return it and how many
    there were."""
    chance = random.Random(f"{strategy}-{seed}")
    at_random = 2 * kills // 5
    folder = tmp_path / f"disturbed{seed}"
    training = Training(nursery, folder, strategy, steps, planned(kills - at_random, strategy, steps, folder, chance))
    training.start()
    killed = 0
    first = list(STRATEGIES).index(strategy)
    targets = [("launcher", "all", "rank")[(first + i) % 3] for i in range(at_random)]
    for i, target in enumerate(targets):
        rows = training.steps()
        due = max(rows + 1, chance.randrange(1 + i * steps // len(targets), 1 + (i + 1) * steps // len(targets)))
        while training.steps() < due and not training.finished():
            if not is_alive(training.launcher):
                training.wait_until_gone()
                training.start()
            time.sleep(0.005)
        time.sleep(chance.random() * 0.1)
        while not (ranks := training.ranks()) and is_alive(training.launcher):  # between two lives
            time.sleep(0.005)
        victims = {"launcher": [training.launcher], "all": ranks, "rank": ranks[-1:]}[target]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        if target == "launcher":
            while is_alive(training.launcher):
                time.sleep(0.005)
            training.wait_until_gone()
            if not training.finished():
                training.start()
    training.wait()
    training.wait_until_gone()
    count = folder / "count"
    return training, killed + (len(count.read_text().split()) if count.exists() else 0)


def same(training: Training, undisturbed: Path) -> None:
    (tensors, state, ranks, log), (tensors_too, state_too, ranks_too, log_too) = (
        outcome(training.folder / "runs/Slow/version_0", training.num_steps),
        outcome(undisturbed / "runs/Slow/version_0", training.num_steps),
    )
    assert tensors.keys() == tensors_too.keys() and any(name.startswith("optimizer/") for name in tensors)
    different = [name for name in tensors if not torch.equal(tensors[name], tensors_too[name])]
    assert not different and state == state_too and ranks == ranks_too
    assert log == log_too
    assert len(log.splitlines()) > training.num_steps


def survive(nursery: subprocess.Popen, tmp_path: Path, strategy: str, kills: int, steps: int, seeds: int) -> int:
    total = 0
    for seed in range(seeds):
        training, killed = crash(nursery, tmp_path, strategy, kills, steps, seed)
        same(training, tmp_path / "undisturbed")
        summary = json.loads((training.folder / "runs/Slow/version_0/summary.json").read_text())
        assert summary["exit"] == "finished" and summary["steps"] == steps and summary["restarts"] > 0
        total += killed
    print(f"{strategy}: {total} kills")
    return total


@pytest.mark.parametrize(
    "strategy", [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name not in DAILY)]
)
def test_five_kills(nursery: subprocess.Popen, tmp_path: Path, strategy: str) -> None:
    assert survive(nursery, tmp_path, strategy, kills=5, steps=12, seeds=1) >= 4, (
        "a kill may fall into a moment without ranks"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forty_kills(nursery: subprocess.Popen, tmp_path: Path, strategy: str) -> None:
    assert survive(nursery, tmp_path, strategy, kills=11, steps=24, seeds=4) >= 40


def kill_once(
    nursery: subprocess.Popen, folder: Path, strategy: str, steps: int, target: str, rows: int, delay_s: float
) -> str:
    """One training and one kill, `delay_s` after it has logged so many rows; return what the kill met."""
    chance = random.Random(folder.name)
    training = Training(nursery, folder, strategy, steps)
    training.start()
    while training.steps() < rows:
        time.sleep(0.002)
    time.sleep(delay_s)
    before, done, below = training.steps(), training.finished(), descendants(training.launcher)
    known = [pid for pid in training.ranks() if pid in below]
    victims = {
        "launcher": [training.launcher],
        "rank": [chance.choice(known or below or [training.launcher])],
        "all": below[::-1],  # ranks before the server that would report them
    }[target]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if target == "launcher":
        end = time.monotonic() + 10
        while left := [pid for pid in below if is_alive(pid)]:
            assert time.monotonic() < end, f"{left} are left 10 s after their launcher\n{training.log()}"
            time.sleep(0.02)
    training.wait()
    training.wait_until_gone()
    same(training, folder.parent / "undisturbed")
    return "after the end" if done else "after the first step" if before else "before the first step"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "fsdp=2,pipeline=2"])
def test_fifty_kills_at_any_instant(nursery: subprocess.Popen, tmp_path: Path, strategy: str) -> None:
    kills, steps, chance = (50 if STRATEGIES[strategy] == 2 else 15), 24, random.Random(strategy)
    for name in ("first", "undisturbed too"):  # the first one trains in the folder `undisturbed` before
        training, began = Training(nursery, tmp_path / name, strategy, steps), time.monotonic()
        training.start()
        while training.steps() < 2:
            time.sleep(0.002)
        first_step_s = time.monotonic() - began
        training.wait()
        same(training, tmp_path / "undisturbed")
    met: Counter[str] = Counter()
    for i in range(kills):
        rows = chance.randrange(2, steps) if i % 3 else 0  # the first is the header
        delay_s = chance.random() * (0.15 if rows else first_step_s)
        met[kill_once(nursery, tmp_path / f"{i}", strategy, steps, TARGETS[i // 3 % 3], rows, delay_s)] += 1
    print(f"{strategy}: {dict(met)}")
    assert met["before the first step"] and met["after the first step"] > kills // 3, met
