"""Looks of the loops at numbers in which user code adds up this rank's part of each batch."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.launch import environment
from lockstep.strategies.launch.program.reads import read_first
from lockstep.strategies.modules.blocks import users_classes
from lockstep.strategies.sync.contents import checksum
from lockstep.strategies.sync.counts import GrowingCounts, PartialCounts, is_of_rank, reads_a_clock, warn_of_differing

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

_INSTEAD = "add self.sum_over_ranks(...) of it in its place, or self.log it"
_NOTHING = -1
_MOST_ELEMENTS = 2**16
"""Of a tensor in an attribute that is compared."""
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
        self._read: ReadAttributes | None = None
        self._named = set[str]()
        """What was warned of."""
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
            self._read = ReadAttributes(run.strategy, module) if loop == "train" else None
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
        self._named |= {*known, *unknown}
        if self._run.is_global_zero:
            warn_of_differing(unknown, strategy.name, _INSTEAD)

    def compare_read(self, samples: int) -> None:
        """Name attributes that steps read and that differ between ranks: `ReadAttributes.compare`."""
        found = [] if self._read is None else self._read.compare(samples)
        names = [name for name in found if name not in self._named]
        if names and self._run.is_global_zero:
            warnings.warn(
                f"training_step reads {', '.join(names)} as an earlier step or hook has set it, under "
                f"{self._run.strategy.name} on each rank from its own samples or random numbers, so that ranks hold "
                "different values where one process has one; give it self.sum_over_ranks(...) of what it is computed "
                "from",
                stacklevel=2,
            )


class ReadAttributes:
    """Attributes with a number or a tensor of `module` and the user's layers in it, of which the code says that a step
    may read what an earlier step or a hook has left there."""

    def __init__(self, strategy: Strategy, module: Module) -> None:
        self._strategy, self._samples = strategy, set[str]()
        self._found = [
            (f"{path}.{name}".lstrip("."), layer, name)
            for path, layer in module.named_modules()
            if users_classes(layer) and not hasattr(type(layer), "metric_state")  # whose states are gathered
            for name in _read_in_steps(layer, path)
            if not is_of_rank(name)
        ]
        self._reads_a_clock = bool(self._found) and reads_a_clock([module])

    def compare(self, samples: int) -> list[str]:
        """The names, each once, of what differs between ranks. Every rank calls it.

        `samples`: of this rank's last batch, 0 at the end of an epoch. What has rows for these, such as the hidden
        state of a recurrent layer or labels that a step gives a layer, is a rank's own. What the module itself holds
        may be weights of as many classes.
        """
        if not self._found:
            return []
        values = {name: vars(layer).get(attribute) for name, layer, attribute in self._found}
        if samples:
            self._samples |= {
                name
                for (name, _, attribute), value in zip(self._found, values.values(), strict=True)
                if isinstance(value, Tensor) and samples in value.shape and (value.dim() > 1 or name != attribute)
            }
        mine = [_NOTHING if name in self._samples else self._content(value) for name, value in values.items()]
        rows = self._strategy.all_gather(torch.tensor(mine)).T.tolist()
        differ = {name for name, row in zip(values, rows, strict=True) if _NOTHING not in row and len({*row}) > 1}
        self._found = [each for each in self._found if each[0] not in differ]
        return sorted(differ)

    def _content(self, value: Any) -> int:
        """A number that changes with the value, `_NOTHING` for what is not compared."""
        if isinstance(value, float | int | np.number) and not isinstance(value, bool):
            return _NOTHING if self._reads_a_clock else zlib.crc32(repr(value).encode())
        if type(value) is np.ndarray and value.dtype.kind in "iuf" and value.size <= _MOST_ELEMENTS:
            return zlib.crc32(np.ascontiguousarray(value).data)
        is_read = type(value) is Tensor and value.layout == torch.strided and not value.is_meta
        return checksum(value) if is_read and value.numel() <= _MOST_ELEMENTS else _NOTHING


def _read_in_steps(layer: nn.Module, path: str) -> list[str]:
    """Attributes that a step may read as it finds them: in the module's step, and in methods of the user's layers but
    for those that begin or are hooks."""
    kind: Any = type(layer)
    methods = [name for each in users_classes(layer) for name in vars(each) if not name.startswith(("__", "on_"))]
    if path:
        return sorted(read_first(kind, tuple(methods), in_order=False))
    return sorted(read_first(kind, ("training_step", "forward")))
