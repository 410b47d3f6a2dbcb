"""Map-style datasets: every rank reads its share of one order of samples, whatever sampler gives it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.strategies.data.permutation import Permutation
from lockstep.strategies.data.sharded_loader import ShardedLoader
from tests.strategies.data.samples import (
    Noisy,
    Numbers,
    ShuffledStream,
    Stream,
    Uneven,
    flat,
    pieces_of,
    random_states,
    read,
    samples_of,
    to_list,
)


@given(
    n=st.integers(1, 50),
    size=st.integers(1, 4),
    batch_size=st.integers(1, 12),
    accumulate=st.integers(1, 4),
    split=st.booleans(),
    drop_last=st.booleans(),
    kind=st.sampled_from(["sequential", "shuffled", "sampler", "batches"]),
    data=st.data(),
)
def test_every_cut_is_exact(
    n: int, size: int, batch_size: int, accumulate: int, split: bool, drop_last: bool, kind: str, data: st.DataObject
) -> None:
    def make() -> Any:
        if kind == "batches":
            return DataLoader(Numbers(n), batch_sampler=Uneven(n, batch_size))
        if kind == "sampler":
            return DataLoader(Numbers(n), batch_size, sampler=SubsetRandomSampler(range(n)), drop_last=drop_last)
        return DataLoader(Numbers(n), batch_size, shuffle=kind == "shuffled", drop_last=drop_last)

    options: dict[str, Any] = {"accumulate": accumulate, "split": split}
    unit = batch_size if split else batch_size * size
    kept = n - n % unit if drop_last and kind != "batches" else n
    if kept == 0:
        with pytest.raises(ValueError, match="empty: drop_last"):
            ShardedLoader(make(), rank=0, size=size, seed=3, **options)
        return
    pieces = pieces_of(read(make, size, epoch=1, **options))
    windows = samples_of(pieces)

    order = flat(windows)
    assert len(order) == kept
    assert len(set(order)) == kept
    assert set(order) <= set(range(n))
    if kind != "batches":
        one_process = flat(samples_of(pieces_of(read(make, 1, epoch=1, **options))))
        assert order == one_process[:kept] or order[: len(one_process)] == one_process
        for window in pieces[:-1]:
            assert sum(num for micros in window for _, num in micros) == (unit if split else unit * accumulate)
    for window in pieces:
        assert len(window) <= accumulate
        for micros in window:
            for batch, num in micros:
                assert len(batch) == (num or 1)
                if not num:
                    assert batch[0] in [sample for other, count in micros if count for sample in other]
            if kind != "batches" or split:
                counts = [num for _, num in micros]
                assert max(counts) - min(counts) <= 1
                assert counts == sorted(counts, reverse=True)

    loader = ShardedLoader(make(), rank=size - 1, size=size, seed=3, **options)
    num_micro_batches = sum(len(window) for window in pieces)
    if kind != "batches":
        assert (len(loader), loader.num_windows(), loader.num_samples) == (num_micro_batches, len(pieces), kept)
        assert loader.batch_size == (unit if split else unit * accumulate)
    elif not split:
        assert (len(loader), loader.num_windows(), loader.num_samples, loader.batch_size) == (
            num_micro_batches,
            len(pieces),
            None,
            None,
        )

    at = data.draw(st.integers(0, len(pieces)))
    start = sum(map(len, windows[:at]))
    assert pieces_of(read(make, size, epoch=1, start=start, **options)) == pieces[at:]

    limit = data.draw(st.integers(0, num_micro_batches + 2))
    limited = pieces_of(read(make, size, epoch=1, limit=limit, **options))
    assert [micros for window in limited for micros in window] == [micros for window in pieces for micros in window][
        :limit
    ]
    assert limited[:-1] == pieces[: max(0, len(limited) - 1)]
    if kind != "batches":
        assert loader.num_windows(limit) == len(limited)
    if start <= sum(map(len, samples_of(limited))):
        assert pieces_of(read(make, size, epoch=1, start=start, limit=limit, **options)) == limited[at:]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n", [24, 29])
def test_a_global_batch_is_the_same_set_on_any_number_of_ranks(shuffle: bool, n: int) -> None:
    def windows(batch_size: int, size: int, **options: Any) -> list[list[int]]:
        return samples_of(
            pieces_of(read(lambda: DataLoader(Numbers(n), batch_size, shuffle=shuffle), size, epoch=2, **options))
        )

    split = windows(12, 1, split=True)
    assert [len(window) for window in split] == [12, 12, 5][: math.ceil(n / 12)]
    for size in (1, 2, 3, 4, 5):
        for accumulate in (1, 2, 3):
            assert windows(12, size, split=True, accumulate=accumulate) == split
    for size in (2, 3, 4, 6):
        assert windows(12 // size, size) == split
        assert windows(12 // size, size, accumulate=2) == [
            a + b for a, b in zip(split[::2], [*split[1::2], []], strict=False)
        ]


def test_shuffling_is_the_permutation_of_seed_and_epoch() -> None:
    loader = DataLoader(Numbers(40), 8, shuffle=True, generator=torch.Generator().manual_seed(9))

    def order(seed: int, epoch: int) -> list[int]:
        return flat(
            [
                to_list(window.micro_batches[0].batch)
                for window in ShardedLoader(loader, rank=0, size=1, seed=seed).windows(epoch)
            ]
        )

    assert order(1, 5) == Permutation(40, 1, 5).take(np.arange(40)).tolist()
    assert order(1, 5) == order(1, 5)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_shuffle_can_be_forced() -> None:
    for shuffled in (False, True):
        loader = DataLoader(Numbers(30), 5, shuffle=shuffled)
        assert flat(samples_of(pieces_of(read(lambda: loader, 2, shuffle=False)))) == list(range(30))  # noqa: B023
        assert (
            flat(samples_of(pieces_of(read(lambda: loader, 2, shuffle=True))))  # noqa: B023
            == Permutation(30, 3, 0).take(np.arange(30)).tolist()
        )
    with pytest.raises(ValueError, match="Uneven"):
        read(lambda: DataLoader(Numbers(5), batch_sampler=Uneven(5, 2)), 1, shuffle=True)
    with pytest.raises(ValueError, match="Stream"):
        read(lambda: DataLoader(Stream(5)), 1, shuffle=True)


def test_distributed_sampler_is_replaced() -> None:
    def make(shuffle: bool, drop_last: bool) -> Any:
        data = Numbers(11)
        return DataLoader(
            data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=1, shuffle=shuffle, drop_last=drop_last)
        )

    assert flat(samples_of(pieces_of(read(lambda: make(False, False), 2)))) == list(range(11))
    assert flat(samples_of(pieces_of(read(lambda: make(False, True), 2)))) == list(range(8))
    assert sorted(flat(samples_of(pieces_of(read(lambda: make(True, False), 3))))) == list(range(11))


class Counted(Sampler[int]):
    """Yields what no other sampler does and notes how it is used."""

    def __init__(self, n: int) -> None:
        self.n, self.epochs = n, list[int]()
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(self.n, (self.n,), generator=self.generator).tolist())


def test_samplers_keep_their_order_and_know_the_epoch() -> None:
    sampler = Counted(30)
    loader = ShardedLoader(DataLoader(Numbers(30), 4, sampler=sampler), rank=0, size=1, seed=1)
    orders = [[to_list(window.micro_batches[0].batch) for window in loader.windows(epoch)] for epoch in (4, 5, 4)]
    assert sampler.epochs == [4, 5, 4]
    assert orders[0] == orders[2] != orders[1]
    assert loader.num_samples is None
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert loader.num_windows(3) is None


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0, 2.0, 3.0, 4.0] * 10, 50),
        lambda: RandomSampler(range(40), replacement=True),
        lambda: Counted(40),
    ],
)
def test_random_samplers_draw_alike_on_all_ranks_and_leave_the_random_state_alone(sampler: Callable[[], Any]) -> None:
    def order(size: int) -> list[int]:
        torch.manual_seed(size)  # ranks differ in their noise
        before = random_states()
        found = flat(samples_of(pieces_of(read(lambda: DataLoader(Numbers(40), 6 // size, sampler=sampler()), size))))
        assert random_states() == before
        return found

    assert order(1) == order(2) == order(3)
    assert len(set(order(1))) < len(order(1))


def test_a_sampler_that_shards_is_refused() -> None:
    class Own(DistributedSampler[int]):
        pass

    data = Numbers(8)
    with pytest.raises(ValueError, match="num_replicas=2"):
        read(lambda: DataLoader(data, sampler=Own(data, num_replicas=2, rank=0)), 2)
    assert flat(
        samples_of(
            pieces_of(read(lambda: DataLoader(data, sampler=Own(data, num_replicas=1, rank=0, shuffle=False)), 2))
        )
    ) == list(range(8))


def test_batch_samplers_keep_their_batches() -> None:
    batches = [[3, 1], [4], [1, 5, 9], [2, 6], [5]]

    def make() -> Any:
        return DataLoader(Numbers(10), batch_sampler=batches)

    dealt = pieces_of(read(make, 2, accumulate=2))
    assert dealt == [[[([3, 1], 2), ([4], 1)], [([1, 5, 9], 3), ([2, 6], 2)]], [[([5], 1), ([5], 0)]]]
    assert samples_of(pieces_of(read(make, 2, split=True, accumulate=2))) == batches
    # Resumed inside a batch, as another number of ranks may have left it.
    assert samples_of(pieces_of(read(make, 2, start=4))) == [[5, 9, 2, 6], [5]]
    # What an epoch drops is what it would have dropped undisturbed.
    dropping = DataLoader(Numbers(12), 8, sampler=list(range(12)), drop_last=True)
    assert read(lambda: dropping, 1, start=9) == [[]]
    plain = BatchSampler(range(10), 4, drop_last=True)
    assert samples_of(pieces_of(read(lambda: DataLoader(Numbers(10), batch_sampler=plain), 1))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(20), 3, shuffle=True),
        lambda: DataLoader(Numbers(20), batch_sampler=Uneven(20, 3)),
        lambda: DataLoader(ShuffledStream(20), 3),
        lambda: DataLoader(Numbers(20), batch_size=None, shuffle=True),
        lambda: (torch.rand(2) for _ in range(5)),
    ],
)
def test_iterating_draws_nothing_from_the_random_state(make: Callable[[], Any]) -> None:
    before = random_states()
    windows = ShardedLoader(make(), rank=0, size=1, seed=3).windows(0, start=6)
    for _ in windows:
        assert random_states() == before
    assert random_states() == before


def test_without_workers_samples_draw_from_the_runs_random_state() -> None:
    loader = ShardedLoader(DataLoader(Noisy(4), 4), rank=0, size=1, seed=3)
    torch.manual_seed(1)
    expected = [torch.rand(()).item() for _ in range(4)]
    torch.manual_seed(1)
    assert next(loader.windows(0)).micro_batches[0].batch[1].tolist() == pytest.approx(expected)


def test_a_sampler_that_yields_more_than_its_length_is_named() -> None:
    class Longer(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return iter([*super().__iter__(), 0, 1, 2])

    loader = ShardedLoader(DataLoader(Numbers(8), 1, sampler=Longer(range(8))), rank=0, size=1, seed=3)
    with pytest.raises(ValueError, match=r"^Longer must yield no more samples .* which is 8, but 9 of the epoch"):
        loader.windows(0, 9)
