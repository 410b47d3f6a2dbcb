"""The benchmarks run and print sane numbers; how fast anything is, no test says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO_ROOT


def run(name: str, *arguments: str, file: Path) -> tuple[str, dict[str, Any]]:
    """Run a benchmark; return what it printed and its JSON."""
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    command = [sys.executable, str(REPO_ROOT / "benchmarks" / name), *arguments, "--json", str(file)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr, result.stderr
    return result.stdout, json.loads(file.read_text())


def test_step_overhead(tmp_path: Path) -> None:
    output, numbers = run("step_overhead.py", "--rounds", "2", "--steps", "20", file=tmp_path / "numbers.json")
    results = numbers["results"]
    expected = {"hand-written loop", "lockstep, bare", "lockstep, 1 logged value", "lockstep, 5 logged values", "lockstep, everything on"}
    assert expected <= set(results)
    for name, row in results.items():
        assert name in output
        assert len(row["rounds_us"]) == 2
        assert 1 < row["min_us"] <= row["median_us"] <= row["max_us"] < 1e6, "a step of this size takes between a microsecond and a second"
        assert row["ratio"] > 0
    assert results["hand-written loop"]["ratio"] == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers.json"], "runs of the benchmark leave nothing behind"


@pytest.mark.parametrize("match", ["import", "lockstep", pytest.param("by hand", marks=pytest.mark.slow)])
def test_start(match: str, tmp_path: Path) -> None:
    output, numbers = run("start.py", "--rounds", "1", "--match", match, file=tmp_path / "numbers.json")
    assert len(numbers["results"]) == 2
    for name, row in numbers["results"].items():
        assert name in output
        assert 0 < row["median_s"] < 280
        assert math.isclose(row["min_s"], row["max_s"])


def test_recompute(tmp_path: Path) -> None:
    output, numbers = run("recompute.py", "--width", "64", "--depth", "2", "--steps", "1", file=tmp_path / "numbers.json")
    kept, recomputed = (numbers["results"][on] for on in ("False", "True"))
    assert 0 < 2 * recomputed["kept_bytes"] < kept["kept_bytes"] and min(kept["step_s"], recomputed["step_s"]) > 0
    assert "activation_checkpointing" in output


def test_restart(tmp_path: Path) -> None:
    output, numbers = run("restart.py", "--restarts", "2", file=tmp_path / "numbers.json")
    assert len(numbers["downs_s"]) == 2 and "2 ranks of ddp" in output
    assert 0 < min(numbers["downs_s"]) <= numbers["median_s"] <= numbers["p95_s"] < 60


def test_memory(tmp_path: Path) -> None:
    output, numbers = run("memory.py", "--ranks", "2", "--match", "dp", file=tmp_path / "numbers.json")
    rows = {row["strategy"]: row for row in numbers["results"]}
    assert set(rows) == {"dp", "ddp", "fsdp"} and all(name in output for name in rows)
    size = 4 * numbers["model"]["parameters"]
    for name, share in (("dp", 1), ("ddp", 1), ("fsdp", 2)):
        row = rows[name]
        assert row["parameters"] == row["gradients"] == size // share
        assert 2 * size // share < row["optimizer"] < 2.01 * size // share, "two moments, and a counter a tensor"
        assert row["total"] == row["parameters"] + row["gradients"] + row["optimizer"] + row["other"]
        assert row["other"] == 0
        assert row["steps"] > row["total"] > 0


def test_saving(tmp_path: Path) -> None:
    output, numbers = run("saving.py", "--megabytes", "2", "--rounds", "1", file=tmp_path / "numbers.json")
    assert set(numbers["results"]) == {"plain", "in an older one's place", "checked to be finite", "beside the training"}
    for name, row in numbers["results"].items():
        assert name in output
        assert 0 < row["blocked_s"] <= row["done_s"] < 60
