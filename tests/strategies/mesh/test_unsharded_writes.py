"""Weights that a step changes in place are those of one process, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Module
from tests.strategies.mesh.perceptrons import STRATEGIES, Block, Blocks, Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit

pytestmark = pytest.mark.ranks


class Target(Perceptron):
    """A slow copy of a network that the step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.move()
        with torch.no_grad():
            wanted = self.slow(batch[0])
        return super().training_step(batch, batch_idx) + (self.net(batch[0]) - wanted).square().mean()

    @torch.no_grad()
    def move(self) -> None:
        for p, q in zip(self.net.parameters(), self.slow.parameters(), strict=True):
            q.lerp_(p, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class TargetByData(Target):
    def move(self) -> None:
        for p, q in zip(self.net.parameters(), self.slow.parameters(), strict=True):
            q.data.copy_(0.9 * q.data + 0.1 * p.data)
        self.net[0].bias.data.clamp_(-0.1, 0.1)


class Remembers(nn.Module):
    """Changes a parameter of its own in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mean = nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(self.linear.weight.detach(), 0.2)
        return x + torch.tanh(self.linear(x)) + x @ self.mean


class RemembersInBlock(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), Remembers(), nn.Linear(8, 4))


class TargetByHand(Target):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.move()
        optimizer = self.optimizers()
        self.manual_backward((self.net(batch[0]) - self.slow(batch[0]) - batch[0][:, :4]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        self.move()


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_weights_changed_in_the_step_follow_one_process(strategy: str, devices: int) -> None:
    makes: list[Callable[[], Module]] = [Target, TargetByData, TargetByHand]
    if strategy == "fsdp":
        makes.append(RemembersInBlock)
    exact(strategy, devices, *makes, n=17)


class TargetOfBatch(Target):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.slow[0].bias.data += batch[0].mean()
        return super().training_step(batch, batch_idx)


def test_weights_set_to_other_values_on_each_rank_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match="training_step changed the weights slow.0.bias to values that are not the same"
    ):
        fit("fsdp", 2, TargetOfBatch(), labeled())


class Zeros(Blocks):
    """Gives parameters gradients of zeros, of which an optimizer applies weight decay and momentum: before a backward,
    after one, in a block, and in a step of which the next makes use."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 4)
        self.net[1].register_forward_pre_hook(self.in_block)
        self.turn = 0

    def in_block(self, block: nn.Module, args: Any) -> None:
        if self.turn == 2:
            self.set_zeros(block)

    def set_zeros(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.turn = batch_idx % 4
        if self.turn in (0, 3):
            self.set_zeros(self)
        loss = super().training_step(batch, batch_idx)
        if self.turn != 2:
            self.manual_backward(loss)
        if self.turn == 1:
            self.set_zeros(self)
        if self.turn < 3:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class OnesLater(Zeros):
    """The next step would add to the gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.unused.weight.grad = torch.ones_like(self.unused.weight)


def test_gradients_of_zeros_are_those_of_one_process_and_others_are_refused() -> None:
    exact("fsdp", 2, Zeros, n=40)
    with pytest.raises(RuntimeError, match="the step has written the gradient of weight"):
        fit("fsdp", 2, OnesLater(), labeled())


class BeforeBackward(Blocks):
    """Changes weights between the forward and the backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        with torch.no_grad():
            self.net[-1].bias.add_(0.1)
        for parameter in self.parameters():
            parameter.data.mul_(0.9)


class ChangedByHook(Blocks):
    """A forward hook of a block changes the block."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_forward_hook(shrink)


def shrink(module: nn.Module, args: Any, output: Any) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.9)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_weights_changed_after_they_were_used_follow_one_process(strategy: str, devices: int) -> None:
    makes: list[Callable[[], Module]] = [BeforeBackward]
    if strategy == "fsdp":  # elsewhere the plan of layers refuses such a hook
        makes.append(ChangedByHook)
    exact(strategy, devices, *makes, n=17)
