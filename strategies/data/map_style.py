"""A map-style dataset: the order of an epoch is known, and each rank fetches its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from lockstep.strategies.data.batch_rows import count_samples, guess_batch_size
from lockstep.strategies.data.fetchers import Samples
from lockstep.strategies.data.order import SampleOrder
from lockstep.strategies.data.randomness import Randomness, Watched
from lockstep.strategies.data.source import (
    Piece,
    Share,
    Source,
    Task,
    cannot_share,
    cut,
    cut_in_groups,
    deal,
    name_of,
    parts_within,
)
from lockstep.strategies.data.workers import Workers

_BLOCK = 4096
"""Indices of the permutation that are computed at once."""


class Indexed(Source):
    """A map-style dataset: ranks know the order and fetch only their own pieces."""

    def __init__(self, loader: DataLoader[Any], share: Share, shuffle: bool | None) -> None:
        self.share = share
        self.window_micro_batches = share.accumulate
        self._workers = Workers(loader, share)
        self.sample_order = SampleOrder(loader, share, shuffle)
        self.batch_size, self._batches = self.sample_order.batch_size, self.sample_order.is_of_batches
        self.counts_own = self.batch_size is None and not self._batches
        if self.counts_own and share.split and share.size * share.accumulate > 1:
            raise ValueError(
                f"split_batches needs batches that can be split, but {name_of(loader)} makes its own (batch_size is "
                "None)"
            )
        self.stateful = self.iterated = self.sample_order.sampler
        # A fetched key is a list of samples to collate, a list that the dataset takes whole, or one ready batch.
        self._fetcher: Any = Samples(
            loader.dataset,
            share.collating(loader),
            share.seed,
            one_by_one=loader.batch_sampler is not None,
            seeds_each=bool(share.virtual),
            draws=self._workers.draws,
        )
        self.may_filter = self._fetcher.may_filter and not self.counts_own
        if self._fetcher.runs_user_code and (share.virtual or self._workers.own_draws is not None):
            read = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
            self._fetcher = Watched(self._fetcher, read, self._workers.own_draws, refuses=bool(share.virtual))
        self._measure()

    def lengths(self, epoch: int | None) -> list[int]:
        length = self.sample_order.length_now(epoch)
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
        share, full, unit = self.share, self.sample_order.kept, self.sample_order.unit
        if self._batches:
            if full is not None:
                self.num_micro_batches = full * share.accumulate if share.split else -(-full // share.ranks)
        elif share.split:
            self.window_micro_batches = min(share.accumulate, unit)
            if full is not None:
                windows, rest = divmod(full, unit)
                self.num_micro_batches = windows * self.window_micro_batches + min(share.accumulate, rest)
        elif full is not None:
            self.num_micro_batches = -(-full // unit)
        if not self.counts_own and not self._batches:
            self.num_samples = full
            self.window_samples = unit if share.split else unit * share.accumulate

    def describe(self) -> str:
        length = self.sample_order.length
        if self.sample_order.drop_last and length:
            return (
                f"drop_last drops the only global micro-batch, as the dataset has {length} samples and a full one "
                f"{self.sample_order.unit}"
            )
        return f"{name_of(self._fetcher.dataset)} has {length or 0} samples or its sampler yields none"

    def check(self, start: int) -> None:
        length = self.sample_order.length
        if self.num_samples is not None and length is not None and start > length:
            sampler = self.sample_order.sampler
            if sampler is not None:
                raise ValueError(
                    f"{name_of(sampler)} must yield no more samples than its __len__ tells, which is {length}, "
                    f"but {start} of the epoch were read before: let __len__ tell how many it yields"
                )
            raise ValueError(f"start is a number of samples of the epoch, which has {length}, but start is {start}")

    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[Piece]:
        # what is drawn up to there, as a sampler or ready batches are read again, was drawn before
        put_back = self.share.held.now() if start and self.share.held is not None else None
        if start and self.counts_own:
            start = self._items_before(epoch, start)
        tasks = self._tasks(epoch, start, limit)
        if put_back is not None:
            tasks = chain([*islice(tasks, 1)], tasks)
            put_back()
        counts: deque[tuple[int, int, int, int]] = deque()

        def keys() -> Iterator[tuple[int, int, Any]]:
            for indices, position, num_samples, all_samples, closes in tasks:
                counts.append((num_samples, all_samples, closes, self.sample_order.hashed))
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
        if self.stateful is not None:
            self.order = hashed, name_of(self.stateful)

    def stand_in(self) -> Any:
        """The first batch, in the order of epoch 0, that has a sample."""
        order = self.sample_order
        with order.apart(), self.share.unmoved():  # other ranks may not need to
            batches = order.replay(0) if self._batches else order.units(0, 0, 1)
            for indices in batches:
                with Randomness(0):  # what the dataset draws here is nobody's
                    task = next(self._indices(0, iter([(indices, 0, len(indices), len(indices), 0)])))
                    batch = self._fetcher[0, 0, task[0]]
                if count_samples(batch, len(indices)):
                    return batch
        return None

    def put_back(self) -> None:
        self.sample_order.put_back()

    def state_dict(self) -> dict[str, Any]:
        return self.sample_order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.sample_order.load_state_dict(state):
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
        order = self.sample_order
        tasks = self._indices(epoch, cut(order.units(epoch, 0, 1), 0, alone, order.unit))
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
        share, order, size = self.share, self.sample_order, self.sample_order.unit
        if share.planned:  # the limit, which counts as planned, may end inside what is one micro-batch here
            stop = None if limit is None else limit * size
            if self._batches:
                batches, passed, _ = order.batches_after(epoch, start)
                return deal(batches if stop is None else islice(batches, max(0, stop - passed)), start, share)
            units = order.units(epoch, start, size * share.accumulate, stop)
            return self._indices(epoch, (cut if share.groups == 1 else cut_in_groups)(units, start, share, size))
        if self._batches:
            batches, passed, done = order.batches_after(epoch, start)
            done = done if share.split else passed // share.size
            tasks = cut(batches, start, share, size) if share.split else deal(batches, start, share)
        else:
            done, rest = divmod(start, size)
            if share.split:  # where a limit ended the epoch within a batch, the rest is a part of it
                most = self.window_micro_batches
                done = done * most + parts_within(rest, size, most)
            tasks = self._indices(epoch, cut(order.units(epoch, start, size), start, share, size))
        return tasks if limit is None else islice(tasks, max(0, limit - done) * len(share.own))

    def _indices(self, epoch: int, tasks: Iterator[Task]) -> Iterator[Task]:
        """Turn ranges of positions into lists of indices, many at once."""
        order = self.sample_order
        if order.sampler is not None:
            yield from tasks
            return
        permutation, at_once = order.permutation(epoch), max(1, _BLOCK * self.share.size // order.unit)
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
