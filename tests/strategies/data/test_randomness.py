"""Random generators that a user's functions draw from, which nobody may call once more than the loop does."""

from __future__ import annotations

import functools
import random
from random import shuffle
from typing import Any

import numpy as np
import omegaconf
import pytest
import torch
from torch.utils.data import default_collate

from lockstep.strategies.launch.program.reach import can_be_tried

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


class Inherits(Calls):
    pass


class Static:
    __slots__ = ("held",)

    def __init__(self, held: Any = None) -> None:
        self.held = held

    @staticmethod
    def draw() -> Any:
        return RNG.normal()

    def __call__(self, samples: list[Any]) -> Any:
        return samples


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def __call__(self, samples: list[Any]) -> Any:
        return samples


class Unreadable(Collate):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Layer(torch.nn.Module):
    def __init__(self, generator: Any = None) -> None:
        super().__init__()
        self.generator = generator


@functools.wraps(default_collate)
def wraps(samples: list[Any]) -> Any:
    return in_a_helper(samples)


@functools.lru_cache
def cached(samples: Any) -> Any:
    return in_a_helper(samples)


def shuffles(samples: list[Any]) -> Any:
    shuffle(samples)
    return samples


def nested(depth: int) -> Any:
    return Transform(nested(depth - 1)) if depth else RNG


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
        (Inherits(), True),
        (Static(), True),
        (Slots(), False),
        (Slots(random.Random(0)), True),
        (functools.partial(of_all_streams, Unreadable()), True),
        (Collate(torch.nn.Sequential(Layer())), False),
        (Collate(torch.nn.Sequential(Layer(RNG))), True),
        (wraps, True),
        (cached, True),
        (shuffles, False),
        (random.Random(0).random, True),
        (Collate(nested(12)), True),
        (Collate(omegaconf.OmegaConf.create({"missing": "???"})), True),
    ],
)
def test_a_generator_of_the_users_is_found(function: Any, has_one: bool) -> None:
    assert can_be_tried(function) is not has_one


@pytest.mark.unit
def test_what_holds_too_much_to_tell_may_have_one() -> None:
    assert not can_be_tried([[object() for _ in range(200)] for _ in range(200)])
