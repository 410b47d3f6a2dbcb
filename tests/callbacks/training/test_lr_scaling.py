"""LRScaling: the factor, its arithmetic on paper, and runs resumed with another global batch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.callbacks._support.lr_factor import lr_factor
from lockstep.callbacks.training.lr_scaling import LRScaling
from lockstep.callbacks.training.lr_warmup import LRWarmup
from lockstep.strategies.base import Topology


def trainer(*optimizers: torch.optim.Optimizer, batch_size: int | None = 256, rank: int = 0) -> Any:
    return SimpleNamespace(
        global_step=0,
        optimizers=list(optimizers),
        print=print if rank == 0 else lambda *_: None,
        _run=SimpleNamespace(batch_size_at_start=batch_size, accumulation_at_start=2),
        strategy=SimpleNamespace(topology=Topology(data_size=4)),
    )


def sgd(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros((), dtype=torch.float64))], lr=lr)


def effective(optimizer: torch.optim.Optimizer) -> float:
    """The rate that moves the parameter in one step."""
    weight = optimizer.param_groups[0]["params"][0]
    weight.data.zero_()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return -weight.item()


def start(callback: LRScaling | LRWarmup, run: Any) -> None:
    callback.on_fit_start(run, None)  # type: ignore[arg-type]


def test_rank_0_prints_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(sgd(0.001), sgd(0.001), sgd(0.5))
    start(LRScaling(64), run)
    assert capsys.readouterr().out == (
        "LRScaling: samples per rank 32 × ranks 4 × accumulation 2 = global batch 256; linear rule against 64: factor "
        "4; lr 0.001 → 0.004, 0.5 → 2\n"
    )
    start(LRScaling(64), trainer(sgd(0.001), rank=1))
    assert capsys.readouterr().out == ""
    start(LRScaling(2**19, rule="sqrt", global_batch_size=2**21), trainer(sgd(0.001), batch_size=None))
    assert (
        capsys.readouterr().out
        == "LRScaling: global batch 2097152, as given; sqrt rule against 524288: factor 2; lr 0.001 → 0.002\n"
    )


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_of_every_optimizer_is_multiplied(rule: str, factor: float) -> None:
    optimizers = sgd(0.125), sgd(0.25)
    scaling = LRScaling(64, rule=rule)
    start(scaling, trainer(*optimizers))
    assert scaling.factor == factor
    assert [effective(optimizer) for optimizer in optimizers] == [0.125 * factor, 0.25 * factor]
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.125, 0.25]


def test_schedulers_keep_their_shape_and_warmup_multiplies() -> None:
    optimizer = sgd(0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    plain = sgd(0.1)
    reference = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.1, total_steps=10)
    run = trainer(optimizer)
    warmup = LRWarmup(steps=3)
    start(LRScaling(64), run)
    start(warmup, run)
    for t in range(10):
        assert lr_factor(optimizer) == 4 * warmup.factor_at(t)
        assert effective(optimizer) == pytest.approx(4 * warmup.factor_at(t) * effective(plain), rel=1e-12)
        scheduler.step()
        reference.step()
        run.global_step += 1
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_a_resumed_run_takes_the_factor_of_its_own_global_batch_once() -> None:
    first = sgd(0.1)
    start(LRScaling(64), trainer(first, batch_size=256))
    assert effective(first) == pytest.approx(0.4)
    resumed, grown = sgd(0.1), sgd(0.1)
    for optimizer, batch_size, rate in ((resumed, 256, 0.4), (grown, 512, 0.8)):
        optimizer.load_state_dict(first.state_dict())
        start(LRScaling(64), trainer(optimizer, batch_size=batch_size))
        assert effective(optimizer) == pytest.approx(rate)


def test_an_unknown_global_batch_must_be_given() -> None:
    with pytest.raises(ValueError, match="set global_batch_size="):
        start(LRScaling(64), trainer(sgd(0.1), batch_size=None))


@pytest.mark.parametrize(
    "arguments",
    [
        {"reference_batch_size": 0},
        {"reference_batch_size": 1, "rule": "cubic"},
        {"reference_batch_size": 1, "global_batch_size": math.inf},
    ],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LRScaling"):
        LRScaling(**arguments)
