"""Looks of the loops at numbers in which user code adds up this rank's part of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.strategies.launch import environment
from lockstep.strategies.sync.counts import PartialCounts

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

_Calls = tuple[Callable[..., Any], ...]


def watch_training(run: RunState, module: Module) -> None:
    hooks = run.hooks
    watch = CountsWatch(run, module, hooks.on_train_batch_start, hooks.on_train_batch_end)
    hooks.on_train_batch_start, hooks.on_train_batch_end = watch.starts, watch.ends


class CountsWatch:
    """`starts` and `ends`, which are called around each batch, with a look before and after them on rank 0, as long as
    there is something to see."""

    def __init__(self, run: RunState, module: Module, starts: _Calls, ends: _Calls) -> None:
        self._run, self.starts, self.ends = run, starts, ends
        place, can = run.strategy.topology, run.strategy.capabilities
        watches = place.data_size > 1 and run.is_global_zero and can.exact and run.shares is None
        if not watches or environment.in_plan():
            return
        own = [item for item in run.callbacks if not type(item).__module__.startswith("lockstep.")]
        owners = {"": module} | {type(item).__name__: item for item in (run.datamodule, *own) if item is not None}
        self._counts = PartialCounts(
            owners,
            place.data_size,
            run.strategy.name,
            "add self.sum_over_ranks(...) of it in its place, or self.log it",
        )
        self.starts, self.ends = (self._begin, *starts), (*ends, self._end)

    def _begin(self, *_: Any) -> None:
        self._counts.begin()

    def _end(self, output: Any, batch: Any, *_: Any) -> None:
        self._counts.end(int(self._run.metrics.weight), batch, output)
