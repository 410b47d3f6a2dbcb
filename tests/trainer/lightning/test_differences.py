"""What docs/migrating/lightning.md lists as different is what `lightning` and `lockstep.lightning` do."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.lightning.differences import DIFFERENCES, ELSEWHERE, RANKS

ROOT = Path(__file__).resolve().parents[3]


def listed() -> list[str]:
    """The first cells of the table of differences."""
    page = (ROOT / "docs/migrating/lightning.md").read_text()
    section = page.partition("## Different\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.+?) \|", section.partition("|---|")[2], re.MULTILINE)


def test_every_row_has_a_program() -> None:
    found = listed()
    assert sorted(found) == sorted([*DIFFERENCES, *ELSEWHERE])
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.ranks] if row in RANKS else []) for row in DIFFERENCES]
)
def test_both_do_what_the_page_says(row: str, tmp_path: Path) -> None:
    probe, theirs, ours = DIFFERENCES[row]
    assert _outcome(probe, "lockstep.lightning.pytorch", tmp_path / "ours") == ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's
        pytest.importorskip("lightning", reason="it is in the extra bench")
        assert _outcome(probe, "lightning.pytorch", tmp_path / "theirs") == theirs


def _outcome(probe: Any, package: str, folder: Path) -> Any:
    folder.mkdir()
    return probe(importlib.import_module(package), folder)
