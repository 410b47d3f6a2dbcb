"""The examples as a user runs them, and what their first lines promise."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.ranks

CSV = "trainer.logger={class: CSVLogger}"


STUBS = REPO_ROOT / "tests" / "examples" / "stubs"
"""Has a torchvision that timm can import beside torch's CPU wheel."""


def run(*arguments: str, root: Path, timeout_s: float = 110, path: tuple[Path, ...] = ()) -> str:
    """Run a command from the repository's root with its runs below `root`; return what it printed."""
    paths = os.pathsep.join(map(str, (REPO_ROOT, *path)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
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


@pytest.mark.long
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


@pytest.mark.slow  # the same training as from the command line
def test_digits_as_a_script(tmp_path: Path) -> None:
    output = run("examples/digits.py", "max_epochs=1", root=tmp_path)
    assert metric(output, "val/acc") > 0.5


@pytest.mark.slow  # the tutorial of the transformer trains one every day
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
    assert min(column(tmp_path, "throughput/samples_per_s")) > 0
    assert re.search(r"---- text after 60 steps ----\ndef ", output)


@pytest.mark.slow  # the text is in the log of the test above too
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


def has(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.mark.slow  # tests/integrations/test_save_pretrained.py writes and reads folders in one process
@has("transformers")
def test_bert_begins_with_a_folder_of_transformers_and_writes_one(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    from examples.bert import Classifier

    begun, written = tmp_path / "begun", tmp_path / "written"
    before = Classifier(width=16).model
    before.save_pretrained(begun)
    options = [f"module.pretrained={begun}", f"module.save_to={written}", "max_steps=1", "trainer.limit_val_batches=1"]
    run("-m", "lockstep", "fit", "examples/bert.yaml", *options, "strategy=fsdp", "devices=2", root=tmp_path)
    after = BertForSequenceClassification.from_pretrained(written).state_dict()
    moved = max(float((after[name] - value).abs().max()) for name, value in before.state_dict().items())
    assert 0 < moved < 1e-4  # one step, whose learning rate is warming up


@pytest.mark.slow  # tests/integrations trains such a model daily
@has("transformers")
def test_llama_is_trained_by_its_own_plan(tmp_path: Path) -> None:
    small = ["module.width=32", "module.depth=1", "module.context=32", "data.max_bytes=60_000", "max_steps=40"]
    options = [*small, "module.sample_bytes=5", "log_every_n_steps=1", "strategy=tensor", "devices=2", CSV]
    output = run("-m", "lockstep", "fit", "examples/llama_hf.yaml", *options, root=tmp_path)
    losses = column(tmp_path, "train/loss")
    assert losses[0] > 5 and losses[-1] < 3.8
    assert re.search(r"---- text after 40 steps ----\ndef ", output)


@pytest.mark.slow  # tests/integrations trains such a model daily
@has("timm")
def test_vit_of_timm_learns_digits(tmp_path: Path) -> None:
    small = ["module.width=32", "module.depth=1", "max_epochs=5", "module.lr=5e-3", "trainer.callbacks=[]"]
    output = run("-m", "lockstep", "fit", "examples/vit.yaml", *small, root=tmp_path, path=(STUBS,))
    assert metric(output, "val/acc") > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key", "low", "high"), [("bert", "val/acc", 0.8, 1), ("llama_hf", "train/loss", 1, 2)]
)
@has("transformers")
def test_models_of_transformers_as_they_come(tmp_path: Path, name: str, key: str, low: float, high: float) -> None:
    output = run("-m", "lockstep", "fit", f"examples/{name}.yaml", root=tmp_path, timeout_s=600)
    assert low < metric(output, key) < high


@pytest.mark.slow
@has("timm")
def test_vit_as_it_comes(tmp_path: Path) -> None:
    output = run("-m", "lockstep", "fit", "examples/vit.yaml", root=tmp_path, timeout_s=600, path=(STUBS,))
    assert metric(output, "val/acc") > 0.85
