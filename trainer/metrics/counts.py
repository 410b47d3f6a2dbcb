"""Looks of the loops at numbers in which user code adds up this rank's part of each batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.strategies.launch import environment
from lockstep.strategies.modules.blocks import users_classes
from lockstep.strategies.sync.counts import GrowingCounts, PartialCounts, warn_of_differing

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

_INSTEAD = "add self.sum_over_ranks(...) of it in its place, or self.log it"
_Calls = tuple[Callable[..., Any], ...]


def watch_training(run: RunState, module: Module) -> CountsWatch:
    """Look around the first batches, whose hooks are as they were afterwards."""
    hooks = run.hooks
    starts, ends = hooks.on_train_batch_start, hooks.on_train_batch_end

    def put_back() -> None:
        hooks.on_train_batch_start, hooks.on_train_batch_end = starts, ends

    watch = CountsWatch(run, module, "train", starts, ends, put_back)
    hooks.on_train_batch_start, hooks.on_train_batch_end = watch.starts, watch.ends
    return watch


def _nothing() -> None: ...


class CountsWatch:
    """`starts` and `ends`, which are called around each batch, with a look before and after them where the loop runs
    for the first time; and a comparison of what ranks have counted."""

    def __init__(
        self,
        run: RunState,
        module: Module,
        loop: str,
        starts: _Calls,
        ends: _Calls,
        done: Callable[[], None] = _nothing,
    ) -> None:
        self._run, self.starts, self.ends, self._done, self._loop = run, starts, ends, done, loop
        self._counts: PartialCounts | None = None
        self._growing: GrowingCounts | None = None
        place, can = run.strategy.topology, run.strategy.capabilities
        watches = place.data_size > 1 and can.steps_together and run.shares is None
        if not watches or loop in run.watched or environment.in_plan():
            return
        run.watched.add(loop)
        own = [item for item in run.callbacks if users_classes(item)]
        owners = {"": module} | {type(item).__name__: item for item in (run.datamodule, *own) if item is not None}
        if run.is_global_zero:
            self._counts = PartialCounts(owners, place.data_size, run.strategy.name, _INSTEAD)
        if run.world_size > 1 and can.runs_step_once:
            self._growing = GrowingCounts(owners)
        if self._counts is not None or self._growing is not None:
            self.starts, self.ends = (self._begin, *starts), (*ends, self._end)

    def _begin(self, *_: Any) -> None:
        if self._counts is not None:
            self._counts.begin()
        if self._growing is not None and not self._growing.has_begun:
            self._growing.look()

    def _end(self, output: Any, batch: Any, *_: Any) -> None:
        if self._counts is not None:
            self._counts.end(int(self._run.metrics.weight), batch, output)
        if self._growing is not None:
            self._growing.look()
        if (self._counts is None or self._counts.done) and (self._growing is None or self._growing.done):
            self._done()

    def compare(self) -> None:
        """Name the numbers that differ between ranks, once enough batches have run. Every rank calls it."""
        if self._growing is None:
            return
        strategy, growing = self._run.strategy, self._growing
        known = {} if self._counts is None else self._counts.named
        names, looks_again = strategy.broadcast([growing.found(), not known])
        if names is None:  # as in a sanity check
            if looks_again and self._loop != "train":
                self._run.watched.discard(self._loop)
            return
        self._growing = None
        if not names:
            return
        values = strategy.all_gather(torch.tensor(growing.values(names), dtype=torch.float64)).unbind(1)
        differ = {name: row.tolist() for name, row in zip(names, values, strict=True) if not (row == row[0]).all()}
        unknown = {name: row for name, row in differ.items() if name not in known and not any(map(math.isnan, row))}
        if self._run.is_global_zero:
            warn_of_differing(unknown, strategy.name, _INSTEAD)
