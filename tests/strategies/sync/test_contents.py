"""What tells whether generators of random numbers were drawn from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.strategies.sync.contents import bytes_of, checksum, generator_state, same_bits

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 2)])
def test_bits_are_compared_in_words_of_any_width(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    part = torch.ones(tensor.numel() + 1, dtype=dtype)[1:].view(shape)  # which does not begin where a word does
    assert same_bits(tensor, tensor.clone()) and same_bits(tensor, part) and same_bits(part.t(), tensor.t())
    if tensor.numel():
        part.view(-1)[-1] = 0
        assert not same_bits(tensor, part)


def test_bits_tell_zeros_dtypes_and_shapes_apart() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.to(torch.int32)) and not same_bits(zero, zero.view(2, 1))


def test_a_single_element_may_have_any_stride() -> None:
    column = torch.ones(1, 8, dtype=torch.float64)[:, 0]
    assert column.stride() == (8,)
    assert checksum(column) == checksum(torch.ones(1, dtype=torch.float64))
    assert bytes_of(column).shape == (1, 8)
    assert same_bits(column, torch.ones(1, dtype=torch.float64))
