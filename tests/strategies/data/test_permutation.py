from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.strategies.data.permutation import Permutation, mix


def block(permutation: Permutation, start: int, stop: int) -> NDArray[np.int64]:
    return permutation.take(np.arange(start, stop))


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_number_once(n: int, seed: int, epoch: int) -> None:
    permutation = Permutation(n, seed, epoch)
    assert sorted(block(permutation, 0, n).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [10**9, 10**12, 2**40, 2**40 + 1, 2**62])
def test_large_domains_are_injective_and_inside(n: int) -> None:
    permutation = Permutation(n, 1, 2)
    images = np.concatenate(
        [block(permutation, 0, 5000), block(permutation, n - 5000, n), block(permutation, n // 2, n // 2 + 5000)]
    )
    assert images.dtype == np.int64
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == 15000


def test_construction_and_first_block_do_not_depend_on_the_size() -> None:
    begin = time.perf_counter()
    block(Permutation(10**12, 0, 0), 10**11, 10**11 + 32)
    assert time.perf_counter() - begin < 0.05


def test_random_access_is_sequential_access() -> None:
    permutation = Permutation(1000, 5, 6)
    everything = block(permutation, 0, 1000)
    assert permutation.take(np.arange(0, 1000, 37)).tolist() == everything[::37].tolist()
    assert block(permutation, 300, 417).tolist() == everything[300:417].tolist()
    assert permutation.take(np.array([7, 3, 999])).tolist() == everything[[7, 3, 999]].tolist()
    assert block(permutation, 4, 4).tolist() == []
    assert [int(permutation.take(np.array([index]))[0]) for index in range(1000)] == everything.tolist()


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    orders = [block(Permutation(500, seed, epoch), 0, 500) for seed in range(4) for epoch in range(4)]
    for first, second in itertools.combinations(orders, 2):
        assert (first == second).sum() < 10  # one fixed point is expected of unrelated permutations
    assert block(Permutation(500, 3, 2), 0, 500).tolist() == orders[14].tolist()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_frequent(n: int) -> None:
    repeats = 3000
    found = Counter(tuple(block(Permutation(n, seed, 1), 0, n).tolist()) for seed in range(repeats))
    orders = list(itertools.permutations(range(n)))
    expected = repeats / len(orders)
    chi_square = sum((found[order] - expected) ** 2 / expected for order in orders)
    assert chi_square < len(orders) - 1 + 5 * (2 * (len(orders) - 1)) ** 0.5


@pytest.mark.parametrize("n", [16, 50, 1025])
def test_places_and_neighbors_are_uniform(n: int) -> None:
    repeats = 1000
    places, steps = np.zeros((16, 16)), np.zeros(n)
    for seed in range(repeats):
        images = block(Permutation(n, seed, 1), 0, n)
        np.add.at(places, (np.arange(n) * 16 // n, images * 16 // n), 1)
        steps += np.bincount((images[1:] - images[:-1]) % n, minlength=n)
    in_bin = np.bincount(np.arange(n) * 16 // n, minlength=16)
    expected = repeats * np.outer(in_bin, in_bin) / n
    assert ((places - expected) ** 2 / expected).sum() < 225 + 5 * 450**0.5
    expected_step = repeats
    assert ((steps[1:] - expected_step) ** 2 / expected_step).sum() < n + 6 * (2 * n) ** 0.5


def test_mix_tells_order_and_sign_apart() -> None:
    values = [mix(1, 2), mix(2, 1), mix(1), mix(1, 0), mix(0, 1), mix(-1), mix(0), mix()]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**64 for value in values)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="n is 0"):
        Permutation(0, 0, 0)
