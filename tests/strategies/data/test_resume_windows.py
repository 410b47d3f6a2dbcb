"""A run that continues on another number of ranks: the same windows, whatever ranks and micro-batches they are cut
over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler

from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from tests.strategies.data.samples import (
    BatchStream,
    Numbers,
    OwnStream,
    Stream,
    Uneven,
    pieces_of,
    read,
    samples_of,
)

KINDS: dict[str, Callable[[int, int, bool], Any]] = {
    "sequential": lambda n, size, drop: DataLoader(Numbers(n), size, drop_last=drop),
    "shuffled": lambda n, size, drop: DataLoader(Numbers(n), size, shuffle=True, drop_last=drop),
    "sampler": lambda n, size, drop: DataLoader(
        Numbers(n), size, sampler=SubsetRandomSampler(range(n)), drop_last=drop
    ),
    "batches": lambda n, size, drop: DataLoader(Numbers(n), batch_sampler=Uneven(n, size)),
}


def resumed(
    make: Callable[[], Any],
    began: int,
    size: int,
    start: int = 0,
    limit: int | None = None,
    whole: bool = False,
    accumulate: int = 1,
) -> tuple[list[list[Window]], ShardedLoader]:
    """The windows of each of `size` ranks that continue with a run of `began` ranks."""
    plan = ShardedLoader(make(), rank=0, size=began, seed=3, accumulate=accumulate, sum_over_ranks=int).plan
    found = []
    for rank in range(size):
        loader = ShardedLoader(make(), rank=rank, size=size, seed=3, accumulate=accumulate)
        done = loader.resume_windows(plan, start, whole)
        assert (done is None) == (began == size)
        assert loader.plan == plan, "what a further checkpoint says"
        found.append(list(loader.windows(1, start, limit)))
    return found, loader


@given(
    n=st.integers(1, 50),
    began=st.integers(1, 4),
    size=st.integers(1, 6),
    batch_size=st.integers(1, 8),
    accumulate=st.integers(1, 4),
    drop_last=st.booleans(),
    kind=st.sampled_from(sorted(KINDS)),
    data=st.data(),
)
def test_windows_batches_and_limits_stay(
    n: int, began: int, size: int, batch_size: int, accumulate: int, drop_last: bool, kind: str, data: st.DataObject
) -> None:
    drop_last = drop_last and n >= batch_size * max(began, size) and kind != "batches"

    def make() -> Any:
        return KINDS[kind](n, batch_size, drop_last)

    before = read(make, began, epoch=1, accumulate=accumulate)
    windows = samples_of(pieces_of(before))
    counts = [window.num_batches for window in before[0]]
    after, loader = resumed(make, began, size, accumulate=accumulate)
    pieces = pieces_of(after)
    assert samples_of(pieces) == windows
    assert [window.num_batches for window in after[0]] == counts
    alone = ShardedLoader(make(), rank=0, size=began, seed=3, accumulate=accumulate)
    assert (len(loader), loader.num_windows(), loader.num_samples, loader.batch_size) == (
        len(alone),
        alone.num_windows(),
        alone.num_samples,
        alone.batch_size,
    )
    most = max((num for window in pieces for micros in window for _, num in micros), default=0)
    assert most <= batch_size, "memory"
    assert all(len(window) <= loader.num_micro_batches for window in pieces)

    at = data.draw(st.integers(0, len(windows)))
    start = sum(map(len, windows[:at]))
    assert samples_of(pieces_of(resumed(make, began, size, start, accumulate=accumulate)[0])) == windows[at:]
    limit = data.draw(st.integers(0, len(alone) + 1))
    limited = read(make, began, epoch=1, limit=limit, accumulate=accumulate)
    shorter, loader = resumed(make, began, size, limit=limit, accumulate=accumulate)
    assert samples_of(pieces_of(shorter)) == samples_of(pieces_of(limited))
    assert [window.num_batches for window in shorter[0]] == [window.num_batches for window in limited[0]]
    assert sum(window.num_batches for window in shorter[0]) == min(limit, len(alone))
    assert loader.num_windows(limit) == len(limited[0]) or kind == "batches"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_ready_batches_by_index_stay_whole(size: int) -> None:
    def make() -> Any:
        return DataLoader(torch.arange(22).reshape(11, 2), batch_size=None)

    def flat(ranks: list[list[Window]]) -> list[list[int]]:
        """The samples of each window in the order (micro-batch, rank)."""
        return [
            [
                sample
                for micros in zip(*(w.micro_batches for w in windows), strict=True)
                for micro in micros
                if micro.num_samples
                for sample in micro.batch.tolist()
            ]
            for windows in zip(*ranks, strict=True)
        ]

    alone = ShardedLoader(make(), rank=0, size=1, seed=3, accumulate=4)
    plan = alone.plan | {"ranks": 1}
    expected = flat([list(alone.windows(0))])
    for start in (0, 8):
        ranks = []
        for rank in range(size):
            loader = ShardedLoader(make(), rank=rank, size=size, seed=3, accumulate=4, sum_over_ranks=lambda n: n)
            loader.resume_windows(plan)
            ranks.append(list(loader.windows(0, start)))
        assert flat(ranks) == expected[start // 8 :]
        assert [window.num_batches for window in ranks[0]] == [4, 4, 3][start // 8 :]


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("began", "size"), [(4, 1), (4, 2), (2, 4), (1, 4), (2, 1)])
@pytest.mark.parametrize(
    "make",
    [
        lambda workers: DataLoader(Stream(29), 2, num_workers=workers),
        lambda _: DataLoader(BatchStream(29), batch_size=None),
    ],
    ids=["items", "batches"],
)
def test_streams_resume_where_whole_batches_share_out(
    make: Callable[[int], Any], began: int, size: int, num_workers: int
) -> None:
    accumulate = 4 // began
    before = read(lambda: make(num_workers), began, epoch=1, accumulate=accumulate)
    after, loader = resumed(lambda: make(num_workers), began, size, accumulate=accumulate)
    windows = samples_of(pieces_of(before))
    assert samples_of(pieces_of(after)) == windows
    assert (
        [window.num_batches for window in after[0]][:-1]
        == [window.num_batches for window in before[0]][:-1]
        == [accumulate] * (len(windows) - 1)
    )
    assert loader.num_micro_batches == 4 // size
    start = sum(map(len, windows[:2]))
    assert (
        samples_of(pieces_of(resumed(lambda: make(num_workers), began, size, start, accumulate=accumulate)[0]))
        == windows[2:]
    )


def test_streams_say_on_which_ranks_they_resume() -> None:
    def resume(make: Callable[[], Any], began: int, size: int, start: int = 0, **options: Any) -> ShardedLoader:
        plan = ShardedLoader(make(), rank=0, size=began, seed=3, sum_over_ranks=int, accumulate=2).plan
        loader = ShardedLoader(make(), rank=0, size=size, seed=3, sum_over_ranks=int, accumulate=2)
        loader.resume_windows(plan, start, **options)
        return loader

    with pytest.raises(
        ValueError,
        match="of Stream, each rank gets complete batches; resume on 1 or 2 or 4, or change accumulate_grad_batches",
    ):
        resume(lambda: DataLoader(Stream(40), 2), 2, 3)
    with pytest.raises(ValueError, match="each rank gets complete batches; resume on 2,"):
        resume(lambda: DataLoader(Stream(40), 2), 2, 4, whole=True)
    with pytest.raises(ValueError, match="drop_last drops by the number of ranks; resume on 2,"):
        resume(lambda: DataLoader(Stream(40), 2, drop_last=True), 2, 4)
    with pytest.raises(ValueError, match="which shards itself, other ranks would see other samples"):
        resume(lambda: DataLoader(OwnStream(40, 0, 2), 2), 2, 4, start=16)
    assert resume(lambda: DataLoader(OwnStream(40, 0, 2), 2), 2, 4).num_micro_batches == 1
    with pytest.raises(ValueError, match="each rank gets complete batches of the 6 of an epoch"):
        resume(lambda: DataLoader(Stream(40), 2), 2, 4).windows(0, limit=3)
    with pytest.raises(ValueError, match="each rank gets complete batches, one a step; resume on 3,"):
        resume(lambda: DataLoader(Numbers(20), batch_sampler=Uneven(20, 3)), 3, 2, whole=True)


def test_one_micro_batch_a_step_where_the_step_is_the_users() -> None:
    before = read(lambda: DataLoader(Numbers(30), 3), 4)
    for size in (1, 2, 3, 6):
        after, loader = resumed(lambda: DataLoader(Numbers(30), 3), 4, size, whole=True)
        assert loader.num_micro_batches == 1 and all(len(window.micro_batches) == 1 for window in after[0])
        assert (
            samples_of(pieces_of(after))
            == [list(range(12)), list(range(12, 24)), list(range(24, 30))]
            == samples_of(pieces_of(before))
        )


def test_another_batch_size_or_accumulation_is_taken_for_what_is_wanted() -> None:
    plan = ShardedLoader(DataLoader(Numbers(40), 4), rank=0, size=2, seed=3, accumulate=2).plan
    for batch_size, accumulate in ((8, 2), (4, 4)):
        loader = ShardedLoader(DataLoader(Numbers(40), batch_size), rank=0, size=1, seed=3, accumulate=accumulate)
        assert loader.resume_windows(plan) is None and loader.batch_size == 16
    loader = ShardedLoader(DataLoader(Numbers(40), 16), rank=0, size=3, seed=3, accumulate=2, split=True)
    assert loader.resume_windows(loader.plan | {"ranks": 2}) is None, "a split global batch never depends on ranks"
    loader = ShardedLoader(DataLoader(Numbers(40), 4), rank=0, size=3, seed=3, accumulate=2)
    assert loader.resume_windows(plan) == (
        "the run began on 2 data ranks and continues on 3: global batches keep 16 samples, in 2 micro-batches a step "
        "(accumulate_grad_batches=2 at its start); batches are counted as before"
    )


@pytest.mark.unit
@pytest.mark.parametrize("ranks", [2, 6, 12], ids=str)
@pytest.mark.parametrize("samples", [48, 43], ids=str)
def test_a_group_keeps_its_samples_on_other_ranks(ranks: int, samples: int) -> None:
    def seen(size: int, planned: bool) -> list[list[set[int]]]:
        """Of each window the samples of each of two groups."""
        windows: list[list[set[int]]] = []
        for rank in range(size):
            loader = ShardedLoader(
                DataLoader(range(samples), 3, shuffle=True), rank=rank, size=size, seed=1, accumulate=2, groups=2
            )
            plan = {"ranks": 4, "batch_size": 3, "accumulate": 2, "split": False}
            assert (loader.resume_windows(plan) is not None) == planned
            for i, window in enumerate(loader.windows(0)):
                if rank == 0:
                    windows.append([set(), set()])
                    assert window.num_samples == min(24, samples - 24 * i)
                for part in window.micro_batches:
                    new = set(part.batch.tolist()) if part.num_samples else set()
                    mine = windows[i][rank * 2 // size]
                    assert len(new) == part.num_samples <= 3 and not mine & new
                    mine |= new
        return windows

    expected = seen(4, False)
    assert sorted(number for window in expected for group in window for number in group) == [*range(samples)]
    assert seen(ranks, True) == expected
