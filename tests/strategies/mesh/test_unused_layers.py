"""Layers that not every rank uses are named, or allowed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion

from lockstep import Module
from lockstep.strategies import FSDP, MeshParallel
from lockstep.strategies.mesh.options import Options
from tests.strategies.mesh.perceptrons import Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit

pytestmark = pytest.mark.ranks


class Experts(Perceptron):
    """Sends each sample to one of four experts: a step may use some on one rank only, and some on none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4)])
        self.gate = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        choice = (x[:, 0] * 2).long().clamp(-2, 1) + 2
        out = self.gate(x)
        for i in range(1 + batch_idx % 2, len(self.experts)):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_put((rows,), self.experts[i](x[rows]), accumulate=True)
        return F.cross_entropy(out, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class ManyExperts(Experts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        count = 1 + self.trainer.global_rank
        return F.cross_entropy(self.gate(x) + sum(expert(x) for expert in self.experts[:count]), target)


class OtherOrder(Experts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        order = [0, 1] if self.trainer.global_rank == 0 else [1, 0]
        return F.cross_entropy(self.gate(x) + sum(self.experts[i](x) for i in order), target)


class OnlyValidates(Experts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.gate(batch[0]), batch[1]) + 0 * sum(e(batch[0]).sum() for e in self.experts)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.experts[self.trainer.global_rank](batch[0])


@pytest.mark.parametrize(
    ("make", "strategy", "message"),
    [
        (Experts, "fsdp", r"uses experts\.\d on rank \d, .* on rank \d; FSDP .*find_unused_parameters"),
        (ManyExperts, "fsdp", r"uses experts\.1 on rank 1, is done with its forward on rank 0|is done .* uses experts"),
        (OtherOrder, "fsdp", r"uses experts\.\d on rank \d, uses experts\.\d on rank \d"),
        (OnlyValidates, "fsdp", r"uses experts\.\d on rank \d, uses experts\.\d on rank \d"),
        pytest.param(
            ManyExperts,
            "ddp=2,tensor=2",
            r"reduces gradients of experts\.1 \(\d+ elements\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_that_ranks_use_differently_are_named(make: Callable[[], Module], strategy: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        fit(strategy, 4 if "," in strategy else 2, make(), labeled(), labeled() if make is OnlyValidates else None)
    assert time.monotonic() - begin < 20


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13, and is refused before")
@pytest.mark.parametrize(
    "strategy", [FSDP(find_unused_parameters=True), MeshParallel("fsdp=2,tensor=2", find_unused_parameters=True)]
)
def test_ranks_may_use_other_experts_where_that_is_allowed(strategy: Any) -> None:
    exact(strategy, 4 if isinstance(strategy, MeshParallel) else 2, Experts, n=18)


def test_torch_reduces_what_some_ranks_do_not_use_since_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(find_unused_parameters=True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    options.applied_to(Experts(), None)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    with pytest.raises(
        ValueError, match=r"find_unused_parameters=True .* needs torch 2\.13 .* this is torch 2\.9\.1; use"
    ):
        options.applied_to(Experts(), None)
