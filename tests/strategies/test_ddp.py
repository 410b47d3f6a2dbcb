"""What DDP's own options change, and what they must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.strategies import DDP
from tests.trainer.toy import Net, data, distance, loader, quiet, weights

pytestmark = pytest.mark.ranks


class Extrapolated(torch.optim.SGD):
    """Keeps the gradient of each step, the tensor itself, and steps beyond the difference to it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                before = self.state[parameter].get("before", parameter.grad)
                parameter -= group["lr"] * (parameter.grad + 0.5 * (parameter.grad - before))
                self.state[parameter]["before"] = parameter.grad


class Turning(Module):
    """Compares the direction of each gradient with that of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))
        self.before: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        now = [parameter.grad for parameter in self.parameters()]
        if self.before:
            one, other = (torch.cat([gradient.flatten() for gradient in held]) for held in (now, self.before))
            self.log("turn", F.cosine_similarity(one, other, dim=0), on_step=False, on_epoch=True)
        self.before = now

    def configure_optimizers(self) -> Any:
        return Extrapolated(self.parameters(), 0.1)


def test_gradients_that_an_optimizer_or_a_hook_keeps_stay_as_they_were() -> None:
    found = []
    for options in ({}, {"strategy": "ddp", "devices": 2}):
        torch.manual_seed(0)
        module = Turning()
        trainer = quiet(precision="64-true", split_batches=True, accelerator="cpu", max_epochs=2, **options)
        trainer.fit(module, loader(22))
        found.append([*weights(module), trainer.callback_metrics["turn"]])
    assert distance(*found) < 1e-12


class Spare(Net):
    """Has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 3)


@pytest.mark.parametrize("sizes", [[1, 3, 2], [3, 1, 2]])
def test_a_static_graph_is_that_of_the_step_on_a_rank_without_samples_too(sizes: list[int]) -> None:
    found = []
    for options in ({}, {"strategy": DDP(static_graph=True), "devices": 2}):
        torch.manual_seed(0)
        module, ends = Spare(), [sum(sizes[: i + 1]) for i in range(len(sizes))]
        batches = [[*range(end - size, end)] for end, size in zip(ends, sizes, strict=True)]
        trainer = quiet(precision="64-true", split_batches=True, accelerator="cpu", max_epochs=2, **options)
        trainer.fit(module, DataLoader(data(6), batch_sampler=batches))
        found.append(weights(module))
    assert distance(*found) < 1e-12


@pytest.mark.parametrize("options", [{"all_reduce": "ring"}, {"compress": "int8"}], ids=str)
def test_sparse_gradients_are_refused_by_what_sends_dense_ones(options: dict[str, Any]) -> None:
    class Sparse(Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(8, 1, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.table(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    run = quiet(strategy=DDP(**options), devices=2, accelerator="cpu", max_epochs=1)
    (option,) = options
    with pytest.raises(ValueError, match=f"table has sparse=True, and {option}.* sends dense gradients; give it"):
        run.fit(Sparse(), DataLoader(TensorDataset(torch.arange(8)), 2))
