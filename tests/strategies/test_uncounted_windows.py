"""A window that counts nothing leaves nothing: no strategy adds its gradients to the next window's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Loss, Module
from lockstep.strategies import DDP, FSDP
from tests.trainer.toy import distance, loader, quiet, weights

pytestmark = pytest.mark.ranks


class Penalized(Module):
    """A penalty is part of the total of a batch of which nothing counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        counts = torch.full_like(x[:, 0], float(batch_idx != 1))
        losses = F.cross_entropy(self.net(x), y, reduction="none") * counts
        return Loss(losses.sum() + 0.1 * self.net(x).square().sum(), counts.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class InTurn(Module):
    """Uses its layers in turn, and in one batch, of which nothing counts, another one than in the next."""

    def __init__(self, returns_none: bool) -> None:
        super().__init__()
        self.returns_none = returns_none
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 4) for _ in range(2)), nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.head(self.layers[batch_idx % 2](x).tanh()), y, reduction="sum")
        if batch_idx != 1:
            return Loss(loss, len(x))
        return None if self.returns_none else Loss(loss * 0, 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.1, weight_decay=0.3)


def trained(make: Any, strategy: Any = "single", devices: int = 1, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = make()
    options = {"precision": "64-true", "split_batches": True, "seed": 0} | options
    quiet(strategy=strategy, devices=devices, accelerator="cpu", **options).fit(module, loader(22))
    return weights(module)


def by_hand(make: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = make().double()
    optimizer = module.configure_optimizers()
    for batch_idx, (x, y) in enumerate(loader(22)):
        loss = module.training_step((x.double(), y), batch_idx)
        if loss is not None and loss.count:
            (loss.total / loss.count).backward()
            optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize("strategy", ["dp", "ddp", "fsdp"])
def test_a_window_that_counts_nothing_adds_no_gradient_to_the_next(strategy: str) -> None:
    assert distance(trained(Penalized, strategy, 2), by_hand(Penalized)) < 1e-12


def test_a_window_of_shares_that_count_nothing_adds_no_gradient_to_the_next() -> None:
    assert distance(trained(Penalized, virtual_ranks=2), by_hand(Penalized)) < 1e-12


@pytest.mark.parametrize("returns_none", [True, False])
@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_a_layer_that_only_an_uncounted_window_uses_has_no_gradient(kind: Any, returns_none: bool) -> None:
    make = functools.partial(InTurn, returns_none)
    assert distance(trained(make, kind(find_unused_parameters=True), 2), by_hand(make)) < 1e-12
