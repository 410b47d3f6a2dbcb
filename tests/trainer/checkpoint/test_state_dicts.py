"""Modules whose state dict has other tensors than their parameters and buffers: what a resumed run gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.callbacks import ModelCheckpoint
from lockstep.trainer.checkpoint.store import CheckpointError
from tests.trainer.toy import Net, equal, loader, quiet, weights


class Copies(Net):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: tensor.detach().clone() for name, tensor in super().state_dict(*args, **options).items()}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [1.0]

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.rows)

    def set_extra_state(self, state: Tensor) -> None:
        self.rows = state.tolist()


class WithTable(Net):
    """A table that grows with each step, in a tensor of extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.table.rows.append(self.table.rows[-1] + 0.1)
        return F.cross_entropy(self(batch[0]) * self.table.rows[-1], batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", float(len(self.table.rows)))


class Attribute(nn.Module):
    """Saves a tensor besides its buffers."""

    loads = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = self.seen * 1

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.loads and f"{prefix}seen" in state_dict:
            self.seen = state_dict[f"{prefix}seen"].clone()
        super()._load_from_state_dict({k: v for k, v in state_dict.items() if not k.endswith("seen")}, prefix, *args)


class NotLoaded(Attribute):
    loads = False


class WithAttribute(Net):
    kind = Attribute

    def __init__(self) -> None:
        super().__init__()
        self.beside = self.kind()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.beside.seen = self.beside.seen + 1
        return F.cross_entropy(self(batch[0]) / self.beside.seen[0], batch[1])


class WithoutLoading(WithAttribute):
    kind = NotLoaded


def fit(kind: type[Net], folder: Path, ckpt: Path | None = None, **options: Any) -> Net:
    torch.manual_seed(0)
    module = kind()
    save = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    run = quiet(callbacks=[save], enable_checkpointing=True, split_batches=True, **options)
    run.fit(module, loader(48), ckpt_path=ckpt)
    return module


@pytest.mark.parametrize("kind", [Copies, WithTable, WithAttribute])
def test_a_resumed_run_has_them(kind: type[Net], tmp_path: Path) -> None:
    whole = fit(kind, tmp_path)
    assert equal(weights(fit(kind, tmp_path, tmp_path / "step=3")), weights(whole))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Copies, WithTable])
def test_a_resumed_run_on_shards_has_them(kind: type[Net], tmp_path: Path) -> None:
    whole = fit(kind, tmp_path, strategy="fsdp", devices=2)
    again = fit(kind, tmp_path, tmp_path / "step=3", strategy="fsdp", devices=2)
    assert equal(weights(again), weights(whole))


def test_a_checkpoint_is_evaluated_with_them(tmp_path: Path) -> None:
    fit(WithTable, tmp_path)
    (found,) = quiet().validate(WithTable(), loader(8), ckpt_path=tmp_path / "step=6")
    assert found["rows"] == 7


def test_a_tensor_that_the_module_does_not_load_is_refused_by_name(tmp_path: Path) -> None:
    fit(WithoutLoading, tmp_path)
    with pytest.raises(
        CheckpointError, match="WithoutLoading has beside.seen, which is not the tensor of a parameter or"
    ):
        fit(WithoutLoading, tmp_path, tmp_path / "step=3")


@pytest.mark.ranks
def test_deepspeed_refuses_copies_and_loads_extra_state(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    whole = fit(WithTable, tmp_path, strategy="deepspeed_stage_1", devices=2)
    again = fit(WithTable, tmp_path, tmp_path / "step=3", strategy="deepspeed_stage_1", devices=2)
    assert equal(weights(again), weights(whole))
    with pytest.raises(ValueError, match=r"the state_dict of Copies has a copy in the place of net.0.weight"):
        fit(Copies, tmp_path, strategy="deepspeed_stage_1", devices=2)
