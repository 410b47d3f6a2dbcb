"""What torchmetrics objects of the user's classes count in attributes beside their states."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.strategies.launch.program.functions import codes_of
from lockstep.strategies.modules.blocks import users_classes
from lockstep.trainer.kept.agreed import is_equal
from lockstep.trainer.kept.values import MOST_ITEMS, copied, encoded, is_savable, mark_of, take

_COUNTS = (int, float, complex, Tensor, np.ndarray, list, dict)
"""What sums and samples are kept in, as a checkpoint holds it."""
_LOOKS = 8
"""After so many updates the attributes of a metric that change are known."""


@contextmanager
def watched_updates(metrics: Mapping[str, Any], num_ranks: int, in_one_process: bool) -> Iterator[None]:
    """While it lasts the first updates of each metric of a user's class, by name, are watched: those that count in an
    attribute raise ValueError if several ranks or slices do; else a checkpoint holds the attribute.

    `in_one_process`: slices are of training only.
    """
    watches = {}
    for name, metric in metrics.items():
        if names := _read_and_written(metric):
            metric.update = watches[name] = _Watch(name, metric, names, num_ranks, in_one_process)
    try:
        yield
    finally:
        for name, watch in watches.items():
            if vars(metrics[name]).get("update") is watch:
                metrics[name].update = watch.update


def counted_beside(metric: Any) -> dict[str, Any]:
    """The attributes in which a watched metric has counted, as a checkpoint holds them."""
    watch = vars(metric).get("update")
    names = sorted(watch.counted) if isinstance(watch, _Watch) else ()
    held = {name: vars(metric)[name] for name in names if name in vars(metric)}
    return {name: encoded(value) for name, value in held.items() if is_savable(mark_of(value, MOST_ITEMS))}


def take_beside(metric: Any, saved: Mapping[str, Any]) -> None:
    """Give a metric what `counted_beside` found."""
    for name, value in saved.items():
        now = vars(metric).get(name)
        take(metric, name, value.to(now.device) if isinstance(now, Tensor) and isinstance(value, Tensor) else value)


class _Watch:
    """`metric.update` that notes which attributes its first calls change.

    One that two updates in turn change to other values of its kind counts: a flag, or a number that the first update
    finds, is not changed again.
    """

    def __init__(self, name: str, metric: Any, names: set[str], num_ranks: int, in_one_process: bool) -> None:
        self.update, self.counted = metric.update, set[str]()
        self._name, self._metric, self._names = name, metric, names
        self._num_ranks, self._in_one_process = num_ranks, in_one_process
        self._looks, self._changed = 0, set[str]()

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._looks == _LOOKS:
            return self.update(*args, **options)
        self._looks += 1
        before = self._look()
        found = self.update(*args, **options)
        now = self._look()
        changed = {name for name in before.keys() | now.keys() if not is_equal(before.get(name), now.get(name))}
        self.counted |= changed
        counting = {name for name in changed if _counts(before.get(name), now.get(name))}
        again = counting & self._changed if self._metric._update_count > 1 else set()  # else it was reset meanwhile
        self._changed = counting
        of_slices = self._num_ranks > 1 and (self._metric.training or not self._in_one_process)
        if again and of_slices:
            name = min(again)
            raise ValueError(
                f"{self._name} ({type(self._metric).__name__}) counts in {name}, which is not one of its states, and "
                f"each of {self._num_ranks} ranks or slices has other samples; make it a state with "
                f"self.add_state({name!r}, torch.tensor(0), dist_reduce_fx='sum'), or for a list with [] and 'cat'"
            )
        return found

    def _look(self) -> dict[str, Any]:
        own = vars(self._metric)
        held = {name: own[name] for name in self._names & own.keys()}
        return {name: copied(value) for name, value in held.items() if is_savable(mark_of(value, MOST_ITEMS))}

    def __deepcopy__(self, memo: Any) -> Any:
        return self.update

    def __reduce__(self) -> Any:
        return _nothing, ()  # a metric makes another one


def _counts(before: Any, now: Any) -> bool:
    return type(before) is type(now) and type(now) is not bool and isinstance(now, _COUNTS)


def _read_and_written(metric: Any) -> set[str]:
    """The names that `compute` and methods that it calls read, and that the user's code uses; not those of states and
    of torchmetrics' own attributes."""
    from torchmetrics import Metric

    kind: Any = type(metric)
    users = [cls for cls in users_classes(metric) if issubclass(cls, Metric)]
    if not users:
        return set()
    read = set[str]()
    pending = [vars(cls)["compute"] for cls in kind.__mro__ if "compute" in vars(cls)]
    while pending:
        for name in _names_of(pending.pop()) - read:
            read.add(name)
            pending.append(getattr(kind, name, None))
    used = {name for cls in users for value in vars(cls).values() for name in _names_of(value)}
    own = {*vars(Metric), *_names_of(Metric.__init__), *metric._defaults, *metric._modules, *metric._buffers}
    return (read & used) - own


def _names_of(value: Any) -> set[str]:
    function = inspect.unwrap(value.fget if isinstance(value, property) and value.fget else value)
    if not isinstance(function, FunctionType):
        return set()
    return {name for code in codes_of(function) for name in code.co_names}


def _nothing() -> None:
    return None
