"""A map-style dataset: the order of an epoch is known, and each rank fetches its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lockstep.strategies.data.batch_rows import count_samples, guess_batch_size
from lockstep.strategies.data.fetchers import Once, Samples, escaped
from lockstep.strategies.data.permutation import Permutation, mix
from lockstep.strategies.data.randomness import Randomness, announce
from lockstep.strategies.data.sampler_state import SamplerState, hash_of
from lockstep.strategies.data.source import (
    Piece,
    Share,
    Source,
    Task,
    bounds,
    cannot_share,
    length_of,
    name_of,
    parts_within,
)
from lockstep.strategies.data.workers import Workers

_READ_AHEAD, _READ_AHEAD_BATCHES = 1024, 32
"""Indices, or batches of them, of a user's sampler that are read at once, as switching the random state costs about 0.1
ms."""
_BLOCK = 4096
"""Indices of the permutation that are computed at once."""


def _is(sampler: Any, kind: type) -> bool:
    """Whether it is of torch's class `kind` itself, or of torchdata's that stands for it."""
    own = type(sampler)
    return own is kind or (own.__module__, own.__name__) == ("torchdata.stateful_dataloader.sampler", kind.__name__)


class Indexed(Source):
    """A map-style dataset: ranks know the order and fetch only their own pieces."""

    def __init__(self, loader: DataLoader[Any], share: Share, shuffle: bool | None) -> None:
        self.share = share
        self.window_micro_batches = share.accumulate
        self._workers = Workers(loader, share)
        sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self._batches = loader.batch_sampler is not None and not _is(sampler, BatchSampler)
        if self._batches and shuffle is not None:
            raise ValueError(
                f"shuffle={shuffle} cannot be forced on {type(sampler).__name__}, which makes its own batches: give "
                "the DataLoader a batch_size"
            )
        cut = _is(sampler, BatchSampler)
        self.counts_own = not cut and not self._batches
        if self.counts_own and share.split and share.size * share.accumulate > 1:
            raise ValueError(
                f"split_batches needs batches that can be split, but {name_of(loader)} makes its own (batch_size is "
                "None)"
            )
        self.hashed = 0
        """Hash of what the user's sampler has yielded in this epoch, some of which may be for later pieces."""
        self._drop_last: bool
        batch_size, self._drop_last = (sampler.batch_size, sampler.drop_last) if cut else (1, False)
        self.batch_size = batch_size if cut else None
        self._order(sampler.sampler if cut else sampler, loader, shuffle)
        self.stateful = self._sampler
        self._state = SamplerState(self._sampler)
        self._unit: int = batch_size if share.split else batch_size * share.ranks
        # A fetched key is a list of samples to collate, a list that the dataset takes whole, or one ready batch.
        self._fetcher = Samples(
            loader.dataset,
            share.collating(loader),
            share.seed,
            one_by_one=loader.batch_sampler is not None,
            seeds_each=bool(share.virtual),
            draws=self._workers.draws,
        )
        self.may_filter = self._fetcher.may_filter and not self.counts_own
        self._measure()

    def _order(self, sampler: Any, loader: DataLoader[Any], shuffle: bool | None) -> None:
        """Find what decides the order: `_length` and `_shuffled`, or the user's own `_sampler`."""
        self._sampler: Any = None
        self._counted: Any
        self._length: int | None
        self._shuffled = bool(shuffle)
        if shuffle is not None:
            self._counted, self._length = loader.dataset, len(loader.dataset)  # type: ignore[arg-type]
        elif (
            _is(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        ):
            self._counted, self._length, self._shuffled = sampler.data_source, len(sampler.data_source), True
        elif type(sampler) is SequentialSampler:
            self._counted, self._length = sampler.data_source, len(sampler.data_source)
        elif type(sampler) is DistributedSampler:
            self._counted, self._shuffled = sampler.dataset, sampler.shuffle
            self._length = length_of(sampler.dataset)
            self._drop_last = self._drop_last or sampler.drop_last
        elif getattr(sampler, "num_replicas", 1) != 1:
            raise ValueError(
                f"{type(sampler).__name__} has num_replicas={sampler.num_replicas}, but Lockstep shards samples "
                "itself: set num_replicas=1 and rank=0"
            )
        else:
            self._sampler, self._counted, self._length = sampler, sampler, length_of(sampler)

    def lengths(self, epoch: int | None) -> list[int]:
        if self._sampler is not None and epoch is not None:
            self._announce(epoch)
        length = length_of(self._counted)
        return [-1 if length is None else length]

    @property
    def reads_ahead(self) -> bool:
        """Whether batches are read before they are asked for."""
        return self._workers.reads_ahead

    def wrap_fetcher(self, kind: type[Any]) -> None:
        """Read batches through what `kind` makes of the fetcher, once."""
        if not isinstance(self._fetcher, kind):
            self._fetcher = kind(self._fetcher)

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
            return (
                f"drop_last drops the only global micro-batch, as the dataset has {self._length} samples and a full "
                f"one {self._unit}"
            )
        return f"{name_of(self._fetcher.dataset)} has {self._length or 0} samples or its sampler yields none"

    def check(self, start: int) -> None:
        if self.num_samples is not None and self._length is not None and start > self._length:
            raise ValueError(
                f"start is a number of samples of the epoch, which has {self._length}, but start is {start}"
            )

    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[Piece]:
        if start and self.counts_own:
            start = self._items_before(epoch, start)
        tasks = self._tasks(epoch, start, limit)
        counts: deque[tuple[int, int, int, int]] = deque()

        def keys() -> Iterator[tuple[int, int, Any]]:
            for indices, position, num_samples, all_samples, closes in tasks:
                counts.append((num_samples, all_samples, closes, self.hashed))
                yield epoch, position, indices[0] if self.counts_own else indices

        for batch in self._workers.run(self._fetcher, keys(), epoch):
            num_samples, all_samples, closes, hashed = counts.popleft()
            if hashed:
                self.note_order(hashed)
            if self.counts_own:
                num_samples = all_samples = guess_batch_size(batch) if num_samples else 0
            yield batch, num_samples, all_samples, closes

    def note_order(self, hashed: int) -> None:
        """Note the hash as of a piece that is about to be given."""
        if self._sampler is not None:
            self.order = hashed, name_of(self._sampler)

    def stand_in(self) -> Any:
        hashed, state, own = self.hashed, self._state, SamplerState(self._sampler)
        own.begin(0)
        self._state = own
        try:
            return self._first_kept()
        finally:  # which other ranks may not need to read
            own.begin(0)
            self.hashed, self._state = hashed, state

    def _first_kept(self) -> Any:
        """The first batch, in the order of epoch 0, that has a sample."""
        for indices in islice(self._units(0, 0, 1) if not self._batches else self._replay(0), _READ_AHEAD):
            with Randomness(0):  # what the dataset draws here is nobody's
                task = next(self._indices(0, iter([(indices, 0, len(indices), len(indices), 0)])))
                batch = self._fetcher[0, 0, task[0]]
            if count_samples(batch, len(indices)):
                return batch
        return None

    def state_dict(self) -> dict[str, Any]:
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._state.load_state_dict(state):
            super().load_state_dict(state)

    def check_planned(self, start: int) -> None:
        share = self.share
        apart = share.groups > 1 or (share.whole and share.size < share.planned)
        if apart and (self._batches or self.counts_own):
            raise cannot_share(
                self._fetcher.dataset, share, "each rank gets complete batches, one a step", [share.planned]
            )

    def _items_before(self, epoch: int, start: int) -> int:
        """How many batches hold the first `start` samples: only reading them tells."""
        alone = replace(self.share, rank=0, size=1, virtual=())
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

    def _tasks(self, epoch: int, start: int, limit: int | None) -> Iterator[Task]:
        share = self.share
        if share.planned:  # the limit, which counts as planned, may end inside what is one micro-batch here
            stop = None if limit is None else limit * self._unit
            if self._batches:
                batches, passed, _ = self._batches_after(epoch, start)
                return self._deal(batches if stop is None else islice(batches, max(0, stop - passed)), start)
            cut = self._cut if share.groups == 1 else self._cut_in_groups
            return self._indices(
                epoch, cut(self._units(epoch, start, self._unit * share.accumulate, stop), start, share)
            )
        if self._batches:
            batches, passed, done = self._batches_after(epoch, start)
            done = done if share.split else passed // share.size
            tasks = self._cut(batches, start, share) if share.split else self._deal(batches, start)
        else:
            done, rest = divmod(start, self._unit)
            if share.split:  # where a limit ended the epoch within a batch, the rest is a part of it
                most = self.window_micro_batches
                done = done * most + parts_within(rest, self._unit, most)
            tasks = self._indices(epoch, self._cut(self._units(epoch, start, self._unit), start, share))
        return tasks if limit is None else islice(tasks, max(0, limit - done) * len(share.own))

    def _units(self, epoch: int, start: int, unit: int, limit: int | None = None) -> Iterator[Sequence[Any]]:
        """What is cut as a whole, of the first `limit` samples: positions of the order, or a user's sampler's own
        indices."""
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
                # If `start` is not a multiple of the unit, what an undisturbed epoch keeps may end inside this one.
                taken = taken[: max(0, len(taken) - (start + len(taken)) % self._unit)]
                if not taken:
                    return
            yield taken
            start += len(taken)

    def _cut(self, units: Iterator[Sequence[Any]], position: int, share: Share) -> Iterator[Task]:
        most = share.num_parts() if share.planned else share.accumulate if share.split else 1
        for number, unit in enumerate(units, 1):
            parts = min(most, len(unit))
            for part in range(parts):
                begin, end = bounds(len(unit), part, parts)
                closes = 0
                if share.planned or share.split:
                    closes = (-(-len(unit) // self._unit) if share.planned else parts) if part + 1 == parts else 0
                elif number % share.accumulate == 0:
                    closes = share.accumulate
                for own in share.own:
                    first, last = share.bounds(end - begin, own)
                    mine = unit[begin + first : begin + last] or unit[begin : begin + 1]
                    ends = own == share.own[-1]
                    counted, closing = (end - begin, closes) if ends else (0, 0)
                    yield mine, position + begin + first, last - first, counted, closing
            position += len(unit)

    def _cut_in_groups(self, units: Iterator[Sequence[Any]], position: int, share: Share) -> Iterator[Task]:
        """Planned windows, in which a group of ranks keeps what it has of each planned micro-batch."""
        parts = -(-share.planned // share.size)
        for unit in units:
            for begin in range(0, len(unit), self._unit):
                length, closes = min(self._unit, len(unit) - begin), -(-len(unit) // self._unit)
                for part, own in product(range(parts), share.own):
                    first, last = share.bounds(length, own, part, parts)
                    mine = unit[begin + first : begin + last] or unit[begin : begin + 1]
                    ends = part + 1 == parts and own == share.own[-1]
                    closing = closes if ends and begin + length == len(unit) else 0
                    yield mine, position + begin + first, last - first, length if ends else 0, closing
            position += len(unit)

    def _indices(self, epoch: int, tasks: Iterator[Task]) -> Iterator[Task]:
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
            indices = permutation.take(
                np.concatenate([np.arange(task[0].start, task[0].stop) for task in block])
            ).tolist()
            begin = 0
            for task in block:
                end = begin + len(task[0])
                yield indices[begin:end], *task[1:]
                begin = end

    def _batches_after(self, epoch: int, start: int) -> tuple[Iterator[list[Any]], int, int]:
        """The batches of a user's batch sampler after `start` samples, how many they follow, and in how many parts if
        split."""
        batches = map(_listed, self._replay(epoch))
        passed = parts = 0
        while start > 0:
            batch = next(batches, None)
            if batch is None:
                break
            most = min(self.share.accumulate, len(batch))
            if len(batch) > start:
                return chain([batch[start:]], batches), passed, parts + parts_within(start, len(batch), most)
            start -= len(batch)
            passed += 1
            parts += most
        return batches, passed, parts

    def _deal(self, batches: Iterator[list[Any]], position: int) -> Iterator[Task]:
        share = self.share
        while window := list(islice(batches, share.ranks * share.accumulate)):
            for begin in range(0, len(window), share.size):
                dealt = window[begin : begin + share.size]
                sizes = [len(batch) for batch in dealt]
                closes = -(-len(window) // share.ranks) if begin + share.size >= len(window) else 0
                for own in share.own:
                    counted, closing = (sum(sizes), closes) if own == share.own[-1] else (0, 0)
                    if own < len(dealt):
                        yield dealt[own], position + sum(sizes[:own]), sizes[own], counted, closing
                    else:
                        yield dealt[0][:1], position, 0, counted, closing
                position += sum(sizes)

    def _replay(self, epoch: int) -> Iterator[Any]:
        """Iterate the user's sampler as every other rank does, leaving the run's random state alone."""
        ahead, hashed = _READ_AHEAD_BATCHES if self._batches else _READ_AHEAD, 0
        apart = Randomness(mix(self.share.seed, epoch))
        self._state.begin(epoch)
        self._announce(epoch)
        try:
            with apart:
                items = iter(self._sampler)
        except StopIteration as error:
            raise escaped(error, f"beginning epoch {epoch} of {name_of(self._sampler)}") from error
        while True:
            with apart:
                read = list(islice(Once(items), ahead))
            self.hashed = hashed = hash_of(read, hashed)
            yield from read
            if len(read) < ahead:
                return

    def _announce(self, epoch: int) -> None:
        try:
            announce(self._sampler, self.share.seed, epoch)
        except StopIteration as error:
            raise escaped(error, f"beginning epoch {epoch} of {name_of(self._sampler)}") from error


def _listed(batch: Any) -> list[Any]:
    """A batch of a user's batch sampler, which may be anything that can be iterated."""
    try:
        return list(batch)
    except StopIteration as error:
        raise escaped(error, "reading a batch of indices") from error
