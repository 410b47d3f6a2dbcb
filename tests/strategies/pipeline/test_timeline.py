"""Schedules hold all work in order, their bubbles follow the formulas, and stages overlap."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.strategies import Pipeline, SingleDevice
from lockstep.strategies.pipeline.schedules import SCHEDULES, schedule
from lockstep.strategies.pipeline.timeline import plan
from lockstep.trainer.cli.main import main

pytestmark = pytest.mark.ranks


class Slow(nn.Linear):
    """Takes its time where it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return super().forward(x)


BEGAN: list[float] = []


class Noting(nn.Module):
    """Notes when its own code begins, before it calls a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Slow(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        BEGAN.append(time.monotonic())
        return self.second(self.first(x))


def began(num_ranks: int) -> float:
    """Seconds that the second stage begins with the user's code later than the first, in a step whose shapes are
    known."""
    strategy = Pipeline()
    strategy.configure(devices=num_ranks, accelerator="cpu")
    strategy.setup()
    try:
        model = nn.ModuleDict({"net": Noting()})
        wrapped = strategy.setup_module(model)
        strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), lr=0.1)})
        for window in strategy.shard_loader(DataLoader(torch.ones(4, 4), 2), seed=5).windows(0):
            BEGAN.clear()
            strategy.forward_backward(wrapped, lambda batch, _: model["net"](batch).mean(), window)
        first, second = strategy.all_gather(torch.tensor(BEGAN[0], dtype=torch.float64)).tolist()
        return second - first
    finally:
        strategy.teardown()


@pytest.mark.long
def test_a_stage_runs_the_users_code_before_its_input_is_there(run_ranks: Callable[..., Any]) -> None:
    assert abs(run_ranks(began, 2, 2)) < 0.25


def test_timelines_hold_all_work_in_order_and_their_bubbles_agree_with_the_formulas() -> None:
    for name, found in SCHEDULES.items():
        for num_ranks, num_parts in ((2, 4), (4, 8)):
            lines = found.timeline(num_ranks, num_parts)
            work = [step[2:] for line in lines for step in line]
            assert len(set(work)) == len(work)
            assert sum(kind == "F" for kind, *_ in work) == num_ranks * num_parts * found.stages_per_rank
            assert all(a[1] <= b[0] for line in lines for a, b in pairwise(line))
            if formula := found.formula(num_ranks, num_parts):
                assert f"{found.bubble(num_ranks, num_parts):.1%}" in formula, name
    assert SCHEDULES["zbv"].bubble(4, 8) < SCHEDULES["interleaved_1f1b"].bubble(4, 8) < SCHEDULES["1f1b"].bubble(4, 8)
    assert schedule("interleaved_1f1b", 4).bubble(2, 4) == pytest.approx(1 / 17)


def test_the_picture_shows_who_works_when() -> None:
    assert SCHEDULES["1f1b"].picture(2, 3).splitlines() == [
        "rank 0  F0 F1 ·· ·· B0 B~ F2 B1 B~ ·· B2 B~",
        "rank 1  ·· F0 B0 B~ F1 B1 B~ F2 B2 B~ ·· ··",
    ]


def test_parts_that_fit_no_schedule_are_named_with_the_next_number_that_does() -> None:
    with pytest.raises(
        ValueError,
        match=r"schedule='1f1b' on 4 ranks does not take num_micro_batches=3; the next number that it takes is 4",
    ):
        schedule("1f1b").check(4, 3)
    with pytest.raises(ValueError, match="the next number that it takes is 8"):
        schedule("dualpipev").check(4, 5)
    assert schedule("dualpipev").fitting(4, 5).name == "zbv" and schedule("1f1b").fitting(4, 3).name == "gpipe"
    assert schedule("interleaved_1f1b", 3).fitting(2, 5).stages_per_rank == 3


@pytest.mark.long
def test_the_plan_names_stages_layers_and_the_bubble(
    capsys: pytest.CaptureFixture[str], repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    assert main(["plan", "examples/gpt.yaml", "strategy=pipeline", "devices=2"]) == 0
    shown = capsys.readouterr().out
    assert "gpt in 2 stages on 2 ranks, schedule 1f1b, 2 parts a micro-batch" in shown
    assert "stage 1  rank 1  gpt.blocks.2 … gpt.head (4)" in shown and SCHEDULES["1f1b"].picture(2, 2) in shown
    assert "Bubble: 33.3% of the ranks' time, (P - 1) / (M + P - 1) = 33.3%" in shown
    strategy = Pipeline(schedule="zbv", num_micro_batches=8, sample=torch.zeros(4, 8), module="net")
    strategy.configure(devices=2, accelerator="cpu")
    shown = plan(strategy, nn.ModuleDict({"net": nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])}))
    assert "net in 4 stages on 2 ranks, schedule zbv, 8 parts" in shown and "ms" in shown
    assert "every rank runs every layer" in plan(SingleDevice(), nn.Linear(1, 1))
