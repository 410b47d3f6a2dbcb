"""Hooks on parameters and modules, computed weights, and layers that freeze and unfreeze during a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from lockstep import Module
from lockstep.strategies import TensorParallel
from tests.strategies.mesh.perceptrons import STRATEGIES, Blocks, Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit

pytestmark = pytest.mark.ranks


class Hooked(Blocks):
    """Hooks that read a whole gradient, one of them in place, on sharded and on replicated parameters."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.arange(16)[:, None] < 8
        self.net[0].up.weight.register_hook(lambda gradient: gradient * rows)
        self.net[0].norm.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        self.net[1].down.bias.register_hook(lambda gradient: gradient.clamp_(max=0.01))
        self.scale.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Edits(Blocks):
    """Reads and writes whole weights and gradients in hooks."""

    def whole(self) -> Any:
        assert self._trainer is not None
        return self._trainer.strategy.whole(self._trainer._run.wrapped)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.whole():
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.div_(norm + 0.1)
            weight = self.net[0].up.weight
            weight.data.div_(weight.detach().norm(dim=1, keepdim=True))

    def on_train_epoch_end(self) -> None:
        with self.whole():
            state = self.state_dict()
            assert state["net.0.up.weight"].shape == (16, 8) and type(state["net.0.up.weight"]) is Tensor
            self.load_state_dict({name: value * 0.9 for name, value in state.items()})
            self.net[1].norm.requires_grad_(False)


class Freezes(Blocks):
    """Whole blocks, part of one and parameters outside of blocks change between trained and frozen."""

    def on_train_epoch_start(self) -> None:
        epoch = self.current_epoch
        self.net[0].requires_grad_(epoch == 1)
        self.net[1].up.weight.requires_grad_(epoch != 1)
        self.net[1].down.requires_grad_(epoch < 2)
        self.scale.requires_grad_(epoch != 1)
        self.net[2].weight.requires_grad_(epoch == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0] * self.scale), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_parameter_hooks_whole_edits_and_freezing_follow_one_process(strategy: str, devices: int) -> None:
    exact(strategy, devices, Hooked, Edits, Freezes, max_epochs=3)


class CallsWhole(Edits):
    def on_train_epoch_end(self) -> None:
        with self.whole():
            self.net(torch.zeros(1, 8))


class WholeInStep(Edits):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.whole():
            return super().training_step(batch, batch_idx)


class Replaces(Edits):
    def on_train_epoch_end(self) -> None:
        with self.whole():
            self.net[0].up.weight = nn.Parameter(torch.zeros(16, 8))


class FreezesWithin(Blocks):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (CallsWhole, "net was called within whole"),
        (WholeInStep, "whole.. was called within a step.*; call it in on_after_backward"),
        (Replaces, "the parameters net.0.up.weight were replaced.*weight.data.copy_"),
        (FreezesWithin, "requires_grad of net.0.*between the micro-batches.*; change it before the first"),
    ],
)
def test_what_fsdp_cannot_take_over_is_refused(make: Callable[[], Module], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit("fsdp", 2, make(), labeled(), accumulate_grad_batches=2)


class ComputedWeights(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[0])
        nn.utils.parametrizations.spectral_norm(self.net[2])
        prune.l1_unstructured(self.net[2], "bias", 0.5)


class ComputedInBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.net[0].up)
        prune.l1_unstructured(self.net[1].down, "weight", 0.5)


def normalized(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / (1 + output.norm(dim=1, keepdim=True))


class HookedLayers(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(normalized)
        self.net[2].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(1, keepdim=True),))


class HookedBetween(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_forward_hook(normalized)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class HookedBlocks(Blocks):
    """A hooked layer, an adapter in the place of one, and a hook on a block, before and during the run."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].up.register_forward_hook(normalized)
        self.net[1].up = Adapter(self.net[1].up)
        self.net[1].register_forward_hook(normalized)

    def on_fit_start(self) -> None:
        self.net[0].register_forward_hook(normalized)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_hooks_and_computed_weights_follow_one_process(strategy: str, devices: int) -> None:
    exact(strategy, devices, ComputedWeights, ComputedInBlocks, HookedLayers, HookedBetween, HookedBlocks)


class HookedLate(Blocks):
    def on_fit_start(self) -> None:
        self.net[0].up.register_forward_hook(normalized)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (HookedLate, {}, RuntimeError, "a hook was registered on net.0.up, which works on shards.*; register it in"),
        (
            HookedLayers,
            {"plan": {"net.0": "column", "net.2": "row"}},
            ValueError,
            "shards net.0, but it has hooks; lea",
        ),
        (
            ComputedWeights,
            {"plan": {"net.0": "gather"}},
            ValueError,
            "shards net.0, but it has a weight that something",
        ),
        (HookedBlocks, {"sequence_parallel": True}, ValueError, "net.0.up has hooks, which would see a share of the"),
    ],
)
def test_hooks_that_would_see_shards_are_refused(
    make: Callable[[], Module], options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(TensorParallel(**options), 2, make(), labeled())


def test_a_model_takes_hooks_again_after_a_run() -> None:
    module = Blocks()
    fit("tensor", 2, module, labeled(), max_epochs=1)
    module.net[0].up.register_forward_hook(normalized)
    assert len(module.net[0].up._forward_hooks) == 1


class NoisyGradients(Perceptron):
    """A factor that each rank draws for itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + 0.1 * torch.rand(()).item())


class NoisyWeights(Perceptron):
    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        for parameter in self.parameters():
            parameter.mul_(1 + 0.1 * random.random())


class NoisyAlike(Perceptron):
    """The same with a generator of its own, and with whole weights, for which all ranks draw what rank 0 draws."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.rand(())
        with self.trainer.whole(self):
            for parameter in self.parameters():
                parameter.data.mul_(1 + 0.1 * random.random())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        drawn = random.Random(self.global_step)
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + 0.1 * drawn.random())


class DrawsBesides(Perceptron):
    """Draws in hooks that freeze a layer and take a gradient away."""

    def on_train_epoch_start(self) -> None:
        self.picked = random.random()
        self.net[2].requires_grad_(not self.current_epoch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.picked = torch.rand(()).item()
        self.net[0].bias.grad = None


@pytest.mark.parametrize("make", [NoisyGradients, NoisyWeights])
def test_hooks_that_scale_shards_by_what_each_rank_draws_are_refused(make: Callable[[], Module]) -> None:
    with pytest.raises(RuntimeError, match=r"disagree on their changes of weights, .*net\.0\.bias by mul_\(1\.0"):
        fit("fsdp", 2, make(), labeled())


def test_hooks_that_draw_alike_on_all_ranks_follow_one_process() -> None:
    exact("fsdp", 2, NoisyAlike, DrawsBesides, n=17, seed=0)
    exact("fsdp", 2, NoisyGradients, NoisyWeights, virtual_ranks=2)  # between steps ranks draw alike
