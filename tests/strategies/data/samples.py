"""Datasets whose samples are numbers, and what each rank of a sharded loader reads of them, all in one process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from lockstep.strategies.data.sharded_loader import ShardedLoader, Window

Pieces = list[list[list[tuple[list[int], int]]]]


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


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


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


def batches(n: int) -> list[torch.Tensor]:
    return [torch.full((index + 1,), index) for index in range(n)]


class Sized(Stream):
    def __len__(self) -> int:
        return self.n


class BatchStream(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(batches(self.n))
