"""Random generators that a user's functions draw from, which nobody may call once more than the loop does."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.strategies.data.randomness import has_generator

RNG = np.random.default_rng(0)


def in_a_comprehension(samples: list[Any]) -> Any:
    return torch.tensor([sample + RNG.normal() for sample in samples])


def in_a_helper(samples: list[Any]) -> Any:
    return in_a_comprehension(samples)


def of_all_streams(samples: list[Any]) -> Any:
    return torch.stack(samples) + torch.rand(1) + random.random() + np.random.rand()


class Transform:
    def __init__(self, generator: Any = None) -> None:
        self.generator = generator


class Collate:
    def __init__(self, generator: Any = None) -> None:
        self.transforms = [Transform(generator)]

    def __call__(self, samples: list[Any]) -> Any:
        return torch.stack(samples)

    def method(self, samples: list[Any]) -> Any:
        return torch.stack(samples)


class OfClass(Collate):
    shared = Transform(random.Random(0))


class Calls(Collate):
    def __call__(self, samples: list[Any]) -> Any:
        return in_a_helper(samples)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("function", "has_one"),
    [
        (of_all_streams, False),
        (Collate(), False),
        (Collate().method, False),
        (functools.partial(of_all_streams), False),
        (in_a_comprehension, True),
        (in_a_helper, True),
        (lambda samples: in_a_helper(samples), True),
        (Collate(torch.Generator()), True),
        (Collate(np.random.RandomState(0)).method, True),
        (OfClass(), True),
        (Calls(), True),
        (functools.partial(of_all_streams, RNG), True),
    ],
)
def test_a_generator_of_the_users_is_found(function: Any, has_one: bool) -> None:
    assert has_generator(function) is has_one


@pytest.mark.unit
def test_what_holds_too_much_to_tell_may_have_one() -> None:
    assert has_generator([[object() for _ in range(200)] for _ in range(200)])
