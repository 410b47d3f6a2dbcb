"""Runs with a ModelCheckpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from tests.callbacks.model_checkpoint.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    return lambda *args, start=True, **options: Run(ModelCheckpoint(*args, **options), tmp_path / "run", start=start)
