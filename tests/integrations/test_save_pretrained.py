"""Folders of transformers from the checkpoints of every strategy, and models that begin with such a folder."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from lockstep.callbacks import ModelCheckpoint
from tests.integrations.hugging_face import NEEDS_PEFT, FineTuning, loader, trainer

pytestmark = [NEEDS_PEFT, pytest.mark.ranks, pytest.mark.timeout(300)]

STRATEGIES = ("ddp", "fsdp", "tensor", "deepspeed_stage_2", "deepspeed_stage_3", "pipeline")
DAILY = ("fsdp",)
EACH = pytest.mark.parametrize(
    "strategy", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Bitwise, by name."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


class Exporting(FineTuning):
    """Writes its folder while the ranks are running, as examples/bert.py does."""

    folder: str

    def on_fit_end(self) -> None:
        with self.trainer.whole(self):
            if self.trainer.is_global_zero:
                self.model.save_pretrained(self.folder)


@pytest.mark.long
@EACH
@pytest.mark.parametrize("kind", ["GPT-2", pytest.param("Llama, tied", marks=pytest.mark.slow)])
def test_transformers_loads_what_a_run_and_its_checkpoints_hold(tmp_path: Path, strategy: str, kind: str) -> None:
    module = Exporting(kind)
    module.folder = str(tmp_path / "in a hook")
    saver = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"precision": "32-true", "callbacks": [saver], "enable_checkpointing": True}
        trainer(tmp_path, strategy, **options).fit(module, loader(kind))
        FineTuning.load_from_checkpoint(saver.last_model_path, kind=kind).model.save_pretrained(tmp_path / "saved")
        module.model.save_pretrained(tmp_path / "after")
        found = [type(module.model).from_pretrained(tmp_path / name) for name in ("in a hook", "saved", "after")]
    assert all(equal(model, module.model) for model in found)
    assert not equal(FineTuning(kind).model, module.model)
