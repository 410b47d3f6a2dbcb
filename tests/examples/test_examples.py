"""The examples as a user runs them, and what their first lines promise."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.ranks

CSV = "trainer.logger={class: CSVLogger}"


def run(*arguments: str, root: Path, timeout_s: float = 110) -> str:
    """Run a command from the repository's root with its runs below `root`; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "OMP_NUM_THREADS": "1"}
    overrides = [f"default_root_dir={root}", "accelerator=cpu"]
    result = subprocess.run(
        [sys.executable, *arguments, *overrides],
        cwd=REPO_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def metric(output: str, name: str) -> float:
    found = re.findall(rf"^  {re.escape(name)} +(\S+)$", output, flags=re.MULTILINE)
    assert found, output
    return float(found[-1])


def column(root: Path, name: str) -> list[float]:
    (file,) = root.rglob("metrics.csv")
    with open(file, newline="") as rows:
        return [float(row[name]) for row in csv.DictReader(rows) if row[name]]


def test_digits_reaches_its_accuracy_and_logs_to_tensorboard(tmp_path: Path) -> None:
    output = run("-m", "lockstep", "fit", "examples/digits.yaml", root=tmp_path)
    assert metric(output, "val/acc") >= 0.97
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    assert f"tensorboard --logdir {events.parent}" in output


@pytest.mark.slow  # tests/examples/test_strategies.py compares every strategy
def test_digits_gives_the_same_numbers_on_two_ranks(tmp_path: Path) -> None:
    """In float64: in float32 a ReLU or MaxPool that rounding tips over parts even two runs on one process
    (docs/exactness.md)."""
    one, two = tmp_path / "one", tmp_path / "two"
    options = ["max_epochs=3", "log_every_n_steps=1", "precision=64-true", CSV]
    single = run("-m", "lockstep", "fit", "examples/digits.yaml", *options, root=one)
    double = run("-m", "lockstep", "fit", "examples/digits.yaml", *options, "strategy=ddp", "devices=2", root=two)
    assert len(column(one, "train/loss")) == 3 * 45
    assert column(one, "train/loss") == pytest.approx(column(two, "train/loss"), rel=1e-12)
    assert metric(single, "val/acc") == metric(double, "val/acc")
    assert metric(single, "val/loss") == metric(double, "val/loss")


def test_digits_as_a_script(tmp_path: Path) -> None:
    output = run("examples/digits.py", "max_epochs=1", root=tmp_path)
    assert metric(output, "val/acc") > 0.5


def test_gpt_learns_and_writes_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(left, right):\n    return left + right\n\n\n" * 1000)
    small = [
        "module.width=32",
        "module.depth=2",
        "module.context=32",
        "data.max_bytes=50_000",
        "module.head_width=16",
        "trainer.max_steps=60",
    ]
    output = run("examples/gpt.py", "--text", str(text), *small, "log_every_n_steps=5", CSV, root=tmp_path)
    losses = column(tmp_path, "train/loss")
    assert losses[0] > 4
    assert losses[-1] < 2.6
    assert min(column(tmp_path, "tokens_per_s")) > 0
    assert re.search(r"---- text after 60 steps ----\ndef ", output)


def test_gpt_writes_samples_to_tensorboard(tmp_path: Path) -> None:
    tiny = ["module.width=32", "module.depth=1", "data.max_bytes=30_000", "trainer.max_steps=8", "val_check_interval=4"]
    run("-m", "lockstep", "fit", "examples/gpt.yaml", *tiny, root=tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    samples = events.Tensors("sample/text_summary")
    assert [event.step for event in samples] == [4, 8]
    assert b"def " in samples[0].tensor_proto.string_val[0]


@pytest.mark.slow
def test_gpt_as_it_comes(tmp_path: Path) -> None:
    output = run("-m", "lockstep", "fit", "examples/gpt.yaml", root=tmp_path, timeout_s=600)
    assert metric(output, "val/loss") < 2.6
