"""BaseFinetuning and BackboneFinetuning as in Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep.lightning.pytorch as pl
from lockstep.lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        norm = self.backbone[1]
        rates = [round(group["lr"], 8) for group in self.trainer.optimizers[0].param_groups]
        self.seen.append((rates, norm.weight.tolist() == [1.0] * 4, norm.running_mean.tolist() == [0.0] * 4))
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


@pytest.mark.parametrize("train_bn", [True, False], ids=["norms", "no norms"])
def test_the_backbone_joins_with_rates_of_its_own(tmp_path: Path, train_bn: bool) -> None:
    """A norm that is trainable before it joins an optimizer is not stepped, and joins without an old gradient."""
    module = Net()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=5,
        enable_model_summary=False, callbacks=[BackboneFinetuning(2, train_bn=train_bn)], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(4, 4), batch_size=4))
    first, second, third, fourth, fifth = module.seen
    assert [first[0], second[0]] == [[0.1], [0.07]]
    assert [third[0], fourth[0], fifth[0]] == [[0.049, 0.0049], [0.0343, 0.0098], [0.02401, 0.0196]]
    assert third[1] and fifth[1] is not train_bn  # the norm's weight is stepped after it has joined, if it does
    assert third[2] is not train_bn  # frozen norms keep their statistics


class Beside(Net):
    """A second optimizer has a group of the index of the backbone's."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, layer in zip(self.optimizers(), (self.head, self.extra), strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(self.backbone(batch)).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.extra.weight]}, {"params": [self.extra.bias], "lr": 0.001}]
        return [torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.SGD(groups, lr=0.1)]


def test_the_rates_of_another_optimizer_stay(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=4,
        enable_model_summary=False, callbacks=[BackboneFinetuning(1)], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Beside(), DataLoader(torch.randn(4, 4), batch_size=4))
    first, second = ([group["lr"] for group in each.param_groups] for each in trainer.optimizers)
    assert first == pytest.approx([0.1, 0.04]) and second == [0.1, 0.001]


def test_helpers_take_nested_lists() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    BaseFinetuning.freeze([model[0], [model[1], [model[2]]]])
    assert list(BaseFinetuning.filter_params(model)) == list(model[1].parameters())
    BaseFinetuning.freeze(model, train_bn=False)
    assert not model[1].track_running_stats and not list(BaseFinetuning.filter_params(model))
    BaseFinetuning.make_trainable(model)
    assert model[1].track_running_stats and len(list(BaseFinetuning.filter_params(model, train_bn=False))) == 4


def test_a_backbone_has_its_first_rate_again_in_another_run(tmp_path: Path) -> None:
    callback, seen = BackboneFinetuning(1), []
    for _ in range(2):
        module = Net()
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=3,
            enable_model_summary=False, callbacks=[callback], default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(torch.randn(4, 4), batch_size=4))
        seen.append([rates for rates, *_ in module.seen])
    assert seen[0] == seen[1] == [[0.1], [0.07, 0.007], [0.049, 0.014]]
