"""Attributes that users set on parameters are found on what strategies put in their place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lockstep.strategies.modules.parameter_hooks import copy_attributes, copy_module, share_attributes
from lockstep.strategies.optimizers.probe import reads_attributes
from tests.trainer.toy import Net, distance, loader, quiet, weights

REPLACING = ["fsdp", "tensor", "pipeline", "dp"]

pytestmark = pytest.mark.usefixtures("one_rank_keeps_its_mesh")


class Scaled(Optimizer):
    """SGD with a rate and a mask for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(p.grad * getattr(p, "mask", 1.0), alpha=-0.1 * getattr(p, "lr_scale", 1.0))


class Attributed(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net[0].weight.bound = 0.05
        self.net[3].weight.lr_scale = 0.5
        self.net[3].weight.mask = torch.ones(3, 16).tril()
        self.net[3].bias.stage = self.net[3].bias.path = "mine"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.net[3].weight.lr_scale == 0.5
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                if hasattr(p, "bound"):
                    p.clamp_(-p.bound, p.bound)
        with self.trainer.whole(self):
            for p in self.parameters():
                p.seen = getattr(p, "seen", 0) + 1
        assert self.net[3].bias.stage == "mine"
        assert self.net[0].weight.seen == self.trainer.global_step

    def configure_optimizers(self) -> Any:
        assert [getattr(p, "bound", 0) for p in self.parameters()] == [0.05, 0, 0, 0]
        return Scaled(self.parameters())


class Inner(Net):
    """A layer whose forward reads them."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight * self.weight.factor, self.bias)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net[0] = self.Layer(8, 16)
        self.net[0].weight.factor = 1.5


def trained(make: Callable[[], Net], **options: Any) -> Net:
    torch.manual_seed(0)
    module = make()
    quiet(accelerator="cpu", seed=0, **options).fit(module, loader())
    return module


@pytest.mark.parametrize("strategy", REPLACING)
@pytest.mark.parametrize("make", [Attributed, Inner])
def test_they_hold_as_on_one_process(make: Any, strategy: str) -> None:
    module, plain = trained(make, strategy=strategy), trained(make)
    assert distance(weights(module), weights(plain)) < 1e-6
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert set(vars(p)) == set(vars(q))
        assert vars(p).get("seen") == vars(q).get("seen")
    assert pickle.loads(pickle.dumps(module.net[0].weight)).shape == (16, 8)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_they_hold_on_two_ranks_and_come_back(strategy: str) -> None:
    module, plain = trained(Attributed, strategy=strategy, devices=2, split_batches=True), trained(Attributed)
    assert distance(weights(module), weights(plain)) < 1e-6
    assert [p.seen for p in module.parameters()] == [p.seen for p in plain.parameters()]
    assert torch.equal(module.net[3].weight.mask, torch.ones(3, 16).tril())


def test_a_tensor_that_stands_for_another_has_its_attributes() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one.early = 1
    share_attributes(one, other)
    other.late = 2
    assert vars(one) == vars(other) == {"early": 1, "late": 2}


def test_a_copied_module_keeps_them() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.scale = 3
    assert copy_module(layer).weight.scale == 3
    assert not hasattr(copy.deepcopy(layer).weight, "scale")


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_probe_tells_whether_an_optimizer_reads_them(scale: float | None) -> None:
    layer = nn.Linear(2, 2)
    layer.bias.other = 1
    if scale is not None:
        layer.bias.lr_scale = scale
    optimizer = Scaled(layer.parameters())
    assert reads_attributes(optimizer) is (scale is not None)
    assert not reads_attributes(torch.optim.SGD(layer.parameters(), lr=0.1))


def test_a_fake_tensor_on_another_device_stays_there() -> None:
    with FakeTensorMode():
        original = nn.Parameter(torch.zeros(3, 3))
        original.lr_scale = 0.5
        other = nn.Parameter(original.detach().to("meta"))
        copy_attributes(original, other)
        assert other.lr_scale == 0.5 and other.device.type == "meta"
        assert (other @ torch.zeros(3, 3, device="meta")).device.type == "meta"
