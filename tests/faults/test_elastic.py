"""Under torchrun the run's folder continues at whatever number of ranks torchrun forms."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.strategies.launch import fault_injection
from lockstep.trainer.checkpoint.store import Checkpoint, newest
from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.faults

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = str(REPO_ROOT / "tests" / "faults" / "elastic.py")
STEPS = 24


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    agents: list[subprocess.Popen] = []

    def run(*arguments: str, folder: Path, **environ: str) -> subprocess.Popen:
        folder.mkdir(exist_ok=True)
        with open(folder / "log", "ab") as log:
            env = {**os.environ, "PYTHONPATH": str(REPO_ROOT), **environ}
            agents.append(
                subprocess.Popen(
                    [*TORCHRUN, *arguments, SCRIPT], env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
                )
            )
        return agents[-1]

    yield run
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()  # torchrun ends its ranks then, which SIGKILL would leave behind
            agent.wait(30)


def finished(folder: Path) -> tuple[list[dict[str, str]], dict[str, Any], dict[str, Any]]:
    """What was logged, the weights, and the account of the run."""
    run = folder / "runs/Slow/version_0"
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    path = newest(run / "checkpoints")
    assert path is not None
    checkpoint = Checkpoint.open(path)
    assert checkpoint.global_step == STEPS
    return (
        rows,
        {name: checkpoint.read(name) for name in checkpoint.names("model/")},
        json.loads((run / "summary.json").read_text()),
    )


def same(folder: Path, undisturbed: Path) -> dict[str, Any]:
    """The same samples in the same global batches: every logged loss, and the weights, to rounding."""
    (rows, weights, summary), (expected, reference, _) = finished(folder), finished(undisturbed)
    assert [(row["step"], row["epoch"]) for row in rows] == [(row["step"], row["epoch"]) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for name, value in other.items():
            assert row[name] == value == "" or float(row[name]) == pytest.approx(float(value), rel=1e-9), (
                row["step"],
                name,
            )
    for name, weight in reference.items():
        assert (weights[name] - weight).abs().max() < 1e-10, name
    assert summary["exit"] == "finished" and summary["steps"] == STEPS
    return summary


def single(folder: Path) -> None:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun(start: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    single(tmp_path / "one")
    folder = tmp_path / "two"
    kill = f"action=sigkill,file={tmp_path / 'count'}"
    plan = f"rank=1,step=7,point=backward,{kill};rank=0,step=15,point=callback,{kill}"
    agent = start(
        "--standalone", "--nproc-per-node=2", "--max-restarts=2", folder=folder, **{fault_injection.VARIABLE: plan}
    )
    assert agent.wait(100) == 0, (folder / "log").read_text()[-5000:]
    assert (tmp_path / "count").read_text() == "0\n1\n"
    summary = same(folder, tmp_path / "one")
    assert (summary["restarts"], summary["world_size"]) == (2, 2)


def position(folder: Path, name: str) -> tuple[int, int]:
    """Process id and step that a rank has written, (0, -1) before."""
    try:
        pid, step = (folder / name).read_text().split()
        return int(pid), int(step)
    except (OSError, ValueError):
        return 0, -1


def wait_for(condition: Callable[[], bool], folder: Path, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, (folder / "log").read_text()[-5000:]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_run_goes_on_at_the_number_of_ranks_that_there_is(
    start: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    """Two agents of a rank each, the second of which is lost with its rank, and comes back."""
    single(tmp_path / "one")
    folder = tmp_path / "elastic"
    folder.mkdir()
    (folder / "slow").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    conf = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    meet = [
        "--nnodes=1:4",
        "--nproc-per-node=1",
        "--max-restarts=9",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic",
    ]
    meet += ["--local-addr=127.0.0.1", "--monitor-interval=0.2"]
    # With torch 2.13 a node that comes back waits forever otherwise: the agents share the store of their own meeting
    # with the ranks.
    shares = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = start(*meet, conf + "true", folder=folder, **shares)
    second = start(*meet, conf + "false", folder=folder, **shares)
    wait_for(lambda: position(folder, "at-2-1")[1] >= 3, folder)
    ranks = {rank: position(folder, f"at-2-{rank}")[0] for rank in (0, 1)}
    children = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    lost = next(pid for pid in ranks.values() if str(pid) in children)
    second.send_signal(signal.SIGKILL)
    os.kill(lost, signal.SIGKILL)
    second.wait()
    wait_for(lambda: position(folder, "at-1-0")[1] >= 6, folder)
    start(*meet, conf + "false", folder=folder, **shares)
    at = position(folder, "at-2-1")[1]
    wait_for(lambda: position(folder, "at-2-1")[1] > max(at, 6), folder)
    (folder / "slow").unlink()
    assert first.wait(100) == 0, (folder / "log").read_text()[-5000:]
    assert (folder / "done").read_text() == f"2 {STEPS}"
    summary = same(folder, tmp_path / "one")
    assert summary["restarts"] >= 2
