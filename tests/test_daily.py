"""`make test` runs every test that starts no process, and of the others one case of each function."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daily import set_aside

TESTS = """
import pytest

@pytest.mark.unit
@pytest.mark.parametrize("number", range(9))
def test_unit(number): pass

@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_ranks(strategy): pass

@pytest.mark.ranks
def test_of_one_case(): pass

@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_long(strategy): pass

@pytest.mark.long
@pytest.mark.unit
def test_long_unit(): pass
"""


class Collected:
    items: list[pytest.Item]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def test_one_case_of_each_function_that_starts_ranks_is_left(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    collected = Collected()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    unit\n    ranks\n    long\n")
    pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", str(tmp_path / "test_some.py")], [collected])
    aside = set_aside(collected.items)
    left = [item.name.partition("[")[0] for item in collected.items if item not in aside]
    assert left == 9 * ["test_unit"] + ["test_ranks", "test_of_one_case"]
    assert set_aside(collected.items[::-1]) == aside  # by their names: the order of the files changes nothing
