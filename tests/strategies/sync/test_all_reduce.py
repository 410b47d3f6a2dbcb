"""Sums by messages between two ranks: right, and the same bits on every rank."""

from __future__ import annotations

import pytest
import torch

from lockstep.strategies import DDP, Strategy, build
from lockstep.strategies.sync.all_reduce import ALGORITHMS, add_up
from tests.strategies.compression.test_ranks import train, weights

NUMEL = (0, 1, 2, 7, 1000)
RANKS = 5


def value(numel: int, rank: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + rank), dtype=torch.float64)


def nodes(number: int) -> list[list[int]]:
    """Two ranks on the first node, the others on a second."""
    return [node for node in (list(range(min(2, number))), list(range(2, number))) if node]


def sums(strategy: Strategy) -> bool:
    rank, equal = strategy.setup().rank, []
    try:
        for number in range(1, RANKS + 1):
            for algorithm in ALGORITHMS:
                for numel in NUMEL:
                    tensor, exact = value(numel, rank), sum(value(numel, other) for other in range(number))
                    if rank < number:
                        add_up(tensor, algorithm, nodes(number), None)
                        torch.testing.assert_close(tensor, exact, rtol=1e-14, atol=1e-14)
                    everywhere = strategy.all_gather(tensor)[:number]
                    equal.append(bool((everywhere == everywhere[0]).all()))
        return all(equal)
    finally:
        strategy.teardown()


@pytest.mark.long
@pytest.mark.ranks
def test_every_algorithm_on_one_to_five_ranks() -> None:
    strategy = DDP().configure(devices=RANKS, accelerator="cpu")
    assert strategy.launch(sums, strategy)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ring", *(pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS[1:])])
def test_it_trains_to_the_weights_of_ddp(name: str) -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}
    found = [weights(train(DDP(all_reduce=how, **options), 3)) for how in ("auto", name)]  # type: ignore[arg-type]
    assert float((found[1] - found[0]).abs().max()) <= 1e-12


@pytest.mark.unit
def test_what_contradicts_is_refused() -> None:
    with pytest.raises(ValueError, match="all_reduce must be one of auto, ring, halving_doubling, tree, hierarchical"):
        DDP(all_reduce="star")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contradicts compress"):
        DDP(all_reduce="ring", compress="sign")
    with pytest.raises(ValueError, match="virtual_ranks cannot be used with all_reduce='ring'"):
        build(DDP(all_reduce="ring"), devices=2, accelerator="cpu", virtual_ranks=2)
