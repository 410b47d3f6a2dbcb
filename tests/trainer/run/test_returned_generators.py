"""Generators and enumerations in attributes are after ranks that Lockstep has started as after one process."""

from __future__ import annotations

import enum
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.strategies.pipeline.classifiers import Base, fit


class Phase(enum.Enum):
    FIRST, LATER = 1, 2


class Drawing(Base):
    """Draws from generators of its own in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.share, self.made = Phase.FIRST, Fraction(1), list[random.Random]()
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numpy, self.older = random.Random(2), np.random.default_rng(3), np.random.RandomState(4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.phase, self.share = Phase.LATER, self.share / 2
        self.made = self.made or [random.Random(5)]
        self.drawn()

    def drawn(self) -> list[float]:
        own = torch.rand(1, generator=self.own).item()
        return [own, self.made[0].random(), self.python.random(), self.numpy.random(), self.older.rand()]


def found(strategy: str, devices: int) -> list[Any]:
    module, held = Drawing(), []
    kept = module.own, module.python, module.numpy, module.older
    for _ in range(2):
        fit(module, strategy, devices, max_epochs=1)
        assert all(a is b for a, b in zip(kept, (module.own, module.python, module.numpy, module.older), strict=True))
        held += [module.phase is Phase.LATER, module.share, module.drawn()]
    return held


@pytest.mark.ranks
def test_generators_and_enumerations_come_back_from_ranks() -> None:
    assert found("ddp", 2) == found("single", 1)
