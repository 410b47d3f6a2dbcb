"""Programs in processes of their own, and a folder for temporary files that a test has for itself."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.strategies.launch.programs import Program


@pytest.fixture
def program(tmp_path: Path, repo_root: Path) -> Iterator[Callable[[str], Program]]:
    started: list[Program] = []

    def start(source: str) -> Program:
        started.append(Program(tmp_path, source, repo_root))
        return started[-1]

    yield start
    for one in started:
        with one.process:  # waits, and closes its pipes
            one.process.kill()


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty: what `launch` leaves there would be seen."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder
