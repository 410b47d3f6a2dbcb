"""Loaders that do not read sample by sample: in bulk, rows of tensors, ready batches, any iterable of batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    TensorDataset,
)

from lockstep.strategies.data.sharded_loader import ShardedLoader
from tests.strategies.data.samples import (
    Bulk,
    Noisy,
    Numbers,
    batches,
    flat,
    pieces_of,
    random_states,
    read,
    read_together,
    samples_of,
)


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_read_in_bulk_where_the_dataset_can(num_workers: int) -> None:
    assert samples_of(pieces_of(read(lambda: DataLoader(Bulk(5), 2, num_workers=num_workers), 2))) == [
        [0, 10, 20, 30],
        [40],
    ]


class Lists(Numbers):
    def __getitem__(self, indices: Any) -> Any:
        return torch.tensor(indices) + 100


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * value for value in super().__getitem__(index))


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_tensors_are_what_stacking_their_samples_gives(num_workers: int) -> None:
    tensors = torch.randn(9, 3, 2), torch.arange(9), torch.rand(9, dtype=torch.float64) < 0.5
    strange = torch.randn(9, 2, 3).transpose(1, 2), torch.arange(9)
    datasets: list[Any] = [
        TensorDataset(*tensors),
        TensorDataset(*strange),
        Doubled(*tensors),
        tensors[0],
        tensors[1],
        strange[0],
    ]
    for dataset in datasets:
        own = list(DataLoader(dataset, batch_size=4))
        ours = [
            window.micro_batches[0].batch
            for window in ShardedLoader(
                DataLoader(dataset, 4, num_workers=num_workers), rank=0, size=1, seed=0
            ).windows(0)
        ]
        for theirs, mine in zip(own, ours, strict=True):
            assert type(mine) is type(theirs) and len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
        ours[0][0].detach().zero_()
        assert torch.equal(own[0][0], next(iter(DataLoader(dataset, batch_size=4)))[0]), (
            "a batch shares memory with the dataset"
        )
    joined = ShardedLoader(DataLoader(TensorDataset(*tensors), 4, collate_fn=len), rank=0, size=1, seed=0)
    assert [window.micro_batches[0].batch for window in joined.windows(0)] == [4, 4, 1]


def test_rows_are_counted_from_the_end_too_and_must_exist() -> None:
    dataset = TensorDataset(torch.randn(9, 3), torch.arange(9))
    for order in ([[8, -1, -9, 0]], [[-2, 3]]):
        (window,) = ShardedLoader(DataLoader(dataset, batch_sampler=order), rank=0, size=1, seed=0).windows(0)
        (own,) = DataLoader(dataset, batch_sampler=order)
        assert all(map(torch.equal, window.micro_batches[0].batch, own))
    with pytest.raises(IndexError, match="out of bounds"):
        next(ShardedLoader(DataLoader(dataset, batch_sampler=[[9]]), rank=0, size=1, seed=0).windows(0))


def test_a_batch_sampler_as_sampler_reads_whole_lists() -> None:
    def make() -> Any:
        return DataLoader(Lists(7), batch_size=None, sampler=BatchSampler(range(7), 2, drop_last=False))

    assert samples_of(pieces_of(read(make, 2))) == [[100, 101, 102, 103], [104, 105, 106]]


class ReadyBatches(Numbers):
    """Item i is a batch of i + 1 samples."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((index + 1,), index)


class ByIndex:
    """No iterator, only indices."""

    def __init__(self, n: int) -> None:
        self.inner, self.read = ReadyBatches(n), list[int]()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.inner[index]


@pytest.mark.parametrize("kind", ["batch_size=None", "indices"])
def test_ready_batches_by_index(kind: str) -> None:
    def make(rank: int = 0) -> Any:
        return DataLoader(ReadyBatches(5), batch_size=None) if kind == "batch_size=None" else ByIndex(5)

    one, _ = read_together(make, 1)
    assert samples_of(pieces_of(one)) == [[0], [1] * 2, [2] * 3, [3] * 4, [4] * 5]
    two, calls = read_together(make, 2, accumulate=2)
    assert samples_of(pieces_of(two)) == [[0] + [1] * 2 + [2] * 3 + [3] * 4, [4] * 5]
    assert calls == 2
    resumed, _ = read_together(make, 2, accumulate=2, start=3)
    assert samples_of(pieces_of(resumed)) == [[2] * 3 + [3] * 4 + [4] * 5]
    limited, _ = read_together(make, 2, limit=2, start=3)
    assert samples_of(pieces_of(limited)) == [[2] * 3 + [3] * 4]
    loader = ShardedLoader(make(), rank=1, size=2, seed=3, sum_over_ranks=lambda value: value)
    assert (len(loader), loader.num_samples, loader.batch_size) == (3, None, None)
    with pytest.raises(ValueError, match="sum_over_ranks"):
        read(make, 2)
    with pytest.raises(ValueError, match="split_batches needs batches"):
        read(make, 1, split=True, accumulate=2)


def test_counting_the_samples_of_ready_batches_leaves_the_random_state_alone() -> None:
    def make() -> ShardedLoader:
        return ShardedLoader(DataLoader(Noisy(6), batch_size=None), rank=0, size=1, seed=3)

    windows = make().windows(0)
    for _ in range(3):
        next(windows)
    state = random_states()[0], random.getstate(), np.random.get_state()
    expected = [window.micro_batches[0].batch for window in windows]
    torch.set_rng_state(torch.tensor(state[0], dtype=torch.uint8))
    random.setstate(state[1])
    np.random.set_state(state[2])
    assert [window.micro_batches[0].batch for window in make().windows(0, start=3)] == expected


@pytest.mark.ranks
def test_ready_batches_in_workers_resume_with_the_same_randomness() -> None:
    def values(start: int) -> list[Any]:
        loader = ShardedLoader(DataLoader(Noisy(6), batch_size=None, num_workers=2), rank=0, size=1, seed=3)
        return [window.micro_batches[0].batch for window in loader.windows(0, start)]

    undisturbed = values(0)
    assert len({str(draws) for _, *draws in undisturbed}) == 6
    assert values(3) == undisturbed[3:]


def test_a_rank_reads_only_its_own_of_what_has_indices() -> None:
    loader = ByIndex(6)
    list(ShardedLoader(loader, rank=1, size=2, seed=3, sum_over_ranks=lambda value: value).windows(0))
    assert loader.read == [1, 3, 5]


def make_batches() -> Iterator[torch.Tensor]:
    return iter(batches(5))


class OwnIteration(DataLoader[Any]):
    """A DataLoader that adds something to what torch's would yield."""

    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__())


@pytest.mark.parametrize("kind", ["list", "function", "iterator", "object", "loader"])
def test_any_iterable_of_batches(kind: str) -> None:
    class Object:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return make_batches()

    def make() -> Any:
        return {
            "list": lambda: batches(5),
            "function": lambda: make_batches,
            "iterator": make_batches,
            "object": Object,
            "loader": lambda: OwnIteration(ReadyBatches(5), batch_size=None),
        }[kind]()

    assert samples_of(pieces_of(read(make, 1))) == [[0], [1] * 2, [2] * 3, [3] * 4, [4] * 5]
    two = pieces_of(read(make, 2, accumulate=2))
    assert samples_of(two) == [[0] + [1] * 2 + [2] * 3 + [3] * 4, [4] * 5]
    assert two[1] == [[([4] * 5, 5), ([4] * 5, 0)]]
    assert pieces_of(read(make, 2, accumulate=2, start=10)) == two[1:]
    assert samples_of(pieces_of(read(make, 3, start=3, limit=2))) == [[2] * 3 + [3] * 4 + [4] * 5]
    loader = ShardedLoader(make(), rank=1, size=2, seed=3)
    if kind in ("list", "loader"):
        assert (len(loader), loader.num_windows(2), loader.num_samples) == (3, 2, None)
    else:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
    with pytest.raises(ValueError, match="split_batches needs batches"):
        read(make, 2, split=True)
    list(loader.windows(0))
    if kind == "iterator":
        with pytest.raises(RuntimeError, match="only once"):
            loader.windows(1)
    else:
        assert len(list(loader.windows(1))) == 3


def test_an_iterable_that_shuffles_itself_is_the_same_on_all_ranks() -> None:
    def shuffled() -> Iterator[torch.Tensor]:
        return iter(torch.randperm(12).split(3))

    def order(size: int, epoch: int) -> list[int]:
        torch.manual_seed(size)
        return flat(samples_of(pieces_of(read(lambda: shuffled, size, epoch=epoch))))

    assert order(1, 0) == order(2, 0) == order(3, 0) != order(1, 1)
