"""How many samples a batch holds whose collate function may have left some out, and what a loader makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, default_collate

from lockstep.strategies.data.batch_rows import count_samples
from lockstep.strategies.data.combined import CombinedLoader
from lockstep.strategies.data.sharded_loader import ShardedLoader
from tests.strategies.data.samples import Numbers, read


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


CASES: list[tuple[str, Any, int, int | None]] = [
    ("all of them", [rows(4, 8), rows(4)], 4, 4),
    ("three of four", [rows(3, 8), rows(3)], 4, 3),
    ("one of two, in a list of two", [rows(1, 8), rows(1)], 2, 1),
    ("inputs alone", rows(3, 8), 4, 3),
    ("nested as default_collate does", [[rows(3, 8), rows(3, 5)], rows(3)], 4, 3),
    ("a dict with text", {"x": rows(2, 8), "y": rows(2), "name": "a"}, 4, 2),
    ("a dataclass", Pair(rows(3, 8), rows(3)), 4, 3),
    ("arrays", (np.zeros((3, 2)), np.zeros(3)), 4, 3),
    ("texts", ["a", "b", "c"], 4, 3),
    ("all texts beside a matrix of classes", {"text": ["a"] * 4, "classes": rows(7, 7)}, 4, 4),
    ("nodes and edges with labels", {"x": rows(17, 8), "edges": rows(2, 30), "y": rows(3)}, 4, 3),
    ("joined tokens with their offsets", {"tokens": rows(17), "offsets": rows(3)}, 4, 3),
    ("images of several sizes", ((rows(3, 9, 9), rows(3, 7, 7)), ({"box": rows(2, 4)}, {"box": rows(5, 4)})), 4, 2),
    ("samples as they are", [(rows(8), 1), (rows(8), 0)], 4, 2),
    ("all samples as they are", [rows(8)] * 4, 4, 4),
    ("two views of each sample", rows(8, 5), 4, 4),
    ("a sum that has all rows", [rows(3, 8), rows(4)], 4, 4),
    ("None", None, 4, 0),
    ("an empty list", [], 4, 0),
    ("tensors without rows", [rows(0, 8), rows(0)], 4, 0),
    ("no tensor at all", {"path": "a"}, 4, 4),
    ("time first", rows(2, 4, 5), 4, None),
    ("packed into one row", rows(1, 90), 4, None),
    ("patches", rows(9, 5), 4, None),
    ("a list of vectors, or columns", [rows(8), rows(8), rows(8)], 4, None),
]


@pytest.mark.parametrize(("batch", "asked", "found"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_samples_in_a_batch(batch: Any, asked: int, found: int | None) -> None:
    assert count_samples(batch, asked) == found


def even(items: list[int]) -> Any:
    return default_collate([item for item in items if item % 2 == 0]) if any(i % 2 == 0 for i in items) else None


class Bulk(Dataset[Any]):
    """Drops odd numbers itself when it is asked for several."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index for index in indices if index % 3 == 0]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(12)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(12), 3, collate_fn=even),
        lambda: DataLoader(Numbers(12), 3, collate_fn=even, num_workers=1),
        lambda: DataLoader(Numbers(12), batch_sampler=BatchSampler(range(12), 3, False), collate_fn=even),
        lambda: DataLoader(Stream(), 3, collate_fn=even),
    ],
    ids=["map-style", "workers", "batch sampler", "iterable-style"],
)
def test_a_micro_batch_counts_what_is_in_it_and_a_window_what_was_asked_for(make: Any) -> None:
    windows = [window for rank in read(make, 2) for window in rank]
    assert {window.num_samples for window in windows} == {6}
    for window in windows:
        for micro in window.micro_batches:
            assert micro.num_samples == len(micro.batch) in (1, 2)


def views(items: list[int], number: int = 2) -> Any:
    """Several rows of each even number."""
    kept = [item for item in items if item % 2 == 0 or item > 5]
    return torch.tensor(kept, dtype=torch.float32).repeat(number)[:, None].expand(-1, 3) if kept else None


def test_rows_of_several_to_a_sample_are_ambiguous_where_some_are_dropped() -> None:
    def ambiguous(numbers: range, size: int = 2) -> list[bool]:
        (windows,) = read(lambda: DataLoader(numbers, size, collate_fn=views), 1)  # type: ignore[arg-type]
        return [micro.is_ambiguous for window in windows for micro in window.micro_batches]

    assert ambiguous(range(6, 13)) == [False] * 4, "all of them, in the short last batch too"
    assert ambiguous(range(10)) == [False, False, False, True, True], "two rows were one sample of two, as is seen then"
    assert ambiguous(range(6, 12), 3) == [False, False]
    assert ambiguous(range(4, 10)) == [False, True, True]


def test_time_first_is_not_several_rows_of_a_sample() -> None:
    (windows,) = read(lambda: DataLoader(Numbers(10), 4, collate_fn=lambda items: rows(8, len(items), 2)), 1)
    assert [micro.num_samples for window in windows for micro in window.micro_batches] == [4, 4, 2]


def test_a_dataset_that_filters_what_it_is_asked_for_together() -> None:
    (windows,) = read(lambda: DataLoader(Bulk(), 4), 1)
    assert [micro.num_samples for window in windows for micro in window.micro_batches] == [2, 1, 1]


def test_loaders_that_are_combined_count_theirs() -> None:
    def make() -> CombinedLoader:
        return CombinedLoader({"a": DataLoader(Numbers(12), 3, collate_fn=even), "b": DataLoader(Numbers(8), 2)})

    (windows,) = read(make, 1)
    assert [window.num_samples for window in windows] == [5] * 4
    assert [window.micro_batches[0].num_samples for window in windows] == [4, 3, 4, 3]


def test_an_empty_batch_is_padding_with_another_batch_in_its_place() -> None:
    def late(items: list[int]) -> Any:
        return default_collate([item for item in items if item >= 4]) if items[-1] >= 4 else None

    (windows,) = read(lambda: DataLoader(Numbers(8), 2, collate_fn=late), 1)
    micros = [window.micro_batches[0] for window in windows]
    assert [micro.num_samples for micro in micros] == [0, 0, 2, 2]
    assert [micro.batch.tolist() for micro in micros] == [[4], [4], [4, 5], [6, 7]]


# ---- objects that begin again whenever they are asked for an iterator -------------------------------


class Restarting:
    """A loader that is its own iterator and reads from its start after `iter`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return torch.full((1,), self.at - 1)


class RestartingDataset(Restarting, IterableDataset[Any]):
    pass


class RestartingSampler(Restarting, Sampler[int]):
    def __next__(self) -> Any:
        return int(super().__next__())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Restarting(10),
        lambda: DataLoader(RestartingDataset(10), 2),
        lambda: DataLoader(Numbers(1500), 2, sampler=RestartingSampler(1500)),
    ],
    ids=["loader", "dataset", "sampler"],
)
def test_an_iterator_that_begins_again_is_read_to_its_end_in_every_epoch(make: Any, size: int) -> None:
    loaders = [ShardedLoader(make(), rank=rank, size=size, seed=0) for rank in range(size)]
    for epoch in range(2):
        seen: list[int] = []
        for loader in loaders:
            for window in loader.windows(epoch):
                for micro in window.micro_batches:
                    seen += micro.batch.flatten().tolist() if micro.num_samples else []
        assert sorted(seen) == list(range(1500 if len(seen) > 10 else 10))


def test_a_generator_is_still_read_only_once() -> None:
    loader = ShardedLoader((torch.zeros(1) for _ in range(3)), rank=0, size=1, seed=0)
    assert len(list(loader.windows(0))) == 3
    with pytest.raises(RuntimeError, match="can be read only once"):
        loader.windows(1)
