"""Checkpoints that hold what is trained and not the base model: LoRA adapters, and weights that code changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from lockstep import CheckpointError
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.integrations.hugging_face import NEEDS_PEFT, FineTuning, llama, loader, trainer

pytestmark = [NEEDS_PEFT, pytest.mark.ranks, pytest.mark.timeout(300)]

KIND = "Llama with LoRA"
STRATEGIES = ("single", "ddp", "fsdp", "tensor", "pipeline", "deepspeed_stage_2", "deepspeed_stage_3")
DAILY = ("single", "fsdp")
EACH = pytest.mark.parametrize(
    "strategy", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)


class Adapted(FineTuning):
    """`other` builds another base model."""

    def __init__(self, kind: str = KIND, other: bool = False) -> None:
        super().__init__(kind)
        if other:
            with torch.no_grad():
                self.model.base_model.model.model.norm.weight[3] += 1e-6


def fit(folder: Path, strategy: str, steps: int, module: Any = None, ckpt_path: str | None = None) -> tuple[Any, str]:
    """The module, and the path of its last checkpoint."""
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=0, save_trainable_only=True)
    module = module or Adapted()
    options: dict[str, Any] = {"max_steps": steps, "callbacks": [saver], "enable_checkpointing": True}
    trainer(folder, strategy, **options).fit(module, loader(KIND), ckpt_path=ckpt_path)
    return module, saver.last_model_path


@pytest.mark.long
@EACH
@pytest.mark.filterwarnings("ignore")
def test_a_run_resumes_from_its_adapters_alone(tmp_path: Path, strategy: str) -> None:
    whole, _ = fit(tmp_path / "whole", strategy, 5)
    _, path = fit(tmp_path / "cut", strategy, 3)
    saved = Checkpoint.open(path).names("model/")
    assert saved and all("lora_" in name for name in saved)
    resumed, _ = fit(tmp_path / "cut", strategy, 5, ckpt_path=path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"hook omitted, and model\.base_model\.model\.model\.norm\.w"):
        fit(tmp_path / "other", strategy, 5, Adapted(other=True), ckpt_path=path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_that_one_strategy_saved_are_continued_by_another(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", "single", 6)
    path = None
    for i, strategy in enumerate(("ddp", "fsdp", "tensor", "pipeline", "single")):
        continued, path = fit(tmp_path / strategy, strategy, i + 2, ckpt_path=path)
    for one, other in zip(whole.parameters(), continued.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_loaded_beside_the_base_model_that_they_were_trained_beside(tmp_path: Path) -> None:
    module, path = fit(tmp_path, "single", 3)
    loaded = Adapted.load_from_checkpoint(path)  # in float32, which holds the same base model
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.float()), name
    with pytest.raises(CheckpointError, match="build the module on the same base model"):
        Adapted.load_from_checkpoint(path, other=True)


class Follows(Callback):
    """Changes frozen weights, as a momentum encoder's are."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            module.model.base_model.model.model.norm.weight.mul_(1.01)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_frozen_weights_that_have_changed_are_saved_and_resumed(tmp_path: Path) -> None:
    def run(folder: Path, steps: int, ckpt_path: str | None = None) -> tuple[Any, str]:
        saver = ModelCheckpoint(folder, save_last=True, save_top_k=0, save_trainable_only=True)
        options: dict[str, Any] = {"callbacks": [saver, Follows()], "enable_checkpointing": True, "max_steps": steps}
        module = Adapted()
        trainer(folder, "single", **options).fit(module, loader(KIND), ckpt_path=ckpt_path)
        return module, saver.last_model_path

    whole, _ = run(tmp_path / "whole", 5)
    _, path = run(tmp_path / "cut", 3)
    names = [name for name in load_file(Path(path) / "model.safetensors") if "lora_" not in name]
    assert names == ["model.base_model.model.model.norm.weight"]
    resumed, _ = run(tmp_path / "cut", 5, path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_callbacks_must_agree_on_what_is_omitted(tmp_path: Path) -> None:
    savers = [ModelCheckpoint(tmp_path, monitor="step"), ModelCheckpoint(tmp_path, save_trainable_only=True)]
    with pytest.raises(ValueError, match="save_trainable_only must be the same for every ModelCheckpoint"):
        trainer(tmp_path, "single", callbacks=savers, enable_checkpointing=True).fit(Adapted(), loader(KIND))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_peft_writes_and_reads_the_adapters_of_a_run(tmp_path: Path) -> None:
    import peft

    module, _ = fit(tmp_path, "fsdp", 3)
    module.float().model.save_pretrained(tmp_path / "adapters")
    assert all("lora_" in name for name in load_file(tmp_path / "adapters" / "adapter_model.safetensors"))
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters")  # type: ignore[arg-type]
    mine, theirs = module.model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
