"""A test that only the slow run has says whether it starts processes, and may take longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kinds
from tests.test_daily import Collected

TESTS = """
import pytest

@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_case(ranks): pass

@pytest.mark.slow
@pytest.mark.ranks
def test_ranks(): pass

@pytest.mark.slow
@pytest.mark.unit
@pytest.mark.timeout(5)
def test_unit(): pass

@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_unsaid(ranks): pass
"""


def collected(folder: Path, *names: str) -> list[pytest.Item]:
    (folder / "test_slow_ones.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    unit\n    ranks\n    slow\n")
    found = Collected()
    chosen = [f"{folder}/test_slow_ones.py::{name}" for name in names]
    pytest.main(["-q", "--collect-only", "--import-mode=importlib", "-p", "no:cacheprovider", *chosen], [found])
    return found.items


def test_a_test_that_only_runs_slowly_says_whether_it_starts_processes(tmp_path: Path) -> None:
    items = collected(tmp_path, "test_a_case", "test_ranks", "test_unit", "test_unsaid")
    for cases in (items[:2], items[2:3], items[3:4]):
        kinds.check(cases)
    with pytest.raises(
        pytest.Collector.CollectError, match="::test_unsaid is slow in all cases: mark it `unit` too, or"
    ):
        kinds.check(items[4:])
    kinds.mark(items)
    assert [bool(item.get_closest_marker("unit")) for item in items] == [True, True, False, True, True, True]


def test_a_slow_test_without_a_limit_of_its_own_may_take_longer(tmp_path: Path) -> None:
    items = collected(tmp_path, "test_a_case", "test_ranks", "test_unit")
    kinds.limit_time(items)
    limits = [item.get_closest_marker("timeout") for item in items]
    assert [limit and limit.args[0] for limit in limits] == [None, kinds.SLOW_LIMIT_S, kinds.SLOW_LIMIT_S, 5]
