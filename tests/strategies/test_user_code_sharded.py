"""What user code does to a model under FSDP, tensor parallelism and their meshes: as on one process, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.test_fsdp import fit
from tests.trainer.toy import distance, weights
from trainer import Module


def labelled(n: int = 16, batch: int = 8) -> DataLoader:
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


STRATEGIES = [("fsdp", 2), ("tensor", 2), ("fsdp=2,tensor=2", 4)]


def exact(make: Callable[[], Module], strategy: Any, devices: int | str, n: int = 16, **options: Any) -> Any:
    """Train under `strategy` and on one process: the weights must be equal. Returns the Trainer of the former."""
    one, several = make(), make()
    fit("single", 1, one, labelled(n), **options)
    trainer = fit(strategy, devices, several, labelled(n), **options)
    assert distance(weights(several), weights(one)) < 1e-12
    return trainer


# ---- ranks without samples ---------------------------------------------------------------------------


class Annealed(Perceptron):
    """Weighs a penalty by a number of its own, which a subclass counts up in the step."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.01 * float(self.weight()) * out.square().mean()

    def count(self) -> None:
        self.calls += 1

    def weight(self) -> Any:
        return self.calls


class InDict(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"beta": 0.0}

    def count(self) -> None:
        self.state["beta"] += 0.5

    def weight(self) -> Any:
        return self.state["beta"]


class InBuffer(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count_", torch.zeros((), dtype=torch.int64))

    def count(self) -> None:
        self.count_ += 1

    def weight(self) -> Any:
        return self.count_


@pytest.mark.parametrize(("make", "name"), [(Annealed, "calls"), (InDict, r"state\['beta'\]")])
@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 2), ("fsdp=2,tensor=2", 4)])
def test_a_count_of_steps_is_refused_where_a_rank_has_no_samples(
    make: Callable[[], Module], name: str, strategy: str, devices: int
) -> None:
    with pytest.raises(RuntimeError, match=rf"changed the number {name} of the model in a step in which a rank has"):
        fit(strategy, devices, make(), labelled(17))


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_a_count_of_steps_holds_where_every_rank_has_samples_or_it_is_a_buffer(strategy: str, devices: int) -> None:
    exact(Annealed, strategy, devices)
    exact(InBuffer, strategy, devices, n=17)
