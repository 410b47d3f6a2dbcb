"""What user code may do to layers placed over several devices: the effect of one device, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module
from lockstep.strategies import ModelParallel
from tests.trainer.toy import equal, loader, quiet, weights


class Plain(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(12, 12)
        self.net[3] = nn.Linear(12, 12)
        self.net[3].weight = self.net[2].weight


class Parametrized(Plain):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[2])


class Hooked(Plain):
    """Hooks on layers and parameters that change what passes, one registered late."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(lambda module, args, output: output * 2)
        self.net[4].register_full_backward_hook(
            lambda module, inputs, outputs: tuple(g.clamp(-0.01, 0.01) for g in inputs)
        )
        self.net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def on_train_start(self) -> None:
        self.net[0].bias.register_hook(lambda gradient: gradient * 0)


class Unfreezes(Plain):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch == 1)


class OutOfOrder(Plain):
    """Layers called by themselves, twice and backwards, and weights used without their layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.net[2](torch.tanh(self.net[2](self.net[0](batch[0])))))
        penalty = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(F.linear(hidden, self.net[4].weight, self.net[4].bias), batch[1]) + 0.01 * penalty


class Follows(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for fast, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return (self.net(batch[0]) - self.slow(batch[0]) + batch[0][:, :3]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def train(kind: type[Module], strategy: Any, **options: Any) -> Module:
    torch.manual_seed(0)
    module = kind()
    quiet(strategy=strategy, accelerator="cpu", max_epochs=2, **options).fit(module, loader(20))
    return module


def test_a_parameter_that_layers_on_two_devices_share_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"but net\.3\.weight on device 1 is net\.2\.weight on device 0; give a device_map"
    ):
        train(Tied, ModelParallel(device_map={"net.0": 0, "net.2": 0, "net.3": 1, "net.4": 1}), devices=2)


def test_a_layer_without_parameters_yet_is_refused_by_name() -> None:
    class Lazy(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = nn.LazyLinear(12)

    with pytest.raises(ValueError, match=r"net\.2 is a LazyLinear without parameters yet, which ModelParallel needs"):
        train(Lazy, "model", devices=2)


@pytest.mark.parametrize("kind", [Tied, Parametrized, Hooked, Unfreezes, OutOfOrder, Follows])
def test_what_user_code_does_has_the_effect_of_one_device(kind: type[Module]) -> None:
    places = {"net.0": 0, "net.2": 0, "net.3": 0, "net.4": 1} if kind is Tied else None
    one, other = train(kind, "single"), train(kind, ModelParallel(device_map=places), devices=2)
    assert equal(weights(other), weights(one))
    own = [hook for module in other.modules() for hook in module._forward_pre_hooks.values()]
    assert not any(
        type(getattr(hook, "__self__", None)).__module__ == "lockstep.strategies.model_parallel" for hook in own
    )
