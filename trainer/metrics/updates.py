"""What each update of a torchmetrics object adds to its states that grow."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

ADDED = "_lockstep_added"
"""The attribute that has for each update how many items it has added, a number for each growing state."""


@contextmanager
def counted_updates(metrics: Sequence[Any]) -> Iterator[None]:
    """While it lasts a metric with states that grow holds what each update has added to them."""
    for metric in metrics:
        count_updates(metric)
    try:
        yield
    finally:
        for metric in metrics:
            count_no_more(metric)


def count_updates(metric: Any) -> None:
    if growing(metric):
        metric.update = _Counted(metric)


def count_no_more(metric: Any) -> None:
    vars(metric).pop(ADDED, None)
    if isinstance(metric.update, _Counted):
        metric.update = metric.update.update


def growing(metric: Any) -> list[str]:
    """The names of states that are lists, or tensors of rows that are concatenated."""
    from torchmetrics.utilities import dim_zero_cat

    def grows(name: str, default: Any) -> bool:
        return isinstance(default, list) or (metric._reductions[name] is dim_zero_cat and default.dim() > 0)

    return [name for name, default in metric._defaults.items() if grows(name, default)]


def rows_of(metric: Any) -> list[list[int]]:
    """For each update since the last reset how many items it has added; fewer rows where that is not known."""
    rows, count = vars(metric).get(ADDED) or [], metric._update_count
    if not metric._enable_grad:  # else the count is of this batch alone
        del rows[: max(0, len(rows) - count)]  # from before a reset, where only `forward` has updated since
    return rows[-count:] if count else []


def put_rows(metric: Any, rows: list[list[int]] | None) -> None:
    if rows:
        vars(metric)[ADDED] = rows
    else:
        vars(metric).pop(ADDED, None)


def leader_of(metric: Any, module: nn.Module) -> Any:
    """The metric that a MetricCollection of `module` updates for this one, whose states it shares; else itself."""
    collections: list[Any] = [each for each in module.modules() if getattr(each, "_groups_checked", False)]
    for each in collections:
        for group in each._groups.values():
            held = [each._modules[name] for name in group if name in each._modules]
            if any(member is metric for member in held):
                return held[0]
    return metric


class _Counted:
    """`metric.update`, which notes how many items it adds."""

    def __init__(self, metric: Any) -> None:
        self.update, self._metric, self._names = metric.update, metric, growing(metric)

    def __call__(self, *args: Any, **options: Any) -> Any:
        metric = self._metric
        before = self._lengths()
        found = self.update(*args, **options)
        # Of the two updates of such a forward the second is of the batch alone, and is undone.
        is_undone = metric._enable_grad and (metric.full_state_update is not False or metric.dist_sync_on_step)
        if not is_undone:
            rows = vars(metric).setdefault(ADDED, [])
            rows.append([*map(operator.sub, self._lengths(), before)])
            if not metric._enable_grad:  # else the count is of this batch alone
                del rows[: -metric._update_count]  # from before a reset
        return found

    def _lengths(self) -> list[int]:
        return [len(getattr(self._metric, name)) for name in self._names]

    def __deepcopy__(self, memo: Any) -> Any:
        return self.update

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy in a file or another process belongs to no run


def _nothing() -> None:
    return None
