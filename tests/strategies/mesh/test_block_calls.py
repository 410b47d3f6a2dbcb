"""Gradients of gradients, and blocks and layers that a step calls in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import Module
from lockstep.strategies import FSDP, TensorParallel
from tests.strategies.mesh.perceptrons import Blocks, Perceptron, exact, penalty

pytestmark = pytest.mark.ranks


class Penalized(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + penalty(self.net, batch[0])


class PenalizedBlocks(Blocks):
    """The forward runs again after the gradient of which a gradient is taken."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return penalty(self.net, batch[0]) + super().training_step(batch, batch_idx)


class PenalizedGathered(Penalized):
    """Layers of other sizes, which the plan shards each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))


TWICE = pytest.mark.skipif(torch.__version__ < "2.12", reason="needs torch 2.12, and is refused before")


@pytest.mark.parametrize(
    ("strategy", "devices", "makes"),
    [
        pytest.param("tensor", 2, [Penalized, PenalizedGathered], marks=TWICE),
        pytest.param(TensorParallel(sequence_parallel=True), 2, [PenalizedBlocks], marks=TWICE),
        ("fsdp", 2, [Penalized, PenalizedBlocks]),
        (FSDP(activation_checkpointing=True, reshard_after_forward=False), 2, [PenalizedBlocks]),
        pytest.param("fsdp=2,tensor=2", 4, [Penalized, PenalizedBlocks], marks=[pytest.mark.slow, TWICE]),
    ],
)
def test_gradients_of_gradients_are_exact(strategy: Any, devices: int, makes: list[Callable[[], Module]]) -> None:
    exact(strategy, devices, *makes, n=17, accumulate_grad_batches=2)


class Twice(Blocks):
    """A block called for several inputs, whose backwards interleave."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = torch.tanh(x * self.scale)
        block = self.net[0]
        return F.cross_entropy(self.net(block(h) * block(x) + block(block(h))), y)


class TwiceBesideRecurrent(Twice):
    """Torch's recurrent layers have a `__setattr__` of their own, through which FSDP puts its parameters in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList([nn.GRU(8, 8, batch_first=True)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step([self.scales[0](x[:, None])[0][:, 0], y], batch_idx)


class LayerFirst(Blocks):
    """A layer called past its block, before the block."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = torch.tanh(x * self.scale)
        early = self.net[0].up(h).square().mean()
        return F.cross_entropy(self.net(h), y) + early


class GradientBetween(Blocks):
    """A gradient taken in the step while the backward through a layer is still to come."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch[0].clone().requires_grad_(True), batch[1]
        early = self.net[0].up(x * self.scale)
        (gradient,) = torch.autograd.grad(early.tanh().sum(), x, create_graph=True)
        return F.cross_entropy(self.net(x + 0.1 * gradient), y) + early.square().mean()


class CheckpointedByHand(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = torch.tanh(batch[0] * self.scale)
        for block in self.net[:2]:
            h = checkpoint(block, h, use_reentrant=False)
        return F.cross_entropy(self.net[2](h), batch[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "devices", "makes"),
    [
        ("fsdp", 2, [Twice, TwiceBesideRecurrent, LayerFirst, GradientBetween, CheckpointedByHand]),
        ("tensor", 2, [Twice, CheckpointedByHand]),
        pytest.param("fsdp=2,tensor=2", 4, [Twice, CheckpointedByHand], marks=pytest.mark.slow),
    ],
)
def test_a_step_may_call_blocks_in_any_way(strategy: Any, devices: int, makes: list[Callable[[], Module]]) -> None:
    exact(strategy, devices, *makes, n=17, accumulate_grad_batches=2)


class Twice(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.softmax(self.net[0](batch[0]), -1)
        x = self.net[2](torch.tanh(self.net[2](x)))
        return F.cross_entropy(self.net[3:](x), batch[1]) + self.net[0](batch[0]).square().mean()


class Repeated(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        layer, norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.net = nn.Sequential(
            nn.Linear(8, 16), norm, layer, nn.Tanh(), layer, norm, nn.Linear(16, 16), nn.Linear(16, 4)
        )


class InPlace(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        self.net = nn.Sequential(nn.Linear(8, 16), relu, nn.Linear(16, 16), relu, nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        out += 1
        return F.cross_entropy(out.mul_(2), batch[1])


class OneByOne(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for layer in self.net:
            x = layer(x)
        return F.cross_entropy(x, batch[1])


@pytest.mark.parametrize("strategy", ["tensor", TensorParallel(activation_checkpointing=nn.Sequential)])
def test_layers_of_a_sharded_pair_may_be_called_in_any_way(strategy: Any) -> None:
    exact(strategy, 2, Twice, Repeated, InPlace, OneByOne)
