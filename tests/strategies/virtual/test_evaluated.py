"""Steps and hooks of an evaluation that change the model: a rank would do it once for each of its shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Module, Trainer
from tests.trainer.toy import loader, quiet


class Changes(Module):
    """A step of an evaluation, or a hook of its batches, calls `change`."""

    def __init__(self, change: Callable[[Any, int], Any], where: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.change, self.where = change, where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) * self.scale).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "step":
            self.change(self, batch_idx)
        self.log("loss", F.mse_loss(self.net(batch[0]), torch.zeros(len(batch[0]), 1)))

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.where == "start":
            self.change(self, batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "end":
            self.change(self, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_data(module: Any, batch_idx: int) -> None:
    if batch_idx == 3:
        module.net[0].weight.data.mul_(0.99)


@torch.no_grad()
def in_place(module: Any, batch_idx: int) -> None:
    module.net[2].bias.add_(0.1)


def buffer(module: Any, batch_idx: int) -> None:
    module.scale = module.scale * 0.9


def statistics(module: Any, batch_idx: int) -> None:
    module.train()
    module.net(torch.ones(2, 8))
    module.eval()


def rate(module: Any, batch_idx: int) -> None:
    module.optimizers().param_groups[0]["lr"] *= 0.9


def momentum(module: Any, batch_idx: int) -> None:
    for state in module.optimizers().state.values():
        state["momentum_buffer"].mul_(0.5)


CHANGES = {
    "net.0.weight": by_data,
    "net.2.bias": in_place,
    "scale": buffer,
    "net.1.running_mean": statistics,
    "what an optimizer holds": rate,
}


def fit(change: Callable[[Any, int], Any], where: str, strategy: str = "single", devices: int = 1) -> Trainer:
    trainer = quiet(strategy=strategy, devices=devices, virtual_ranks=2, max_epochs=1, seed=0, split_batches=True)
    trainer.fit(Changes(change, where), loader(32), loader(32))
    return trainer


@pytest.mark.parametrize("where", ["step", "start", "end"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_an_evaluation_changes_is_refused_by_name(name: str, where: str) -> None:
    with pytest.raises(RuntimeError, match=rf"changed {name}.* in an evaluation, which a rank would change once for"):
        fit(CHANGES[name], where)


def momentum_by_data(module: Any, batch_idx: int) -> None:
    for state in module.optimizers().state.values() if batch_idx == 3 else ():
        state["momentum_buffer"].data.mul_(0.5)


@pytest.mark.parametrize("change", [momentum, momentum_by_data])
def test_the_state_of_an_optimizer_is_too(change: Callable[[Any, int], Any]) -> None:
    with pytest.raises(RuntimeError, match="changed what an optimizer holds in an evaluation"):
        fit(change, "step")


class Halves(Changes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        momentum_by_data(self, batch_idx)
        return super().training_step(batch, batch_idx)


def test_state_of_an_optimizer_that_a_step_changes_by_data_is_refused() -> None:
    trainer = quiet(virtual_ranks=2, max_epochs=1, seed=0, split_batches=True)
    with pytest.raises(RuntimeError, match="changed the state of an optimizer, which the shares of this rank have"):
        trainer.fit(Halves(momentum, "never"), loader(32))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_is_refused_on_any_number_of_ranks(strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"changed net\.0\.weight in an evaluation, which a rank would change once"):
        fit(by_data, "step", strategy, 2)


@torch.no_grad()
def swapped(module: Any, batch_idx: int) -> None:
    """Other weights for a while, and a cache."""
    weight = module.net[0].weight
    kept = weight.clone()
    weight.mul_(2)
    weight.copy_(kept)
    module.cache += 1


def test_what_is_put_back_by_the_end_of_a_batch_and_caches_may_change() -> None:
    assert "loss" in fit(swapped, "step").callback_metrics
