"""From a loader to where its batches come from; and several loaders at once."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, TypeGuard

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.strategies.data.combined import CombinedLoader
from lockstep.strategies.data.iterable_style import Streamed
from lockstep.strategies.data.map_style import Indexed
from lockstep.strategies.data.order import SamplerState
from lockstep.strategies.data.permutation import mix
from lockstep.strategies.data.randomness import EPOCHS, Randomness
from lockstep.strategies.data.source import Factory, Piece, Share, Source, cannot_share
from lockstep.strategies.data.workers import keep

READS_AS_TORCH = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
"""Modules of loaders whose iteration follows from their arguments, so that a rank can read its own samples instead."""


_OWN, _PADDING = 1, 2
"""A rank fetches a unit that is its own, or, where it has none to run the step with, another's without weight."""


def source_of(loader: Any, share: Share, shuffle: bool | None) -> Source:
    if isinstance(loader, CombinedLoader):
        return Combined(loader, share, shuffle)
    if _reads_as_torch(loader):
        if getattr(loader, "next_iter_state", None) is not None:
            raise ValueError(
                f"a {type(loader).__name__} with a loaded state would begin elsewhere than the run: remove its "
                "load_state_dict, as checkpoints hold the position in the data"
            )
        return (
            Streamed(loader.dataset, share, shuffle, loader)
            if isinstance(loader.dataset, IterableDataset)
            else Indexed(loader, share, shuffle)
        )
    refuse_dataset(loader)
    is_data = isinstance(loader, str | bytes) or hasattr(type(loader), "__array__")  # a tensor, array or data frame
    if hasattr(loader, "__iter__") and not is_data and not isinstance(loader, type):
        return Streamed(loader, share, shuffle)
    if hasattr(loader, "__getitem__") and hasattr(loader, "__len__") and not is_data:
        return Indexed(DataLoader(loader, batch_size=None, collate_fn=keep), share, shuffle)
    if callable(loader) and not isinstance(loader, type):
        return Streamed(Factory(loader), share, shuffle)
    raise TypeError(
        "a loader is a DataLoader, an iterable of batches or a function that returns one, but it is "
        f"{f'the class {loader.__name__}' if isinstance(loader, type) else type(loader).__name__}; "
        + ("pass an object of it" if isinstance(loader, type) else "pass a DataLoader")
    )


def _reads_as_torch(loader: Any) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and all(
        getattr(type(loader), name).__module__ in READS_AS_TORCH for name in ("__iter__", "_get_iterator")
    )


def read_by(loader: Any) -> dict[str, Any]:
    """By name the datasets and collate functions that user code reads batches with in this process, but for what is
    iterated, which is read again where a run continues."""
    if isinstance(loader, CombinedLoader):
        loaders = enumerate(loader.named().values())
        return {f"{i}.{name}": part for i, each in loaders for name, part in read_by(each).items()}
    if not _reads_as_torch(loader):
        return {} if isinstance(loader, DataLoader) or hasattr(loader, "__iter__") else {"dataset": loader}
    found = {} if isinstance(loader.dataset, IterableDataset) else {"dataset": loader.dataset}
    return found | {"collate_fn": loader.collate_fn}


def refuse_dataset(loader: Any) -> None:
    """Raise TypeError for a dataset in the place of a loader: its items are samples, without the dimension of a
    batch."""
    if isinstance(loader, Dataset):
        name = type(loader).__name__
        raise TypeError(
            f"a loader yields batches, but {name} is a dataset, which yields samples; pass DataLoader({name}(...), "
            "batch_size=...), "
            "with batch_size=None if its items are already batches"
        )


def _restores(loader: Any) -> bool:
    return not isinstance(loader, DataLoader) and hasattr(loader, "load_state_dict")


class Combined(Source):
    """Batches of several loaders, each a unit that one rank gets; the units go to the ranks in turn."""

    def __init__(self, combined: CombinedLoader, share: Share, shuffle: bool | None) -> None:
        if share.split and share.size * share.accumulate > 1:
            raise ValueError(
                "split_batches cannot be used with several loaders, whose batches cannot be split: remove it"
            )
        if share.virtual:
            raise ValueError(
                "virtual_ranks, learners and workers of a parameter server cannot be used with several loaders, whose "
                "batches cannot be split between them: use one loader"
            )
        self.share = share
        self.window_micro_batches = share.accumulate
        self._combined = combined
        self._sources = {
            name: source_of(loader, Share(0, 1, mix(share.seed, i), 1, False), shuffle)
            for i, (name, loader) in enumerate(combined.named().items())
        }
        for name, source in self._sources.items():
            if source.shards_itself:
                raise ValueError(
                    "a dataset that shards itself cannot be combined with others, as ranks may have other numbers of "
                    f"batches, but {name!r} does"
                )
        self.may_filter = any(source.may_filter for source in self._sources.values())
        self._asked: list[tuple[Source, Any, int]] = []
        self._states = [SamplerState(source.iterated) for source in self._sources.values()]
        """As an epoch of all loaders begins, which may have several of a shorter one."""
        self._length = combined.length([source.num_micro_batches for source in self._sources.values()])
        if any(source.num_micro_batches == 0 for source in self._sources.values()):
            self._length = 0
        if self._length is not None:
            self.num_micro_batches = -(-self._length // share.ranks)
        sizes = [source.batch_size for source in self._sources.values()]
        if combined.mode != "sequential" and None not in sizes:
            self.window_samples = sum(size or 0 for size in sizes) * share.ranks * share.accumulate

    @property
    def rows_each(self) -> list[tuple[float, float]]:
        return [rows for source in self._sources.values() for rows in source.rows_each]

    def put_back(self) -> None:
        for source, state in zip(self._sources.values(), self._states, strict=True):
            source.put_back()
            state.put_back()

    def state_dict(self) -> dict[str, Any]:
        states = [state.state_dict() for state in self._states]
        return {"loaders": states} if any(states) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("loaders", []) if state else [{} for _ in self._states]
        pairs = list(zip(self._states, saved, strict=False))
        if len(saved) != len(self._states) or not all(not new or own.load_state_dict(new) for own, new in pairs):
            raise ValueError(
                "the loaders' state comes from samplers, and iterable datasets read without workers, that have a "
                "state, which these loaders do not have in the same places"
            )

    def describe(self) -> str:
        return "; ".join(
            f"{name!r}: {source.describe()}"
            for name, source in self._sources.items()
            if source.num_micro_batches in (0, None)
        )

    def check(self, start: int) -> None:
        for source in self._sources.values():
            source.check(0)

    def lengths(self, epoch: int | None) -> list[int]:
        return [length for source in self._sources.values() for length in source.lengths(epoch)]

    def check_planned(self, start: int) -> None:
        share = self.share
        if share.groups > 1 or (share.whole and share.size < share.planned):
            raise cannot_share(self._combined, share, "each rank gets complete batches, one a step", [share.planned])

    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[Piece]:
        share, end = self.share, self._length
        if limit is not None:
            end = limit * share.ranks if end is None else min(end, limit * share.ranks)
        own = [name for name, loader in self._combined.named().items() if start and _restores(loader)]
        if own:
            raise ValueError(
                f"CombinedLoader resumes within an epoch by reading its loaders again, but {own[0]!r} has a state of "
                "its own; resume a checkpoint of the end of an epoch"
            )
        put_back = share.held.now() if start and share.held is not None else None
        first = self._units_before(epoch, start) if start else 0
        places = _Places(share, first, end, self._length is not None)
        mine, num_samples, all_samples = None, 0, 0
        asked: list[tuple[Source, Any, int]] = []
        inside, open_ = 0, False
        units = self._units(epoch, end, places.fetches)
        deque(islice(units, first), maxlen=0)
        if put_back is not None:  # what was drawn up to there was drawn before
            put_back()
        for unit, (batch, its_parts) in enumerate(islice(units, None if end is None else max(0, end - first)), first):
            inside, rank, num_ranks = places.of(unit)
            its_samples = sum(number for _, _, number in its_parts)
            all_samples += its_samples
            if places.fetches(unit):
                mine, num_samples, asked = batch, its_samples if rank == share.rank else 0, its_parts
            open_ = rank + 1 < num_ranks
            if not open_:
                self._note(asked)
                yield mine, num_samples, all_samples, places.closes(unit)
                num_samples = all_samples = 0
        if open_:
            self._note(asked)
            yield mine, num_samples, all_samples, places.micro_batches_to(inside)

    def _note(self, asked: list[tuple[Source, Any, int]]) -> None:
        """Note of what the unit is that is about to be given."""
        self._asked = asked
        orders = [source.order for source in self._sources.values()]
        hashes = [hashed for hashed, _ in orders]
        self.order = zlib.crc32(repr(hashes).encode()) * any(hashes), ", ".join(name for _, name in orders if name)

    def samples_in(self, batch: Any, asked: int) -> int | None:
        found = [
            source.samples_in(part, number) if source.may_filter else number for source, part, number in self._asked
        ]
        return None if None in found else sum(number or 0 for number in found)

    def _units_before(self, epoch: int, start: int) -> int:
        """How many units hold the first `start` samples; of datasets with indices none is read."""
        seen = number = 0
        with Randomness(0):  # what reading draws was drawn before the run was interrupted
            for _, parts in self._units(epoch, self._length, lambda unit: 0):
                if seen >= start:
                    break
                seen += sum(num_samples for _, _, num_samples in parts)
                number += 1
        self.check(0)
        return number

    def _units(
        self, epoch: int, end: int | None, fetches: Callable[[int], int]
    ) -> Iterator[tuple[Any, list[tuple[Source, Any, int]]]]:
        """(what a step gets, of which loader its parts are with their samples) unit by unit; None for what is not this
        rank's to fetch."""
        combined = self._combined
        for state in self._states:
            state.begin(epoch)
        if combined.mode == "sequential":
            unit = 0
            for source in self._sources.values():
                for batch, num_samples in _numbered(source, epoch, unit, end, fetches):
                    unit += 1
                    yield batch, [(source, batch, num_samples)]
            return
        running = {name: _numbered(source, epoch, 0, end, fetches) for name, source in self._sources.items()}
        cycles = dict.fromkeys(running, 0)
        for unit in count() if end is None else range(end):
            batches, parts = {}, []
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
                        running[name] = _numbered(
                            self._sources[name], epoch + cycles[name] * EPOCHS, unit, end, fetches
                        )
                        item = next(running[name], None)
                        if item is None:
                            raise ValueError(
                                f"the loader {name!r} yielded no batch in epoch {epoch}: "
                                f"{self._sources[name].describe()}"
                            )
                batches[name] = item[0]
                parts.append((self._sources[name], *item))
            yield combined.together(batches), parts


@dataclass(frozen=True)
class _Places:
    """Where the units of an epoch go, from the `first` that is read to the `end`; without one it is found by
    reading."""

    share: Share
    first: int
    end: int | None
    length_is_known: bool

    @property
    def _window(self) -> int:
        return self.share.ranks * self.share.accumulate

    def of(self, unit: int) -> tuple[int, int, int]:
        """Its number in its window, the rank that gets it, and how many ranks get one with it."""
        inside = (unit - self.first) % self._window
        rank = inside % self.share.size
        left = self._window - inside + rank
        return inside, rank, min(self.share.size, left if self.end is None else min(left, self.end - unit + rank))

    def fetches(self, unit: int) -> int:
        """Whether this rank does, and what for."""
        if unit < self.first:
            return 0
        _, rank, num_ranks = self.of(unit)
        if rank == self.share.rank:
            return _OWN
        pads = (rank == 0 and self.share.rank >= num_ranks) or (not self.length_is_known and unit == self.first)
        return _PADDING if pads else 0

    def closes(self, unit: int) -> int:
        """How many micro-batches the window has that ends with this unit; 0 if it does not."""
        inside, _, _ = self.of(unit)
        return self.micro_batches_to(inside) if inside + 1 == self._window or unit + 1 == self.end else 0

    def micro_batches_to(self, inside: int) -> int:
        return -(-(inside + 1) // self.share.ranks)


def _numbered(
    source: Source, epoch: int, first: int, end: int | None, fetches: Callable[[int], int]
) -> Iterator[tuple[Any, int]]:
    """(batch, samples) of an epoch of a loader on one process, the first of which has the number `first`; None where it
    is not to be fetched."""
    if not isinstance(source, Indexed) or source.counts_own:
        yield from ((batch, num_samples) for batch, num_samples, *_ in source.pieces(epoch, 0, None))
        return
    tasks = enumerate(islice(source._tasks(epoch, 0, None), None if end is None else max(0, end - first)), first)
    known: deque[tuple[int, int, int]] = deque()
    to_fetch: deque[tuple[int, int, Any]] = deque()

    def look_ahead() -> bool:
        for number, (indices, position, num_samples, *_) in tasks:
            known.append((fetches(number), num_samples, source.sample_order.hashed))
            if known[-1][0]:
                to_fetch.append((epoch, position, indices))
            return True
        return False

    def keys() -> Iterator[tuple[int, int, Any]]:
        """Workers ask for several at once; without them none is read before its turn, as that may draw random
        numbers."""
        while to_fetch or look_ahead():
            if to_fetch:
                yield to_fetch.popleft()

    fetched = source._workers.run(source._fetcher, keys(), epoch)
    while known or look_ahead():
        whose, num_samples, hashed = known.popleft()
        source.note_order(hashed)
        with Randomness(0) if whose == _PADDING else nullcontext():  # a resumed run may pad where the whole one did not
            batch = next(fetched) if whose else None
        yield batch, num_samples
