"""What markers say of tests: which may start processes, and how long those of `make test-slow` may take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

KINDS = ("ranks", "faults", "docs")
"""Markers of tests that may start processes. Every other test is marked `unit`, and fails if it does."""
SLOW_LIMIT_S = 1800


def check(cases: Sequence[pytest.Item]) -> None:
    """Raise CollectError for a test of no kind whose cases are all slow: CI would not see it start a process."""
    slow = [item for item in cases if item.get_closest_marker("slow")]
    if slow and len(slow) == len(cases) and not all(map(_has_kind, slow)):
        raise pytest.Collector.CollectError(
            f"{slow[0].nodeid.partition('[')[0]} is slow in all cases: mark it `unit` too, or "
            f"{', '.join(f'`{kind}`' for kind in KINDS)} if it starts processes"
        )


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark tests of no kind as `unit`."""
    for item in items:
        if not _has_kind(item):
            item.add_marker(pytest.mark.unit)


def limit_time(items: Sequence[pytest.Item]) -> None:
    """Give slow tests more time than the limit of pyproject.toml, if they set none themselves."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


def _has_kind(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, (*KINDS, "unit")))
