"""The notebooks: cells run in order in a new process, where their classes are in no file, and print what is stored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.ranks

NOTEBOOKS = sorted((REPO_ROOT / "examples" / "notebooks").glob("*.ipynb"))
KERNEL = """
import json, sys
for cell in json.load(sys.stdin):
    exec(compile(cell, "<cell>", "exec"), globals())
    print("end of cell", flush=True)
"""


def cells(notebook: Path) -> list[dict[str, Any]]:
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4 and content["metadata"]["kernelspec"]["language"] == "python"
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    parts = re.split(r"(\d+\.\d+)", text)
    return parts[::2], [float(number) for number in parts[1::2]]


@pytest.mark.slow  # they do what the tutorials do, whose blocks run every day
@pytest.mark.parametrize("notebook", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_cells_print_what_is_stored(notebook: Path) -> None:
    sources = ["".join(cell["source"]) for cell in cells(notebook)]
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(sources),
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *printed, _ = done.stdout.split("end of cell\n")
    for cell, shown in zip(cells(notebook), printed, strict=True):
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        words, numbers = words_and_numbers(shown)
        assert words == words_and_numbers(stored)[0], shown
        assert numbers == pytest.approx(words_and_numbers(stored)[1], abs=0.05), shown


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
