"""Values that user code assigns to `data` of weights under ZeRO, and puts back."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module
from tests.trainer.test_user_code import assert_same, batches, quiet

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="it is in the extra deepspeed"),
    pytest.mark.ranks,
]


class AveragesInValidation(Module):
    """Puts averages in the place of weights while it validates, as hand-written averaging does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.averages = [p.detach().clone() for p in self.net.parameters()]
        self.backup = list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, parameter in zip(self.averages, self.net.parameters(), strict=True):
            average.lerp_(parameter.data, 0.3)

    def on_validation_start(self) -> None:
        self.backup = [parameter.data for parameter in self.net.parameters()]
        for average, parameter in zip(self.averages, self.net.parameters(), strict=True):
            parameter.data = average

    def on_validation_end(self) -> None:
        for held, parameter in zip(self.backup, self.net.parameters(), strict=True):
            parameter.data = held
        self.backup = []


class KeepsABackup(AveragesInValidation):
    def on_validation_end(self) -> None:
        pass


class ClipsByData(AveragesInValidation):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.net.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


def validated(module: Module, strategy: str, devices: int) -> tuple[Module, float]:
    trainer = quiet(strategy=strategy, devices=devices, accelerator="cpu", max_epochs=2, split_batches=True)
    trainer.fit(module, batches(24, torch.float32), batches(24, torch.float32))
    return module, float(trainer.callback_metrics["val"])


@pytest.mark.parametrize("make", [AveragesInValidation, ClipsByData])
def test_data_that_is_assigned_and_put_back_is_that_of_one_process(make: type[Module]) -> None:
    (alone, val), (module, on_ranks) = validated(make(), "single", 1), validated(make(), "deepspeed_stage_2", 2)
    assert on_ranks == pytest.approx(val, abs=1e-6)
    assert_same(module, alone, bound=1e-6)


def test_a_backup_of_memory_that_the_engine_writes_to_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"taken of `data` of net\.\d\.\w+ before it assigned .* clone\(\)"):
        validated(KeepsABackup(), "deepspeed_stage_2", 2)
