"""Buffers that are in no state dict: each rank has its own, of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer
from lockstep.strategies import DDP, FSDP, LocalSGD, ParameterServer


class Rotates(nn.Module):
    """Keeps the rotations of the longest batch so far."""

    def __init__(self, start: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("cos", start, persistent=False)

    def forward(self, length: int) -> Tensor:
        if self.cos is None or length > len(self.cos):
            self.cos = torch.arange(length, dtype=torch.float64).cos()
        return self.cos[:length]


class Sequences(Module):
    """The longest of a batch, whose lengths are its samples' first numbers, counts."""

    def __init__(self, start: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotates, self.norm, self.net = Rotates(start), nn.BatchNorm1d(9).double(), nn.Linear(9, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        length = int(x[:, 0].max())
        turned = torch.cat([x[:, :length] * self.rotates(length), x[:, length:]], 1)
        return F.mse_loss(self.net(self.norm(turned)), x.sin().sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def lengthening(turned: bool) -> DataLoader[Any]:
    """Batches that become longer, of each of which one half is shorter than the other."""
    x = torch.randn(32, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    places = torch.arange(32)
    x[:, 0] = 2 + 2 * (places // 8) - ((places % 8 < 4) == turned).double()
    return DataLoader(TensorDataset(x), 8)


def fit(strategy: Any, devices: int, start: Tensor | None, turned: bool, **options: Any) -> dict[str, Any]:
    module = Sequences(start)
    trainer = Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=2, logger=False, precision="64-true", seed=0,
        enable_checkpointing=False, enable_progress_bar=False, split_batches=True, **options,
    )  # fmt: skip
    trainer.fit(module, lengthening(turned))
    return module.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "turned", "options"),
    [
        (LocalSGD(learners=2, period=2), True, {}),
        (LocalSGD(learners=2, period=2, start=3), False, {}),
        (DDP(), True, {"virtual_ranks": 2}),
        (FSDP(), False, {"virtual_ranks": 2}),
        (ParameterServer(workers=2, staleness=0), True, {}),
    ],
    ids=["rounds", "post-local", "virtual", "virtual fsdp", "served"],
)
def test_ranks_have_caches_of_other_lengths(strategy: Any, turned: bool, options: dict[str, Any]) -> None:
    alone, ranks = (fit(strategy, devices, torch.zeros(0).double(), turned, **options) for devices in (1, 2))
    assert all(torch.equal(value, ranks[name]) for name, value in alone.items())


@pytest.mark.unit
def test_each_learner_of_a_rank_fills_a_cache_of_its_own() -> None:
    lazy, ready = (fit(LocalSGD(learners=2, period=2), 1, start, True) for start in (None, torch.zeros(0).double()))
    assert all(torch.equal(value, ready[name]) for name, value in lazy.items())
