"""Numbers of sharded tensors are global; code that would mix shards with other tensors is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Module
from tests.strategies.mesh.perceptrons import STRATEGIES, Blocks, Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit

pytestmark = pytest.mark.ranks


class LogsNorms(Blocks):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.tensor(norms).norm(), on_step=False, on_epoch=True)
        gradient = self.net[0].up.weight.grad
        assert gradient is not None
        self.log("most", gradient.abs().max().item(), on_step=False, on_epoch=True)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_numbers_of_sharded_gradients_are_global(strategy: str, devices: int) -> None:
    expected = fit("single", 1, LogsNorms(), labeled(), max_epochs=1).callback_metrics
    found = fit(strategy, devices, LogsNorms(), labeled(), max_epochs=1).callback_metrics
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-9
    )


class CountsInGroups(torch.optim.SGD):
    """Its rate follows a count of its own in param_groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, foreach=True)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class CountedRate(Perceptron):
    def configure_optimizers(self) -> Any:
        return CountsInGroups(self.parameters())


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES[1:])
def test_what_an_optimizer_keeps_in_its_groups_survives_the_step(strategy: str, devices: int) -> None:
    exact(strategy, devices, CountedRate)


class PenalizedWeights(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())


class ToNumpy(Perceptron):
    def on_train_epoch_end(self) -> None:
        self.net[0].weight.detach().numpy()


class JoinsInHook(Perceptron):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters()])


class MovesWeightsInHook(Perceptron):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        vector = torch.zeros(sum(p.numel() for p in self.parameters()), dtype=torch.float64)
        torch.nn.utils.vector_to_parameters(vector, self.parameters())


@pytest.mark.parametrize(
    ("make", "strategy", "message"),
    [
        (
            JoinsInHook,
            "tensor",
            r"JoinsInHook.on_before_optimizer_step computes \(aten\.cat\) .*trainer.whole.* gradient_clip_val",
        ),
        (MovesWeightsInHook, "fsdp", r"assigned to `data` of a parameter of shape \[16, 8\] .*trainer.whole"),
        (PenalizedWeights, "tensor", "training_step computes .* weights or gradients that are sharded .*trainer.whole"),
        (ToNumpy, "fsdp", r"numpy.. was called on a tensor of shape \[16, 8\] of which .*trainer.whole"),
    ],
)
def test_code_that_would_mix_shards_with_others_is_refused(
    make: Callable[[], Module], strategy: str, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit(strategy, 2, make(), labeled())


class PenaltyInValidation(Blocks):
    """Adds weights, which are sharded, to the loss of this rank's samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + self.penalty())

    def penalty(self) -> torch.Tensor:
        return self.net[0].up.weight.square().sum()

    def val_dataloader(self) -> Any:
        return labeled(12)


class PenaltyAsNumber(PenaltyInValidation):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + self.penalty()
        self.log("val/loss", loss.item())


@pytest.mark.parametrize("make", [PenaltyInValidation, PenaltyAsNumber])
def test_a_sum_of_sharded_weights_and_own_values_is_refused_in_a_step(make: Callable[[], Module]) -> None:
    """Before torch 2.12 the sum is whole before a value is added, and so exact."""
    if torch.__version__ < "2.12":
        runs = [
            fit(strategy, devices, make(), labeled(), max_epochs=1)
            for strategy, devices in (("single", 1), ("fsdp", 2))
        ]
        one, other = (float(run.callback_metrics["val/loss"]) for run in runs)
        assert one == pytest.approx(other, rel=1e-12)
        return
    with pytest.raises(RuntimeError, match="a sum over weights that are sharded over ranks, to which values of this"):
        fit("fsdp", 2, make(), labeled(), max_epochs=1)


class LearnedInnerRate(Perceptron):
    """A step of gradient descent within the step, whose rate is a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        before = dict(self.net.named_parameters())
        first = F.cross_entropy(torch.func.functional_call(self.net, before, (x,)), y)
        gradients = torch.autograd.grad(first, list(before.values()), create_graph=True)
        after = {name: p - self.rate * gradient for (name, p), gradient in zip(before.items(), gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, after, (x,)), y)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="needs torch 2.12, and is refused before")
def test_a_plain_parameter_gets_a_whole_gradient_from_cut_ones() -> None:
    exact("tensor", 2, LearnedInnerRate)


class LogsDistances(Perceptron):
    """Losses of weights and gradients that two ranks hold unequal shards of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.net[2].weight.detach().requires_grad_()
        ones = torch.ones_like(weight)
        losses = [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.binary_cross_entropy_with_logits]
        total = sum(loss(weight, ones) for loss in losses) + F.binary_cross_entropy(weight.sigmoid(), ones)
        (gradient,) = torch.autograd.grad(total, weight)
        self.log("distance", total.detach(), on_step=False, on_epoch=True)
        self.log("gradient", gradient.square().sum(), on_step=False, on_epoch=True)


def test_mean_losses_of_unequal_shards_are_those_of_the_whole() -> None:
    expected = fit("single", 1, LogsDistances(), labeled(), max_epochs=1).callback_metrics
    found = fit("fsdp", 2, LogsDistances(), labeled(), max_epochs=1).callback_metrics
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-9
    )


class SetsEye(Perceptron):
    def on_train_epoch_start(self) -> None:
        nn.init.eye_(self.net[0].weight)


class CopiesRows(Perceptron):
    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        weight = self.net[0].weight
        weight.index_copy_(0, torch.tensor([0]), weight[1:2].clone())


@pytest.mark.parametrize(("make", "name"), [(SetsEye, "eye"), (CopiesRows, "index_copy_")])
def test_what_torch_would_do_to_each_shard_by_itself_is_refused(make: Callable[[], Module], name: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"{name}\(\) was called for a tensor of shape \[16, 8\] of which this rank"
    ):
        fit("fsdp", 2, make(), labeled(), max_epochs=1)
