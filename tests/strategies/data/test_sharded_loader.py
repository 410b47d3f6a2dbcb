"""Time and memory of the largest datasets, empty loaders, wrong arguments and the guessed size of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Sampler,
)

from lockstep.strategies.data.batch_rows import guess_batch_size
from lockstep.strategies.data.sharded_loader import ShardedLoader
from tests.strategies.data.samples import Numbers, Sized, Stream, to_list


class Never(Sampler[int]):
    """Has no length and yields nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_billion_samples_start_and_resume_at_once(shuffle: bool, split: bool) -> None:
    begin = time.perf_counter()
    loader = ShardedLoader(
        DataLoader(Numbers(10**9), 64, shuffle=shuffle), rank=3, size=8, seed=1, accumulate=2, split=split
    )
    first = next(loader.windows(0))
    late = next(loader.windows(7, start=5 * 10**8, limit=10**9))
    assert time.perf_counter() - begin < 1
    assert first.num_samples == late.num_samples == (64 if split else 1024)
    if not shuffle:
        assert to_list(late.micro_batches[0].batch)[0] == 5 * 10**8 + (12 if split else 192)


@pytest.mark.parametrize("split", [False, True])
def test_a_window_knows_how_many_samples_a_group_of_ranks_has(split: bool) -> None:
    ranks = [
        ShardedLoader(DataLoader(Numbers(23), 6), rank=rank, size=4, seed=0, accumulate=2, split=split, groups=2)
        for rank in range(4)
    ]
    for windows in zip(*(loader.windows(0) for loader in ranks), strict=True):
        own = [sum(part.num_samples for part in window.micro_batches) for window in windows]
        assert [window.in_group for window in windows] == [own[0] + own[1]] * 2 + [own[2] + own[3]] * 2
        assert {window.num_samples for window in windows} == {sum(own)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(0), 2),
        lambda: DataLoader(Numbers(3), 2, drop_last=True),
        lambda: DataLoader(Numbers(5), sampler=[]),
        lambda: DataLoader(Numbers(5), batch_sampler=[]),
        lambda: DataLoader(Sized(0), 2),
        list,
    ],
)
def test_an_empty_loader_is_an_error_when_it_is_given(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="the loader is empty"):
        ShardedLoader(make(), rank=0, size=2, seed=0)


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(Stream(0)), lambda: iter([]), lambda: DataLoader(Numbers(4), sampler=Never())]
)
def test_a_loader_that_yields_nothing_is_an_error_when_it_is_read(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="no batch in epoch 4"):
        list(ShardedLoader(make(), rank=0, size=2, seed=0).windows(4))


def test_errors_name_what_is_wrong() -> None:
    loader = DataLoader(Numbers(4))
    with pytest.raises(ValueError, match="rank is 2 and size is 2"):
        ShardedLoader(loader, rank=2, size=2, seed=0)
    with pytest.raises(ValueError, match="it is 0"):
        ShardedLoader(loader, rank=0, size=1, seed=0, accumulate=0)
    with pytest.raises(ValueError, match="start is -1"):
        ShardedLoader(loader, rank=0, size=1, seed=0).windows(0, -1)
    with pytest.raises(ValueError, match="has 4, but start is 5"):
        ShardedLoader(loader, rank=0, size=1, seed=0).windows(0, 5)
    with pytest.raises(TypeError, match="but it is int"):
        ShardedLoader(3, rank=0, size=1, seed=0)
    assert ShardedLoader(loader, rank=0, size=1, seed=0).dataset is loader.dataset


@dataclass
class Graphs:
    name: str
    nodes: torch.Tensor


class WithSize:
    size = 7


class WithLength:
    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(3, 2), 3),
        (np.zeros((4, 2)), 4),
        (torch.tensor(1.0), 1),
        ((torch.zeros(5), torch.zeros(6)), 5),
        ({"name": "x", "x": [None, torch.zeros(2, 9)]}, 2),
        (Graphs("x", torch.zeros(6)), 6),
        (WithSize(), 7),
        (WithLength(), 8),
        (["a", "bc", "d"], 3),
        ([3, 1.0, 2.0], 1),
        (["name", torch.zeros(4)], 4),
        ("abc", 1),
        (None, 1),
        ({}, 1),
        (object(), 1),
    ],
)
def test_batch_sizes_are_guessed(batch: Any, expected: int) -> None:
    assert guess_batch_size(batch) == expected


class OfItsOwn(Stream):
    shards_itself = True


@pytest.mark.parametrize(
    ("loader", "is_even"),
    [
        (DataLoader(range(10), 4), True),
        (DataLoader(range(10), 4, collate_fn=list), False),
        (DataLoader(range(10), batch_size=None), False),
        (DataLoader(OfItsOwn(10), 4), False),
    ],
    ids=["cut", "filtered", "one by one", "shards itself"],
)
def test_samples_are_even_over_ranks_where_the_loader_cuts_them(loader: DataLoader, is_even: bool) -> None:
    assert ShardedLoader(loader, rank=0, size=2, seed=0, sum_over_ranks=lambda number: number).is_even is is_even
