"""Several loaders as one: whose batches meet, on which rank, and where a run continues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, WeightedRandomSampler

from lockstep.strategies.data.combined import MODES, CombinedLoader
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from tests.strategies.data.samples import Numbers, OwnStream, Stream, Uneven, to_list

Unit = tuple[Any, int]


class Fetched(Numbers):
    """Notes what was read."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list) and not all(isinstance(item, int) for item in batch):
        return [plain(value) for value in batch]
    return None if batch is None else to_list(batch)


def sharded(loader: CombinedLoader, rank: int = 0, size: int = 1, **options: Any) -> ShardedLoader:
    return ShardedLoader(loader, rank=rank, size=size, seed=3, **options)


def units_of(
    make: Callable[[], CombinedLoader],
    size: int,
    epoch: int = 1,
    start: int = 0,
    began: int | None = None,
    **options: Any,
) -> list[list[Unit]]:
    """[window] -> units in order, (what a step gets, its samples). Checks that ranks keep step, and that all know the
    sums."""
    limit, accumulate = options.pop("limit", None), options.pop("accumulate", 1)
    ranks: list[list[Window]] = []
    for rank in range(size):
        loader = sharded(make(), rank, size, accumulate=accumulate)
        if began is not None:
            loader.resume_windows(loader.plan | {"ranks": began}, start)
        ranks.append(list(loader.windows(epoch, start, limit)))
    found = []
    for windows in zip(*ranks, strict=True):
        assert len({(window.num_samples, window.num_batches, len(window.micro_batches)) for window in windows}) == 1
        micros = [micro for step in zip(*(window.micro_batches for window in windows), strict=True) for micro in step]
        assert all(micro.batch is not None for micro in micros), "padding too is something to compute with"
        found.append([(plain(micro.batch), micro.num_samples) for micro in micros if micro.num_samples])
        assert sum(num for _, num in found[-1]) == windows[0].num_samples
        assert len(found[-1]) == sum(1 for micro in micros if micro.num_samples)
    return found


def flat(windows: list[list[Unit]]) -> list[Unit]:
    return [unit for window in windows for unit in window]


def test_what_a_batch_is_and_how_long_an_epoch() -> None:
    def units(mode: str, loaders: Any) -> list[Any]:
        loader = sharded(CombinedLoader(loaders, mode))
        found = [window.micro_batches[0] for window in loader.windows(0)]
        assert len(loader) == len(found) == len(CombinedLoader(loaders, mode))
        return [(plain(micro.batch), micro.num_samples) for micro in found]

    loaders = {"long": DataLoader(Numbers(5), 2), "short": DataLoader(Numbers(3), 2)}
    assert units("min_size", loaders) == [({"long": [0, 1], "short": [0, 1]}, 4), ({"long": [2, 3], "short": [2]}, 3)]
    assert units("max_size", loaders)[2] == ({"long": [4], "short": None}, 1)
    assert units("max_size_cycle", loaders) == [*units("min_size", loaders), ({"long": [4], "short": [0, 1]}, 3)]
    assert [batch for batch, _ in units("max_size_cycle", list(loaders.values()))] == [
        [[0, 1], [0, 1]],
        [[2, 3], [2]],
        [[4], [0, 1]],
    ]
    assert units("sequential", loaders) == [([0, 1], 2), ([2, 3], 2), ([4], 1), ([0, 1], 2), ([2], 1)]


LOADERS: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda n: DataLoader(Numbers(n), 3, shuffle=True),
    "dropping": lambda n: DataLoader(Numbers(n), 2, shuffle=True, drop_last=n > 1),
    "weighted": lambda n: DataLoader(Numbers(n), 2, sampler=WeightedRandomSampler([1.0] * n, n)),
    "batches": lambda n: DataLoader(Numbers(n), batch_sampler=Uneven(n, 3)),
    "stream": lambda n: DataLoader(Stream(n), 2),
    "list": lambda n: [torch.arange(i, i + 2) for i in range(n)],
}


@pytest.mark.long
@given(
    kinds=st.lists(st.tuples(st.sampled_from(sorted(LOADERS)), st.integers(1, 11)), min_size=1, max_size=3),
    mode=st.sampled_from(MODES),
    size=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    data=st.data(),
)
def test_ranks_share_out_what_one_process_sees(
    kinds: list[tuple[str, int]], mode: str, size: int, accumulate: int, data: st.DataObject
) -> None:
    def make() -> CombinedLoader:
        return CombinedLoader([LOADERS[kind](n) for kind, n in kinds], mode)

    alone = flat(units_of(make, 1))
    windows = units_of(make, size, accumulate=accumulate)
    assert flat(windows) == alone
    assert [len(window) for window in windows[:-1]] == [size * accumulate] * (len(windows) - 1)
    if mode == "sequential" and not any(kind == "dropping" or kind == "weighted" for kind, _ in kinds):
        assert sorted(samples(unit for unit, _ in alone)) == sorted(
            samples(batch for kind, n in kinds for batch in LOADERS[kind](n))
        ), "each once"

    at = data.draw(st.integers(0, len(windows)))
    start = sum(num for _, num in flat(windows[:at]))
    assert units_of(make, size, start=start, accumulate=accumulate) == windows[at:]
    others = data.draw(st.integers(1, 5))
    assert units_of(make, others, start=start, began=size, accumulate=accumulate) == windows[at:]
    limit = data.draw(st.integers(0, len(alone) + 1))
    assert flat(units_of(make, size, limit=limit, accumulate=accumulate)) == alone[: limit * size]


def samples(batches: Any) -> list[int]:
    return list(itertools.chain.from_iterable(map(to_list, batches)))


def test_a_shorter_one_starts_again_in_a_new_order_and_loaders_differ() -> None:
    def orders(epoch: int) -> tuple[list[list[int]], list[int]]:
        units = flat(
            units_of(
                lambda: CombinedLoader(
                    [DataLoader(Numbers(24), 4, shuffle=True), DataLoader(Numbers(8), 4, shuffle=True)]
                ),
                2,
                epoch,
            )
        )
        short = samples(unit[1] for unit, _ in units)
        return [short[i : i + 8] for i in range(0, 24, 8)], samples(unit[0] for unit, _ in units)

    (cycles, long), (others, _) = orders(0), orders(1)
    assert all(sorted(cycle) == list(range(8)) for cycle in cycles + others) and sorted(long) == list(range(24))
    assert len({tuple(cycle) for cycle in cycles + others}) == 6
    twins = flat(units_of(lambda: CombinedLoader([DataLoader(Numbers(24), 24, shuffle=True) for _ in range(2)]), 1))
    assert twins[0][0][0] != twins[0][0][1]


@pytest.mark.parametrize("mode", ["max_size_cycle", "sequential"])
def test_a_rank_reads_only_its_own_and_only_when_it_is_time(mode: str) -> None:
    """Reading ahead would draw random numbers before a checkpoint that its resumed run draws again."""
    read = []
    for rank in range(2):
        dataset, other = Fetched(16), Fetched(8)
        windows = sharded(CombinedLoader([DataLoader(dataset, 2), DataLoader(other, 2)], mode), rank, 2).windows(0)
        next(windows)
        assert dataset.read == [2 * rank, 2 * rank + 1]
        next(windows)
        assert dataset.read == [2 * rank, 2 * rank + 1, 4 + 2 * rank, 5 + 2 * rank]
        list(windows)
        read.append((dataset.read, other.read))
    assert sorted(read[0][0] + read[1][0]) == list(range(16)) and not set(read[0][0]) & set(read[1][0])
    skipped = Fetched(16)
    list(sharded(CombinedLoader([DataLoader(skipped, 2)], mode), 0, 2).windows(0, start=8))
    assert skipped.read == [8, 9, 12, 13]


class Draws(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_read_for_padding_draws_nothing(rank: int) -> None:
    """Where no loader knows its length a rank reads the first batch that comes, for the case that none of its own
    follows: another batch in a resumed run than in the whole one."""

    def windows(start: int) -> Iterator[Window]:
        loaders = [DataLoader(Draws(24), 2), DataLoader(Stream(24), 2)]
        return sharded(CombinedLoader(loaders, "max_size_cycle"), rank, 2).windows(0, start)

    torch.manual_seed(5)
    whole = windows(0)
    num_samples = next(whole).num_samples
    seen = torch.get_rng_state()
    left = [window.micro_batches[0].batch for window in whole]
    torch.set_rng_state(seen)
    resumed = [window.micro_batches[0].batch for window in windows(num_samples)]
    assert str(resumed) == str(left) and len(left) == 5


@pytest.mark.ranks
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_give_the_same(persistent: bool) -> None:
    def make(num_workers: int) -> CombinedLoader:
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": persistent and num_workers > 0,
            "shuffle": True,
        }
        return CombinedLoader({"a": DataLoader(Numbers(13), 2, **options), "b": DataLoader(Numbers(5), 2, **options)})

    expected = units_of(lambda: make(0), 2)
    assert units_of(lambda: make(2), 2) == expected
    assert units_of(lambda: make(1), 2, start=sum(num for _, num in expected[0])) == expected[1:]
    loader = sharded(make(1))
    for epoch in (0, 1):
        assert [plain(w.micro_batches[0].batch) for w in loader.windows(epoch)] == [
            unit for unit, _ in flat(units_of(lambda: make(0), 1, epoch))
        ]


def test_the_size_of_a_step_is_known_where_that_of_each_loader_is() -> None:
    loaders = [DataLoader(Numbers(24), 4), DataLoader(Numbers(8), 2)]
    assert sharded(CombinedLoader(loaders), 0, 2, accumulate=3).batch_size == 36
    assert sharded(CombinedLoader(loaders, "sequential"), 0, 2).batch_size is None
    assert sharded(CombinedLoader([*loaders, DataLoader(Numbers(5), batch_sampler=Uneven(5, 2))])).batch_size is None
    with pytest.raises(TypeError, match="no len"):
        len(CombinedLoader([DataLoader(Stream(5), 2), *loaders]))


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(
        ValueError,
        match=(
            "mode of CombinedLoader must be one of 'max_size_cycle', 'min_size', 'max_size', 'sequential', but "
            "mode='longest'"
        ),
    ):
        CombinedLoader([DataLoader(Numbers(2))], mode="longest")
    with pytest.raises(ValueError, match=r"CombinedLoader needs a dict or list of loaders, but got \{\}"):
        CombinedLoader({})
    with pytest.raises(
        ValueError, match="the loader is empty: 'b': Numbers has 1 samples|the loader is empty: 'b': drop_last drops"
    ):
        sharded(CombinedLoader({"a": DataLoader(Numbers(2)), "b": DataLoader(Numbers(1), 2, drop_last=True)}))
    with pytest.raises(ValueError, match="a dataset that shards itself cannot be combined with others, .*but 'b' does"):
        sharded(CombinedLoader({"a": DataLoader(Numbers(2)), "b": DataLoader(OwnStream(4, 0, 1), 2)}))
    with pytest.raises(ValueError, match="split_batches cannot be used with several loaders"):
        sharded(CombinedLoader([DataLoader(Numbers(4), 2)]), 0, 2, split=True)
    with pytest.raises(ValueError, match="the loader 1 yielded no batch in epoch 0"):
        list(sharded(CombinedLoader([DataLoader(Numbers(4), 2), DataLoader(Stream(0), 2)])).windows(0))


class Announced(Numbers):
    """A sampler whose order is of its epoch, as numpy seeds it, and of the global random numbers."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epochs: list[int] = []
        self.draws: list[float] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        self.draws.append(torch.rand(()).item())
        return iter(np.random.RandomState(self.epochs[-1]).permutation(self.n).tolist())


def test_a_sampler_is_given_the_same_epoch_in_each_round_and_other_random_numbers() -> None:
    sampler = Announced(8)
    loaders = {"long": DataLoader(Numbers(24), 4), "short": DataLoader(Numbers(8), 4, sampler=sampler)}
    units = list(sharded(CombinedLoader(loaders)).windows(5))
    assert len(units) == 6 and set(sampler.epochs) == {5}
    # as a run draws that began before samplers were given the epoch alone
    assert sampler.draws == pytest.approx([0.55395228, 0.02669084, 0.80752504])
