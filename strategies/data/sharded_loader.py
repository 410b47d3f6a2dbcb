"""Which samples each rank sees, when: duty three of the Strategy contract.

An epoch has an order: a pure function of (seed, epoch), equal on all ranks. It is cut into global
micro-batches, each of them into one contiguous piece a rank, and `accumulate` of them make a window.
So a global batch is the same set of samples on any number of ranks, and the pieces in the order
(micro-batch, rank) give the epoch's order back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from lockstep.strategies.data.batch_rows import count_samples
from lockstep.strategies.data.open_loader import read_by, source_of
from lockstep.strategies.data.randomness import HeldState
from lockstep.strategies.data.sample_axis import Shown
from lockstep.strategies.data.source import Order, Share


@dataclass(slots=True)
class MicroBatch:
    """What one rank feeds one forward with."""

    batch: Any
    """What the loader's collate function made; of padding None if no rank has had a sample yet."""
    num_samples: int
    """Samples in this rank's batch, which a collate function may have skipped some of; 0 marks padding: a batch to
    run with zero weight where ranks must keep step."""
    batch_idx: int = 0
    """Index of the batch in its epoch on this rank; set by who drives the loop."""
    is_ambiguous: bool = False
    """True where the collate function left it open how many samples there are; `num_samples` are those asked for."""
    share: int = 0
    """The virtual rank that runs it."""
    output: Any = None
    """What the step function returned for it, detached; set by `forward_backward`."""


@dataclass(slots=True)
class Window:
    """What one optimizer step sees: this rank's micro-batches, in order; equally many on every rank."""

    micro_batches: list[MicroBatch]
    num_samples: int
    """Samples asked for over all micro-batches and ranks: positions of the epoch count them."""
    num_shares: int = 0
    """Virtual ranks of this rank, whose micro-batches follow each other, equally many of each; 0 without any."""
    num_batches: int = 0
    """What it adds to the loader's count of batches: its micro-batches; after `resume_windows` those of the run that
    began."""
    in_group: int = 0
    """Samples asked for over all micro-batches and the ranks of this rank's group, if there are several groups."""
    may_lack: bool = False
    """Whether a rank may lack samples that no other rank knows of; once the step has run, whether one did."""
    more: bool = False
    """Whether this is a part of a window that another part follows on this rank: its last batch ends like any."""

    @property
    def has_samples(self) -> bool:
        """Whether this rank has samples in each micro-batch."""
        return all(micro_batch.num_samples for micro_batch in self.micro_batches)


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

    `rank` of `size` counts the ranks that see different samples. With `virtual`, `size` is the number of virtual ranks,
    and this rank reads the parts of those of `virtual`; what a dataset draws is then a function of a sample's place
    without workers too. `groups` of ranks share a micro-batch first. `sum_over_ranks` is a collective that
    sums an int over them; it is called once a window where a rank cannot know the others' samples. `first_of_ranks`
    gives the first value of theirs that is not None, for a rank that has no batch to pad with.

    Raises ValueError if the loader is empty or cannot be split as asked, TypeError for an object that is not a loader.
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
        first_of_ranks: Callable[[Any], Any] | None = None,
        virtual: Sequence[int] = (),
        groups: int = 1,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, size), but rank is {rank} and size is {size}")
        self.loader = loader
        """The loader as it was given."""
        self.dataset = getattr(loader, "dataset", loader)
        """The dataset of the loader; the loader itself where it has none."""
        self._shuffle = shuffle
        self._held = held = HeldState(read_by(loader), rank)
        share = Share(rank, size, seed, _positive(accumulate), split, virtual=tuple(virtual), groups=groups, held=held)
        self._source = source_of(loader, share, shuffle)
        self._sum, self._first = sum_over_ranks, first_of_ranks
        self._last: Any = None
        """Used as padding: the last batch of this rank that had a sample, else one of another rank."""
        if size > 1 and sum_over_ranks is None and self._source.counts_own:
            raise ValueError(
                f"{type(loader).__name__} gives a rank only its own samples, so sum_over_ranks is required if size is "
                f"{size}"
            )
        self._lengths = self._source.lengths(None)
        if self._source.num_micro_batches == 0:
            raise ValueError(f"the loader is empty: {self._source.describe()}")

    def windows(self, epoch: int, start: int = 0, limit: int | None = None) -> Iterator[Window]:
        """The windows of `epoch` that follow its first `start` samples (over all ranks).

        `limit` is the number of batches (as in `len`) of the whole epoch. To start later costs nothing
        where the order is computed; other samplers and iterables are replayed and skipped, unless
        `load_state_dict` brought an iterable dataset's own state. Every rank calls it alike and reads equally many
        windows. Raises ValueError for a loader that yields nothing, RuntimeError for an iterator read a second time.
        """
        if start < 0 or (limit is not None and limit < 0):
            raise ValueError(f"start and limit must not be negative, but start is {start} and limit is {limit}")
        self._source.check(start)
        self._held.begin()
        limit = self._source.limit_here(limit)
        windows = self._agreed_windows if self._source.shards_itself else self._windows
        return windows(epoch, start, limit)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of epoch 0, read apart from any `windows`; other ranks need not take part."""
        self._source.check(0)
        apart = source_of(self.loader, self._source.share, self._shuffle)
        return (batch for batch, num_samples, *_ in apart.pieces(0, 0, None) if num_samples)

    @property
    def splits(self) -> bool:
        """Whether the loader's batch is the global one of a window, split into ranks and micro-batches."""
        return self._source.share.split

    @property
    def may_filter(self) -> bool:
        """Whether batches may hold fewer samples than were asked for, as the user's own function makes them."""
        return self._source.may_filter

    @property
    def is_even(self) -> bool:
        """Whether the samples of each window are shared over ranks as evenly as they can be."""
        return self.batch_size is not None and not self._source.counts_own and not self.may_filter

    @property
    def rows_each(self) -> list[tuple[float, float]]:
        """The least and the most rows that the collate function, of each loader in this one, has made of a sample in
        what was read so far; infinity and 0 if nothing tells."""
        return self._source.rows_each

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
        wanted = total if total is None or limit is None else min(total, limit)
        return None if wanted is None else -(-wanted // self._source.window_micro_batches)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a full window on each rank."""
        return self._source.window_parts

    @property
    def order(self) -> Order:
        """A hash of what a user's sampler has yielded up to the last window read, equal on all ranks unless it differs
        on them, and its name. 0 on one process, and where Lockstep decides the order."""
        return self._source.order

    @property
    def plan(self) -> dict[str, Any]:
        """By what windows are measured, for `resume_windows`: JSON data, the same on all ranks."""
        share = self._source.share
        return {
            "ranks": share.ranks,
            "batch_size": self._source.batch_size,
            "accumulate": share.accumulate,
            "split": share.split,
        }

    def resume_windows(self, plan: Mapping[str, Any], start: int = 0, whole: bool = False) -> str | None:
        """Continue with the windows of a run that had `plan`, on another number of ranks; return what was done, None
        for nothing.

        Windows keep their samples; batches are measured, limited and counted as in that run. Each window is
        cut again over ranks and micro-batches, none of which has more samples a rank than was planned, or
        with `whole` into one micro-batch. Where batch size or accumulation is another than in `plan`, that
        is taken for what is wanted. `start` samples of the epoch are done. Every rank calls it alike,
        before `windows`. Raises ValueError where batches that are not ours to cut do not share out.
        """
        mine, share = self.plan, self._source.share
        if (
            plan["split"]
            or plan["ranks"] == share.size
            or any(plan[key] != mine[key] for key in ("batch_size", "accumulate", "split"))
        ):
            return None
        self._source = source_of(self.loader, replace(share, planned=plan["ranks"], whole=whole), self._shuffle)
        self._source.check_planned(start)
        size = self.batch_size
        return (
            f"the run began on {plan['ranks']} data ranks and continues on {share.size}: "
            f"{f'global batches keep {size} samples' if size else 'global batches are unchanged'}, in "
            f"{self.num_micro_batches} micro-batches a step "
            f"(accumulate_grad_batches={share.accumulate} at its start); batches are counted as before"
        )

    def set_accumulation(self, accumulate: int) -> None:
        """Give the windows that follow another number of micro-batches. Every rank calls it alike, between epochs.

        Raises ValueError for a number below 1, and if batches cannot be split so.
        """
        share, state = replace(self._source.share, accumulate=_positive(accumulate)), self._source.state_dict()
        self._source = source_of(self.loader, share, self._shuffle)
        self._source.load_state_dict(state)
        if share.planned:
            self._source.check_planned(0)

    def lengths(self, epoch: int) -> list[int]:
        """The length of each dataset, or of the user's own sampler, at the start of `epoch`; -1 where it is unknown."""
        return self._source.lengths(epoch)

    def follow(self, lengths: list[int]) -> bool:
        """Read epochs of the `lengths` that datasets have now; return whether these are others than before. Every rank
        calls it alike, between epochs or before the first `windows`."""
        if lengths == self._lengths:
            return False
        share, state = self._source.share, self._source.state_dict()
        self._source, self._lengths = source_of(self.loader, share, self._shuffle), lengths
        self._source.load_state_dict(state)
        if share.planned:
            self._source.check_planned(0)
        return True

    def learn_samples(self) -> Shown:
        """From now on, learn from its collate function where samples are in batches; what is learned is returned."""
        shown = Shown()
        self._source = source_of(self.loader, replace(self._source.share, shown=shown), self._shuffle)
        return shown

    def set_virtual(self, virtual: Sequence[int]) -> None:
        """Read the parts of other virtual ranks from the next `windows` on."""
        share = replace(self._source.share, rank=virtual[0], virtual=tuple(virtual))
        self._source = source_of(self.loader, share, self._shuffle)

    def put_back(self) -> None:
        """Let samplers, and what reads samples in this process, be as before the last `windows` were read."""
        self._source.put_back()
        self._held.put_back()

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler, or of an iterable dataset read without workers, after the last window read (the
        same on all ranks unless it shards itself), and what a map-style dataset holds. Else resuming replays."""
        return self._source.state_dict() | self._held.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], ranks: int = 0) -> None:
        """Take `state` for the next `windows` of its epoch, which then need not replay, or of the epoch that
        follows. `ranks`: how many saw different samples where it was saved, if not as many as here; of a dataset that
        shards itself it is then nobody's."""
        share, state = self._source.share, self._held.load_state_dict(state)
        if ranks not in (0, share.size):
            if self._source.shards_itself:
                return
            if "micro_batches" in state and not share.split:  # of which each is a batch of all ranks
                state = {**state, "micro_batches": state["micro_batches"] * ranks // share.size}
        self._source.load_state_dict(state)

    def _windows(self, epoch: int, start: int, limit: int | None) -> Iterator[Window]:
        micro_batches: list[MicroBatch] = []
        total, in_group, empty, share = 0, 0, start == 0 and limit != 0, self._source.share
        counts = self._source.may_filter
        for batch, num_samples, all_samples, closes in self._source.pieces(epoch, start, limit):
            micro_batches.append(self._micro_batch(batch, num_samples) if counts else MicroBatch(batch, num_samples))
            total += all_samples
            in_group += share.in_group(all_samples) if share.groups > 1 else 0
            if closes:
                yield self._window(micro_batches, self._over_ranks(total), closes, in_group)
                micro_batches, total, in_group, empty = [], 0, 0, False
        if micro_batches:
            num_batches = self._source.batches_of(len(micro_batches) // len(share.own))
            yield self._window(micro_batches, self._over_ranks(total), num_batches, in_group)
        elif empty:
            raise ValueError(f"the loader yielded no batch in epoch {epoch}: {self._source.describe()}")

    def _window(self, micro_batches: list[MicroBatch], num_samples: int, num_batches: int, in_group: int) -> Window:
        """A window of micro-batches as they were read; those of a virtual rank come one after the other."""
        share, virtual = self._source.share, self._source.share.virtual
        if not virtual:
            if share.groups > 1 and self._source.counts_own:  # of other ranks' batches only the sum is known
                in_group = num_samples // share.groups
            may_lack = self._source.may_filter or self._source.counts_own
            return Window(micro_batches, num_samples, num_batches=num_batches, in_group=in_group, may_lack=may_lack)
        for i, micro_batch in enumerate(micro_batches):
            micro_batch.share = virtual[i % len(virtual)]
        ordered = [part for i in range(len(virtual)) for part in micro_batches[i :: len(virtual)]]
        return Window(ordered, num_samples, len(virtual), num_batches)

    def _micro_batch(self, batch: Any, asked: int) -> MicroBatch:
        """`batch`, made of the `asked` samples that this rank was to get, with the number that is in it; padding, for
        which one sample was collated, if it was to get none."""
        if not self._source.may_filter:
            return MicroBatch(batch, asked)
        found = self._source.samples_in(batch, asked) if asked else count_samples(batch, 1)
        if found == 0:
            self._last = batch = self._source.stand_in() if self._last is None else self._last
        elif asked or self._last is None:
            self._last = batch
        return MicroBatch(
            batch, asked if found is None else min(found, asked), is_ambiguous=asked > 0 and found is None
        )

    def _over_ranks(self, total: int) -> int:
        return (
            self._sum(total)
            if self._sum is not None and self._source.counts_own and self._source.share.size > 1
            else total
        )

    def _agreed_windows(self, epoch: int, start: int, limit: int | None) -> Iterator[Window]:
        """Windows of a dataset that shards itself: no rank knows when the others end."""
        seen, done = self._source.resumed(epoch, start)
        pieces = self._source.pieces(epoch, start, None)
        empty = start == 0 and limit != 0
        while limit is None or done < limit:
            want = self._source.window_parts if limit is None else min(self._source.window_parts, limit - done)
            read = [(batch, num_samples) for batch, num_samples, _, _ in islice(pieces, want)]
            mine = [self._micro_batch(*item) for item in read]
            lacks = len(mine) < want or any(part.batch is None for part in mine)
            # One sum carries both the samples and how many ranks need padding.
            shared = self._over_ranks(sum(asked for _, asked in read) + (lacks << 32))
            if shared >> 32:
                have = 0
                while have < want and self._over_ranks(int(len(mine) > have)):
                    have += 1
                want = have
            if want == 0:
                break
            if mine and mine[-1].batch is not None:
                self._last = mine[-1].batch
            if shared >> 32 and self._first is not None and self._over_ranks(int(self._last is None)):
                found = self._first(self._last)
                self._last = found if self._last is None else self._last
            for part in mine:
                part.batch = self._last if part.batch is None else part.batch
            mine += [MicroBatch(self._last, 0) for _ in range(want - len(mine))]
            seen, done, empty = seen + shared % (1 << 32), done + want, False
            if seen > start:
                self._source.mark(seen, done)
                yield Window(mine, shared % (1 << 32), num_batches=self._source.batches_of(want), may_lack=True)
        if empty:
            raise ValueError(f"the loader yielded no batch in epoch {epoch}: {self._source.describe()}")


def _positive(accumulate: int) -> int:
    if accumulate < 1:
        raise ValueError(
            f"accumulate is the number of micro-batches of a window and must be at least 1, but it is {accumulate}"
        )
    return accumulate
