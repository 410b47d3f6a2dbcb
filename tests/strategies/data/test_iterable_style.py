"""Iterable-style datasets: shared out by position, or sharded by themselves, and resumed in the middle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    get_worker_info,
)

from lockstep.strategies import DDP
from lockstep.strategies.data.sharded_loader import ShardedLoader
from tests.strategies.data.samples import (
    BatchStream,
    Numbers,
    OwnStream,
    ShuffledStream,
    Sized,
    Stream,
    batches,
    flat,
    noisy,
    pieces_of,
    read,
    read_together,
    samples_of,
    to_list,
)


class WorkerStream(Stream):
    """Shares itself out over workers, as in torch's documentation."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


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


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Stream, WorkerStream, ShuffledStream])
@pytest.mark.parametrize("n", [pytest.param(24, marks=pytest.mark.slow), 31])
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


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_with_a_length_has_all_the_numbers(drop_last: bool) -> None:
    loader = ShardedLoader(DataLoader(Sized(23), 2, drop_last=drop_last), rank=0, size=2, seed=3, accumulate=2)
    windows = list(loader.windows(0))
    assert len(loader) == sum(len(window.micro_batches) for window in windows)
    assert loader.num_windows() == len(windows)
    assert loader.num_samples == sum(window.num_samples for window in windows)


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


@pytest.mark.long
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
    elsewhere = make()
    elsewhere.load_state_dict(state, ranks=2)  # whose parts are other samples
    assert elsewhere.state_dict() == {}


def test_own_state_counts_batches_of_the_size_that_it_is_read_with() -> None:
    saved = ShardedLoader(DataLoader(StatefulStream(24), 2), rank=0, size=1, seed=3, accumulate=2)
    next(saved.windows(0))
    resumed = ShardedLoader(DataLoader(StatefulStream(24), 4), rank=0, size=1, seed=3)
    resumed.load_state_dict(saved.state_dict())
    assert [window.num_samples for window in resumed.windows(0, 4, limit=3)] == [4, 4]


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
