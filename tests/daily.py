"""The tests of every day (`--daily`): all that start no process, and one case of each function that does."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest


def set_aside(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those that only `make test-all` runs: tests marked `long`, and the other cases of functions that start ranks.

    A function's case is the one whose name has the smallest checksum: over all functions each strategy has its turn,
    and a new case seldom moves the choice.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    long = {item for item in items if item.get_closest_marker("long")}
    for item in items:
        if item not in long and not item.get_closest_marker("unit"):
            cases[item.nodeid.partition("[")[0]].append(item)
    ordered = [sorted(of_one, key=lambda item: zlib.crc32(item.nodeid.encode())) for of_one in cases.values()]
    return long | {item for _, *others in ordered for item in others}
