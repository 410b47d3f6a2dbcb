"""The tables of docs/exactness.md are what happens: nothing in them differs from one process silently."""

from __future__ import annotations

import functools

import pytest

from tests.zoo.table import ACCUMULATING, COLUMNS, Result, cases, column, expected_results, precision_of, written

pytestmark = pytest.mark.ranks

DAILY = ("ddp",)
"""The others are run by `make test-slow`."""
DAILY_IN_2_MICRO_BATCHES = [
    "perceptron",
    "A gradient hook registered in on_fit_start that is not linear",
    "A target network that training_step moves",
    "Loss(total, count), and None where no sample counts",
]


@functools.cache
def expected(precision: str, suffix: str) -> dict[str, Result]:
    return expected_results(("ddp" if precision == "64-true" else "deepspeed_stage_1") + suffix)


def test_the_tables_have_every_case_under_every_strategy() -> None:
    table = written()
    assert set(table) == set(COLUMNS)
    assert all(set(found) == set(cases()) for found in table.values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "head", [head if head in DAILY else pytest.param(head, marks=pytest.mark.slow) for head in COLUMNS]
)
def test_every_case_is_what_the_table_says(head: str) -> None:
    strategy, devices = COLUMNS[head]
    suffix = ACCUMULATING if head.endswith(ACCUMULATING) else ""
    assert column(strategy, devices, expected(precision_of(strategy), suffix)) == written()[head]


@pytest.mark.long
@pytest.mark.parametrize("head", ["ddp=2,pipeline=2", "fsdp=2,pipeline=2"])
def test_a_stage_without_buffers_is_evaluated_beside_one_that_has_some(head: str) -> None:
    names = ["pruned weights", "orthogonal weights"]
    found = column(*COLUMNS[head], expected_results("ddp", names))
    assert found == {name: written()[head][name] for name in names} == dict.fromkeys(names, "equal")


@pytest.mark.long
def test_a_few_cases_that_accumulate_are_what_the_table_says() -> None:
    head = f"ddp{ACCUMULATING}"
    found = column(*COLUMNS[head], expected_results(head, DAILY_IN_2_MICRO_BATCHES))
    assert found == {name: written()[head][name] for name in DAILY_IN_2_MICRO_BATCHES}
