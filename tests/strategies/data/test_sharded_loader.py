from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from lockstep.strategies import DDP
from lockstep.strategies.data.permutation import Permutation
from lockstep.strategies.data.randomness import Randomness
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window, guess_batch_size

Pieces = list[list[list[tuple[list[int], int]]]]


# ---- datasets ------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Sample i is i and a draw from each random state."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:  # type: ignore[override]
        return index, torch.rand(()).item(), random.random(), float(np.random.rand())


class Bulk(Numbers):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("samples are to be read in bulk")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 10 for index in indices]


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.n))


class ShuffledStream(Stream):
    """Shuffles by torch's random state, and draws from random and numpy for each sample."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(self.n).tolist():
            yield index, random.random(), float(np.random.rand())


class WorkerStream(Stream):
    """Shares itself out over workers, as in torch's documentation."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


class OwnStream(Stream):
    """Takes every size-th item itself, of which workers take theirs."""

    shards_itself = True

    def __init__(self, n: int, rank: int, size: int) -> None:
        super().__init__(n)
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(self.rank + worker * self.size, self.n, self.size * workers))


class StatefulStream(Stream):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.position, self.epoch, self.read = 0, -1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        begin, self.position = self.position, 0
        for index in range(begin, self.n):
            self.position = index + 1
            self.read += 1
            yield index + 1000 * self.epoch, torch.rand(()).item()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


# ---- reading all ranks of a loader in one process ------------------------------------------------


def to_list(batch: Any) -> list[int]:
    return [] if batch is None else batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def read(
    make: Callable[[], Any], size: int, *, epoch: int = 0, start: int = 0, limit: int | None = None, **options: Any
) -> list[list[Window]]:
    """The windows of each rank; ranks without a collective to meet in are read one after the other."""
    return [
        list(ShardedLoader(make(), rank=rank, size=size, seed=3, **options).windows(epoch, start, limit))
        for rank in range(size)
    ]


class Meeting:
    """A sum over threads, each of which is a rank."""

    def __init__(self, size: int) -> None:
        self.calls = 0
        self._values: list[int] = []
        self._size = size
        self._barrier = threading.Barrier(size, timeout=60)

    def sum(self, value: int) -> int:
        self._values.append(value)
        self._barrier.wait()
        total = sum(self._values)
        if self._barrier.wait() == 0:
            self._values.clear()
            self.calls += 1
        self._barrier.wait()
        return total


def read_together(
    make: Callable[[int], Any], size: int, *, epoch: int = 0, start: int = 0, limit: int | None = None, **options: Any
) -> tuple[list[list[Window]], int]:
    """The windows of each rank where ranks meet in a collective, and how often they met."""
    meeting = Meeting(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        loader = ShardedLoader(make(rank), rank=rank, size=size, seed=3, sum_over_ranks=meeting.sum, **options)
        found[rank] = list(loader.windows(epoch, start, limit))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, meeting.calls


def pieces_of(ranks: list[list[Window]]) -> Pieces:
    """[window][micro-batch][rank] -> (samples as fetched, how many count). Checks that ranks keep step and totals are
    true."""
    assert len({len(windows) for windows in ranks}) == 1
    out: Pieces = []
    for windows in zip(*ranks, strict=True):
        assert len({len(window.micro_batches) for window in windows}) == 1
        assert len({window.num_samples for window in windows}) == 1
        out.append(
            [
                [(to_list(micro.batch), micro.num_samples) for micro in micros]
                for micros in zip(*(w.micro_batches for w in windows), strict=True)
            ]
        )
        assert windows[0].num_samples == sum(num for micros in out[-1] for _, num in micros)
        assert all(any(num for _, num in micros) for micros in out[-1]), "a micro-batch is empty on all ranks"
    return out


def samples_of(pieces: Pieces) -> list[list[int]]:
    """The samples of each window, in the order (micro-batch, rank); padding skipped."""
    return [[sample for micros in window for batch, num in micros if num for sample in batch] for window in pieces]


def flat(windows: list[list[int]]) -> list[int]:
    return [sample for window in windows for sample in window]


# ---- map-style datasets --------------------------------------------------------------------------


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


class Uneven(Sampler[list[int]]):
    """Batches of 1 to `most` indices in a random order."""

    def __init__(self, n: int, most: int) -> None:
        self.n, self.most = n, most
        self.sizes = [1 + index % most for index in range(n)]
        while sum(self.sizes) - self.sizes[-1] >= n:
            self.sizes.pop()
        self.sizes[-1] -= sum(self.sizes) - n

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(self.n).tolist())
        for size in self.sizes:
            yield [next(order) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.sizes)


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

    assert order(1, 5) == Permutation(40, 1, 5).block(0, 40).tolist()
    assert order(1, 5) == order(1, 5)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_shuffle_can_be_forced() -> None:
    for shuffled in (False, True):
        loader = DataLoader(Numbers(30), 5, shuffle=shuffled)
        assert flat(samples_of(pieces_of(read(lambda: loader, 2, shuffle=False)))) == list(range(30))  # noqa: B023
        assert (
            flat(samples_of(pieces_of(read(lambda: loader, 2, shuffle=True))))  # noqa: B023
            == Permutation(30, 3, 0).block(0, 30).tolist()
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


class Never(Sampler[int]):
    """Has no length and yields nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


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


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


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


# ---- workers -------------------------------------------------------------------------------------


def noisy(make: Callable[[], Any], size: int = 1, epochs: tuple[int, ...] = (0,), start: int = 0) -> list[Any]:
    """All samples with what was drawn for them, in the order of the epochs."""
    ranks = [ShardedLoader(make(), rank=rank, size=size, seed=3) for rank in range(size)]
    found = []
    for epoch in epochs:
        for windows in zip(*(rank.windows(epoch, start) for rank in ranks), strict=True):
            for window in windows:
                columns = window.micro_batches[0].batch
                found += list(zip(*(column.tolist() for column in columns), strict=True))[
                    : window.micro_batches[0].num_samples
                ]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("persistent", [False, True])
def test_augmentations_in_workers_depend_on_the_place_in_the_order_alone(persistent: bool) -> None:
    def make(batch_size: int = 4, num_workers: int = 2) -> Any:
        return DataLoader(Noisy(22), batch_size, shuffle=True, num_workers=num_workers, persistent_workers=persistent)

    undisturbed = noisy(make, epochs=(0, 1))
    assert len(set(undisturbed)) == 44
    assert len({draws for _, *draws in map(tuple, undisturbed) for draws in [tuple(draws)]}) == 44
    assert noisy(make, epochs=(1,), start=8) == undisturbed[30:]
    assert noisy(lambda: make(2), size=2, epochs=(0, 1)) == undisturbed
    assert noisy(lambda: make(4, 1), epochs=(0, 1)) == undisturbed


def add_noise(samples: list[Any]) -> tuple[torch.Tensor, ...]:
    numbers = torch.tensor([sample[0] if isinstance(sample, tuple) else sample for sample in samples])
    return numbers, torch.rand(len(samples)) + random.random() + float(np.random.rand())


@pytest.mark.ranks
@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_randomness_in_collate_functions_of_workers_resumes(dataset: Callable[[int], Any]) -> None:
    def make() -> Any:
        return DataLoader(dataset(22), 4, num_workers=2, collate_fn=add_noise)

    undisturbed = noisy(make)
    assert len({noise for _, noise in undisturbed}) == 22
    assert noisy(make, start=12) == undisturbed[12:]


@pytest.mark.ranks
def test_random_split_keeps_augmentations_by_sample() -> None:
    def make(batch_size: int) -> Any:
        return DataLoader(
            random_split(Noisy(12), [8, 4], torch.Generator().manual_seed(0))[0], batch_size, num_workers=1
        )

    assert noisy(lambda: make(4)) == noisy(lambda: make(2), size=2)


class Seeds(Numbers):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return os.getpid(), info.seed, info.dataset is self, self.marked

    marked = False


def mark_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.marked = worker_id >= 0  # type: ignore[attr-defined]


@pytest.mark.ranks
def test_worker_seeds_differ_by_rank_and_worker_and_workers_see_the_users_dataset() -> None:
    seeds = set()
    for rank in range(2):
        make = DataLoader(
            Seeds(8), 2, num_workers=2, worker_init_fn=mark_dataset, persistent_workers=True, prefetch_factor=1
        )
        loader = ShardedLoader(make, rank=rank, size=2, seed=3)
        pids = []
        for epoch in range(2):
            batches = [window.micro_batches[0].batch for window in loader.windows(epoch)]
            pids.append({pid for batch in batches for pid in batch[0].tolist()})
            seeds |= {seed for batch in batches for seed in batch[1].tolist()}
            assert all(batch[2].all() and batch[3].all() for batch in batches)
        assert pids[0] == pids[1]  # the workers persist
    assert len(seeds) == 4


@pytest.mark.ranks
@pytest.mark.parametrize("persistent", [False, True])
def test_iterators_may_be_open_at_once_or_left_in_the_middle(persistent: bool) -> None:
    loader = ShardedLoader(
        DataLoader(Numbers(12), 2, num_workers=1, persistent_workers=persistent), rank=0, size=1, seed=3
    )

    def rest(windows: Iterator[Window]) -> list[int]:
        return flat([to_list(window.micro_batches[0].batch) for window in windows])

    outer = loader.windows(0)
    assert to_list(next(outer).micro_batches[0].batch) == [0, 1]
    assert rest(loader.windows(0)) == list(range(12))
    assert rest(outer) == list(range(2, 12))
    left = loader.windows(0)
    next(left)
    del left
    assert rest(loader.windows(1, start=4)) == list(range(4, 12))


@pytest.mark.ranks
def test_an_error_in_a_worker_comes_out_as_itself() -> None:
    loader = ShardedLoader(DataLoader(Bulk(4), batch_size=None, num_workers=1), rank=0, size=1, seed=3)
    with pytest.raises(AssertionError, match="in bulk"):
        list(loader.windows(0))


@pytest.mark.ranks
def test_order_is_kept_where_the_loader_would_not() -> None:
    make = DataLoader(Numbers(8), 2, num_workers=2, in_order=False)
    with pytest.warns(UserWarning, match="in_order=False is ignored"):
        loader = ShardedLoader(make, rank=0, size=1, seed=3)
    assert flat([to_list(window.micro_batches[0].batch) for window in loader.windows(0)]) == list(range(8))


# ---- loaders that read in other ways -------------------------------------------------------------


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


def batches(n: int) -> list[torch.Tensor]:
    return [torch.full((index + 1,), index) for index in range(n)]


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


# ---- iterable datasets ---------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Stream, WorkerStream, ShuffledStream])
@pytest.mark.parametrize("n", [24, 31])
def test_a_streams_global_batches_are_those_of_one_process(dataset: type[Stream], num_workers: int, n: int) -> None:
    def make(batch_size: int) -> Any:
        return DataLoader(dataset(n), batch_size, num_workers=num_workers, collate_fn=first_column)

    def windows(size: int, accumulate: int = 1, **options: Any) -> list[list[int]]:
        return samples_of(pieces_of(read(lambda: make(12 // size), size, accumulate=accumulate, **options)))

    one = windows(1)
    assert sorted(flat(one)) == list(range(n))
    assert [len(window) for window in one] == [12, 12, 7][: math.ceil(n / 12)]
    sizes = (2, 3) if num_workers == 0 or dataset is ShuffledStream else (2,)
    for size in sizes:
        assert windows(size) == one
    assert windows(2, accumulate=2) == [one[0] + one[1], *one[2:]]
    assert windows(2, start=12) == one[1:]
    assert windows(2, limit=1) == one[:1]
    assert windows(2, start=12, limit=2) == one[1:2]


class GaussianStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(30):
            yield gaussian()


def gaussian() -> tuple[float, float, float]:
    """One number of each library: all of them make two at once and hold the second one for the next call."""
    return torch.randn((), dtype=torch.float64).item(), random.gauss(0, 1), float(np.random.standard_normal())


def test_gaussian_numbers_do_not_depend_on_how_a_stream_is_cut() -> None:
    def numbers(batch_size: int) -> list[Any]:
        windows = ShardedLoader(
            DataLoader(GaussianStream(), batch_size, collate_fn=list), rank=0, size=1, seed=3
        ).windows(0)
        return [sample for window in windows for micro_batch in window.micro_batches for sample in micro_batch.batch]

    whole = numbers(30)
    assert len(set(whole)) == 30
    assert numbers(3) == numbers(5) == numbers(1) == whole


def test_random_states_change_hands_with_the_gaussian_numbers_that_they_hold() -> None:
    before = random.getstate(), np.random.get_state()
    try:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        outside = [gaussian() for _ in range(4)]
        apart = Randomness(7)
        with apart:
            inside = [gaussian() for _ in range(4)]

        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        apart, found, drawn = Randomness(7), [], []
        for _ in range(4):
            found.append(gaussian())
            with apart:
                drawn.append(gaussian())
            saved = apart.state_dict()
            apart = Randomness(8)
            apart.load_state_dict(
                saved
                | {"numpy": json.loads(json.dumps(saved["numpy"])), "python": json.loads(json.dumps(saved["python"]))}
            )
        assert (found, drawn) == (outside, inside)
        apart.load_state_dict(saved | {"numpy": saved["numpy"][:2]})  # of a checkpoint without that number
        assert apart.state_dict()["numpy"] == [*saved["numpy"][:2], 0, 0.0]
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def first_column(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([sample[0] if isinstance(sample, tuple) else sample for sample in samples])


@given(
    n=st.integers(1, 40),
    size=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    drop_last=st.booleans(),
    at=st.integers(0, 40),
)
def test_every_cut_of_a_stream_is_exact(
    n: int, size: int, batch_size: int, accumulate: int, drop_last: bool, at: int
) -> None:
    def make() -> Any:
        return DataLoader(Stream(n), batch_size, drop_last=drop_last)

    unit = batch_size * size
    kept = n - n % unit if drop_last else n
    if not kept:
        with pytest.raises(
            ValueError, match="yielded no batch in epoch 0: Stream yields no item or drop_last drops all"
        ):
            read(make, size)
        return
    pieces = pieces_of(read(make, size, accumulate=accumulate))
    assert flat(samples_of(pieces)) == list(range(kept))
    for window in pieces[:-1]:
        assert [len(micros) for micros in window] == [size] * accumulate
    assert all(len(batch) == (num or 1) for window in pieces for micros in window for batch, num in micros)
    begin = sum(map(len, samples_of(pieces)[:at]))
    assert pieces_of(read(make, size, accumulate=accumulate, start=begin)) == pieces[at:]


def test_splitting_a_streams_batches() -> None:
    def make(batch_size: int = 12) -> Any:
        return DataLoader(Stream(30), batch_size)

    one = samples_of(pieces_of(read(make, 1, split=True)))
    assert [len(window) for window in one] == [12, 12, 6]
    for size, accumulate in [(2, 1), (2, 3), (3, 2), (1, 4)]:
        assert samples_of(pieces_of(read(make, size, split=True, accumulate=accumulate))) == one
    loader = ShardedLoader(make(), rank=0, size=2, seed=3, split=True, accumulate=3)
    assert (loader.batch_size, loader.num_samples) == (12, None)
    with pytest.raises(ValueError, match=r"must divide .* it is 10 and they are 2 \* 2"):
        read(lambda: make(10), 2, split=True, accumulate=2)


class Sized(Stream):
    def __len__(self) -> int:
        return self.n


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_with_a_length_has_all_the_numbers(drop_last: bool) -> None:
    loader = ShardedLoader(DataLoader(Sized(23), 2, drop_last=drop_last), rank=0, size=2, seed=3, accumulate=2)
    windows = list(loader.windows(0))
    assert len(loader) == sum(len(window.micro_batches) for window in windows)
    assert loader.num_windows() == len(windows)
    assert loader.num_samples == sum(window.num_samples for window in windows)


class BatchStream(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(batches(self.n))


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_ready_batches(num_workers: int) -> None:
    def make() -> Any:
        return DataLoader(BatchStream(5), batch_size=None, num_workers=num_workers)

    pieces = pieces_of(read(make, 2))
    assert samples_of(pieces) == [[0] + [1] * 2, [2] * 3 + [3] * 4, [4] * 5]
    assert pieces_of(read(make, 2, start=3)) == pieces[1:]


@pytest.mark.ranks
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_in_workers_resume_with_the_same_randomness(persistent: bool) -> None:
    def make(batch_size: int = 4) -> Any:
        return DataLoader(ShuffledStream(22), batch_size, num_workers=2, persistent_workers=persistent)

    undisturbed = noisy(make, epochs=(0, 1))
    assert len(set(undisturbed)) == 44
    assert noisy(make, epochs=(1,), start=8) == undisturbed[30:]
    assert noisy(lambda: make(2), size=2, epochs=(0, 1)) == undisturbed
    assert noisy(lambda: DataLoader(ShuffledStream(22), 4), epochs=(0, 1)) == undisturbed


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stream_that_shards_itself_is_left_to_it_and_ranks_agree(size: int, num_workers: int) -> None:
    def make(rank: int) -> Any:
        return DataLoader(OwnStream(4 * size + 1, rank, size), 2, num_workers=num_workers)

    ranks, _ = read_together(make, size, accumulate=2)
    pieces = pieces_of(ranks)
    assert sorted(flat(samples_of(pieces))) == list(range(4 * size + 1))
    if num_workers == 0 and size > 1:
        assert pieces[-1][-1][1][1] == 0  # the other ranks pad
        assert pieces[-1][-1][1][0] == pieces[0][-1][1][0]  # with their last batch
    resumed, _ = read_together(make, size, accumulate=2, start=len(samples_of(pieces)[0]))
    assert pieces_of(resumed) == pieces[1:]
    limited, _ = read_together(make, size, accumulate=2, limit=1)
    assert pieces_of(limited) == [pieces[0][:1]]


def read_own_stream_on_a_rank() -> list[Any]:
    strategy = DDP()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    loader = strategy.shard_loader(DataLoader(OwnStream(5, strategy.topology.rank, 2), 2), seed=3, accumulate=2)
    windows = [
        ([to_list(micro.batch) for micro in window.micro_batches], window.num_samples) for window in loader.windows(0)
    ]
    both = [strategy.broadcast([[list(map(list, batches)), num] for batches, num in windows], src) for src in range(2)]
    strategy.teardown()
    return both


@pytest.mark.ranks
def test_real_ranks_agree_on_a_stream_that_shards_itself(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(read_own_stream_on_a_rank, 2) == [[[[[0, 2], [4]], 5]], [[[[1, 3], [1, 3]], 5]]]


def test_a_rank_that_never_had_a_sample_has_no_batch() -> None:
    ranks, _ = read_together(lambda rank: DataLoader(OwnStream(2, rank, 3), 2), 3)
    assert [[(micro.batch is None, micro.num_samples) for micro in windows[0].micro_batches] for windows in ranks] == [
        [(False, 1)],
        [(False, 1)],
        [(True, 0)],
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_a_streams_own_state_spares_the_replay(size: int) -> None:
    def make() -> tuple[StatefulStream, list[ShardedLoader]]:
        data = [StatefulStream(30) for _ in range(size)]
        return data[0], [
            ShardedLoader(DataLoader(dataset, 4), rank=rank, size=size, seed=3) for rank, dataset in enumerate(data)
        ]

    def values(loaders: list[ShardedLoader], start: int) -> list[Any]:
        return [
            [column.tolist() for column in window.micro_batches[0].batch]
            for loader in loaders
            for window in loader.windows(2, start)
        ]

    _, whole = make()
    undisturbed = values(whole, 0)
    _, ranks = make()
    states = []
    for loader in ranks:
        windows = loader.windows(2)
        next(windows)
        states.append(loader.state_dict())
    assert states[0]["samples"] == 4 * size
    assert all(str(state) == str(states[0]) for state in states)

    dataset, resumed = make()
    for loader in resumed:
        loader.load_state_dict(states[0])
        assert str(loader.state_dict()) == str(states[0])
    number = len(undisturbed) // size
    assert values(resumed, 4 * size) == [
        value for rank in range(size) for value in undisturbed[rank * number + 1 : (rank + 1) * number]
    ]
    assert dataset.read == 30 - 4 * size
    assert resumed[0].state_dict()["samples"] == 30
    # A later place in the epoch skips only what is between; a state of another place or epoch is not used.
    dataset, resumed = make()
    resumed[0].load_state_dict(states[0])
    list(resumed[0].windows(2, 8 * size))
    assert dataset.read == 30 - 4 * size
    dataset, resumed = make()
    resumed[0].load_state_dict(states[0])
    list(resumed[0].windows(3, 4 * size))
    assert dataset.read == 30


def test_own_state_of_a_stream_that_shards_itself() -> None:
    class Own(StatefulStream):
        shards_itself = True

    def make() -> ShardedLoader:
        return ShardedLoader(DataLoader(Own(10), 2), rank=0, size=1, seed=3, accumulate=2)

    loader = make()
    windows = loader.windows(0)
    next(windows)
    state = loader.state_dict()
    rest = [[micro.batch[1].tolist() for micro in window.micro_batches] for window in windows]
    resumed = make()
    resumed.load_state_dict(state)
    assert [[micro.batch[1].tolist() for micro in window.micro_batches] for window in resumed.windows(0, 4)] == rest
    assert resumed.dataset.read == 6
    limited = make()
    limited.load_state_dict(state)
    assert [len(window.micro_batches) for window in limited.windows(0, 4, limit=3)] == [1]


def test_loaders_without_a_state_of_their_own() -> None:
    for loader in (
        DataLoader(Numbers(4)),
        DataLoader(Stream(4)),
        DataLoader(StatefulStream(4), num_workers=1),
        batches(2),
    ):
        sharded = ShardedLoader(loader, rank=0, size=1, seed=3)
        if not isinstance(loader, DataLoader) or not loader.num_workers:
            next(sharded.windows(0))
        assert sharded.state_dict() == {}
        sharded.load_state_dict({})
        with pytest.raises(ValueError, match="this loader is not"):
            sharded.load_state_dict({"epoch": 0})
    with pytest.raises(ValueError, match="has the keys"):
        ShardedLoader(DataLoader(StatefulStream(4)), rank=0, size=1, seed=3).load_state_dict({"epoch": 0})


# ---- size, speed and errors ----------------------------------------------------------------------


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
