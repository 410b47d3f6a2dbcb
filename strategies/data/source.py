"""Where the batches of a rank come from: what the kinds of loaders have in common."""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, default_collate

from lockstep.strategies.data.batch_rows import count_samples, rows_each
from lockstep.strategies.data.randomness import HeldState
from lockstep.strategies.data.sample_axis import Shown

Piece: TypeAlias = tuple[Any, int, int, int]
"""A micro-batch: (batch, samples of this rank, samples of all ranks, batches of the window that it ends, else 0)."""
Task: TypeAlias = tuple[Any, int, int, int, int]
"""What to fetch for one: (indices, position of the first in the order, then as in `Piece`)."""
Order: TypeAlias = "tuple[int, str]"
"""Hash (below 2**32) of the indices that samplers have yielded, and the names of these."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part in the cut of an epoch."""

    rank: int
    size: int
    seed: int
    accumulate: int
    """Micro-batches of a window."""
    split: bool
    """The loader's batch is the global batch of a window."""
    planned: int = 0
    """Ranks by which batches and windows are measured where not by `size`: of a run that began on so many; else 0."""
    whole: bool = False
    """Cut a planned window into one micro-batch, where a step of the user's is one."""
    virtual: tuple[int, ...] = ()
    """Virtual ranks, of `size`, that this rank runs one after the other; without them it is `rank` itself."""
    groups: int = 1
    """Groups of neighboring ranks, as many in each, that a micro-batch is cut into first: learners of local updates."""
    shown: Shown | None = None
    """What learns from a user's collate function where samples are in its batches."""
    held: HeldState | None = None
    """What datasets and collate functions hold; None in one of several loaders."""

    def unmoved(self) -> AbstractContextManager[None]:
        """What is read within is read again by a run, or by none: what datasets hold stays."""
        return nullcontext() if self.held is None else self.held.unmoved()

    def collating(self, loader: DataLoader[Any]) -> Any:
        """What makes its batches; torch's own collate function puts samples first."""
        known = loader.collate_fn is default_collate or loader.batch_sampler is None  # which is not given samples
        return (
            loader.collate_fn
            if self.shown is None or self.virtual or known
            else self.shown.collating(loader.collate_fn)
        )

    @property
    def own(self) -> tuple[int, ...]:
        """Which of `size` parts this rank reads."""
        return self.virtual or (self.rank,)

    @property
    def ranks(self) -> int:
        """Ranks by which batches and windows are measured."""
        return self.planned or self.size

    @property
    def cuts_batches(self) -> bool:
        """Whether a batch of one process is collated in parts, by ranks or micro-batches."""
        return not self.virtual and bool(self.planned or (self.split and self.size * self.accumulate > 1))

    def num_parts(self) -> int:
        """Micro-batches into which a planned window is cut: no rank gets more samples at once than was planned."""
        if self.groups > 1:  # each keeps its samples of each planned micro-batch
            return self.accumulate * -(-self.planned // self.size)
        return 1 if self.whole else -(-self.planned * self.accumulate // self.size)

    def in_group(self, length: int) -> int:
        """How many samples of a micro-batch the group of this rank reads."""
        first, last = bounds(length, self.rank * self.groups // self.size, self.groups)
        return last - first

    def bounds(self, length: int, own: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Begin and end of what rank `own` reads of a micro-batch, of one of `parts` in which its group reads it."""
        ranks, begin, end = self.size // self.groups, 0, length
        for place, places in ((own // ranks, self.groups), (part, parts), (own % ranks, ranks)):
            first, last = bounds(end - begin, place, places)
            begin, end = begin + first, begin + last
        return begin, end


class Source(ABC):
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
    may_filter = False
    """True where the user's own function makes batches, so that samples may be skipped."""
    shards_itself = False
    stateful: Any = None
    """The user's sampler, or iterable dataset that has a state which this process changes."""
    iterated: Any = None
    """The user's sampler, or iterable dataset that this process iterates."""
    order: Order = 0, ""
    """Of a user's sampler, up to the last piece; hashed where there are several processes."""

    least, most = math.inf, 0.0
    """Rows for each sample asked for, in the batches so far."""

    @property
    def rows_each(self) -> list[tuple[float, float]]:
        """The least and the most of each loader in it."""
        return [(self.least, self.most)]

    @abstractmethod
    def put_back(self) -> None:
        """Let the user's samplers, and iterable datasets read in this process, be as before the epoch was read."""

    @abstractmethod
    def pieces(self, epoch: int, start: int, limit: int | None) -> Iterator[Piece]: ...

    @abstractmethod
    def describe(self) -> str:
        """What was checked, for the message that it is empty."""

    @abstractmethod
    def check(self, start: int) -> None:
        """Raise where an epoch cannot be read from `start`."""

    def lengths(self, epoch: int | None) -> list[int]:
        """The length that each dataset, sampler or iterable of the user's has now; -1 where it is unknown. A sampler's
        is that of `epoch`, if given."""
        return []

    def samples_in(self, batch: Any, asked: int) -> int | None:
        """How many of the samples asked for are in `batch`; None where nothing tells.

        That is also so where samples have several rows in a batch, but not equally many in each: as many rows as were
        asked for are then fewer samples.
        """
        found = count_samples(batch, asked)
        if found and (each := rows_each(batch, asked)):
            self.least, self.most = min(each, self.least), max(each, self.most)
            if self.least < self.most > 1:
                return None
        return found

    def stand_in(self) -> Any:
        """A batch to run with zero weight where none before holds a sample, on each rank that asks; None where there is
        none."""
        return None

    @property
    def window_parts(self) -> int:
        """Micro-batches of a full window."""
        return self.share.num_parts() if self.share.planned else self.window_micro_batches

    @abstractmethod
    def check_planned(self, start: int) -> None:
        """Raise where an epoch cannot continue after `start` samples with the windows of another number of ranks."""

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
            raise ValueError(
                "the loader's state comes from an iterable dataset with its own state, read without workers, or from a "
                "sampler with one, which this loader is not"
            )

    def resumed(self, epoch: int, start: int) -> tuple[int, int]:
        """Samples and micro-batches that a loaded state makes it needless to replay."""
        return 0, 0

    def mark(self, samples: int, micro_batches: int) -> None:
        """Note what all ranks have read, for `state_dict`, where this one cannot know it."""
        raise NotImplementedError


def escaped(error: StopIteration, doing: str) -> RuntimeError:
    """What to raise in place of a StopIteration of user code that would end our own iteration by mistake."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    code = frame.f_code
    where = f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}, line {line})"
    return RuntimeError(
        f"{where} raised StopIteration while {doing}, which would end the epoch silently; pass a default to next(), or "
        "catch it"
    )


def refuse_emptied(error: IndexError, samples: str) -> None:
    """Raise ValueError in place of torch's error for a collate function that has called `default_collate` without
    samples."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    given = frame.f_locals.get("batch")
    if frame.f_code.co_filename == default_collate.__code__.co_filename and isinstance(given, list) and not given:
        raise ValueError(
            f"the collate function drops all {samples}and calls default_collate with an empty list; return None if no "
            "sample is left"
        ) from error


@dataclass(frozen=True)
class Factory:
    """An iterable of what a function returns."""

    make: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def cannot_share(loader: Any, share: Share, why: str, counts: Sequence[int]) -> ValueError:
    """What to say where a run cannot continue with its global batches on this number of ranks."""
    return ValueError(
        f"the run began on {share.planned} ranks and cannot keep its global batches on {share.size}: of "
        f"{name_of(loader)}, {why}; "
        f"resume on {' or '.join(map(str, counts))}, or change accumulate_grad_batches, which changes the global "
        "batches"
    )


def divisors(number: int, share: Share) -> list[int]:
    """The numbers of ranks, around those that there were, over which `number` whole batches share out."""
    if share.whole:
        return [share.planned]
    most = max(share.planned, share.size) * 2
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def name_of(value: Any) -> str:
    return getattr(value.make, "__name__", "the function") if isinstance(value, Factory) else type(value).__name__


def length_of(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def bounds(length: int, part: int, parts: int) -> tuple[int, int]:
    """Begin and end of one of `parts` contiguous pieces, the first of which are one longer where they must be
    uneven."""
    quotient, rest = divmod(length, parts)
    begin = part * quotient + min(part, rest)
    return begin, begin + quotient + (part < rest)


def parts_within(samples: int, length: int, parts: int) -> int:
    """How many of `parts` pieces end within the first `samples` of `length`."""
    return sum(bounds(length, part, parts)[1] <= samples for part in range(parts))


def cut(units: Iterator[Sequence[Any]], position: int, share: Share, size: int) -> Iterator[Task]:
    """What this rank reads of each unit; `size`: samples of a batch of all ranks."""
    most = share.num_parts() if share.planned else share.accumulate if share.split else 1
    for number, unit in enumerate(units, 1):
        parts = min(most, len(unit))
        for part in range(parts):
            begin, end = bounds(len(unit), part, parts)
            closes = 0
            if share.planned or share.split:
                closes = (-(-len(unit) // size) if share.planned else parts) if part + 1 == parts else 0
            elif number % share.accumulate == 0:
                closes = share.accumulate
            for own in share.own:
                first, last = share.bounds(end - begin, own)
                mine = unit[begin + first : begin + last] or unit[begin : begin + 1]
                ends = own == share.own[-1]
                counted, closing = (end - begin, closes) if ends else (0, 0)
                yield mine, position + begin + first, last - first, counted, closing
        position += len(unit)


def cut_in_groups(units: Iterator[Sequence[Any]], position: int, share: Share, size: int) -> Iterator[Task]:
    """Planned windows, in which a group of ranks keeps what it has of each planned micro-batch."""
    parts = -(-share.planned // share.size)
    for unit in units:
        for begin in range(0, len(unit), size):
            length, closes = min(size, len(unit) - begin), -(-len(unit) // size)
            for part, own in product(range(parts), share.own):
                first, last = share.bounds(length, own, part, parts)
                mine = unit[begin + first : begin + last] or unit[begin : begin + 1]
                ends = part + 1 == parts and own == share.own[-1]
                closing = closes if ends and begin + length == len(unit) else 0
                yield mine, position + begin + first, last - first, length if ends else 0, closing
        position += len(unit)


def deal(batches: Iterator[list[Any]], position: int, share: Share) -> Iterator[Task]:
    """What this rank reads of batches of which each goes to one rank, in turn."""
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


def begins_again(loader: Any, samples: int) -> RuntimeError:
    """What to raise where a loader does not continue where its state was taken."""
    return RuntimeError(
        f"{name_of(loader)} was given the state that its state_dict had returned after {samples} samples of an epoch, "
        "but begins with the first of them, so that a resumed run would read samples again; let it continue there, or "
        "remove its state_dict, so that what was read is read again and skipped"
    )
