"""DeepSpeed's configuration: contradictions and what cannot be exact are refused before work starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointError, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import DeepSpeed
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        (
            {"stage": 3, "config": {"zero_optimization": {"stage": 2}}},
            {},
            r"zero_optimization.stage=2, but the run has stage=3",
        ),
        ({"config": {"zero_optimization": {"stage": 0}}}, {}, r"zero_optimization.stage=0, but it must be 1, 2 or 3"),
        ({"config": {"bf16": {"enabled": True}}}, {}, r"bf16.enabled=True, but the run has precision='32-true'"),
        (
            {"config": {"fp16": {"enabled": True}}},
            {"precision": "bf16-mixed"},
            r"fp16.enabled=True, but the run has precision='bf16-mixed'",
        ),
        (
            {"config": {"bf16": {"enabled": False}}},
            {"precision": "bf16-true"},
            r"bf16.enabled=False, but the run has precision='bf16-true'",
        ),
        ({"config": {"optimizer": {"type": "AdamW"}}}, {}, r"section 'optimizer', but configure_optimizers makes it"),
        ({"config": {"scheduler": {"type": "WarmupLR"}}}, {}, r"section 'scheduler'"),
        (
            {"offload_optimizer": True, "config": {"zero_optimization": {"offload_optimizer": {"device": "none"}}}},
            {},
            r"device='none'.*offload_optimizer=True",
        ),
        ({"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}}, {}, r"'nvme'.*give 'cpu'"),
        ({"offload_parameters": True}, {}, r"offload_parameters needs stage 3.*stage=2"),
        ({"config": {"gradient_allreduce_op": "sum"}}, {}, r"gradient_allreduce_op='sum'"),
        ({"config": "missing.json"}, {}, r"config='missing.json' cannot be read"),
        ({}, {"precision": "64-true"}, r"float32.*precision='64-true'"),
        (
            {},
            {"precision": "16-mixed"},
            r"precision must be one of 32-true, tf32-true, bf16-mixed, bf16-true, but precision='16-mixed'",
        ),
    ],
)
def test_contradictions_are_found_before_a_process_starts(
    options: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(strategy=DeepSpeed(**options), devices=2, accelerator="cpu", max_epochs=1, **run)


def test_stage_must_exist() -> None:
    with pytest.raises(ValueError, match="stage must be 1, 2 or 3, but stage=4"):
        DeepSpeed(stage=4)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        ImportError, match=r"needs the package deepspeed; install it with `pip install 'lockstep-trainer\[deepspeed\]'`"
    ):
        quiet(strategy="deepspeed", devices=2)


@pytest.mark.parametrize(
    ("config", "run", "message"),
    [
        (
            {"gradient_accumulation_steps": 4},
            {"accumulate_grad_batches": 2},
            r"gradient_accumulation_steps=4, but the run has accumulate_grad_batches=2",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            {},
            r"train_micro_batch_size_per_gpu=4, but the run has samples of a rank in a micro-batch=8",
        ),
        (
            {"train_batch_size": 8},
            {"accumulate_grad_batches": 2},
            r"train_batch_size=8, but the run has samples of all ranks in a step=16",
        ),
        (
            {"gradient_clipping": 1.0},
            {"gradient_clip_val": 0.5},
            r"gradient_clipping=1.0 \(by norm\), but the run has gradient_clip_val=0.5",
        ),
    ],
)
def test_what_the_loader_and_the_step_contradict(config: dict[str, Any], run: dict[str, Any], message: str) -> None:
    module = net()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=message):
        quiet(strategy=DeepSpeed(config=config), **run).fit(module, loader())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_a_file_for_another_trainer_fits(tmp_path: Path) -> None:
    """ "auto" leaves a value open; what agrees with the run is taken; clipping of the file holds where the run has
    none."""
    file = tmp_path / "zero.json"
    file.write_text(
        json.dumps(
            {
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.1,
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
            }
        )
    )
    weights = []
    for strategy, clip in ((DeepSpeed(config=file), None), ("single", 0.1)):
        module = net()
        quiet(strategy=strategy, seed=0, accumulate_grad_batches=2, gradient_clip_val=clip).fit(module, loader())
        weights.append(list(module.parameters()))
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


class Refused(Net):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.spare = nn.Parameter(torch.ones(() if what == "scalar" else 2), requires_grad=what in ("unused", "scalar"))
        if what in ("double", "complex"):
            self.spare = nn.Parameter(torch.ones(2, dtype=torch.float64 if what == "double" else torch.complex64))
        self.automatic_optimization = what != "manual"

    def configure_optimizers(self) -> Any:
        if self.what == "several":
            return [
                torch.optim.SGD(self.net[0].parameters(), lr=0.1),
                torch.optim.SGD(self.net[3].parameters(), lr=0.1),
            ]
        if self.what == "frozen":
            return torch.optim.SGD([{"params": list(self.net.parameters())}, {"params": [self.spare]}], lr=0.1)
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.Adafactor(trained) if self.what == "factored" else torch.optim.SGD(trained, lr=0.1)
        if self.what == "hooked":
            optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.what == "stepped":
            optimizer.step()


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("several", ValueError, r"steps one optimizer; return one from configure_optimizers"),
        ("factored", ValueError, r"hands Adafactor flat pieces .* and it does not, because .*; use AdamW"),
        ("frozen", ValueError, r"group 1 of the optimizer has no trainable parameter"),
        ("scalar", ValueError, r"without dimensions, which spare is; give it the shape \(1,\)"),
        ("manual", ValueError, r"cannot optimize manually"),
        ("double", ValueError, r"keeps all parameters in float32 under precision='32-true', but spare is float64"),
        ("complex", ValueError, r"keeps all parameters in float32 under precision='32-true', but spare is complex64"),
        ("hooked", ValueError, r"SGD has a step hook, which would see flat pieces"),
        ("unused", RuntimeError, r"got no gradient in a step.*: spare; use them"),
        ("stepped", RuntimeError, r"SGD.step was called, but it holds pieces"),
    ],
)
def test_refused_by_name(what: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quiet(strategy="deepspeed").fit(Refused(what), loader())


def test_state_that_zero_cannot_hold_is_refused(tmp_path: Path) -> None:
    """One step count for all parameters: a checkpoint in which they differ continues elsewhere."""

    class Alternating(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net[0].requires_grad_(batch_idx % 2 == 0)
            return super().training_step(batch, batch_idx)

    saver = ModelCheckpoint(dirpath=tmp_path / "checkpoints")
    quiet(strategy="single", enable_checkpointing=True, callbacks=[saver]).fit(Alternating(), loader())
    (path,) = (tmp_path / "checkpoints").iterdir()
    with pytest.raises(
        CheckpointError, match=r"step of net.3.weight is .*, but .* of others, and ZeRO keeps one for all"
    ):
        quiet(strategy="deepspeed", max_epochs=2).fit(net(), loader(), ckpt_path=path)
