"""Hooks on parameters and gradients within a step: exact, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Module
from tests.strategies.pipeline.classifiers import ALL, TWO, Base, exact, fit, layers, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class HooksOnParameters(Base):
    """Hooks that are not linear, on the gradient of the window; one comes late, one after accumulation."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.net.parameters():
            p.register_hook(clipped_gradient)
        self.net[0].weight.register_post_accumulate_grad_hook(halves_gradient)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[2].weight.register_hook(clipped_gradient)
            self.net[4].bias.register_hook(clipped_gradient)


def clipped_gradient(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.02, 0.02) * 1.5


def halves_gradient(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


@pytest.mark.long
def test_hooks_on_parameters_see_the_gradient_of_one_process() -> None:
    exact(HooksOnParameters, ALL)


class GradientsWithin(Base):
    """Runs backward within the step, through layers of the last stage or to the inputs."""

    to_inputs = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        losses = F.cross_entropy(self.net(x), batch[1], reduction="none")
        of = x if self.to_inputs else self.net[4].weight
        (gradient,) = torch.autograd.grad(losses.sum(), of, create_graph=True)
        return losses.mean() + 0.01 * gradient.sum() / len(losses)


class GradientsToInputs(GradientsWithin):
    to_inputs = True


class DecidesByValues(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = Deciding()


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1:](x if x.sum() > 0 else -x)


class ReadsItsStep(Base):
    """Keeps a tensor of the step for a hook, and a cache for itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean = batch[0].mean()
        if not hasattr(self, "cache"):
            self.cache = torch.ones(1)
        return super().training_step(batch, batch_idx) * self.cache

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.cache == 1
        self.log("mean", self.mean)


class Remembers(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


class ReadsALayersInput(Base):
    """On the rank of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = Remembers()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.net[1].last.mean()


def test_gradients_of_the_last_stages_weights_are_exact_within_a_step() -> None:
    exact(GradientsWithin, TWO)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (GradientsToInputs, "training_step asks for a gradient by torch.autograd.grad"),
        (DecidesByValues, "it reads values that layers have computed"),
        (ReadsItsStep, "training_step has set self.mean"),
        (ReadsALayersInput, "training_step has set self.net.1.last"),
    ],
)
def test_what_a_stage_cannot_see_is_refused_by_name(make: type[Module], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(make(), "pipeline", 2)


class Forces(Base):
    """Gradients of inputs, in an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x)[:, 0].sum(), x)
        self.log("force", force.norm())


def test_gradients_of_inputs_in_an_evaluation_are_refused() -> None:
    run = quiet(strategy="pipeline", devices=2, precision="64-true", inference_mode=False)
    with pytest.raises(RuntimeError, match="the step of an evaluation asks for a gradient by torch.autograd.grad"):
        run.validate(Forces(), DataLoader(samples(), 8))
