"""Counting what passes of a clone of Lightning's tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.lightning_tests import outcome, row

pytestmark = pytest.mark.ranks

TESTS = """
import subprocess
import sys
import lightning
import pytorch_lightning
from lightning.pytorch.demos.toys import name
from lightning.pytorch.utilities.rank_zero import rank_zero_only


def test_is_ours():
    assert lightning.pytorch is pytorch_lightning
    assert pytorch_lightning.__name__ == "lockstep.lightning.pytorch"
    assert name() == "toys"
    words = [sys.executable, "-c", "import lightning; print(lightning.__name__)"]  # as a rank
    assert subprocess.run(words, capture_output=True, text=True).stdout == "lockstep.lightning\\n"


def test_fails():
    raise KeyboardInterrupt
"""


@pytest.mark.long
def test_outcomes_are_counted_by_file(tmp_path: Path) -> None:
    tests, demos = tmp_path / "tests" / "tests_pytorch", tmp_path / "src" / "lightning" / "pytorch" / "demos"
    tests.mkdir(parents=True)
    demos.mkdir(parents=True)
    (demos / "__init__.py").touch()
    (demos / "toys.py").write_text("import lightning.pytorch\ndef name(): return 'toys'\n")
    (tests / "test_some.py").write_text(TESTS)
    found = outcome(tests / "test_some.py", tmp_path, timeout=300)
    assert found == Counter(passed=1, failed=1)
    assert row("test_some.py", found).split(None, 1)[1] == "1 passed, 1 failed"


@pytest.mark.slow
def test_a_name_that_is_not_offered_fails_what_uses_it(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "from lightning.pytorch.loops import _FitLoop\n"
        "from lightning.pytorch.callbacks import _Private\n"
        "def test_uses_it(): _FitLoop()\n"
        "def test_does_not(): assert not isinstance(_Private.SOME, int)\n"
    )
    assert outcome(tmp_path / "test_other.py", tmp_path, timeout=300) == Counter(failed=1, passed=1)
