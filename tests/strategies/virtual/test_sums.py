"""Sums and norms whose bits do not depend on where the parts are."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.strategies import DDP, Strategy
from lockstep.strategies.sync.tree import PartialSums, all_reduce, total_of
from lockstep.strategies.virtual.norm import total_norm
from lockstep.trainer.metrics.exact import ExactSum

floats = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(floats, min_size=16, max_size=16))
def test_subtrees_of_any_size_add_to_the_same_bits(numbers: list[float]) -> None:
    for size in (1, 2, 4, 8, 16):
        parts = [total_of(numbers[i : i + size]) for i in range(0, 16, size)]
        assert total_of(parts) == total_of(numbers)


def test_numbers_that_lack_to_a_power_of_two_count_as_zeros() -> None:
    assert total_of([0.0, 0.0, 0.0, 0.0, 0.1, 0.2]) == total_of([0.1, 0.2])


def test_running_sums_would_not() -> None:
    made = torch.Generator().manual_seed(0)
    numbers = torch.randn(1000, 16, generator=made, dtype=torch.float64).tolist()
    differ = sum(sum(row) != sum(row[:8]) + sum(row[8:]) for row in numbers)
    assert differ > 300


def test_partial_sums_keep_a_value_a_level() -> None:
    sums = PartialSums[float](lambda one, other: one + other)
    most = 0
    for _ in range(64):
        sums.append(1.0)
        most = max(most, len(sums._sums))
    assert (sums.total(), most) == (64.0, 6)


@given(st.lists(floats | st.floats(allow_nan=False, allow_infinity=False), max_size=40), st.randoms())
def test_exact_sums_have_no_order(numbers: list[float], order: random.Random) -> None:
    shuffled = order.sample(numbers, len(numbers))
    half = len(numbers) // 2
    parts = ExactSum.of(shuffled[:half]) + ExactSum.of(ExactSum.of(shuffled[half:]).floats())
    try:
        expected = math.fsum(numbers)
    except OverflowError:
        return
    assert float(parts) == expected == float(ExactSum.of(numbers))


@given(st.lists(st.tuples(floats, st.integers(1, 64)), min_size=1, max_size=20), floats)
def test_a_weight_may_be_shared_out(pairs: list[tuple[float, int]], number: float) -> None:
    whole, parts = ExactSum(), ExactSum()
    for value, weight in pairs:
        value /= 3
        whole = whole.plus_product(value, weight)
        parts = parts.plus_product(value, weight - 1).plus_product(value, 1.0)
    assert (whole.floats(), float(whole)) == (parts.floats(), float(parts))
    assert ExactSum().plus_product(number / 3, 7) / ExactSum.of([7.0]) == number / 3


def test_exact_sums_of_what_is_not_finite() -> None:
    assert float(ExactSum.of([1.0, math.inf])) == math.inf
    assert math.isnan(float(ExactSum.of([math.inf, 1.0, -math.inf])))
    assert ExactSum.of([math.inf, 2.0]).floats() == [math.inf]
    assert float(ExactSum().plus_product(math.inf, 2.0)) == math.inf == ExactSum.of([math.inf]) / ExactSum.of([2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_a_norm_does_not_depend_on_who_holds_which_rows(dtype: torch.dtype, scale: float) -> None:
    made = torch.Generator().manual_seed(1)
    tensors = [(torch.randn(shape, generator=made) * scale).to(dtype) for shape in ((50, 7), (33,), (5, 3, 2), (1, 64))]
    rows = sum(map(len, tensors))
    whole = total_norm(tensors, rows, torch.device("cpu"))
    pieces = [t[i : i + 4] for t in tensors for i in range(0, len(t), 4)]
    assert torch.equal(total_norm(pieces[::-1], rows, torch.device("cpu")), whole)
    exact = math.sqrt(math.fsum(x * x for t in tensors for x in t.double().flatten().tolist()))
    assert float(whole) == pytest.approx(exact, rel=1e-14)


def test_norms_at_the_edges() -> None:
    def norm(values: list[float]) -> float:
        return float(total_norm([torch.tensor(values, dtype=torch.float64)], len(values), torch.device("cpu")))

    assert norm([0.0, 0.0]) == 0.0
    assert norm([1e300, 0.0]) == 1e300
    assert norm([5e-324]) >= 0.0
    assert math.isnan(norm([1.0, math.nan]))


def made(seed: int, rank: int) -> list[Tensor]:
    """Tensors of a rank whose sizes are not a multiple of the ranks, one with numbers that are not finite or zero."""
    rng = torch.Generator().manual_seed(10 * seed + rank)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    odd = torch.tensor([0.0, -0.0, 1e-45, math.inf, 3e38])[[(i + rank) % 5 for i in range(5)]]
    return [*(torch.randn((5, 3), generator=rng).to(kind) for kind in kinds), odd]


def reduced(strategy: Strategy) -> list[list[list[float]]]:
    rank = strategy.setup().rank
    try:
        found = []
        for seed in range(3):
            tensors = made(seed, rank)
            for tensor in tensors:
                all_reduce(tensor)
            found.append([tensor.flatten().tolist() for tensor in tensors])
        return found
    finally:
        strategy.teardown()


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_add_in_the_tree(num_ranks: int) -> None:
    strategy = DDP().configure(devices=num_ranks, accelerator="cpu")
    for seed, found in enumerate(strategy.launch(reduced, strategy)):
        for values, *parts in zip(found, *(made(seed, rank) for rank in range(num_ranks)), strict=True):
            first = parts[0] + parts[1]
            expected = first if num_ranks == 2 else first + (parts[2] + parts[3])
            assert repr(values) == repr(expected.flatten().tolist())
