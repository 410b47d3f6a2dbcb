"""What users do holds in any composition: resumed from any checkpoint, and under every strategy or refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.zoo.compositions import draw, train

STRATEGIES = {
    "ddp": 2,
    "fsdp": 2,
    "tensor": 2,
    "pipeline": 2,
    "dp": 2,
    "ddp=2,fsdp=2": 4,
    "ddp=2,tensor=2": 4,
    "ddp=2,pipeline=2": 4,
    "fsdp=2,tensor=2": 4,
    "fsdp=2,pipeline=2": 4,
}
SHARED = ("ddp", "fsdp", "pipeline", "ddp=2,fsdp=2", "ddp=2,pipeline=2")
"""Strategies that can share work among virtual ranks."""
REFUSED = "requires_grad|within an accumulation window|is refused|cannot|needs"


def some(daily: int, all_seeds: int) -> list[object]:
    return [*range(daily), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(daily, all_seeds))]


@pytest.mark.parametrize("seed", some(6, 60))
def test_a_run_resumed_from_a_checkpoint_is_the_run_that_was_not(seed: int, tmp_path: Path) -> None:
    composition = draw(seed)
    expected = train(composition, tmp_path / "whole", dropout=0.2)
    saved = sorted((tmp_path / "whole").glob("step=*"), key=lambda path: int(path.name.partition("=")[2]))
    found = train(
        composition, tmp_path / "rest", dropout=0.2, ckpt_path=random.Random(seed).choice(saved[:-1] or saved)
    )
    assert found.differences(expected, 0.0) == [], composition


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(s, marks=pytest.mark.slow) for s in [*STRATEGIES][1:])])
def test_a_strategy_gives_the_numbers_of_one_process_or_a_sentence(strategy: str, tmp_path: Path) -> None:
    seeds = range(100, 103 if strategy == "ddp" else 115)
    equal = 0
    for seed in seeds:
        composition = draw(seed)
        expected = train(composition, tmp_path / f"{seed} alone")
        try:
            found = train(composition, tmp_path / f"{seed}", strategy, STRATEGIES[strategy])
        except (RuntimeError, ValueError) as error:
            assert len(str(error)) < 1000 and any(word in str(error) for word in REFUSED.split("|")), composition
            continue
        assert found.differences(expected, 1e-9) == [], composition
        equal += 1
    assert equal > len(seeds) / 2


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "strategy"),
    [
        (2010, "fsdp"),  # a block that runs twice in a step, with accumulation
        (2025, "ddp=2,pipeline=2"),  # ranks without samples in every step, and hooks that log
        *(pytest.param(seed, strategy, marks=pytest.mark.slow) for seed in range(2000, 2016) for strategy in SHARED),
    ],
)
def test_virtual_ranks_give_the_same_bits_resumed_or_not(seed: int, strategy: str, tmp_path: Path) -> None:
    composition = draw(seed)
    composition = replace(composition, options=(*composition.options, ("virtual_ranks", 4)))
    expected = train(composition, tmp_path / "alone", dropout=0.2)
    saved = sorted((tmp_path / "alone").glob("step=*"))
    for ckpt_path in (None, random.Random(seed).choice(saved)):
        found = train(
            composition,
            tmp_path / ("resumed" if ckpt_path else "whole"),
            strategy,
            STRATEGIES[strategy],
            dropout=0.2,
            ckpt_path=ckpt_path,
        )
        assert found.differences(expected, 0.0) == [], composition
