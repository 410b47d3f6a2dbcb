"""Fetch a rank's batches by key, in the main process or in a DataLoader's worker: `Samples` from a map-style dataset,
`Items` from an iterable-style one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info

from lockstep.strategies.data.batch_rows import count_samples, guess_batch_size
from lockstep.strategies.data.permutation import mix
from lockstep.strategies.data.randomness import Draws, Randomness, announce, drawn_from, seed_all
from lockstep.strategies.data.source import Share, begins_again, escaped, refuse_emptied
from lockstep.strategies.launch.program.attributes import bits_of
from lockstep.strategies.launch.rng import kept_streams


class Samples:
    """Fetches the samples of a key `(epoch, position, indices)`, in the main process or in a worker."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        seed: int,
        one_by_one: bool,
        seeds_each: bool,
        draws: Draws | None,
    ) -> None:
        """`seeds_each`: what the dataset draws is a function of a sample's place in the order in the main process
        too. `draws` notes what is drawn for a batch as a whole."""
        self.dataset = dataset
        self._seeds_each = seeds_each
        self._draws = draws
        self._collate_fn = collate_fn
        self._seed = seed
        self._one_by_one = one_by_one
        inner = dataset
        while type(inner) is Subset:
            # A Subset always has `__getitems__`, which is a loop unless its dataset has one.
            inner = inner.dataset
        self._in_bulk = one_by_one and bool(getattr(inner, "__getitems__", None))
        self._is_tensor = type(dataset) is torch.Tensor
        self._tensors = _stacked(dataset) if one_by_one and collate_fn is default_collate else None
        self.runs_user_code = self._tensors is None
        self._rows_of = dataset.tensors if self._tensors is not None and not self._is_tensor else None
        self.may_filter = self._tensors is None and (self._in_bulk or collate_fn is not default_collate)
        """Whether the user's own function makes batches and so may leave samples out."""

    def __getitem__(self, key: tuple[int, int, Any]) -> Any:
        try:
            epoch, position, indices = key
            if self._rows_of is not None and self.dataset.tensors is not self._rows_of:  # replaced since
                self._tensors, self._rows_of = _stacked(self.dataset), self.dataset.tensors
            if self._tensors is not None:
                rows = torch.from_numpy(np.array(indices))
                try:
                    batch = [tensor.index_select(0, rows) for tensor in self._tensors]
                except (IndexError, RuntimeError):  # counted from the end, or none of the dataset's
                    batch = [tensor[rows] for tensor in self._tensors]
                return batch[0] if self._is_tensor else batch
            if get_worker_info() is not None:
                return self._seeded(epoch, position, indices)
            if self._seeds_each:
                with kept_streams():
                    return self._seeded(epoch, position, indices)
            dataset = self.dataset
            if self._in_bulk:
                return self._collate_fn(dataset.__getitems__(indices))
            return self._collate_fn([dataset[index] for index in indices] if self._one_by_one else dataset[indices])
        except StopIteration as error:
            raise escaped(error, f"reading {str(key[2])[:200]} of {type(self.dataset).__name__}") from error
        except IndexError as error:
            refuse_emptied(error, f"samples {str(key[2])[:200]} of {type(self.dataset).__name__}")
            raise

    def _seeded(self, epoch: int, position: int, indices: Any) -> Any:
        """A batch in which each sample draws from a stream of its own place, on any rank and in any worker."""
        dataset = self.dataset
        if self._in_bulk:
            return _collated(self._collate_fn, self._in_bulk_seeded(epoch, position, indices), self._draws)
        if self._one_by_one:
            samples = []
            for place, index in enumerate(indices, position):
                seed_all(mix(self._seed, epoch, place))
                samples.append(dataset[index])
            return _collated(self._collate_fn, samples, self._draws)
        seed_all(mix(self._seed, epoch, position))
        return self._collate_fn(dataset[indices])

    def _in_bulk_seeded(self, epoch: int, position: int, indices: Any) -> Any:
        """What the dataset reads at once; one by one, each from a stream of its own place, if it draws."""
        seed_all(mix(self._seed, epoch, position))
        before = drawn_from()
        samples = self.dataset.__getitems__(indices)
        if drawn_from() == before:
            return samples
        if not isinstance(samples, list):  # a batch that is not ours to join
            if self._draws is not None:
                self._draws.note()
            return samples
        samples = []
        for place, index in enumerate(indices, position):
            seed_all(mix(self._seed, epoch, place))
            samples += self.dataset.__getitems__([index])
        return samples


def _collated(collate_fn: Callable[[Any], Any], samples: Any, draws: Draws | None) -> Any:
    """A batch of samples; notes whether random numbers were drawn to make it."""
    if draws is None:
        return collate_fn(samples)
    before = drawn_from()
    batch = collate_fn(samples)
    if drawn_from() != before:
        draws.note()
    return batch


def _stacked(dataset: Any) -> Sequence[torch.Tensor] | None:
    """The tensors of a dataset whose batches are rows of them, so that indexing gives at once what stacking samples
    does; else None."""
    tensors = (
        (dataset,) if type(dataset) is torch.Tensor else dataset.tensors if type(dataset) is TensorDataset else None
    )
    if tensors is None or not all(
        type(t) is torch.Tensor and t.layout == torch.strided and t.is_contiguous() and not t.requires_grad
        for t in tensors
    ):
        return None
    return tensors


class Items:
    """Fetches this rank's part of global micro-batch `number` for a key `(run, epoch, start, limit, number)`.

    A new `run` opens the iterable again. Keys come with rising numbers, to one worker every so-many-th;
    what is between is read and left to the others. Returns for each part that this rank reads (batch, samples here,
    samples on all ranks), the last of which is -1 after the end, and 0 but for the last part.
    """

    STATE = ("epoch", "samples", "micro_batches", "ended", "dataset", "random")

    def __init__(
        self,
        dataset: Any,
        share: Share,
        batch_size: int | None,
        collate_fn: Callable[[Any], Any] | None,
        drop_last: bool,
        draws: Draws | None = None,
    ) -> None:
        self.dataset = dataset
        self._draws = draws
        self.drop_last = drop_last
        self._share = share
        self._batch_size = batch_size
        self._collate_fn = collate_fn
        self._alone = bool(getattr(dataset, "shards_itself", False)) and collate_fn is not None
        self._own, self._size = ((0,), 1) if self._alone else (share.own, share.size)
        self._unit = (batch_size or 1) * self._size
        filters = batch_size is not None and collate_fn not in (None, default_collate)
        self._may_lack = filters and not self._alone and not share.virtual
        """Whether no batch so far had a sample that the user's function has left in it, of those that other ranks see
        too."""
        self._read_last: list[Any] = []
        """The items of all ranks in a micro-batch, as long as `_may_lack`."""
        self._run = -1
        self._resume: Mapping[str, Any] | None = None
        self._began: Any = None
        self.before: Any = None
        """The state of the dataset before it was opened, if this process may save it."""
        self._after_first: Any = None
        """What tells its state after the first item of the epoch, to which a later one may be equal."""
        self._first: str | None = None
        """What tells the first two items of the epoch, if they differ."""
        self.samples = 0
        """Samples of the epoch read so far, over all ranks."""
        self.micro_batches = 0
        """Global micro-batches of the epoch read so far."""

    def copy(self) -> Items:
        return Items(self.dataset, self._share, self._batch_size, self._collate_fn, self.drop_last, self._draws)

    def __getitem__(self, key: tuple[int, int, int, int | None, int]) -> list[tuple[Any, int, int]]:
        try:
            return self._fetch(key)
        except StopIteration as error:
            raise escaped(error, f"reading batch {key[4]} of {type(self.dataset).__name__}") from error
        except IndexError as error:
            refuse_emptied(error, f"samples of batch {key[4]} of {type(self.dataset).__name__}")
            raise

    def _fetch(self, key: tuple[int, int, int, int | None, int]) -> list[tuple[Any, int, int]]:
        run, epoch, start, limit, number = key
        if run != self._run:
            self._open(epoch, start, limit)
            self._run = run
        while True:
            parts, all_samples = self._read()
            if all_samples < 0:
                return [(None, 0, -1)]
            self._number += 1
            if self._alone or self._number > number:
                break
        if not self._share.virtual:
            if get_worker_info() is not None:
                seed_all(mix(self._share.seed, epoch, self.micro_batches, *self._place))
            ((mine, num_samples),) = parts
            batch = self._collated(mine)
            if self._may_lack and count_samples(batch, len(mine)) == 0:
                batch, num_samples = self._of_others(), 0
            self._may_lack = self._may_lack and batch is None
            return [(batch, num_samples, all_samples)]
        batches = []
        for own, (mine, num_samples) in zip(self._own, parts, strict=True):
            with kept_streams():
                seed_all(mix(self._share.seed, epoch, self.micro_batches, own))
                batch = self._collated(mine)
            batches.append((batch, num_samples, all_samples if own == self._own[-1] else 0))
        return batches

    def _of_others(self) -> Any:
        """What the first rank that has samples of a micro-batch gets of it; None if no rank has any."""
        size, items = self._unit // self._size, self._read_last
        with kept_streams():
            batches = (self._collated(items[begin : begin + size]) for begin in range(0, len(items), size))
            return next((batch for batch in batches if count_samples(batch, size) != 0), None)

    def _collated(self, mine: list[Any]) -> Any:
        batch = mine if self._batch_size is not None else mine[0]
        return batch if self._collate_fn is None else _collated(self._collate_fn, batch, self._draws)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Begin the next run where `state` was taken: within its epoch, or in one that follows it."""
        self._resume = state

    @property
    def has_state(self) -> bool:
        # The state of a stateful DataLoader is its own affair: it may hold what a checkpoint refuses.
        return (
            not isinstance(self.dataset, DataLoader)
            and hasattr(self.dataset, "state_dict")
            and hasattr(self.dataset, "load_state_dict")
        )

    def state_dict(self) -> dict[str, Any]:
        if self._run < 0 or not self.has_state:
            return {}
        read = self._epoch, self.samples, self.micro_batches, self._ended
        state = dict(zip(self.STATE, (*read, self.dataset.state_dict(), self._apart.state_dict()), strict=True))
        state |= {} if self._first is None else {"first": self._first}
        return state | ({"began": self.before} if self._holds_no_place(state["dataset"]) else {})

    def _holds_no_place(self, state: Any) -> bool:
        """Whether the state is the same however much was read, so that to continue is to read again; also after
        the first item, of which that is not known, and which costs little."""
        is_read = self._after_first is not None and not self._ended
        return is_read and bits_of(state) in (self._after_first, bits_of(self.before))

    def _open(self, epoch: int, start: int, limit: int | None) -> None:
        state, self._resume = self._resume, None
        if self.has_state and get_worker_info() is not None:
            self._begin()
        self._place = (self._share.rank, getattr(get_worker_info(), "id", 0)) if self._alone else (self._share.rank,)
        self._apart = Randomness(mix(self._share.seed, epoch, *(self._place if self._alone else ())))
        self._epoch, self._limit = epoch, limit
        self._number, self._ended = 0, False
        self.samples = self.micro_batches = 0
        self._after_first, self._first, self._continues = None, None, False
        self._noted: list[str] = []
        if state is not None and (state["epoch"] != epoch or "began" in state):  # what it begins this epoch with
            self.dataset.load_state_dict(deepcopy(state["began" if state["epoch"] == epoch else "dataset"]))
            state = None
        announce(self.dataset, self._share.seed, epoch)
        if state is not None:
            self.dataset.load_state_dict(state["dataset"])
            self.samples, self.micro_batches = state["samples"], state["micro_batches"]
            if self._batch_size is not None and not self._alone:  # of other ranks, or another size, than were counted
                self.micro_batches = -(-self.samples // self._unit)
            if state.get("ended", False):  # to iterate would begin the next epoch
                self._ended = True
                self._apart.load_state_dict(state["random"])
                return
        with self._iterating():
            self._items = iter(self.dataset)
        if state is not None:
            self._apart.load_state_dict(state["random"])
            self._first, self._continues = state.get("first"), self.samples > 0
        passed = 0
        with self._iterating():
            while self.samples < start and not self._ended:
                item = next(self._items, _NOTHING)
                if item is _NOTHING:
                    self._ended = True
                else:
                    self.samples += self._weight(item)
                    passed += 1
        self.micro_batches += passed // self._unit

    def _begin(self) -> None:
        """Let a copy in a persistent worker, whose state no checkpoint can hold, begin each epoch like a new one."""
        if self._run < 0:
            with suppress(Exception):  # it has a state from `__iter__` on, which then also begins it again
                self._began = deepcopy(self.dataset.state_dict())
        elif self._began is not None:
            self.dataset.load_state_dict(deepcopy(self._began))

    @contextmanager
    def _iterating(self) -> Iterator[None]:
        """Be to the dataset as on every other rank and worker: one process, one random state."""
        info = torch_worker._worker_info
        if not self._alone:
            # A dataset that shares itself out over workers would drop what our own cut gives to the others.
            torch_worker._worker_info = None
        try:
            with self._apart:
                yield
        finally:
            torch_worker._worker_info = info

    def _read(self) -> tuple[list[tuple[list[Any], int]], int]:
        """The items of each part that this rank reads, with their samples; and the samples of all."""
        if self._ended or (self._limit is not None and self.micro_batches >= self._limit):
            return [], -1
        size = self._unit // self._size
        parts: dict[int, list[Any]] = {own: [] for own in self._own}
        samples = dict.fromkeys(self._own, 0)
        padding = None
        items = all_samples = 0
        self._read_last = []
        with self._iterating():
            for item in islice(Once(self._items), self._unit):
                if self._may_lack:
                    self._read_last.append(item)
                weight = self._weight(item)
                if items == 0:
                    padding = item
                if len(self._noted) < 2:
                    self._note_first(item)
                if (own := items // size) in parts:
                    parts[own].append(item)
                    samples[own] += weight
                items += 1
                all_samples += weight
        self._ended = items < self._unit
        if items == 0 or (self._ended and self.drop_last):
            self._ended = True
            return [], -1
        self.samples += all_samples
        self.micro_batches += 1
        return [(mine or [padding], samples[own]) for own, mine in parts.items()], all_samples

    def _note_first(self, item: Any) -> None:
        """Of the first two that are read note what tells them, and the state of the dataset after the first; refuse two
        that were the first of the epoch before, unless they are equal, as then others may be, too."""
        if not self._continues and self.before is None:
            return
        self._noted.append(bits_of(item))
        if self._after_first is None and self.before is not None:
            self._after_first = bits_of(self.dataset.state_dict())
        noted = " ".join(self._noted)
        if self.before is not None:
            self._first = noted if len({*self._noted}) == 2 else None
        elif self._first == noted or (self._unit == 1 and (self._first or "").startswith(noted)):  # it would be a step
            raise begins_again(self.dataset, self.samples)

    def _weight(self, item: Any) -> int:
        return guess_batch_size(item) if self._batch_size is None else 1


class Once:
    """Reads on in an iterator without asking it for another: one whose `__iter__` begins again would."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


_NOTHING = object()
