"""SIGTERM and SIGINT at random instants, from the start of a program to its end, to any of its processes.

The exit code is 143 or 130. There is a checkpoint of the last step if one was done, and none before. Code 0 only comes
if all was done before the signal. Nothing hangs, and nothing is left running. Twelve signals by default, 200 in the
slow run (`-m slow`).
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.trainer.checkpoint.store import Checkpoint, newest
from tests.conftest import REPO_ROOT
from tests.faults.processes import descendants, is_alive

pytestmark = pytest.mark.faults

STRATEGIES = ("single", "ddp", "fsdp", "pipeline")
DAILY = ("single",)
"""Ranks get signals every day in tests/trainer/run/test_signals_outside_steps.py."""
TARGETS = ("launcher", "rank", "group", "all")
CODES = {signal.SIGTERM: (143, -signal.SIGTERM), signal.SIGINT: (130, -signal.SIGINT)}
"""As the program's own code, or where it had no handler yet or any more, which a shell shows as the same number."""
LIMIT_S = 100.0


class Nursery:
    def __init__(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.signalled"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, folder: Path, strategy: str, workers: int, *, cold: bool = False, resume: bool = False) -> int:
        folder.mkdir(exist_ok=True)
        order = {"folder": str(folder), "strategy": strategy, "workers": workers, "cold": cold, "resume": resume}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        return int(self.process.stdout.readline())

    def code(self, folder: Path) -> int:
        """The exit code of the program that was started last."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        assert ready, f"it hangs: {(folder / 'log').read_text()}"
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    with found.process:
        yield found
        found.process.kill()


def send(number: int, target: str, launcher: int, folder: Path, chance: random.Random) -> None:
    ranks = [int(path.name) for path in (folder / "pids").glob("*")]
    pids = {"rank": [chance.choice(ranks)] if ranks else [launcher], "all": [launcher, *descendants(launcher)]}
    if target == "group":
        os.killpg(launcher, number)
        return
    for pid in pids.get(target, [launcher]):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_once(nursery: Nursery, folder: Path, number: int, target: str, delay_s: float, **how: Any) -> str:
    """One program and one signal; return where the signal met it."""
    chance = random.Random(str(folder.name))
    launcher = nursery.start(folder, **how)
    time.sleep(delay_s)
    before = {path.name: path.read_text() for path in folder.glob("finished")}
    with suppress(ProcessLookupError):  # it has ended
        send(number, target, launcher, folder, chance)
    code = nursery.code(folder)
    case = f"{folder.name}: {signal.Signals(number).name} to {target} after {delay_s:.2f} s, {how}: code {code}"
    log = (folder / "log").read_text() if (folder / "log").exists() else ""
    end = time.monotonic() + 10
    while left := [path.name for path in (folder / "pids").glob("*") if is_alive(int(path.name))]:
        assert time.monotonic() < end, f"{case}; {left} are left\n{log}"
        time.sleep(0.02)
    steps = int((folder / "steps").read_text() or 0) if (folder / "steps").exists() else 0
    found = newest(folder / "runs/Paced/version_0/checkpoints")
    saved = Checkpoint.open(found).global_step if found is not None else 0
    if code == 0:
        assert before, f"{case}, but it had not finished\n{log}"
    else:
        assert code in CODES[signal.Signals(number)], f"{case}\n{log}"
    assert saved == steps, f"{case}; {steps} steps were done, and {saved} saved\n{log}"
    return "finished" if code == 0 else "with a checkpoint" if steps else "before the first step"


def barrage(nursery: Nursery, folder: Path, strategy: str, count: int, workers: tuple[int, ...]) -> Counter[str]:
    """`count` signals over the life of programs under a strategy, evenly over time and targets; what they met."""
    chance = random.Random(strategy)
    met: Counter[str] = Counter()
    lasts: dict[tuple[int, bool], float] = {}
    for i in range(count):
        number = (signal.SIGTERM, signal.SIGINT)[i % 2]
        how = {"strategy": strategy, "workers": workers[i % len(workers)], "cold": count > 20 and i % 10 == 9}
        key = how["workers"], how["cold"]
        if key not in lasts:  # how long one takes that is left alone, on this machine now
            nursery.start(folder / f"undisturbed-{strategy}-{how['workers']}-{how['cold']}", **how)
            began = time.monotonic()
            assert nursery.code(folder) == 0
            lasts[key] = time.monotonic() - began
        delay_s = lasts[key] * (i + chance.random()) / count
        one = folder / f"{strategy}{i}"
        outcome = signal_once(nursery, one, number, TARGETS[(i + i // 4) % 4], delay_s, **how)
        met[outcome] += 1
        if outcome == "with a checkpoint" and count > 20 and i % 5 == 0:
            nursery.start(one, **{**how, "cold": False}, resume=True)
            assert nursery.code(one) == 0
            undisturbed = folder / f"undisturbed-{strategy}-{how['workers']}-{how['cold']}"
            assert (one / "weights.json").read_text() == (undisturbed / "weights.json").read_text()
            met["resumed exactly"] += 1
    print(f"{strategy}: {dict(met)}")
    return met


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "strategy", [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name not in DAILY)]
)
def test_three_signals(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    met = barrage(nursery, tmp_path, strategy, 3, (2,) if strategy in ("single", "ddp") else (0,))
    assert met.total() == 3


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fifty_signals(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    met = barrage(nursery, tmp_path, strategy, 50, (0, 2))
    assert met["before the first step"] and met["with a checkpoint"], met
