"""The actors and the learner of examples/impala.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep import Trainer, seed_everything
from lockstep.callbacks import Callback
from tests.conftest import REPO_ROOT
from tests.examples.test_examples import CSV, column, metric, run

gymnasium = pytest.importorskip("gymnasium")
from examples.impala import Plan, Policy, Rollouts, vtrace  # noqa: E402

pytestmark = pytest.mark.ranks


def double_loop(ratios: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 1 of the paper as it stands, for one environment."""
    length, c = len(rewards), ratios.clamp(max=1)
    deltas = c * (rewards + discounts * values[1:] - values[:-1])
    targets = values.clone()
    for s in range(length):
        for t in range(s, length):
            targets[s] += discounts[s:t].prod() * c[s:t].prod() * deltas[t]
    return targets[:-1], c * (rewards + discounts * targets[1:] - values[:-1])


@pytest.mark.parametrize("lag", [True, False], ids=["off_policy", "on_policy"])
def test_vtrace_is_the_sum_of_the_paper(lag: bool) -> None:
    torch.manual_seed(0)
    length, width = 20, 6
    log_ratios = torch.randn(length, width, dtype=torch.float64) * lag
    log_ratios[7, 2] = -torch.inf if lag else 0
    discounts = 0.99 * (torch.rand(length, width) > 0.2).double()
    rewards, values = torch.randn(length, width).double(), torch.randn(length + 1, width, dtype=torch.float64)
    found = vtrace(log_ratios, discounts, rewards, values)
    for i in range(width):
        expected = double_loop(log_ratios[:, i].exp(), discounts[:, i], rewards[:, i], values[:, i])
        for one, other in zip(found, expected, strict=True):
            assert (one[:, i] - other).abs().max() <= 1e-12
    if not lag:  # the return of the next steps until the episode or the rollout ends
        following = values[-1]
        for t in reversed(range(length)):
            following = rewards[t] + discounts[t] * following
            assert (found[0][t] - following).abs().max() <= 1e-12


NONE: dict[str, Any] = {}


class Kill(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            os.kill(trainer.datamodule.actors[1][0].pid, signal.SIGKILL)


class Lags(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found += batch["lag"].unique().tolist()


def train(folder: Path, *callbacks: Callback, options: dict[str, Any] = NONE, **data: Any) -> Tensor:
    seed_everything(0)
    module, rollouts = Policy(width=8), Rollouts(games=2, length=5, width=8, max_lag=2, **data)
    arguments: dict[str, Any] = {"max_steps": 7, "limit_val_batches": 0, "split_batches": True, "accelerator": "cpu"}
    arguments |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments |= {"default_root_dir": folder, **options}
    ckpt_path = arguments.pop("ckpt_path", None)
    Trainer(callbacks=list(callbacks), **arguments).fit(module, datamodule=rollouts, ckpt_path=ckpt_path)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.slow
def test_a_run_is_a_function_of_its_seed_and_can_be_replayed(tmp_path: Path) -> None:
    lags = Lags()
    first = train(tmp_path, lags, actors=1, record=str(tmp_path / "first"))
    assert lags.found == [0, 1, 2, 2, 2, 2, 2]
    assert torch.equal(first, train(tmp_path, actors=3))
    assert torch.equal(first, train(tmp_path, replay=str(tmp_path / "first")))

    killed = tmp_path / "killed"
    with pytest.warns(
        UserWarning, match=r"actor 1 \(process \d+\) was killed by SIGKILL at step [3-6]; another begins"
    ):
        second = train(tmp_path, Kill(), actors=3, record=str(killed))
    assert killed.stat().st_size == 7 * 4 * Plan(games=2, length=5).rollout.itemsize
    assert not torch.equal(first, second)
    assert torch.equal(second, train(tmp_path, replay=str(killed)))
    with pytest.raises(FileExistsError, match="killed"):
        train(tmp_path, record=str(killed))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"accumulate_grad_batches": 2}, id="accumulation"),
        pytest.param({"strategy": "dp", "devices": 2}, id="dp"),
        pytest.param({"strategy": "tensor", "devices": 2}, id="tensor", marks=pytest.mark.slow),
    ],
)
def test_what_actors_cannot_wait_for_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="actors need single, ddp or fsdp, and no accumulation"):
        train(tmp_path, options=options)


@pytest.mark.slow
def test_a_resumed_run_plays_new_games(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "saved")

    first, second = tmp_path / "first", tmp_path / "second"
    train(tmp_path, Save(), record=str(first))
    train(tmp_path, options={"ckpt_path": tmp_path / "saved"}, record=str(second))
    one, two = (np.fromfile(path, Plan(games=2, length=5).rollout).reshape(7, 4) for path in (first, second))
    assert not two["valid"][:4].any() and two["valid"][4:].any(axis=(1, 2, 3)).all()
    assert not np.array_equal(one["obs"][4], two["obs"][4])


IMPALA = ["-m", "lockstep", "fit", "examples/impala.yaml"]


@pytest.mark.slow
def test_the_learner_is_the_same_under_every_strategy(tmp_path: Path) -> None:
    record = tmp_path / "rollouts"
    run(*IMPALA, "max_steps=20", "trainer.limit_val_batches=0", f"data.record={record}", root=tmp_path)
    compared = "single,dp,model,ddp,fsdp,tensor"
    arguments = ["-m", "lockstep", "compare", *IMPALA[3:], "--strategies", compared, "--devices", "2", "--steps", "20"]
    run(*arguments, f"data.replay={record}", "trainer.limit_val_batches=0", root=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_has_actors(strategy: str, tmp_path: Path) -> None:
    options = ["max_steps=40", "val_check_interval=40", "log_every_n_steps=1", CSV, f"strategy={strategy}", "devices=2"]
    output = run(*IMPALA, *options, root=tmp_path)
    assert metric(output, "val/return") > 30
    assert column(tmp_path, "train/lag") == [0] + [1] * 39


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_returns_reach_475_of_500(seed: int, tmp_path: Path) -> None:
    start = time.monotonic()
    output = run(*IMPALA, f"seed={seed}", root=tmp_path, timeout_s=600)
    print(f"seed {seed}: {metric(output, 'val/return')} after {time.monotonic() - start:.0f} s")
    assert metric(output, "val/return") >= 475


def session(leader: int) -> dict[int, str]:
    """Names of the processes in the session of `leader`, which may be gone."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            match = re.fullmatch(r"(\d+) \((.*)\) (\S) \S+ \S+ (\S+) .*", stat.read_text().strip(), re.DOTALL)
        except OSError:
            continue
        if match and int(match[4]) == leader and match[3] != "Z":
            found[int(match[1])] = match[2]
    return found


@pytest.mark.slow
def test_actors_end_with_the_trainer(tmp_path: Path) -> None:
    command = [sys.executable, *IMPALA, "accelerator=cpu", "max_steps=100000", f"default_root_dir={tmp_path}", CSV]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with open(log, "wb") as out:
        trainer = subprocess.Popen(
            command, cwd=REPO_ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    wait_for(lambda: any(file.stat().st_size > 200 for file in tmp_path.rglob("metrics.csv")), 90)
    assert len(session(trainer.pid)) >= 4  # the trainer, the server of its forks and two actors
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not session(trainer.pid), 5)


def wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
