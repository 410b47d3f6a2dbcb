"""Looks of the loops at numbers in which user code adds up this rank's part of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.strategies.launch import environment
from lockstep.strategies.modules.blocks import users_classes
from lockstep.strategies.sync.counts import PartialCounts

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

_Calls = tuple[Callable[..., Any], ...]


def watch_training(run: RunState, module: Module) -> None:
    """Look around the first batches, whose hooks are as they were afterwards."""
    hooks = run.hooks
    starts, ends = hooks.on_train_batch_start, hooks.on_train_batch_end

    def put_back() -> None:
        hooks.on_train_batch_start, hooks.on_train_batch_end = starts, ends

    watch = CountsWatch(run, module, "train", starts, ends, put_back)
    hooks.on_train_batch_start, hooks.on_train_batch_end = watch.starts, watch.ends


def _nothing() -> None: ...


class CountsWatch:
    """`starts` and `ends`, which are called around each batch, with a look before and after them on rank 0, where the
    loop runs for the first time."""

    def __init__(
        self,
        run: RunState,
        module: Module,
        loop: str,
        starts: _Calls,
        ends: _Calls,
        done: Callable[[], None] = _nothing,
    ) -> None:
        self._run, self.starts, self.ends, self._done = run, starts, ends, done
        place, can = run.strategy.topology, run.strategy.capabilities
        watches = place.data_size > 1 and run.is_global_zero and can.exact and run.shares is None
        if not watches or loop in run.watched or environment.in_plan():
            return
        run.watched.add(loop)
        own = [item for item in run.callbacks if users_classes(item)]
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
        if self._counts.done:
            self._done()
