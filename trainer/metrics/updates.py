"""What each update of a torchmetrics object adds to its states that grow."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

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


def put_first(metric: Any, rows: Mapping[str, list[Any]], count: int) -> None:
    """Let its states that grow hold these items (those that are not given nothing) as if the last of `count` updates
    had added them all."""
    names = growing(metric)
    for name in names:
        begin: Any = metric._defaults[name]
        held: Any = rows.get(name, [])
        if not isinstance(begin, list):
            held = torch.stack(held) if held else begin.detach().clone().to(metric.device)
        setattr(metric, name, held)
    metric._update_count = count
    put_rows(metric, [*[[0] * len(names)] * (count - 1), [len(rows.get(name, ())) for name in names]])


def leader_of(metric: Any, module: nn.Module) -> Any:
    """The metric that a MetricCollection of `module` updates for this one, whose states it shares; else itself."""
    collections: list[Any] = [each for each in module.modules() if getattr(each, "_groups_checked", False)]
    for each in collections:
        for group in each._groups.values():
            held = [each._modules[name] for name in group if name in each._modules]
            if any(member is metric for member in held):
                return held[0]
    return metric


def as_sent(metric: Any, states: Mapping[str, Any], count: int, added: list[list[int]]) -> dict[str, Any]:
    """The states of a metric after `count` updates, of which `joined` takes those that grow. `added`: see
    `rows_of`."""
    names = [name for name in growing(metric) if name in states]
    updates: dict[str, Any] = dict(zip(names, zip(*added, strict=True), strict=False)) if added else {}
    updates = {name: updates.get(name, ()) for name in names}
    if len(added) != count or any(sum(updates[name]) != len(states[name]) for name in names):
        updates = {}  # as after a checkpoint that does not have them
    return {name: _sent(held, updates.get(name)) if name in names else held for name, held in states.items()}


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The growing states of a metric with the items of all ranks, or shares, in the order of one process: what an
    update of each has added in turn. `parts`: by state what `as_sent` made of it.

    Where that is not known an item of each in turn, or by rank if states differ in length, so that items that belong
    together are at the same place in each.
    """
    items = [{name: _received(sent) for name, sent in part.items()} for part in parts]
    is_known = all(sent["updates"] is not None for part in parts for sent in part.values())
    is_even = all(len({len(found) for found in part.values() if found}) < 2 for part in items)
    together: dict[str, list[Any]] = {}
    for name in parts[0] if parts else ():
        rows = [part[name] for part in items]
        if is_known:
            numbers = [part[name]["updates"] for part in parts]
        else:
            numbers = [[1] * len(row) if is_even else [len(row)] for row in rows]
        turns = zip_longest(*(_cut(row, each) for row, each in zip(rows, numbers, strict=True)), fillvalue=())
        together[name] = [item for turn in turns for update in turn for item in update]
    return together


def reduced(items: list[Any], held: Any, reduction: Any) -> Any:
    """What `compute` gets of the items of all: a list, or a tensor of rows, as in one process, or what the metric's own
    reduction makes of them. `held`: what one rank has."""
    from torchmetrics.utilities import dim_zero_cat

    if isinstance(held, Tensor):
        return torch.stack(items) if items else held
    return items if reduction in (None, dim_zero_cat) or not items else reduction(items)


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


def _sent(items: Any, updates: Sequence[int] | None) -> dict[str, Any]:
    """Tensors that are alike but for their number of rows are one, with these numbers: fewer to send."""
    found: dict[str, Any] = {"updates": None if updates is None else [*updates]}
    if isinstance(items, Tensor):
        return found | {"rows": items, "numbers": None}
    kinds = {(item.dtype, item.shape[1:], item.dim()) if isinstance(item, Tensor) else None for item in items}
    if len(items) < 2 or len(kinds) > 1 or None in kinds:
        return found | {"items": items}
    if not items[0].dim():
        return found | {"rows": torch.stack(items), "numbers": None}
    return found | {"rows": torch.cat(items), "numbers": [len(item) for item in items]}


def _received(sent: dict[str, Any]) -> list[Any]:
    if "items" in sent:
        return [*sent["items"]]
    return [*(sent["rows"].unbind() if sent["numbers"] is None else sent["rows"].split(sent["numbers"]))]


def _cut(items: list[Any], numbers: Sequence[int]) -> Iterator[list[Any]]:
    rest = iter(items)
    return ([*islice(rest, n)] for n in numbers)
