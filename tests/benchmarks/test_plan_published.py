"""What the comparison with published runs counts."""

from __future__ import annotations

import math
import re

import pytest

from benchmarks.plan_published import Result, _rows, report, spearman

pytestmark = pytest.mark.unit


def test_orders_are_compared_with_ties() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)


def test_rows_that_calibrate_are_not_counted_and_errors_are() -> None:
    rows = _rows()
    assert sum(row.calibrates for row in rows) == 3 and sum(row.gib == math.inf for row in rows) == 2
    text = report([Result(row, (row.gib or 1) * 1.05 if row.gib != math.inf else 200, 100, 0) for row in rows])
    assert "Memory within 10 %: 9 of 9 rows. Fits or not as published: 19 of 19." in text
    assert re.findall(r"Order of throughput in (.*): Spearman .* over (\d+) rows", text) == [
        ("64 A100", "8"),
        ("Qwen3-32B", "4"),
    ], "tables with at least three rows that do not calibrate"
    wrong = report([Result(row, 20, 100, 0) for row in rows])
    assert "Memory within 10 %: 0 of 9 rows. Fits or not as published: 17 of 19." in wrong
    assert "predicted to fit" in wrong and "(calibrates)" in wrong
