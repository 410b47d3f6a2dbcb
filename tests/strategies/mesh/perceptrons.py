"""Small modules that FSDP, tensor parallelism and their meshes train, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.strategies.launch.launcher import launch
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, weights


def labeled(n: int = 16, batch: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(n, 8, generator=generator), torch.randint(0, 4, (n,), generator=generator)), batch
    )


class Perceptron(Module):
    """Three linear layers, of which the automatic plan of tensor parallelism shards two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


STRATEGIES = [("fsdp", 2), ("tensor", 2), pytest.param("fsdp=2,tensor=2", 4, marks=pytest.mark.slow)]


def fit_each(strategy: Any, makes: list[Callable[[], Module]], n: int, options: dict[str, Any]) -> list[list[Tensor]]:
    """The weights after training each module; on every rank."""
    modules = [make() for make in makes]
    for module in modules:
        fit(strategy, "auto", module, labeled(n), **options)
    return [weights(module) for module in modules]


def exact(strategy: Any, devices: int, *makes: Callable[[], Module], n: int = 16, **options: Any) -> None:
    """Train each module under `strategy`, in one start of ranks, and on one process: the weights must be equal."""
    found = launch(fit_each, (strategy, list(makes), n, options), devices)
    for make, several, one in zip(makes, found, fit_each("single", list(makes), n, options), strict=True):
        assert distance(several, one) < 1e-12, make


class Block(nn.Module):
    """A residual layer: gathered as one by FSDP, sharded by the automatic plan."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.net = nn.Sequential(Block(), Block(), nn.Linear(8, 4))


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()
