"""The table of docs/exactness.md is what happens: nothing in it differs from one process silently."""

from __future__ import annotations

import functools

import pytest

from tests.zoo.table import STRATEGIES, Result, cases, column, expected_results, precision_of, written

pytestmark = pytest.mark.ranks

DAILY = ("ddp",)
"""The others are run by `make test-slow`."""


@functools.cache
def expected(precision: str) -> dict[str, Result]:
    return expected_results("ddp" if precision == "64-true" else "deepspeed_stage_1")


def test_the_table_has_every_case_under_every_strategy() -> None:
    table = written()
    assert set(table) == set(STRATEGIES)
    assert all(set(found) == set(cases()) for found in table.values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "head", [head if head in DAILY else pytest.param(head, marks=pytest.mark.slow) for head in STRATEGIES]
)
def test_every_case_is_what_the_table_says(head: str) -> None:
    strategy, devices = STRATEGIES[head]
    assert column(strategy, devices, expected(precision_of(strategy))) == written()[head]
