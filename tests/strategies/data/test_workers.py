"""Loader workers: what they draw depends on the sample's place in the order alone, and each has its own seed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    get_worker_info,
    random_split,
)

from lockstep.strategies.data.randomness import Randomness
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from tests.strategies.data.samples import Bulk, Noisy, Numbers, Stream, flat, noisy, to_list


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
@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_randomness_in_collate_functions_is_named_where_a_batch_is_made_in_parts(dataset: Callable[[int], Any]) -> None:
    """Of ranks or micro-batches; a rank's own whole batches, and a collate function that draws nothing, are exact."""

    def read(collate_fn: Any = add_noise, size: int = 2, **options: Any) -> list[str]:
        make = DataLoader(dataset(24), 4, num_workers=1, collate_fn=collate_fn)
        loader = ShardedLoader(make, rank=0, size=size, seed=3, **options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert sum(1 for epoch in range(2) for _ in loader.windows(epoch)) > 2
        return [str(warning.message) for warning in seen]

    (warning,) = read(split=True)
    assert "collate_fn=add_noise" in warning and "draw them for each sample in the dataset" in warning
    assert len(read(size=1, split=True, accumulate=2)) == 1
    assert not read(size=1, split=True) and not read(torch.tensor, split=True) and not read(split=True, virtual=(0, 1))
    assert len(read()) == (dataset is Stream)


class BulkNoisy(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.ranks
@pytest.mark.parametrize("subset", [False, True])
def test_augmentations_of_bulk_reads_depend_on_the_place_in_the_order_alone(subset: bool) -> None:
    def make(batch_size: int = 4, kind: Any = BulkNoisy) -> Any:
        dataset = Subset(kind(22), range(22)) if subset else kind(22)
        return DataLoader(dataset, batch_size, shuffle=True, num_workers=1)

    undisturbed = noisy(make)
    assert undisturbed == noisy(lambda: make(kind=Noisy)) == noisy(lambda: make(2), size=2)
    assert noisy(make, start=8) == undisturbed[8:]


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


HELD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep.strategies import SingleDevice

loader = DataLoader(TensorDataset(torch.zeros(64, 1)), 2, num_workers=2)
held = [SingleDevice().shard_loader(loader, seed=0).windows(0) for _ in range(4)]
for windows in held:
    next(windows)
"""


@pytest.mark.long
@pytest.mark.ranks
def test_a_program_that_ends_with_open_loaders_says_nothing_of_their_workers() -> None:
    ended = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
