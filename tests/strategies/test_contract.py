"""Every strategy passes the same suite, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.strategies import (
    DDP,
    FSDP,
    DataParallel,
    DeepSpeed,
    MeshParallel,
    ModelParallel,
    Pipeline,
    SingleDevice,
    Strategy,
    TensorParallel,
)
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights

pytestmark = [pytest.mark.ranks, pytest.mark.grouped("name")]

STRATEGIES: dict[str, tuple[Callable[[], Strategy], int]] = {
    "single": (SingleDevice, 1),
    "dp 2": (DataParallel, 2),
    "dp 3": (DataParallel, 3),
    "model 3": (ModelParallel, 3),
    "ddp 2": (DDP, 2),
    "ddp 3": (DDP, 3),
    "ddp static graph": (lambda: DDP(static_graph=True), 2),
    "ddp unused": (lambda: DDP(find_unused_parameters=True), 2),
    "ddp compress topk 2": (lambda: DDP(compress="topk=1"), 2),
    "ddp compress powersgd 3": (lambda: DDP(compress="powersgd=64"), 3),
    "fsdp 2": (FSDP, 2),
    "tensor 2": (TensorParallel, 2),
    "ddp tensor 4": (lambda: MeshParallel("ddp=2,tensor=2"), 4),
    "fsdp tensor 4": (lambda: MeshParallel("fsdp=2,tensor=2"), 4),
    "ddp fsdp 4": (lambda: FSDP(replicas=2), 4),
    "ddp fsdp compress 4": (lambda: FSDP(replicas=2, compress="topk=1"), 4),
    "pipeline 2 gpipe": (lambda: Pipeline(schedule="gpipe"), 2),
    "pipeline 2 1f1b": (Pipeline, 2),
    "pipeline 2 zero bubble": (lambda: Pipeline(schedule="zbv"), 2),
    "pipeline 4 1f1b": (lambda: Pipeline(num_micro_batches=8), 4),
    "ddp=2,pipeline=2": (lambda: Pipeline(mesh="ddp=2,pipeline=2"), 4),
    "fsdp=2,pipeline=2": (lambda: Pipeline(mesh="fsdp=2,pipeline=2"), 4),
    "deepspeed 1": (lambda: DeepSpeed(stage=1), 2),
    "deepspeed 2": (DeepSpeed, 2),
    "deepspeed 3": (
        lambda: DeepSpeed(stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}),
        2,
    ),
}
"""How to build each strategy, and its number of devices."""

FLOAT32 = ("deepspeed 1", "deepspeed 2", "deepspeed 3")
"""Strategies whose engine does not compute in float64: they agree to rounding."""

DAILY = ("single", "dp 2", "ddp 2", "fsdp 2", "tensor 2", "pipeline 2 1f1b", "deepspeed 2", "deepspeed 3")
"""What everything is run for; the others are variants of these, for which the default run does with less."""

RARELY = (
    "dp 3",
    "ddp static graph",
    "ddp compress topk 2",
    "ddp compress powersgd 3",
    "ddp fsdp compress 4",
    "ddp tensor 4",
    "ddp fsdp 4",
    "pipeline 2 gpipe",
    "ddp=2,pipeline=2",
    "deepspeed 1",
)
"""Variants that the default run skips: it has others with as many ranks and the same axes, and their own files of
tests."""

PLANS = {
    "plain": Plan(),
    "accumulation": Plan(accumulate=3),
    "clip norm": Plan(clip=0.1),
    "clip value": Plan(clip=0.003, clip_algorithm="value"),
    "token counts": Plan(step="token_step", accumulate=2),
    "uneven": Plan(num_samples=13, global_batch=5),
    "ranks without samples": Plan(num_samples=5, global_batch=4, accumulate=2),
    "momentum": Plan(optimizer="SGD", accumulate=2, clip=0.5),
}
"""These, and the half of a training, in the finest precision that the strategy computes in."""

HALF = Plan(epochs=1)

PRECISIONS = {
    "single precision": Plan(precision="32-true", optimizer="SGD", clip=1.0),
    "mixed precision": Plan(precision="bf16-mixed", optimizer="SGD"),
}

TELLING = ("uneven", "clip norm", "first half")
"""Plans that the default run does for variants too."""


def slow(condition: bool) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow,) if condition else ()


@pytest.fixture(params=[pytest.param(name, marks=slow(name in RARELY)) for name in STRATEGIES], scope="module")
def made(request: pytest.FixtureRequest) -> tuple[Strategy, int]:
    make, devices = STRATEGIES[request.param]
    return make(), devices


def finest(name: str) -> str:
    """The finest precision that the strategy computes in."""
    return "32-true" if name in FLOAT32 else "64-true"


Trained = Callable[[str, str], tuple[dict[str, Any], Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`trained(strategy, plan)` is what `contract.run` found, and the checkpoint.

    The plans that one run of the tests needs are trained together: a start of ranks costs more than a training.
    """
    folder, done = tmp_path_factory.mktemp("trained"), {}

    def get(name: str, key: str) -> tuple[dict[str, Any], Path]:
        if (name, key) not in done:
            make, devices = STRATEGIES[name]
            plans = {
                other: replace(plan, precision=finest(name)) for other, plan in (PLANS | {"first half": HALF}).items()
            } | PRECISIONS
            together = {
                other: (make(), plan)
                for other, plan in plans.items()
                if name in DAILY or (other in TELLING) == (key in TELLING)
            }
            place = folder / str(len(done))
            found = contract.run_each(together, devices, place)
            done.update({(name, other): (found[other], place / other) for other in together})
        return done[name, key]

    return get


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param(
            name, key, id=f"{name}-{key}", marks=slow(name in RARELY or (name not in DAILY and key not in TELLING))
        )
        for name in STRATEGIES
        for key in PLANS
    ],
)
def test_gradients_are_those_of_one_process(name: str, key: str, trained: Trained) -> None:
    found, saved = trained(name, key)
    model, expected = reference(replace(PLANS[key], precision=finest(name)))
    exact = finest(name) == "64-true"
    assert difference(saved_weights(saved), model) < (1e-11 if exact else 1e-5)
    assert found["counts"] == pytest.approx(expected["counts"], rel=1e-12)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9 if exact else 1e-6)
    assert torch.tensor(found["outputs"]).allclose(
        torch.tensor(expected["outputs"]), rtol=1e-9 if exact else 1e-5, atol=1e-9 if exact else 1e-5
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow(name in RARELY)) for name in STRATEGIES])
def test_state_goes_to_one_process_and_back(name: str, trained: Trained, tmp_path: Path) -> None:
    """Model and optimizer state saved here continues there as if nothing had happened, in both directions."""
    make, devices = STRATEGIES[name]
    half = replace(HALF, precision=finest(name))
    model, kept = reference(half)
    expected, _ = reference(half, model, kept["optimizer"])
    _, here = trained(name, "first half")
    contract.run(SingleDevice(), 1, replace(half, start_from=str(here)), tmp_path / "here then one")
    contract.run(SingleDevice(), 1, half, tmp_path / "one")
    contract.run(make(), devices, replace(half, start_from=str(tmp_path / "one")), tmp_path / "one then here")
    for folder in ("here then one", "one then here"):
        assert difference(saved_weights(tmp_path / folder), expected) < (1e-11 if finest(name) == "64-true" else 1e-5)


daily = pytest.mark.parametrize("name", [pytest.param(name, marks=slow(name not in DAILY)) for name in STRATEGIES])
"""For tests that variants pass if what they are variants of does."""


@daily
def test_single_precision_agrees_to_rounding(name: str, trained: Trained) -> None:
    _, saved = trained(name, "single precision")
    assert difference(saved_weights(saved), reference(PRECISIONS["single precision"])[0]) < 1e-5


@daily
def test_mixed_precision_trains(name: str, trained: Trained) -> None:
    saved = saved_weights(trained(name, "mixed precision")[1])
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert 0 < difference(saved, reference(replace(PRECISIONS["mixed precision"], precision="32-true"))[0]) < 0.05


def facts_and_collectives(strategy: Strategy) -> dict[str, object]:
    strategy.setup()
    try:
        rank, size = strategy.topology.rank, strategy.topology.world_size
        assert 0 <= strategy.topology.data_rank < strategy.topology.data_size <= size
        assert 0 <= strategy.topology.local_rank <= rank < size
        mine = torch.tensor([float(rank), 1.0])
        strategy.barrier()
        found = {
            "sum": strategy.all_reduce(mine).tolist(),
            "mean": strategy.all_reduce(mine, "mean").tolist(),
            "max": strategy.all_reduce(mine, "max").tolist(),
            "min": strategy.all_reduce(mine, "min").tolist(),
            "gathered": strategy.all_gather(mine).tolist(),
            "tensor": strategy.broadcast(torch.full((2,), rank), src=size - 1).tolist(),
            "json": strategy.broadcast({"from": rank, "text": "ä" * 300}, src=size - 1)["from"],
            "size": size,
        }
        assert mine.tolist() == [rank, 1.0], "arguments stay as they are"
        shared = strategy.all_gather(torch.tensor(list(found["sum"])))  # type: ignore[call-overload]
        assert all(torch.equal(row, shared[0]) for row in shared)
        return found
    finally:
        strategy.teardown()


def test_facts_and_collectives(made: tuple[Strategy, int]) -> None:
    strategy, devices = made
    strategy.configure(devices=devices, accelerator="cpu")
    found = strategy.launch(facts_and_collectives, strategy)
    n = found["size"]
    assert n == devices or devices > 1
    total = n * (n - 1) / 2
    assert found["sum"] == [total, n] and found["mean"] == [total / n, 1.0]
    assert found["max"] == [n - 1, 1.0] and found["min"] == [0.0, 1.0]
    assert found["gathered"] == [[float(r), 1.0] for r in range(n)]
    assert found["tensor"] == [n - 1] * 2 and found["json"] == n - 1
    assert not dist.is_initialized()


class OwnError(Exception):
    pass


def fail_on_last_rank(strategy: Strategy) -> None:
    strategy.setup()
    try:
        if strategy.topology.rank == strategy.topology.world_size - 1:
            raise OwnError("of a user")
        strategy.barrier()
    finally:
        strategy.teardown()


def test_exceptions_come_out_as_themselves(made: tuple[Strategy, int]) -> None:
    strategy, devices = made
    strategy.configure(devices=devices, accelerator="cpu")
    with pytest.raises(OwnError, match="of a user"):
        strategy.launch(fail_on_last_rank, strategy)


def test_teardown_without_setup_does_nothing(made: tuple[Strategy, int]) -> None:
    made[0].teardown()
