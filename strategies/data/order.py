"""The order in which samples of a map-style dataset come, and the state of what decides it: of a user's sampler, or of
a dataset among several loaders, with which a resumed run reads the order of the epoch and of those that follow."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain, islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lockstep.strategies.data.fetchers import Once
from lockstep.strategies.data.permutation import Permutation, mix
from lockstep.strategies.data.randomness import EPOCHS, Randomness, announce
from lockstep.strategies.data.source import Share, escaped, length_of, name_of, parts_within
from lockstep.strategies.launch.program.attributes import Attributes
from lockstep.strategies.launch.program.held_search import search
from lockstep.strategies.launch.program.held_state import put_state

READ_AHEAD, _READ_AHEAD_BATCHES = 1024, 32
"""Indices, or batches of them, of a user's sampler that are read at once, as switching the random state costs about 0.1
ms."""


class SamplerState:
    """What a sampler, or an iterable dataset, held as its epoch began, and what it holds now.

    An epoch is read from its beginning also where a run continues within it.
    """

    KEYS = ("epoch", "began", "now")

    def __init__(self, sampler: Any) -> None:
        # The order of a DistributedSampler follows from the epoch, and torchdata's would skip what it has yielded.
        self._sampler: Any = (
            None if sampler is None or isinstance(sampler, DistributedSampler) else _with_state(sampler)
        )
        self._epoch = -1
        self._began: Any = None
        self._loaded: Any = None
        """What it held in the run that is resumed, until it is read."""

    def begin(self, epoch: int) -> None:
        """Let the sampler be as when it first began `epoch`."""
        if self._sampler is None:
            return
        if epoch == self._epoch:
            self._put_began()
        else:
            if self._loaded is not None:
                self._sampler.load_state_dict(self._loaded)
            self._epoch, self._began = epoch, self._held()
        self._loaded = None

    def put_back(self) -> None:
        """Let the sampler be as before its epoch was read, and as if it had not been."""
        if self._epoch >= 0 and not (isinstance(self._sampler, Attributes) and self._sampler.lacks(self._held())):
            self._put_began()
        self._epoch, self._began = -1, None

    def _put_began(self) -> None:
        self._sampler.load_state_dict(self._began if isinstance(self._sampler, Attributes) else deepcopy(self._began))

    def state_dict(self) -> dict[str, Any]:
        if self._sampler is None or self._epoch < 0:
            return {}
        now = self._held() if self._loaded is None else self._loaded
        state = dict(zip(self.KEYS, (self._epoch, self._began, now), strict=True))
        if not isinstance(self._sampler, Attributes):
            return state
        changed = self._sampler.changed(now) | self._sampler.changed(self._began)
        if not changed or self._sampler.lacks(now):
            return {}
        own = {key: {name: state[key][name] for name in changed if name in state[key]} for key in self.KEYS[1:]}
        return state | own | {ATTRIBUTES: True}

    def _held(self) -> Any:
        held = self._sampler.state_dict()
        return held if isinstance(self._sampler, Attributes) else deepcopy(held)

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take up `state`; whether it is that of a sampler, and there is one to take it, or it needs none."""
        of_attributes = bool(state.get(ATTRIBUTES))
        if set(state) - {ATTRIBUTES} != set(self.KEYS) or isinstance(self._sampler, Attributes) is not of_attributes:
            return of_attributes
        self._epoch, self._began, now = (state[key] for key in self.KEYS)
        if of_attributes:  # now, as hooks may change them before the epoch begins
            self._sampler.resume(now, now.keys() | self._began.keys())
        else:
            self._loaded = now
            if self._sampler is not None:  # a validation before may read from it
                self._sampler.load_state_dict(deepcopy(now))
        return True


ATTRIBUTES = "attributes"
"""In a state of `SamplerState`: it is of `Attributes`, which nothing else needs."""


def _with_state(owner: Any) -> Any:
    own = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
    if own and not isinstance(owner, DataLoader):
        return owner
    return _Stream(owner) if isinstance(owner, IterableDataset) else Attributes(owner)


class _Stream(Attributes):
    """Also the generators and numbers of other objects that an iterable dataset holds, such as transforms."""

    def __init__(self, owner: Any) -> None:
        self._reached = search({_REACHED: owner}).copied()
        super().__init__(owner)

    def state_dict(self) -> dict[str, Any]:
        now, first = search({_REACHED: self._owner}), self._reached
        inner = {key: state for key, state in now.states.items() if key[0] != _REACHED}
        kept = {" ".join(key): state for key, state in inner.items() if now.may_put(key, state, first)}
        return super().state_dict() | kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: each for name, each in state.items() if " " not in name})
        now = search({_REACHED: self._owner})
        for key, place in now.places.items():
            each = state.get(" ".join(key))
            if each is not None and now.may_put(key, each, self._reached):
                put_state(place, each)


_REACHED = "dataset"


def other_indices(sampler: str, kind: str, place: str, first: int) -> RuntimeError:
    """What to raise where a user's sampler of the `kind` of data has not yielded in `place` what it has on rank
    `first`."""
    return RuntimeError(
        f"the ranks disagree on the order of samples: {sampler or 'a sampler'} of the {kind} data has yielded other "
        f"indices on {place} than on rank {first}, so that samples would be read twice; every rank must seed it "
        "equally, or let it decide from what all ranks know, such as trainer.callback_metrics"
    )


def hash_of(read: list[Any], before: int) -> int:
    """A hash of indices and those before them, for other processes to compare; 0 where there are none."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    return zlib.crc32(re.sub(r" at 0x\w+", "", repr(read)).encode(), before)  # an address is of one process


class SampleOrder:
    """The order in which a loader asks for the samples of a map-style dataset, or for batches of them."""

    def __init__(self, loader: DataLoader[Any], share: Share, shuffle: bool | None) -> None:
        sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        is_cut = _is(sampler, BatchSampler)
        self.is_of_batches = loader.batch_sampler is not None and not is_cut
        if self.is_of_batches and shuffle is not None:
            raise ValueError(
                f"shuffle={shuffle} cannot be forced on {type(sampler).__name__}, which makes its own batches: give "
                "the DataLoader a batch_size"
            )
        self.batch_size: int | None = None
        """None where batches are not cut from the order."""
        self.drop_last = False
        if is_cut:
            self.batch_size, self.drop_last = sampler.batch_size, sampler.drop_last
        self.sampler: Any = None
        """The user's own, if that decides."""
        self.length: int | None
        self.shuffled = bool(shuffle)
        self.hashed = 0
        """Hash of what the user's sampler has yielded in this epoch, some of which may be for later pieces."""
        self._share = share
        self._find(sampler.sampler if is_cut else sampler, loader, shuffle)
        self._state = SamplerState(self.sampler)
        self.unit = (self.batch_size or 1) * (1 if share.split else share.ranks)
        """Samples of a batch of all ranks; with `drop_last` those that are dropped unless all are there."""

    def _find(self, sampler: Any, loader: DataLoader[Any], shuffle: bool | None) -> None:
        self._counted: Any
        if shuffle is not None:
            self._counted, self.length = loader.dataset, len(loader.dataset)  # type: ignore[arg-type]
        elif (
            _is(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        ):
            self._counted, self.length, self.shuffled = sampler.data_source, len(sampler.data_source), True
        elif type(sampler) is SequentialSampler:
            self._counted, self.length = sampler.data_source, len(sampler.data_source)
        elif type(sampler) is DistributedSampler:
            self._counted, self.shuffled = sampler.dataset, sampler.shuffle
            self.length = length_of(sampler.dataset)
            self.drop_last = self.drop_last or sampler.drop_last
        elif getattr(sampler, "num_replicas", 1) != 1:
            raise ValueError(
                f"{type(sampler).__name__} has num_replicas={sampler.num_replicas}, but Lockstep shards samples "
                "itself: set num_replicas=1 and rank=0"
            )
        else:
            self.sampler, self._counted, self.length = sampler, sampler, length_of(sampler)

    def length_now(self, epoch: int | None) -> int | None:
        """The length that the sampler has now, in `epoch` if given, or what it draws from; None if it is unknown."""
        if self.sampler is not None and epoch is not None:
            self._announce(epoch)
        return length_of(self._counted)

    @property
    def kept(self) -> int | None:
        """How much of an epoch is read."""
        if self.length is None or not self.drop_last:
            return self.length
        return self.length - self.length % self.unit

    def put_back(self) -> None:
        self._state.put_back()

    def state_dict(self) -> dict[str, Any]:
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        return self._state.load_state_dict(state)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is read within, of epoch 0, is read again where a run reads it."""
        hashed, state, own = self.hashed, self._state, SamplerState(self.sampler)
        own.begin(0)
        self._state = own
        try:
            yield
        finally:
            own.begin(0)
            self.hashed, self._state = hashed, state

    def units(self, epoch: int, start: int, unit: int, limit: int | None = None) -> Iterator[Sequence[Any]]:
        """What is cut as a whole, of the first `limit` samples: positions of the order, or a user's sampler's own
        indices."""
        if self.sampler is None:
            assert self.kept is not None
            stop = self.kept if limit is None else min(self.kept, limit)
            for begin in range(start, stop, unit):
                yield range(begin, min(begin + unit, stop))
            return
        indices = islice(self.replay(epoch), limit)
        deque(islice(indices, start), maxlen=0)
        while taken := list(islice(indices, unit)):
            if self.drop_last and len(taken) < unit:
                # If `start` is not a multiple of the unit, what an undisturbed epoch keeps may end inside this one.
                taken = taken[: max(0, len(taken) - (start + len(taken)) % self.unit)]
                if not taken:
                    return
            yield taken
            start += len(taken)

    def permutation(self, epoch: int) -> Permutation | None:
        """What a position of a shuffled order stands for."""
        if not self.shuffled:
            return None
        assert self.length is not None
        return Permutation(self.length, self._share.seed, epoch)

    def batches_after(self, epoch: int, start: int) -> tuple[Iterator[list[Any]], int, int]:
        """The batches of a user's batch sampler after `start` samples, how many they follow, and in how many parts if
        split."""
        batches = map(self._listed, self.replay(epoch))
        passed = parts = 0
        while start > 0:
            batch = next(batches, None)
            if batch is None:
                break
            most = min(self._share.accumulate, len(batch))
            if len(batch) > start:
                return chain([batch[start:]], batches), passed, parts + parts_within(start, len(batch), most)
            start -= len(batch)
            passed += 1
            parts += most
        return batches, passed, parts

    def replay(self, epoch: int) -> Iterator[Any]:
        """Iterate the user's sampler as every other rank does, leaving the run's random state alone."""
        ahead, hashed = _READ_AHEAD_BATCHES if self.is_of_batches else READ_AHEAD, 0
        apart = Randomness(mix(self._share.seed, epoch))
        self._state.begin(epoch)
        self._announce(epoch)
        try:
            with apart:
                items = iter(self.sampler)
        except StopIteration as error:
            raise escaped(error, f"beginning epoch {epoch % EPOCHS} of {name_of(self.sampler)}") from error
        while True:
            with apart:
                read = list(islice(Once(items), ahead))
            self.hashed = hashed = hash_of(read, hashed)
            yield from read
            if len(read) < ahead:
                return

    def _listed(self, batch: Any) -> list[Any]:
        """A batch of a user's batch sampler, which may be anything that can be iterated."""
        if not isinstance(batch, Iterable):
            raise TypeError(
                f"a batch sampler must yield lists of indices, but {name_of(self.sampler)} yielded {batch!r}; "
                "pass it as sampler=, with a batch_size"
            )
        try:
            return list(batch)
        except StopIteration as error:
            raise escaped(error, "reading a batch of indices") from error

    def _announce(self, epoch: int) -> None:
        try:
            announce(self.sampler, self._share.seed, epoch)
        except StopIteration as error:
            raise escaped(error, f"beginning epoch {epoch % EPOCHS} of {name_of(self.sampler)}") from error


def _is(sampler: Any, kind: type) -> bool:
    """Whether it is of torch's class `kind` itself, or of torchdata's that stands for it."""
    own = type(sampler)
    return own is kind or (own.__module__, own.__name__) == ("torchdata.stateful_dataloader.sampler", kind.__name__)
