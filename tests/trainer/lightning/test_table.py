"""The table of Lightning's names in docs/migrating/lightning.md is what both packages say."""

from __future__ import annotations

import warnings

import pytest


def test_the_table_is_current() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's
        lightning = pytest.importorskip("lightning", reason="it is in the extra bench")
    if not lightning.__version__.startswith("2.6."):
        pytest.skip("the table is of Lightning 2.6")
    from docs.make_lightning_table import DIFFERENT, PAGE, groups, with_table

    page = PAGE.read_text()
    assert page == with_table(page), "run python -m docs.make_lightning_table"
    for title, rows in groups().items():
        assert not DIFFERENT[title].keys() - {row.name for row in rows}, "Lightning has no such name"
        assert all(row.how for row in rows if row.status != "same")
