"""What `self.log` collects: sums and counts on the value's own device, reduced over ranks when shown.

Logging a value adds to a running sum: no host sync, no collective, no growth. At each logging interval and at epoch
ends several ranks compare their names in one small all_gather and exchange their sums in a packed one (with exact sums
after one for their length), so every value is the exact weighted mean over all samples and ranks.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.trainer.metrics import reduction
from lockstep.trainer.metrics.entry import (
    Entry,
    Reduced,
    added_by_rank,
    is_complex,
    is_metric,
    not_a_number,
    number_of,
    of_two_kinds,
    reduction_of,
    too_late,
    weight_of,
)
from lockstep.trainer.metrics.exact import saved_count, saved_sum
from lockstep.trainer.metrics.part import Part

if TYPE_CHECKING:
    from lockstep.strategies import Strategy


class MetricStore:
    """The metrics of one phase (training or one evaluation)."""

    def __init__(
        self, module: nn.Module | None = None, training: bool = True, exact: bool = False, several: bool = False
    ) -> None:
        self.module = module
        self.entries: dict[str, Entry] = {}
        self.keys_hash = 0
        """Below 2**52, equal on ranks that have logged the same names."""
        self.weight = 1.0
        """Samples of the running micro-batch: the weight of what is logged in it."""
        self.samples = 0
        """Samples that this rank has seen in the epoch: the weight of what is logged outside of batches."""
        self.num_loaders = 0
        """Loaders of an evaluation that gave this rank a sample."""
        self.is_ambiguous = False
        """Whether nothing tells how many samples the running batch holds, so that a mean over it has no weight."""
        self.weighs = False
        """Whether a mean was weighted by the samples of its batch."""
        self.in_batch = False
        """Whether a batch is being worked on: decides the defaults of `on_step` and `on_epoch`."""
        self.in_share = True
        """Whether it is of one share, where a rank works on several: not after the last backward of a step."""
        self.training = training
        self.exact = exact
        """Whether sums are exact, so that they have the same bits on any number of ranks."""
        self.several = several or exact
        """Whether others log values of their own samples."""
        self.suffix = ""
        """Appended to names where several loaders are evaluated."""
        self.noticed: set[str] = set()
        """Names of which ranks' own values were averaged, so that it was said."""
        self._reductions = 0
        self._read: dict[tuple[int, str], tuple[int, float, float]] = {}
        self._restored: dict[str, tuple[float, float]] = {}
        self._parts: deque[Part] = deque()
        self.open_part: Part | None = None
        """That on which a step runs now."""

    @property
    def in_part(self) -> bool:
        """Whether a step runs on a part of a micro-batch."""
        return self.open_part is not None

    @property
    def is_padding(self) -> bool:
        """Whether a batch is worked on of which this rank has no samples."""
        return self.in_batch and not self.weight

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable = "mean",
        batch_size: float | None = None,
        add_dataloader_idx: bool = True,
        rank_zero_only: bool = False,
    ) -> None:
        if self._parts and (part := self.open_part) is not None:
            value = value.detach() if isinstance(value, Tensor) else value
            flags = prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx, rank_zero_only
            part.calls.append((name, value, *flags))
            return
        if self.suffix and add_dataloader_idx:
            name += self.suffix
        entry = self.entries.get(name)
        given = reduce_fx, on_step, on_epoch, prog_bar, logger, rank_zero_only, self.in_batch
        if entry is None:
            entry = self._add(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, rank_zero_only)
            entry.given, entry.by_hand = given, not self.in_batch and batch_size is None
        elif entry.given != given:
            entry.check_flags(given, not self.in_batch and batch_size is None, self.several)
        if entry.metric is not None:
            if not is_metric(value):
                raise of_two_kinds(name)
            if value is not entry.metric:
                self._replace(entry, value)
            entry.seen = 1.0
            value = getattr(value, "_forward_cache", None) if entry.on_step else None
            if value is None:
                return
        weight = 1.0 if batch_size is None else weight_of(name, batch_size)
        if entry.reduce_fx != "mean":
            weight = 1.0
            if entry.reduce_fx == "sum" and self.exact and not rank_zero_only and not (self.in_share and self.in_batch):
                raise added_by_rank(name)
        elif batch_size is None:
            weight = self.weight
            self.weighs |= self.in_batch
            if self.is_ambiguous and self.in_batch:
                raise ValueError(
                    f"self.log({name!r}) cannot weigh a mean over a batch that does not show how many samples its "
                    "collate function left in it; give batch_size="
                )
        if self.is_padding:  # whatever the step takes its size for
            weight = 0.0
        self._count(entry, value, weight)

    def log_measured(self, name: str, value: float, reduce_fx: str, weight: float) -> None:
        """What a strategy has measured of a batch."""
        self.log(name, value, reduce_fx=reduce_fx, on_step=True, on_epoch=False, batch_size=weight)

    def _count(self, entry: Entry, value: Any, weight: float) -> None:
        """Add a number, or a tensor of one element, to the sum of `entry`."""
        if isinstance(value, Tensor):
            if value.is_complex():
                raise is_complex(entry.name)
            if value.numel() != 1:
                raise ValueError(
                    f"self.log({entry.name!r}) takes one number, but got a tensor of shape {list(value.shape)}; log "
                    "its mean or its elements under names of their own"
                )
            is_sharded = type(value) is not Tensor and hasattr(value, "full_tensor")  # every rank takes its item
            if not value.is_cpu and self.exact and not is_sharded:
                entry.add_later(value, weight)
                entry.count += weight
                return
            if not value.is_cpu and not is_sharded:
                entry.add_on_device(value.detach().reshape(()), weight)
                entry.count += weight
                return
            value = value.item()
        elif is_metric(value):
            raise of_two_kinds(entry.name)
        entry.add(value if type(value) is float else number_of(entry.name, value), weight)
        entry.count += weight

    @property
    def samples_here(self) -> float:
        """Samples that a step runs on."""
        return self.weight if self.open_part is None else self.open_part.num_samples

    def part(self, num_samples: int) -> Part:
        """A context in which a step runs on a part of the micro-batch: what is logged in it weighs `num_samples`.

        Parts count in the order in which they were made, so sums are reproducible.
        What is logged in a part of no samples does not count: the step runs a second time somewhere.
        """
        part = Part(self, num_samples)
        self._parts.append(part)
        return part

    def leave(self, part: Part) -> None:
        """Count what the parts at the head of the queue have logged."""
        part.done = True
        weight = self.weight
        while self._parts and self._parts[0].done:
            head = self._parts.popleft()
            self.weight = head.num_samples
            for call in head.calls if head.num_samples else ():
                self.log(*call)
        self.weight = weight

    def mark(self) -> list[tuple[Any, ...]]:
        """What has been logged so far, for `back_to`."""
        return [(e, e.sums(), e.seen, e.epoch_value, e.epoch_count) for e in self.entries.values()]

    def back_to(self, mark: list[tuple[Any, ...]]) -> None:
        """Forget what was logged since `mark`; names stay."""
        for entry in self.entries.values():
            entry.forget()
            entry.seen, entry.epoch_value, entry.epoch_count = 0.0, float(entry.start), 0.0
        for entry, sums, *values in mark:
            entry.put_sums(sums)
            entry.seen, entry.epoch_value, entry.epoch_count = values

    @contextmanager
    def undone_after_errors(self) -> Iterator[None]:
        """Forget what is logged within, if it ends with an error or is closed."""
        mark, samples = self.mark(), self.samples
        try:
            yield
        except BaseException:
            self.back_to(mark)
            self.samples = samples
            raise

    def names(self) -> list[str]:
        """The names that this rank has logged for all ranks."""
        return [entry.name for entry in self.shared()]

    def close(self) -> None:
        """Nobody reads what is logged from now on: say so."""
        self.log = too_late  # type: ignore[assignment,method-assign]

    def shared(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if not entry.rank_zero_only]

    def of_rank_zero(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.rank_zero_only]

    def path(self, metric: Any) -> str | None:
        if metric is None or self.module is None:
            return None
        return next((name for name, child in self.module.named_modules() if child is metric), None)

    def state_dict(self) -> dict[str, Any]:
        """JSON data: the running sums of this rank and the epoch's values."""
        return {
            e.name: [
                *self.saved(e),
                e.epoch_value,
                e.epoch_count or e.seen,
                *([] if e.by_hand is None else [e.by_hand]),
            ]
            for e in self.entries.values()
        }

    def saved(self, entry: Entry) -> list[Any]:
        """As JSON data its flags, the path of its metric, and what was added since the last reduction."""
        entry.settle()
        return [*entry.flags(), self.path(entry.metric), saved_sum(entry.number), saved_count(entry.count)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back `state_dict`; a number that is None is that of a name for which this rank has none."""
        for name, (
            reduce_fx,
            on_step,
            on_epoch,
            prog_bar,
            logger,
            rank_zero_only,
            metric,
            number,
            count,
            epoch_value,
            epoch_count,
            *by_hand,  # checkpoints of old do not say it
        ) in state.items():
            entry = self.new(name, reduce_fx, on_step, on_epoch, prog_bar, logger, rank_zero_only)
            entry.by_hand = by_hand[0] if by_hand else None
            entry.epoch_value, entry.epoch_count = epoch_value, epoch_count
            if metric is not None:
                entry.metric, entry.seen = self.module.get_submodule(metric), epoch_count  # type: ignore[union-attr]
                if not is_metric(entry.metric):
                    raise ValueError(
                        f"{name!r} was logged of the metric {metric}, which is not a torchmetrics Metric in this run"
                    )
            if number is not None:
                entry.put_saved(number, count)
                self._restored[name] = entry.number, entry.count

    def reduce(self, strategy: Strategy, epoch_end: bool = False, reset: bool = True) -> list[Reduced]:
        """Exchange what was added since the last call; return the values to show now.

        Every rank calls it. `epoch_end` returns the epoch's values and, with `reset`, starts a new epoch;
        otherwise the means since the last call are returned.
        """
        self._reductions += 1
        return reduction.reduce(self, strategy, epoch_end, reset)

    def preview(self, strategy: Strategy) -> list[Reduced]:
        """What `reduce` would return now; changes nothing. Every rank calls it."""
        mark = self.mark()
        try:
            return reduction.reduce(self, strategy, epoch_end=False, reset=False)
        finally:
            self.back_to(mark)

    def of_this_step(self, name: str, reader: int, strategy: Strategy, wanted: bool) -> float | None:
        """The mean over all ranks of what was logged as `name` in this optimizer step; None where nothing was.

        `reader` calls it after each step, on every rank: a host synchronization, and where the value is `wanted` a
        collective.
        """
        if self.exact:
            raise ValueError(
                f"a scheduler that monitors {name!r} in each step adds it over ranks in their order, so that it would "
                'depend on their number; give it interval="epoch"'
            )
        entry = self.entries.get(name) or self.entries.get(name.removesuffix("_step"))
        mine = [0.0, 0.0]
        if entry is not None and entry.on_step and entry.metric is None and entry.reduce_fx == "mean":
            entry.settle()
            reductions, number, count = self._read.get(
                (reader, entry.name), (0, *self._restored.get(entry.name, (0.0, 0.0)))
            )
            if reductions != self._reductions:  # the sums began again
                number = count = 0.0
            self._read[reader, entry.name] = self._reductions, entry.number, entry.count
            if strategy.topology.is_reporting_rank:
                mine = [entry.number - number, entry.count - count]
        if not wanted:
            return None
        total, count = strategy.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        return total / count if count else None

    # ---- helpers -----------------------------------------------------------------------------------

    def _add(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        rank_zero_only: bool,
    ) -> Entry:
        if not isinstance(name, str):
            raise TypeError(
                f"self.log takes a name and a value, but its name is {name!r}; write self.log('name', value)"
            )
        counts_itself = is_metric(value)
        if not counts_itself and not isinstance(value, (Tensor, Number)):
            raise not_a_number(name, value)
        reduction = reduction_of(name, reduce_fx)
        if on_step is None:
            on_step = self.in_batch and self.training
        if on_epoch is None:
            on_epoch = not (self.in_batch and self.training)
        if not on_step and not on_epoch:
            raise ValueError(f"self.log({name!r}) with on_step=False and on_epoch=False shows nothing; set one to True")
        if counts_itself:
            self._check_place(name, value)
            twin = next((e.name for e in self.entries.values() if e.metric is value), None)
            if twin is not None and "/dataloader_idx_" in twin and self.suffix and not twin.endswith(self.suffix):
                raise ValueError(
                    f"the metric logged as {name!r} is logged as {twin!r} too and would be computed over both loaders; "
                    "make one for each"
                )
        entry = self.new(name, reduction, on_step, on_epoch, prog_bar, logger, rank_zero_only)
        if counts_itself:
            entry.metric = value
        return entry

    def _check_place(self, name: str, metric: Any) -> None:
        if self.module is not None and self.path(metric) is None:
            raise ValueError(
                f"the metric logged as {name!r} is not an attribute of {type(self.module).__name__}, so it is "
                "neither moved nor saved; make it one"
            )

    def _replace(self, entry: Entry, metric: Any) -> None:
        """Show `metric` under the name of one that the module no longer has; one of a replica counts there."""
        old, new = self.path(entry.metric), self.path(metric)
        if old is None:
            self._check_place(entry.name, metric)
            entry.metric = metric
        elif new is not None:
            raise ValueError(
                f"two metrics of {type(self.module).__name__}, {old} and {new}, are logged as {entry.name!r}; give "
                "each a name of its own"
            )

    def new(self, name: str, *flags: Any) -> Entry:
        """A name with flags as those of `Entry.flags`."""
        entry = self.entries[name] = Entry(name, *flags, exact=self.exact)
        if not entry.rank_zero_only:
            self.keys_hash ^= (zlib.crc32(name.encode()) << 20) | (zlib.adler32(name.encode()) & 0xFFFFF)
        return entry
