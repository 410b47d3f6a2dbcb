"""Numbers of things and of bytes, as commands and pages show them."""

from __future__ import annotations

import pytest

from lockstep.callbacks._support.tables import count, human_size


def test_counts_have_their_noun() -> None:
    assert [count(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**41, "2048.00 GiB")])
def test_sizes_have_a_unit_that_fits(size: int, text: str) -> None:
    assert human_size(size) == text
