"""Counts of steps that a module keeps itself, also on ranks without samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep import Module
from tests.strategies.mesh.perceptrons import STRATEGIES, Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit

pytestmark = pytest.mark.ranks


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
@pytest.mark.parametrize(("strategy", "devices"), [STRATEGIES[0], STRATEGIES[2]])
def test_a_count_of_steps_is_refused_where_a_rank_has_no_samples(
    make: Callable[[], Module], name: str, strategy: str, devices: int
) -> None:
    with pytest.raises(RuntimeError, match=rf"changed the number {name} of the model in a step in which a rank has"):
        fit(strategy, devices, make(), labeled(17))


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_a_count_of_steps_holds_where_every_rank_has_samples_or_it_is_a_buffer(strategy: str, devices: int) -> None:
    exact(strategy, devices, Annealed)
    exact(strategy, devices, InBuffer, n=17)
