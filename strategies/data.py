"""Which samples each rank sees, when: duty three of the Strategy contract.

An epoch has an order: a pure function of (seed, epoch), equal on all ranks. It is cut into global
micro-batches, each of them into one contiguous piece a rank, and `accumulate` of them make a window.
So a global batch is the same set of samples on any number of ranks, and the pieces in the order
(micro-batch, rank) give the epoch's order back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from strategies.combined import CombinedLoader
from strategies.fetcher import Items, Randomness, Samples, Share, Workers, announce, guess_batch_size, keep
from strategies.permutation import Permutation, mix


@dataclass(slots=True)
class MicroBatch:
    """What one rank feeds one forward with."""

    batch: Any
    """What the loader's collate function made."""
    num_samples: int
    """Samples of this rank's batch; 0 marks padding: a batch to run with zero weight where ranks must keep step."""
    batch_idx: int = 0
    """Index of the batch in its epoch on this rank; set by who drives the loop."""
    output: Any = None
    """What the step function returned for it, detached; set by `forward_backward`."""


@dataclass(slots=True)
class Window:
    """What one optimizer step sees: this rank's micro-batches, in order; equally many on every rank."""

    micro_batches: list[MicroBatch]
    num_samples: int
    """Samples over all micro-batches and ranks."""
    num_batches: int = 0
    """What it adds to the loader's count of batches: its micro-batches; after `resume_windows` those of the run that began."""


class ShardedLoader:
    """This rank's share of a loader, in windows of one optimizer step.

    What a loader may be, and how it is shared out:

    - a DataLoader over a map-style dataset. `batch_size` is per rank, or with `split` the global batch
      of a window. Its RandomSampler becomes a computed permutation and a DistributedSampler is
      replaced; any other sampler or batch sampler keeps its order: every rank iterates all of it, under
      a random state seeded from (seed, epoch), reading ahead (1,024 indices or 32 batches). A custom batch sampler
      keeps its batches: batch i goes to rank i % size, or is cut with `split`;
    - a DataLoader over an IterableDataset: every rank and every worker iterates all of it, as if alone
      (`get_worker_info()` is None), under a random state seeded from (seed, epoch), and keeps its share.
      So it must yield the same on every rank. A dataset with the attribute `shards_itself = True` is
      iterated as it is, and the ranks agree on each window with a collective;
    - any other iterable of batches, or a function that returns one: every rank iterates all of it and
      batch i goes to rank i % size. An object with only `__getitem__` and `__len__`, like a DataLoader
      with `batch_size=None`, is read by each rank for its own batches. The number of samples is guessed.

    In workers the random state is seeded for each sample from (seed, epoch, its place in the order), so
    an augmentation depends on neither the number of ranks and workers nor on where a run resumed.
    Without workers samples draw from the run's own random state; iterating itself draws nothing from it.

    `rank` of `size` counts the ranks that see different samples. `sum_over_ranks` is a collective that
    sums an int over them; it is called once a window where a rank cannot know the others' samples.

    Raises ValueError where the loader is empty or cannot be cut as asked, TypeError for what is no loader.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        size: int,
        seed: int,
        shuffle: bool | None = None,
        accumulate: int = 1,
        split: bool = False,
        sum_over_ranks: Callable[[int], int] | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, size), but rank is {rank} and size is {size}")
        if accumulate < 1:
            raise ValueError(f"accumulate is the number of micro-batches of a window and must be at least 1, but it is {accumulate}")
        self.loader = loader
        """The loader as it was given."""
        self.dataset = getattr(loader, "dataset", loader)
        """The dataset of the loader; the loader itself where it has none."""
        self._shuffle = shuffle
        self._source = _source(loader, Share(rank, size, seed, accumulate, split), shuffle)
        self._sum = sum_over_ranks
        if size > 1 and sum_over_ranks is None and self._source.counts_own:
            raise ValueError(f"{type(loader).__name__} shows a rank only its own samples, so sum_over_ranks must be given when size is {size}")
        if self._source.num_micro_batches == 0:
            raise ValueError(f"the loader is empty: {self._source.describe()}")

    def windows(self, epoch: int, start: int = 0, limit: int | None = None) -> Iterator[Window]:
        """The windows of `epoch` that follow its first `start` samples (over all ranks).

        `limit` is the number of batches (as in `len`) of the whole epoch. To start later costs nothing
        where the order is computed; other samplers and iterables are replayed and skipped, unless
        `load_state_dict` brought an iterable dataset's own state. Every rank calls it alike and reads
        equally many windows. Raises ValueError for a loader that yields nothing, RuntimeError where an
        iterator is read a second time.
        """
        if start < 0 or (limit is not None and limit < 0):
            raise ValueError(f"start and limit must not be negative, but start is {start} and limit is {limit}")
        self._source.check(start)
        limit = self._source.limit_here(limit)
        return self._agreed_windows(epoch, start, limit) if self._source.shards_itself else self._windows(epoch, start, limit)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of epoch 0, read apart from any `windows`; other ranks need not take part."""
        self._source.check(0)
        apart = _source(self.loader, self._source.share, self._shuffle)
        return (batch for batch, num_samples, *_ in apart.pieces(0, 0, None) if num_samples)

    def __len__(self) -> int:
        """Batches (`Window.num_batches`) of an epoch on each rank. Raises TypeError where that is unknown."""
        if self._source.num_micro_batches is None:
            raise TypeError(f"{type(self.loader).__name__} over {type(self.dataset).__name__} has no length")
        return self._source.num_micro_batches

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks, or None where that is unknown."""
        return self._source.num_samples

    @property
    def batch_size(self) -> int | None:
        """Samples of a full window over all ranks, or None where batches are not ours to cut."""
        return self._source.window_samples

    def num_windows(self, limit: int | None = None) -> int | None:
        """Windows of an epoch of at most `limit` batches a rank, or None where its length is unknown."""
        total = self._source.num_micro_batches
        if total is None:
            return None
        return -(-(total if limit is None else min(total, limit)) // self._source.window_micro_batches)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a full window on each rank."""
        return self._source.window_parts

    @property
    def plan(self) -> dict[str, Any]:
        """By what windows are measured, for `resume_windows`: JSON data, the same on all ranks."""
        share = self._source.share
        return {"ranks": share.ranks, "batch_size": self._source.batch_size, "accumulate": share.accumulate, "split": share.split}

    def resume_windows(self, plan: Mapping[str, Any], start: int = 0, whole: bool = False) -> str | None:
        """Go on with the windows of a run that had `plan`, on another number of ranks; return what was done, None for nothing.

        Windows keep their samples; batches are measured, limited and counted as in that run. Each window is
        cut anew over ranks and micro-batches, none of which has more samples a rank than was planned, or
        with `whole` into one micro-batch. Where batch size or accumulation is another than in `plan`, that
        is taken for what is wanted. `start` samples of the epoch are done. Every rank calls it alike,
        before `windows`. Raises ValueError where batches that are not ours to cut do not share out.
        """
        mine, share = self.plan, self._source.share
        if plan["split"] or plan["ranks"] == share.size or any(plan[key] != mine[key] for key in ("batch_size", "accumulate", "split")):
            return None
        self._source = _source(self.loader, replace(share, planned=plan["ranks"], whole=whole), self._shuffle)
        self._source.check_planned(start)
        size = self.batch_size
        return (
            f"the run began on {plan['ranks']} ranks with different data and goes on on {share.size}: "
            f"{f'global batches of {size} samples stay' if size else 'global batches stay'}, in {self.num_micro_batches} micro-batches a step "
            f"(accumulate_grad_batches={share.accumulate} as it began); batches are counted as they were"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of an iterable dataset that has its own, after the last window read; else {}.

        A dataset's copies in DataLoader workers are out of reach: then it is {}, and resuming replays.
        The state is the same on all ranks, unless the dataset shards itself.
        """
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state` for the next `windows` of its epoch, which then need not replay."""
        self._source.load_state_dict(state)

    def _windows(self, epoch: int, start: int, limit: int | None) -> Iterator[Window]:
        micro_batches: list[MicroBatch] = []
        total, empty = 0, start == 0 and limit != 0
        for batch, num_samples, all_samples, closes in self._source.pieces(epoch, start, limit):
            micro_batches.append(MicroBatch(batch, num_samples))
            total += all_samples
            if closes:
                yield Window(micro_batches, self._over_ranks(total), closes)
                micro_batches, total, empty = [], 0, False
        if micro_batches:
            yield Window(micro_batches, self._over_ranks(total), self._source.batches_of(len(micro_batches)))
        elif empty:
            raise ValueError(f"the loader yielded no batch in epoch {epoch}: {self._source.describe()}")

    def _over_ranks(self, total: int) -> int:
        return self._sum(total) if self._sum is not None and self._source.counts_own and self._source.share.size > 1 else total

    def _agreed_windows(self, epoch: int, start: int, limit: int | None) -> Iterator[Window]:
        """Windows of a dataset that shards itself: no rank knows when the others end."""
        seen, done = self._source.resumed(epoch, start)
        pieces = self._source.pieces(epoch, start, None)
        padding, empty = None, start == 0 and limit != 0
        while limit is None or done < limit:
            want = self._source.window_parts if limit is None else min(self._source.window_parts, limit - done)
            mine = [MicroBatch(batch, num_samples) for batch, num_samples, _, _ in islice(pieces, want)]
            # One sum carries both the samples and how many ranks ran short.
            shared = self._over_ranks(sum(micro.num_samples for micro in mine) + ((len(mine) < want) << 32))
            if shared >> 32:
                have = 0
                while have < want and self._over_ranks(int(len(mine) > have)):
                    have += 1
                want = have
            if want == 0:
                break
            if mine:
                padding = mine[-1].batch
            mine += [MicroBatch(padding, 0) for _ in range(want - len(mine))]
            seen, done, empty = seen + shared % (1 << 32), done + want, False
            if seen > start:
                self._source.mark(seen, done)
                yield Window(mine, shared % (1 << 32), self._source.batches_of(want))
        if empty:
            raise ValueError(f"the loader yielded no batch in epoch {epoch}: {self._source.describe()}")


# ---- where batches come from ---------------------------------------------------------------------

_READ_AHEAD, _READ_AHEAD_BATCHES = 1024, 32
"""Indices, or batches of them, of a user's sampler that are read at once, as switching the random state costs about 25 us."""
_BLOCK = 4096
"""Indices of the permutation that are computed at once."""


_Piece: TypeAlias = tuple[Any, int, int, int]
"""A micro-batch: (batch, samples of this rank, samples of all ranks, batches of the window that it ends, else 0)."""
_Task: TypeAlias = tuple[Any, int, int, int, int]
"""What to fetch for one: (indices, position of the first in the order, then as in `_Piece`)."""


class _Source(ABC):
    """Where the pieces of a rank come from."""

    share: Share
    num_samples: int | None = None
    num_micro_batches: int | None = None
    window_samples: int | None = None
    window_micro_batches: int
    """Batches of a full window, as counted."""
    batch_size: int | None = None
    """The loader's own, or None where its batches are not ours to cut."""
    counts_own = False
    """True where a rank counts only its own samples."""
    shards_itself = False

    @abstractmethod
    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[_Piece]: ...

    @abstractmethod
    def describe(self) -> str:
        """What was looked at, for the message that it is empty."""

    @abstractmethod
    def check(self, start: int) -> None:
        """Raise where an epoch cannot be read from `start`."""

    @property
    def window_parts(self) -> int:
        """Micro-batches of a full window."""
        return self.share.num_parts() if self.share.planned else self.window_micro_batches

    @abstractmethod
    def check_planned(self, start: int) -> None:
        """Raise where an epoch cannot go on after `start` samples with the windows of another number of ranks."""

    def batches_of(self, num_micro_batches: int) -> int:
        """Batches of a last window that is shorter than a full one and was not known to be the last."""
        # After `resume_windows` up to a micro-batch more than were read, as that is not known: an epoch ends with it.
        return min(self.share.accumulate, -(-num_micro_batches * self.share.size // self.share.ranks))

    def limit_here(self, limit: int | None) -> int | None:
        """A limit in batches as `pieces` takes it."""
        return limit

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError("the loader's state comes from an iterable dataset with its own state, read without workers, which this loader is not")

    def resumed(self, epoch: int, start: int) -> tuple[int, int]:
        """Samples and micro-batches that a loaded state makes it needless to replay."""
        return 0, 0

    def mark(self, samples: int, micro_batches: int) -> None:
        """Note what all ranks have read, for `state_dict`, where this one cannot know it."""
        raise NotImplementedError


def _source(loader: Any, share: Share, shuffle: bool | None) -> _Source:
    if isinstance(loader, CombinedLoader):
        return _Combined(loader, share, shuffle)
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__ and type(loader)._get_iterator is DataLoader._get_iterator:
        return _Streamed(loader.dataset, share, shuffle, loader) if isinstance(loader.dataset, IterableDataset) else _Indexed(loader, share, shuffle)
    if hasattr(loader, "__iter__"):
        return _Streamed(loader, share, shuffle)
    if hasattr(loader, "__getitem__") and hasattr(loader, "__len__"):
        return _Indexed(DataLoader(loader, batch_size=None, collate_fn=keep), share, shuffle)
    if callable(loader):
        return _Streamed(_Factory(loader), share, shuffle)
    raise TypeError(f"a loader is a DataLoader, an iterable of batches or a function that returns one, but it is {type(loader).__name__}")


class _Indexed(_Source):
    """A map-style dataset: ranks know the order and fetch only their own pieces."""

    def __init__(self, loader: DataLoader[Any], share: Share, shuffle: bool | None) -> None:
        self.share = share
        self.window_micro_batches = share.accumulate
        self._workers = Workers(loader, share)
        sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self._batches = loader.batch_sampler is not None and type(sampler) is not BatchSampler
        if self._batches and shuffle is not None:
            raise ValueError(f"shuffle={shuffle} cannot be forced on {type(sampler).__name__}, which makes its own batches: give the DataLoader a batch_size")
        cut = type(sampler) is BatchSampler
        self.counts_own = not cut and not self._batches
        if self.counts_own and share.split and share.size * share.accumulate > 1:
            raise ValueError(f"split needs batches that can be cut, but {_name(loader)} makes its own (batch_size is None)")
        self._drop_last: bool
        batch_size, self._drop_last = (sampler.batch_size, sampler.drop_last) if cut else (1, False)
        self.batch_size = batch_size if cut else None
        self._order(sampler.sampler if cut else sampler, loader, shuffle)
        self._unit: int = batch_size if share.split else batch_size * share.ranks
        # A fetched key is a list of samples to collate, a list that the dataset takes whole, or one ready batch.
        self._fetcher = Samples(loader.dataset, loader.collate_fn, share.seed, one_by_one=loader.batch_sampler is not None)
        self._measure()

    def _order(self, sampler: Any, loader: DataLoader[Any], shuffle: bool | None) -> None:
        """Find what decides the order: `_length` and `_shuffled`, or the user's own `_sampler`."""
        self._sampler: Any = None
        self._shuffled = bool(shuffle)
        if shuffle is not None:
            self._length: int | None = len(loader.dataset)  # type: ignore[arg-type]
        elif type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
            self._length, self._shuffled = len(sampler.data_source), True
        elif type(sampler) is SequentialSampler:
            self._length = len(sampler.data_source)
        elif type(sampler) is DistributedSampler:
            self._length, self._shuffled = len(sampler.dataset), sampler.shuffle  # type: ignore[arg-type]
            self._drop_last = self._drop_last or sampler.drop_last
        elif getattr(sampler, "num_replicas", 1) != 1:
            raise ValueError(
                f"{type(sampler).__name__} has num_replicas={sampler.num_replicas}, but Lockstep itself shares samples out: give it num_replicas=1 and rank=0"
            )
        else:
            self._sampler, self._length = sampler, _length(sampler)

    def _measure(self) -> None:
        if self._length is None:
            full = None
        else:
            full = self._length - self._length % self._unit if self._drop_last else self._length
        share = self.share
        if self._batches:
            if full is not None:
                self.num_micro_batches = full * share.accumulate if share.split else -(-full // share.ranks)
        elif share.split:
            self.window_micro_batches = min(share.accumulate, self._unit)
            if full is not None:
                windows, rest = divmod(full, self._unit)
                self.num_micro_batches = windows * self.window_micro_batches + min(share.accumulate, rest)
        elif full is not None:
            self.num_micro_batches = -(-full // self._unit)
        if not self.counts_own and not self._batches:
            self.num_samples = full
            self.window_samples = self._unit if share.split else self._unit * share.accumulate

    def describe(self) -> str:
        if self._drop_last and self._length:
            return f"drop_last drops the only global micro-batch, as the dataset has {self._length} samples and a full one {self._unit}"
        return f"{_name(self._fetcher.dataset)} has {self._length or 0} samples or its sampler gives none"

    def check(self, start: int) -> None:
        if self.num_samples is not None and self._length is not None and start > self._length:
            raise ValueError(f"start is a number of samples of the epoch, which has {self._length}, but start is {start}")

    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[_Piece]:
        if start and self.counts_own:
            start = self._items_before(epoch, start)
        tasks = self._tasks(epoch, start, limit)
        counts: deque[tuple[int, int, int]] = deque()

        def keys() -> Iterator[tuple[int, int, Any]]:
            for indices, position, num_samples, all_samples, closes in tasks:
                counts.append((num_samples, all_samples, closes))
                yield epoch, position, indices[0] if self.counts_own else indices

        for batch in self._workers.run(self._fetcher, keys(), epoch):
            num_samples, all_samples, closes = counts.popleft()
            if self.counts_own:
                num_samples = all_samples = guess_batch_size(batch) if num_samples else 0
            yield batch, num_samples, all_samples, closes

    def check_planned(self, start: int) -> None:
        share = self.share
        if share.whole and share.size < share.planned and (self._batches or self.counts_own):
            raise _cannot_share(self._fetcher.dataset, share, "each rank takes whole batches, one a step", [share.planned])

    def _items_before(self, epoch: int, start: int) -> int:
        """How many batches hold the first `start` samples: only reading them tells."""
        alone = replace(self.share, rank=0, size=1)
        tasks = self._indices(epoch, self._cut(self._units(epoch, 0, 1), 0, alone))
        keys = ((epoch, position, indices[0]) for indices, position, *_ in tasks)
        seen = number = 0
        # What the dataset draws here was drawn before the run was interrupted.
        with Randomness(0):
            for batch in self._workers.run(self._fetcher, keys, epoch):
                number += 1
                seen += guess_batch_size(batch)
                if seen >= start:
                    break
        return number

    def _tasks(self, epoch: int, start: int, limit: int | None) -> Iterator[_Task]:
        share = self.share
        if share.planned:  # the limit, which counts as planned, may end inside what is one micro-batch here
            stop = None if limit is None else limit * self._unit
            if self._batches:
                batches, passed, _ = self._batches_after(epoch, start)
                return self._deal(batches if stop is None else islice(batches, max(0, stop - passed)), start)
            return self._indices(epoch, self._cut(self._units(epoch, start, self._unit * share.accumulate, stop), start, share))
        if self._batches:
            batches, passed, done = self._batches_after(epoch, start)
            done = done if share.split else passed // share.size
            tasks = self._cut(batches, start, share) if share.split else self._deal(batches, start)
        else:
            done = start // self._unit * (self.window_micro_batches if share.split else 1)
            tasks = self._indices(epoch, self._cut(self._units(epoch, start, self._unit), start, share))
        return tasks if limit is None else islice(tasks, max(0, limit - done))

    def _units(self, epoch: int, start: int, unit: int, limit: int | None = None) -> Iterator[Sequence[Any]]:
        """What is cut as a whole, of the first `limit` samples: positions of the order, or a user's sampler's own indices."""
        if self._sampler is None:
            assert self._length is not None
            stop = self._length - self._length % self._unit if self._drop_last else self._length
            stop = stop if limit is None else min(stop, limit)
            for begin in range(start, stop, unit):
                yield range(begin, min(begin + unit, stop))
            return
        indices = islice(self._replay(epoch), limit)
        deque(islice(indices, start), maxlen=0)
        while taken := list(islice(indices, unit)):
            if self._drop_last and len(taken) < unit:
                # Where `start` is no multiple of the unit, what an undisturbed epoch keeps may end inside this one.
                taken = taken[: max(0, len(taken) - (start + len(taken)) % self._unit)]
                if not taken:
                    return
            yield taken
            start += len(taken)

    def _cut(self, units: Iterator[Sequence[Any]], position: int, share: Share) -> Iterator[_Task]:
        most = share.num_parts() if share.planned else share.accumulate if share.split else 1
        for number, unit in enumerate(units, 1):
            parts = min(most, len(unit))
            for part in range(parts):
                begin, end = _bounds(len(unit), part, parts)
                first, last = _bounds(end - begin, share.rank, share.size)
                closes = 0
                if share.planned or share.split:
                    closes = (-(-len(unit) // self._unit) if share.planned else parts) if part + 1 == parts else 0
                elif number % share.accumulate == 0:
                    closes = share.accumulate
                mine = unit[begin + first : begin + last] or unit[begin : begin + 1]
                yield mine, position + begin + first, last - first, end - begin, closes
            position += len(unit)

    def _indices(self, epoch: int, tasks: Iterator[_Task]) -> Iterator[_Task]:
        """Turn ranges of positions into lists of indices, many at once."""
        if self._sampler is not None:
            yield from tasks
            return
        assert self._length is not None
        permutation = Permutation(self._length, self.share.seed, epoch) if self._shuffled else None
        at_once = max(1, _BLOCK * self.share.size // self._unit)
        while block := list(islice(tasks, at_once)):
            if permutation is None:
                for task in block:
                    yield list(task[0]), *task[1:]
                continue
            indices = permutation.take(np.concatenate([np.arange(task[0].start, task[0].stop) for task in block])).tolist()
            begin = 0
            for task in block:
                end = begin + len(task[0])
                yield indices[begin:end], *task[1:]
                begin = end

    def _batches_after(self, epoch: int, start: int) -> tuple[Iterator[list[Any]], int, int]:
        """The batches of a user's batch sampler after `start` samples, how many they follow, and in how many parts if split."""
        batches = map(list, self._replay(epoch))
        passed = parts = 0
        while start > 0:
            batch = next(batches, None)
            if batch is None:
                break
            if len(batch) > start:
                return chain([batch[start:]], batches), passed, parts
            start -= len(batch)
            passed += 1
            parts += min(self.share.accumulate, len(batch))
        return batches, passed, parts

    def _deal(self, batches: Iterator[list[Any]], position: int) -> Iterator[_Task]:
        share = self.share
        while window := list(islice(batches, share.ranks * share.accumulate)):
            for begin in range(0, len(window), share.size):
                dealt = window[begin : begin + share.size]
                sizes = [len(batch) for batch in dealt]
                closes = -(-len(window) // share.ranks) if begin + share.size >= len(window) else 0
                if share.rank < len(dealt):
                    yield dealt[share.rank], position + sum(sizes[: share.rank]), sizes[share.rank], sum(sizes), closes
                else:
                    yield dealt[0][:1], position, 0, sum(sizes), closes
                position += sum(sizes)

    def _replay(self, epoch: int) -> Iterator[Any]:
        """Iterate the user's sampler as every other rank does, leaving the run's random state alone."""
        ahead = _READ_AHEAD_BATCHES if self._batches else _READ_AHEAD
        announce(self._sampler, self.share.seed, epoch)
        apart = Randomness(mix(self.share.seed, epoch))
        with apart:
            items = iter(self._sampler)
        while True:
            with apart:
                read = list(islice(items, ahead))
            yield from read
            if len(read) < ahead:
                return


class _Streamed(_Source):
    """An iterable dataset, or any iterable of batches: every rank iterates all of it and keeps its share."""

    def __init__(self, iterable: Any, share: Share, shuffle: bool | None, loader: DataLoader[Any] | None = None) -> None:
        name = _name(iterable)
        if shuffle:
            raise ValueError(f"shuffle=True needs a dataset with indices, but {name} can only be iterated")
        self.share = share
        self.window_micro_batches = share.accumulate
        self.batch_size = None if loader is None else loader.batch_size
        self._iterable = iterable
        self._workers = None if loader is None else Workers(loader, share)
        self.shards_itself = self.counts_own = loader is not None and bool(getattr(iterable, "shards_itself", False))
        batch_size = None if loader is None else loader.batch_size
        if share.split and share.size * share.accumulate > 1:
            if batch_size is None:
                raise ValueError(f"split needs batches that can be cut, but {name} yields ready ones")
            if batch_size % (share.size * share.accumulate):
                raise ValueError(
                    f"with split the batch_size of an iterable dataset must divide by ranks times micro-batches, but it is {batch_size} "
                    f"and they are {share.size} * {share.accumulate}"
                )
            batch_size //= share.size * share.accumulate
        self._fetcher = Items(iterable, share, batch_size, None if loader is None else loader.collate_fn, loader is not None and loader.drop_last)
        self._runs = count()
        self._read = False
        self._live: Items | None = None
        self._loaded: Mapping[str, Any] | None = None
        if batch_size is not None:
            self.window_samples = batch_size * share.ranks * share.accumulate
        length = None if self.shards_itself else _length(iterable)
        if length is not None:
            unit = (batch_size or 1) * share.ranks
            if loader is not None and loader.drop_last:
                length -= length % unit
            self.num_micro_batches = -(-length // unit)
            self.num_samples = None if batch_size is None else length

    def check_planned(self, start: int) -> None:
        share, name = self.share, self._iterable
        if self.shards_itself and start:
            raise _cannot_share(name, share, "which shards itself, other ranks would see other samples before the epoch ends", [share.planned])
        if self._fetcher.drop_last:
            raise _cannot_share(name, share, "drop_last drops by the number of ranks", [share.planned])
        if share.whole or share.planned * share.accumulate % share.size:
            raise _cannot_share(name, share, "each rank takes whole batches", _divisors(share.planned * share.accumulate, share))

    def limit_here(self, limit: int | None) -> int | None:
        share = self.share
        if limit is None or not share.planned:
            return limit
        if limit * share.planned % share.size:
            raise _cannot_share(self._iterable, share, f"each rank takes whole batches of the {limit * share.planned} of an epoch", [share.planned])
        return limit * share.planned // share.size

    def describe(self) -> str:
        return f"{_name(self._iterable)} gives no item" + (" or drop_last drops all" if self._fetcher.drop_last else "")

    def check(self, start: int) -> None:
        # A length that an iterable reports is an estimate, so `start` is not checked against it.
        if self._read and isinstance(self._iterable, Iterator):
            raise RuntimeError(
                f"{_name(self._iterable)} is an iterator and can be read only once: give a list, a DataLoader or a function that returns a new iterator"
            )
        self._read = True

    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[_Piece]:
        run = next(self._runs)
        if self.shards_itself:
            # The ranks agree on the windows to skip and on the last.
            start, limit = self.resumed(epoch, start)[0], None
        keys = ((run, epoch, start, limit, number) for number in count())
        fetcher = self._fetcher.copy()
        if self._workers is None or not self._workers.num_workers:
            self._live = fetcher
            if self._loaded is not None and self._fits(epoch, start):
                fetcher.resume(self._loaded)
            self._loaded = None
        fetched = map(fetcher.__getitem__, keys) if self._workers is None else self._workers.run(fetcher, keys, epoch)
        still = max(1, self._workers.num_workers) if self.shards_itself and self._workers is not None else 1
        number = 0
        for batch, num_samples, all_samples in fetched:
            if all_samples < 0:
                still -= 1
                if not still:
                    return
                continue
            number += 1
            yield batch, num_samples, all_samples, 0 if number % self.window_parts else self.share.accumulate

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return dict(self._loaded)
        return {} if self._live is None else self._live.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            self._loaded = None
        elif not self._fetcher.has_state or (self._workers is not None and self._workers.num_workers):
            super().load_state_dict(state)
        elif set(state) != set(Items.STATE):
            raise ValueError(f"the state of an iterable dataset has the keys {sorted(Items.STATE)}, but it has {sorted(state)}")
        else:
            self._loaded = state

    def resumed(self, epoch: int, start: int) -> tuple[int, int]:
        return (self._loaded["samples"], self._loaded["micro_batches"]) if self._loaded is not None and self._fits(epoch, start) else (0, 0)

    def _fits(self, epoch: int, start: int) -> bool:
        return self._loaded is not None and self._loaded["epoch"] == epoch and self._loaded["samples"] <= start

    def mark(self, samples: int, micro_batches: int) -> None:
        if self._live is not None:
            self._live.samples, self._live.micro_batches = samples, micro_batches


class _Combined(_Source):
    """Batches of several loaders, each a unit that one rank gets; the units go to the ranks in turn."""

    def __init__(self, combined: CombinedLoader, share: Share, shuffle: bool | None) -> None:
        if share.split and share.size * share.accumulate > 1:
            raise ValueError("split needs batches that can be cut, but those of several loaders are not: leave split_batches out")
        self.share = share
        self.window_micro_batches = share.accumulate
        self._combined = combined
        self._sources = {name: _source(loader, Share(0, 1, mix(share.seed, i), 1, False), shuffle) for i, (name, loader) in enumerate(combined.named().items())}
        for name, source in self._sources.items():
            if source.shards_itself:
                raise ValueError(f"a dataset that shards itself cannot be combined with others, as ranks may have other numbers of batches, but {name!r} does")
        self._length = combined.length([source.num_micro_batches for source in self._sources.values()])
        if any(source.num_micro_batches == 0 for source in self._sources.values()):
            self._length = 0
        if self._length is not None:
            self.num_micro_batches = -(-self._length // share.ranks)
        sizes = [source.batch_size for source in self._sources.values()]
        if combined.mode != "sequential" and None not in sizes:
            self.window_samples = sum(size or 0 for size in sizes) * share.ranks * share.accumulate

    def describe(self) -> str:
        return "; ".join(f"{name!r}: {source.describe()}" for name, source in self._sources.items() if source.num_micro_batches in (0, None))

    def check(self, start: int) -> None:
        for source in self._sources.values():
            source.check(0)

    def check_planned(self, start: int) -> None:
        share = self.share
        if share.whole and share.size < share.planned:
            raise _cannot_share(self._combined, share, "each rank takes whole batches, one a step", [share.planned])

    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[_Piece]:
        share, end = self.share, self._length
        if limit is not None:
            end = limit * share.ranks if end is None else min(end, limit * share.ranks)
        first = self._units_before(epoch, start) if start else 0
        a_window = share.ranks * share.accumulate

        def place(unit: int) -> tuple[int, int, int]:
            """Its number in its window, the rank that gets it, and how many ranks get one with it."""
            inside = (unit - first) % a_window
            rank = inside % share.size
            left = a_window - inside + rank
            return inside, rank, min(share.size, left if end is None else min(left, end - unit + rank))

        def is_mine(unit: int) -> bool:
            _, rank, num_ranks = place(unit)
            pads = (rank == 0 and share.rank >= num_ranks) or (self._length is None and unit == first)  # a rank without one needs another's
            return unit >= first and (rank == share.rank or pads)

        mine, num_samples, all_samples = None, 0, 0
        inside, open_ = 0, False
        for unit, (batch, its_samples) in enumerate(islice(self._units(epoch, end, is_mine), first, end if end is None else max(first, end)), first):
            inside, rank, num_ranks = place(unit)
            all_samples += its_samples
            if is_mine(unit):
                mine, num_samples = batch, its_samples if rank == share.rank else 0
            open_ = rank + 1 < num_ranks
            if not open_:
                closes = -(-(inside + 1) // share.ranks) if inside + 1 == a_window or unit + 1 == end else 0
                yield mine, num_samples, all_samples, closes
                num_samples = all_samples = 0
        if open_:
            yield mine, num_samples, all_samples, -(-(inside + 1) // share.ranks)

    def _units_before(self, epoch: int, start: int) -> int:
        """How many units hold the first `start` samples; of datasets with indices none is read."""
        seen = number = 0
        with Randomness(0):  # what reading draws was drawn before the run was interrupted
            for _, num_samples in self._units(epoch, self._length, lambda unit: False):
                if seen >= start:
                    break
                seen += num_samples
                number += 1
        self.check(0)
        return number

    def _units(self, epoch: int, end: int | None, is_mine: Callable[[int], bool]) -> Iterator[tuple[Any, int]]:
        """(what a step gets, its samples) unit by unit; None in place of what is not this rank's to fetch."""
        combined = self._combined
        if combined.mode == "sequential":
            unit = 0
            for source in self._sources.values():
                for batch, num_samples in _numbered(source, epoch, unit, end, is_mine):
                    unit += 1
                    yield batch, num_samples
            return
        running = {name: _numbered(source, epoch, 0, end, is_mine) for name, source in self._sources.items()}
        cycles = dict.fromkeys(running, 0)
        for unit in count() if end is None else range(end):
            batches, total = {}, 0
            for name in running:
                item = next(running[name], None)
                if item is None:
                    if combined.mode == "min_size":
                        return
                    cycles[name] += 1
                    if all(cycles.values()) and self._length is None:
                        return
                    item = None, 0
                    if combined.mode == "max_size_cycle":
                        running[name] = _numbered(self._sources[name], epoch + (cycles[name] << 32), unit, end, is_mine)
                        item = next(running[name], None)
                        if item is None:
                            raise ValueError(f"the loader {name!r} yielded no batch in epoch {epoch}: {self._sources[name].describe()}")
                batches[name] = item[0]
                total += item[1]
            yield combined.together(batches), total


def _numbered(source: _Source, epoch: int, first: int, end: int | None, is_mine: Callable[[int], bool]) -> Iterator[tuple[Any, int]]:
    """(batch, samples) of an epoch of a loader on one process, the first of which has the number `first`; None where it is not to be fetched."""
    if not isinstance(source, _Indexed) or source.counts_own:
        yield from ((batch, num_samples) for batch, num_samples, *_ in source.pieces(epoch, 0, None))
        return
    tasks = enumerate(islice(source._tasks(epoch, 0, None), None if end is None else max(0, end - first)), first)
    known: deque[tuple[bool, int]] = deque()
    to_fetch: deque[tuple[int, int, Any]] = deque()

    def look_ahead() -> bool:
        for number, (indices, position, num_samples, *_) in tasks:
            known.append((is_mine(number), num_samples))
            if known[-1][0]:
                to_fetch.append((epoch, position, indices))
            return True
        return False

    def keys() -> Iterator[tuple[int, int, Any]]:
        """Workers ask for several at once; without them none is read before its turn, as that may draw random numbers."""
        while to_fetch or look_ahead():
            if to_fetch:
                yield to_fetch.popleft()

    fetched = source._workers.run(source._fetcher, keys(), epoch)
    while known or look_ahead():
        is_here, num_samples = known.popleft()
        yield next(fetched) if is_here else None, num_samples


@dataclass(frozen=True)
class _Factory:
    """An iterable of what a function returns."""

    make: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def _cannot_share(loader: Any, share: Share, why: str, counts: Sequence[int]) -> ValueError:
    """What to say where a run cannot go on with its global batches on this number of ranks."""
    return ValueError(
        f"the run began on {share.planned} ranks and cannot keep its global batches on {share.size}: of {_name(loader)}, {why}; "
        f"resume on {' or '.join(map(str, counts))}, or give another accumulate_grad_batches, which makes other global batches"
    )


def _divisors(number: int, share: Share) -> list[int]:
    """The numbers of ranks, around those that there were, over which `number` whole batches share out."""
    if share.whole:
        return [share.planned]
    most = max(share.planned, share.size) * 2
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _name(value: Any) -> str:
    return getattr(value.make, "__name__", "the function") if isinstance(value, _Factory) else type(value).__name__


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _bounds(length: int, part: int, parts: int) -> tuple[int, int]:
    """Begin and end of one of `parts` contiguous pieces, the first of which are one longer where they must be uneven."""
    quotient, rest = divmod(length, parts)
    begin = part * quotient + min(part, rest)
    return begin, begin + quotient + (part < rest)


__all__ = ["MicroBatch", "ShardedLoader", "Window", "guess_batch_size"]
