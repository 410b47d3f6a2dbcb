"""A checkpoint of any strategy and number of ranks continues under any other, optimizer state included, as the
undisturbed run.

`tests/strategies/test_contract.py` has every strategy to one process and back; here they follow one another.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from lockstep.strategies import DDP, FSDP, DeepSpeed, MeshParallel, Pipeline, SingleDevice, Strategy, TensorParallel
from tests.strategies import contract
from tests.strategies.contract import Model, Plan, difference, reference, saved_weights

STRATEGIES: dict[str, tuple[Callable[[], Strategy], int]] = {
    "single": (SingleDevice, 1),
    "ddp 2": (DDP, 2),
    "fsdp 2": (FSDP, 2),
    "tensor 2": (TensorParallel, 2),
    "pipeline 2": (Pipeline, 2),
    "ddp=2,tensor=2": (lambda: MeshParallel("ddp=2,tensor=2"), 4),
    "fsdp=2,tensor=2": (lambda: MeshParallel("fsdp=2,tensor=2"), 4),
    "fsdp 3": (FSDP, 3),
    "deepspeed 1": (lambda: DeepSpeed(stage=1), 2),
    "deepspeed 2": (lambda: DeepSpeed(stage=2), 2),
    "deepspeed 3": (
        lambda: DeepSpeed(stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}),
        2,
    ),
}
EXACT = [name for name in STRATEGIES if not name.startswith("deepspeed")]
"""DeepSpeed computes in float32 at best."""

TOLERANCES = {"64-true": 1e-12, "32-true": 1e-5}

CHAINS = {
    "64-true": [
        "single",
        "ddp 2",
        "fsdp 2",
        "tensor 2",
        "pipeline 2",
        "fsdp=2,tensor=2",
        "fsdp 3",
        "ddp=2,tensor=2",
        "pipeline 2",
        "single",
    ],
    "32-true": [
        "deepspeed 3",
        "fsdp 2",
        "deepspeed 2",
        "pipeline 2",
        "deepspeed 3",
        "ddp=2,tensor=2",
        "deepspeed 1",
        "deepspeed 3",
        "single",
    ],
}
CHEAP = ["ddp 2", "fsdp 2", "tensor 2", "pipeline 2"]


def train(name: str, plan: Plan, folder: Path, start_from: Path | None) -> None:
    make, devices = STRATEGIES[name]
    contract.run(make(), devices, replace(plan, start_from=None if start_from is None else str(start_from)), folder)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("precision", "chain"),
    [
        pytest.param("64-true", CHEAP, id="64-true"),
        *(
            pytest.param(precision, chain, id=f"{precision} all", marks=pytest.mark.slow)
            for precision, chain in CHAINS.items()
        ),
    ],
)
def test_a_training_handed_from_one_strategy_to_the_next(tmp_path: Path, precision: str, chain: list[str]) -> None:
    plan = Plan(epochs=1, precision=precision)
    model: Model | None = None
    kept: dict = {"optimizer": None}
    for i, (before, name) in enumerate(pairwise(["", *chain])):
        train(name, plan, tmp_path / str(i), tmp_path / str(i - 1) if i else None)
        model, kept = reference(plan, model, kept["optimizer"])
        assert difference(saved_weights(tmp_path / str(i)), model) < TOLERANCES[precision] * (
            i + 1 if precision == "32-true" else 1
        ), f"{before} to {name}"


PAIRS = [
    pytest.param(precision, source, target, id=f"{source} to {target}")
    for precision in TOLERANCES
    for source, target in product(STRATEGIES, STRATEGIES)
    if (precision == "64-true") == (source in EXACT and target in EXACT)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The checkpoint of a strategy in the middle of the training; made once."""
    folder = tmp_path_factory.mktemp("saved")

    def make(name: str, precision: str) -> Path:
        path = folder / precision / name.replace("=", "-").replace(",", "-")
        if not path.exists():
            train(name, Plan(epochs=1, precision=precision), path, None)
        return path

    return make


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("precision", "source", "target"), PAIRS)
def test_every_strategy_continues_where_every_other_one_was(
    tmp_path: Path, saved: Callable[[str, str], Path], precision: str, source: str, target: str
) -> None:
    plan = Plan(epochs=1, precision=precision)
    model, kept = reference(plan)
    expected, _ = reference(plan, model, kept["optimizer"])
    start = tmp_path / "moved"
    shutil.copytree(saved(source, precision), start)
    train(target, plan, tmp_path / "end", start)
    assert difference(saved_weights(tmp_path / "end"), expected) < TOLERANCES[precision]
