"""What can only be iterated: every rank reads all of it and keeps its share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from itertools import count
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lockstep.strategies.data.fetchers import Items
from lockstep.strategies.data.order import SamplerState
from lockstep.strategies.data.randomness import Watched
from lockstep.strategies.data.source import Piece, Share, Source, cannot_share, divisors, length_of, name_of
from lockstep.strategies.data.workers import Workers


class Streamed(Source):
    """An iterable dataset, or any iterable of batches: every rank iterates all of it and keeps its share."""

    def __init__(
        self, iterable: Any, share: Share, shuffle: bool | None, loader: DataLoader[Any] | None = None
    ) -> None:
        name = name_of(iterable)
        if shuffle:
            raise ValueError(f"shuffle=True needs a map-style dataset, but {name} is iterable-style")
        if share.virtual and getattr(iterable, "shards_itself", False):
            raise ValueError(
                "virtual_ranks, learners and workers of a parameter server cannot be used with "
                f"{name}, which shards itself, so that its samples depend on the number of ranks; remove shards_itself"
            )
        self.share = share
        self.window_micro_batches = share.accumulate
        self.batch_size = None if loader is None else loader.batch_size
        self._iterable = iterable
        self._collate_fn = None if loader is None or loader.collate_fn is default_collate else loader.collate_fn
        self._workers = None if loader is None else Workers(loader, share)
        self.shards_itself = self.counts_own = loader is not None and bool(getattr(iterable, "shards_itself", False))
        batch_size = self.batch_size
        if share.split and share.size * share.accumulate > 1:
            if batch_size is None:
                raise ValueError(f"split_batches needs batches that can be split, but {name} yields ready-made ones")
            if batch_size % (share.size * share.accumulate):
                raise ValueError(
                    "with split the batch_size of an iterable dataset must divide by ranks times micro-batches, but "
                    f"it is {batch_size} "
                    f"and they are {share.size} * {share.accumulate}"
                )
            batch_size //= share.size * share.accumulate
        self._fetcher = Items(
            iterable,
            share,
            batch_size,
            None if loader is None else share.collating(loader),
            loader is not None and loader.drop_last,
            None if self._workers is None else self._workers.draws,
        )
        in_workers = self._workers is not None and bool(self._workers.num_workers)
        if self._fetcher.has_state and not in_workers:
            self.stateful = iterable
        self.iterated = None if in_workers else iterable
        self._state = SamplerState(None if self._fetcher.has_state else self.iterated)
        self.may_filter = batch_size is not None and loader is not None and loader.collate_fn is not default_collate
        self._runs = count()
        self._read = False
        self._live: Items | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._given: Any = None
        """What the dataset held before that."""
        self._began: tuple[int, Any] = (-1, None)
        if batch_size is not None:
            self.window_samples = batch_size * share.ranks * share.accumulate
        length = None if self.shards_itself else length_of(iterable)
        if length is not None:
            unit = (batch_size or 1) * share.ranks
            if loader is not None and loader.drop_last:
                length -= length % unit
            self.num_micro_batches = -(-length // unit)
            self.num_samples = None if batch_size is None else length

    def lengths(self, epoch: int | None) -> list[int]:
        length = None if self.shards_itself else length_of(self._iterable)
        return [-1 if length is None else length]

    def check_planned(self, start: int) -> None:
        share, name = self.share, self._iterable
        if self.shards_itself and start:
            raise cannot_share(
                name,
                share,
                "which shards itself, other ranks would see other samples before the epoch ends",
                [share.planned],
            )
        if self._fetcher.drop_last:
            raise cannot_share(name, share, "drop_last drops by the number of ranks", [share.planned])
        if share.whole or share.groups > 1 or share.planned * share.accumulate % share.size:
            raise cannot_share(
                name, share, "each rank gets complete batches", divisors(share.planned * share.accumulate, share)
            )

    def limit_here(self, limit: int | None) -> int | None:
        share = self.share
        if limit is None or not share.planned:
            return limit
        if limit * share.planned % share.size:
            raise cannot_share(
                self._iterable,
                share,
                f"each rank gets complete batches of the {limit * share.planned} of an epoch",
                [share.planned],
            )
        return limit * share.planned // share.size

    def describe(self) -> str:
        return f"{name_of(self._iterable)} yields no item" + (
            " or drop_last drops all" if self._fetcher.drop_last else ""
        )

    def check(self, start: int) -> None:
        # A length that an iterable reports is an estimate, so `start` is not checked against it.
        if self._read and _ends_for_good(self._iterable):
            raise RuntimeError(
                f"{name_of(self._iterable)} is an iterator and can be read only once: give a list, a DataLoader or a "
                "function that returns a new iterator"
            )
        self._read = True

    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[Piece]:
        run = next(self._runs)
        if self.shards_itself:
            # The ranks agree on the windows to skip and on the last.
            start, limit = self.resumed(epoch, start)[0], None
        keys = ((run, epoch, start, limit, number) for number in count())
        fetcher = self._fetcher.copy()
        if self._workers is None or not self._workers.num_workers:
            self._live = fetcher
            if self._loaded is not None and (self._fits(epoch, start) or (start == 0 and self._precedes(epoch))):
                fetcher.resume(self._loaded)
                fetcher.before = self._loaded.get("began" if self._loaded["epoch"] == epoch else "dataset")
            elif self.stateful is not None:
                if self._loaded is not None and self._given is not None:  # of another place or epoch
                    self.stateful.load_state_dict(self._given)
                self._begin(epoch)
                fetcher.before = self._began[1]
            self._loaded = None
            self._state.begin(epoch)
        fetched = (
            map(fetcher.__getitem__, keys) if self._workers is None else self._in(self._workers, fetcher, keys, epoch)
        )
        still = max(1, self._workers.num_workers) if self.shards_itself and self._workers is not None else 1
        number = 0
        for parts in fetched:
            if parts[0][2] < 0:
                still -= 1
                if not still:
                    return
                continue
            number += 1
            closes = 0 if number % self.window_parts else self.share.accumulate
            for i, (batch, num_samples, all_samples) in enumerate(parts):
                yield batch, num_samples, all_samples, closes if i == len(parts) - 1 else 0

    def _in(self, workers: Workers, fetcher: Items, keys: Iterator[Any], epoch: int) -> Iterator[Any]:
        if self._collate_fn is None or not (self.share.virtual or workers.own_draws is not None):
            return workers.run(fetcher, keys, epoch)
        read = {"collate_fn": self._collate_fn}  # the dataset is iterated alike by all ranks and workers
        watched = Watched(fetcher, read, workers.own_draws, refuses=bool(self.share.virtual))
        return workers.run(watched, keys, epoch)

    def _begin(self, epoch: int) -> None:
        """Let the dataset be as when it first began `epoch`: each validation of a run, and its sanity check, is one."""
        if epoch == self._began[0]:
            self.stateful.load_state_dict(deepcopy(self._began[1]))
            return
        try:
            self._began = epoch, deepcopy(self.stateful.state_dict())
        except Exception:  # it has a state from `__iter__` on, which then also begins it again
            self._began = -1, None

    def put_back(self) -> None:
        if self._began[0] >= 0:
            self.stateful.load_state_dict(self._began[1])
            self._began = -1, None
        self._state.put_back()

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return dict(self._loaded)
        return self._state.state_dict() if self._live is None or self.stateful is None else self._live.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state or self._state.load_state_dict(state):
            self._loaded = None
        elif self.stateful is None:
            super().load_state_dict(state)
        elif (set(state) - {"began", "first"}) | {"ended"} != set(
            Items.STATE
        ):  # checkpoints of old do not say whether it had
            raise ValueError(
                f"the state of an iterable dataset has the keys {sorted(Items.STATE)}, but it has {sorted(state)}"
            )
        else:
            self._loaded, self._given = state, None
            with suppress(Exception):  # it has a state from `__iter__` on
                self._given = deepcopy(self.stateful.state_dict())
            self.stateful.load_state_dict(deepcopy(state["dataset"]))  # a validation before may read it

    def resumed(self, epoch: int, start: int) -> tuple[int, int]:
        return (
            (self._loaded["samples"], self._loaded["micro_batches"])
            if self._loaded is not None and self._fits(epoch, start) and "began" not in self._loaded
            else (0, 0)
        )

    def _fits(self, epoch: int, start: int) -> bool:
        return self._loaded is not None and self._loaded["epoch"] == epoch and self._loaded["samples"] <= start

    def _precedes(self, epoch: int) -> bool:
        """Whether the loaded state was taken before `epoch` began, so that the dataset continues over epochs with
        it."""
        return self._loaded is not None and self._loaded["epoch"] < epoch

    def mark(self, samples: int, micro_batches: int) -> None:
        if self._live is not None:
            self._live.samples, self._live.micro_batches = samples, micro_batches


def _ends_for_good(iterable: Any) -> bool:
    """Whether it can be read once only, as a generator. A user's class that is its own iterator may begin again in
    `__iter__`."""
    if not isinstance(iterable, Iterator):
        return False
    own = type(iterable).__iter__
    return not isinstance(own, FunctionType) or own.__module__ == Iterator.__module__
