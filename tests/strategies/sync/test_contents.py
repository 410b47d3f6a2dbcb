"""What tells whether generators of random numbers were drawn from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.strategies.sync.contents import generator_state

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda it: torch.rand(1, generator=it)),
        (random.Random(0), lambda it: it.random()),
        (np.random.default_rng(0), lambda it: it.random()),
        (np.random.RandomState(0), lambda it: it.rand()),
    ],
)
def test_a_draw_shows(generator: Any, draw: Any) -> None:
    before = generator_state(generator)
    assert before is not None and generator_state(generator) == before
    draw(generator)
    assert generator_state(generator) != before


@pytest.mark.parametrize("other", [random.SystemRandom(), 1, None, np.zeros(2)])
def test_what_has_no_state_has_none(other: Any) -> None:
    assert generator_state(other) is None
