"""The examples train the same under every strategy: loss, gradient norm, metrics and weights of each step, by `lockstep
compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.strategies import DDP, registry
from lockstep.trainer.cli.main import main
from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.ranks

FLOAT64 = ["single", "dp", "ddp", "model", "fsdp", "tensor", "pipeline"]
FLOAT32 = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
MESHES = ["ddp=2+tensor=2", "fsdp=2+tensor=2", "ddp=2+fsdp=2", "fsdp=2+pipeline=2", "ddp=2+pipeline=2"]

# Batches that no number of ranks divides, and gradients that are clipped at every step.
DIGITS = [
    "examples/digits.yaml",
    "module.width=8",
    "data.batch_size=15",
    "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=0.1",
]
GPT = [
    "examples/gpt.yaml",
    "module.width=32",
    "module.depth=2",
    "module.head_width=16",
    "module.context=32",
    "data.text=trainer/run/fit.py",
]
GPT += ["data.batch_size=6", "trainer.gradient_clip_val=0.5", "module.sample_bytes=0"]
LLAMA = ["examples/llama.yaml", "module.depth=2", "module.context=32", "module.loss_chunks=2"]
LLAMA += ["module.lr=5e-4", "data.text=trainer/run/fit.py", "data.batch_size=6", "trainer.gradient_clip_val=0.5"]
EXAMPLES = pytest.mark.parametrize("example", [DIGITS, GPT, LLAMA], ids=["digits", "gpt", "llama"])


def compare(example: list[str], strategies: list[str], folder: Path, steps: int, expected: int = 0) -> dict[str, Any]:
    """What `lockstep compare` writes about `strategies` on 2 devices, meshes on 4."""
    options = [
        "--strategies",
        ",".join(strategies),
        "--devices",
        "2",
        "--steps",
        str(steps),
        "--precision",
        "64-true",
        "--json",
        str(folder / "found.json"),
    ]
    code = main(
        ["compare", *example, *options, "accelerator=cpu", "trainer.limit_val_batches=0", f"default_root_dir={folder}"]
    )
    found = json.loads((folder / "found.json").read_text())
    assert code == expected, found
    assert list(found) == [name.replace("+", ",") for name in strategies]
    return found


def check(found: dict[str, Any], steps: int) -> None:
    first = next(iter(found.values()))
    for name, run in found.items():
        exact = not name.startswith("deepspeed")
        assert run["error"] is None and run["steps"] == steps, name
        assert run["precision"] == ("64-true" if exact else "32-true"), name
        assert set(run["parameters"]) == set(first["parameters"]) and "train/loss" in run["metrics"], name
        for value in (run["loss"], run["grad_norm"], *run["metrics"].values(), *run["parameters"].values()):
            assert value < (1e-12 if exact else 1e-5), (name, run)


@pytest.fixture(autouse=True)
def root(isolate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO_ROOT)


@pytest.mark.parametrize(
    ("example", "strategies"),
    [
        pytest.param(DIGITS, FLOAT64, id="digits", marks=pytest.mark.slow),
        pytest.param(GPT, ["single", "fsdp", "tensor", "pipeline"], id="gpt", marks=pytest.mark.slow),
        pytest.param(LLAMA, ["single", "tensor"], id="llama", marks=pytest.mark.slow),
    ],
)
def test_strategies_on_two_devices(example: list[str], strategies: list[str], tmp_path: Path) -> None:
    """Some of them here; the slow run has all of them in both examples."""
    check(compare(example, strategies, tmp_path, steps=3), steps=3)


class Wrong(DDP):
    """One gradient of all is off by a billionth, which AdamW would not show in the weights."""

    def forward_backward(self, wrapped: Any, *args: Any, **options: Any) -> Any:
        result = super().forward_backward(wrapped, *args, **options)
        next(iter(wrapped.parameters())).grad *= 1 + 1e-9
        return result


@pytest.mark.slow  # tests/trainer/testing/test_compare.py finds it without a program of its own
def test_a_strategy_that_is_off_by_a_billionth_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry.STRATEGIES, "wrong", Wrong)
    found = compare(DIGITS, ["single", "wrong"], tmp_path, steps=2, expected=1)
    assert not found["wrong"]["same"] and found["wrong"]["first_step"] == 1
    assert "differs: step 1, gradient norm" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view tensor"
)  # a stage that ends with Flatten; nothing is changed in place
@EXAMPLES
@pytest.mark.parametrize("strategies", [FLOAT64 + FLOAT32, ["single", *MESHES]], ids=["two", "meshes"])
def test_twenty_steps(example: list[str], strategies: list[str], tmp_path: Path) -> None:
    check(compare(example, strategies, tmp_path, steps=20), steps=20)
