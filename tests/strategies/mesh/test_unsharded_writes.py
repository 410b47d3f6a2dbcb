"""Weights that a step changes in place are those of one process, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from lockstep import Module
from lockstep.strategies import FSDP
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


class MaxNorm(nn.Linear):
    """Sets its weight to one of a bounded norm, as EEGNet's layers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


class MaxNorms(Blocks):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(8), MaxNorm(8, 8), nn.Tanh()) for _ in range(2)]
        self.net = nn.Sequential(Block(), *blocks, nn.Linear(8, 4))


class AssignsAfterUse(Perceptron):
    """The backward uses the values before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.assign()
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.assign()

    def assign(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.95


class AssignsInHooks(Blocks):
    """A forward hook assigns what its layer has used, and a hook of the backward changes it."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.net.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self.assign)
                module.register_full_backward_hook(self.shrink)

    def assign(self, module: Any, *_: Any) -> None:
        module.weight.data = module.weight.data * 0.95

    def shrink(self, module: Any, *_: Any) -> None:
        module.bias.data.mul_(0.95)


class SwapsBack(Blocks):
    """Other weights for a while, as for a validation with averaged ones."""

    def on_train_epoch_end(self) -> None:
        held = [parameter.data for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.5
        for parameter, value in zip(self.parameters(), held, strict=True):
            parameter.data = value


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_values_before_an_assignment_to_data_are_kept_as_on_one_process(strategy: str, devices: int) -> None:
    makes: list[Callable[[], Module]] = [AssignsAfterUse, SwapsBack]
    if strategy == "fsdp":
        makes += [MaxNorms, AssignsInHooks]
    exact(strategy, devices, *makes, n=17)


class AssignsToBlocks(Blocks):
    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.95


def test_an_assignment_to_data_of_a_block_whose_backward_is_to_come_is_refused() -> None:
    with pytest.raises(RuntimeError, match="`data` of weight of a LayerNorm was assigned between the forward of its"):
        fit("fsdp", 2, AssignsToBlocks(), labeled())


class EditsBeforeBackward(Perceptron):
    def on_before_backward(self, loss: Tensor) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(0.1)


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("fsdp", 2)])
def test_weights_changed_before_the_backward_are_refused_with_virtual_ranks(strategy: str, devices: int) -> None:
    with pytest.raises(RuntimeError, match="changed the parameters net.0.bias or their requires_grad"):
        fit(strategy, devices, EditsBeforeBackward(), labeled(), virtual_ranks=2)


class ScalesBetween(Blocks):
    """Changes a layer after its forward and before its backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.net[0].up.bias.data.mul_(0.9)
        return loss


class AssignsBetween(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.net[0].up.bias.data = 0.9 * self.net[0].up.bias.data
        return loss


class FreezesBetween(ScalesBetween):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Blocks.training_step(self, batch, batch_idx)
        self.net[0].up.bias.requires_grad_(False)
        return loss


class ScalesBefore(ScalesBetween):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].up.bias.data.mul_(0.9)
        return Blocks.training_step(self, batch, batch_idx)


def on_fewer_ranks() -> FSDP:
    return FSDP(reshard_after_forward=2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [AssignsBetween, FreezesBetween])
def test_what_is_kept_on_fewer_ranks_until_the_backward_is_not_changed(make: Callable[[], Module]) -> None:
    with pytest.raises(
        RuntimeError, match="bias of a Linear was assigned, frozen or got a hook between the forward of its"
    ):
        fit(on_fewer_ranks(), 4, make(), labeled())


@pytest.mark.slow
def test_weights_changed_where_fewer_ranks_keep_them_follow_one_process() -> None:
    exact(on_fewer_ranks(), 4, ScalesBefore, ScalesBetween)


class Manual(Perceptron):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.change()
        optimizer.step()

    def change(self) -> None: ...


class TiesInStep(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.net[0].bias.data = self.net[2].bias.data
        super().training_step(batch, batch_idx)
        self.stepped = True


class SwapsInStep(Manual):
    def change(self) -> None:
        one, other = self.net[0].bias, self.net[2].bias
        one.data, other.data = other.data, one.data


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 1), ("tensor", 2)])
def test_a_tie_by_data_within_a_step_is_refused_before_an_optimizer_steps(
    strategy: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    module = TiesInStep()
    with pytest.raises(RuntimeError, match=r"what was assigned to `data` of net.0.bias is kept by another parameter"):
        fit(strategy, devices, module, labeled())
    assert not hasattr(module, "stepped")


class Averages(Perceptron):
    """Trains with averages in place of the weights during validation, and keeps all it has assigned."""

    shadow: dict[str, Tensor]

    def on_train_start(self) -> None:
        self.__dict__["shadow"] = {name: p.data.clone() for name, p in self.named_parameters()}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for name, p in self.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.data

    def on_train_epoch_end(self) -> None:
        self.__dict__["backup"] = {}
        for name, p in self.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]
        for name, p in self.named_parameters():
            p.data = self.backup[name]


class WritesWhatItAssigned(Perceptron):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if "kept" not in self.__dict__:
            self.__dict__["kept"] = [0.9 * p.data for p in self.parameters()]
            for p, value in zip(self.parameters(), self.kept, strict=True):
                p.data = value
        for value in self.kept:
            value.mul_(0.97)


class AssignsRows(Perceptron):
    """Gives two parameters parts of one tensor, which have nothing in common."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        one, other = self.net[0].bias, self.net[2].bias
        one.data, other.data = torch.stack([one.data, other.data]).mul(0.9).unbind()


class SwapsTensors(Perceptron):
    def on_train_start(self) -> None:
        swap_tensors(self.net[0].bias, self.net[2].bias)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_what_was_assigned_to_data_is_the_memory_of_the_parameter(strategy: str, devices: int) -> None:
    exact(strategy, devices, Averages, WritesWhatItAssigned, SwapsInStep, SwapsTensors, n=17)


def test_parameters_may_have_rows_of_one_tensor() -> None:
    exact("fsdp", 2, AssignsRows, n=17)


class TiesTwice(Perceptron):
    """Ties two layers that are sharded in two ways, changes both, and parts them before the step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        one, other = self.net[0].bias, self.net[2].bias
        one.data = other.data
        one.data.mul_(0.5)
        one.data = one.data.clone()


class TiesWholeWeights(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not batch_idx:
            self.net[0].bias.data = self.net[2].bias.data
        return super().training_step(batch, batch_idx)


def test_ties_of_weights_that_are_sharded_in_two_ways_are_refused() -> None:
    with pytest.raises(RuntimeError, match="a second tensor was assigned to `data` of a parameter of shape"):
        fit("tensor", 2, TiesTwice(), labeled())


@pytest.mark.slow
def test_ties_of_weights_that_a_step_has_whole_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"what was assigned to `data` of net.0.bias is kept by another parameter"):
        fit("fsdp=2,tensor=2", 4, TiesWholeWeights(), labeled())


class CopiesInLists(Perceptron):
    """Functions of lists, of tensors that are sharded in several ways."""

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        weights, biases = [self.net[0].weight, self.net[2].weight], [self.net[0].bias, self.net[2].bias]
        torch._foreach_copy_(weights, [0.9 * weight for weight in weights])
        torch._foreach_add_(biases, biases[::-1], alpha=-0.1)
        torch._foreach_copy_(biases[:1], torch._foreach_mul(biases[1:], 0.5))


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_functions_of_lists_of_weights_follow_one_process(strategy: str, devices: int) -> None:
    exact(strategy, devices, CopiesInLists, n=17)
