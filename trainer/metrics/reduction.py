"""Reducing what was logged: packed exchanges over ranks, and the values to show."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.trainer.metrics.entry import COMBINE, Entry, Reduced
from lockstep.trainer.metrics.exact import ExactSum

if TYPE_CHECKING:
    from lockstep.strategies import Strategy
    from lockstep.trainer.metrics.store import MetricStore


def reduce(store: MetricStore, strategy: Strategy, epoch_end: bool, reset: bool) -> list[Reduced]:
    """`MetricStore.reduce`."""
    noticed = {*store.noticed}
    samples = _agree_on_names(store, strategy) if strategy.topology.world_size > 1 else [1]
    shared = sorted(store.shared(), key=lambda e: e.name)
    local = sorted(store.of_rank_zero(), key=lambda e: e.name)
    rows = _exact_rows(shared, strategy) if store.exact else _rows(shared, strategy)
    reduced: list[Reduced] = []
    computed: dict[int, Any] = {}
    of_this_rank = [_values_of(local)] if store.exact else [_pack(local).tolist()]
    for entries, values in ((shared, rows), (local, of_this_rank)):
        for i, entry in enumerate(entries):
            if any(row[3 * i + 2] for row in values):  # a rank without a sample computes with the others
                entry.epoch_count = 1.0
            if entry.metric is not None and entry.epoch_count:
                computed[id(entry.metric)] = entry.metric
            numbers, counts = [row[3 * i] for row in values], [row[3 * i + 1] for row in values]
            if entry.by_hand and (len(values) > 1 or store.exact):
                numbers, counts = _weighed_by_samples(store, entry, numbers, counts, samples)
            shown = _values(entry, numbers, counts, epoch_end, reset, store.training)
            reduced += [Reduced(name, value, entry) for name, value in shown.items()]
    if strategy.topology.rank == 0:
        _say_what_was_averaged(sorted(store.noticed - noticed))
    if epoch_end and reset:
        for metric in computed.values():  # now that it is computed under every name that it has
            metric.reset()
    return reduced


def _rows(shared: list[Entry], strategy: Strategy) -> list[list[float]]:
    """What each rank has of these entries: value, count, and whether a metric was logged, of each."""
    mine = _pack(shared)
    if not strategy.topology.is_reporting_rank:  # another rank reports the same samples
        mine = torch.tensor([x for e in shared for x in (e.start, 0.0, 0.0)], dtype=torch.float64)
    return [mine.tolist()] if strategy.topology.world_size == 1 or not shared else strategy.all_gather(mine).tolist()


def _values_of(entries: list[Entry]) -> list[Any]:
    return [x for e in entries for x in (e.number, e.count, e.seen)]


def _exact_rows(shared: list[Entry], strategy: Strategy) -> list[list[Any]]:
    """The same with sums that are not rounded: as many floats for each value as the longest needs."""
    if strategy.topology.world_size == 1 or not shared:
        return [_values_of(shared)]
    held = [(e.number, e.count, e.seen) for e in shared]
    if not strategy.topology.is_reporting_rank:  # another rank reports the same samples
        held = [(e.start, e.no_count, 0.0) for e in shared]
    parts = [[*map(_floats, (number, count))] for number, count, _ in held]
    width = int(strategy.all_reduce(torch.tensor(max(len(part) for both in parts for part in both)), "max"))
    mine = [x for (*_, seen), both in zip(held, parts, strict=True) for x in (seen, *_padded(both, width))]
    rows = []
    for row in strategy.all_gather(torch.tensor(mine, dtype=torch.float64)).tolist():
        values: list[Any] = []
        for i, entry in enumerate(shared):
            seen, *rest = row[(2 * width + 1) * i : (2 * width + 1) * (i + 1)]
            number = ExactSum.of(rest[:width]) if isinstance(entry.start, ExactSum) else rest[0]
            values += [number, ExactSum.of(rest[width:]), seen]
        rows.append(values)
    return rows


def _floats(number: Any) -> list[float]:
    return (number.floats() or [0.0]) if isinstance(number, ExactSum) else [number]


def _padded(parts: list[list[float]], width: int) -> list[float]:
    return [x for part in parts for x in (*part, *[0.0] * (width - len(part)))]


def _values(
    entry: Entry, numbers: list[float], counts: list[float], epoch_end: bool, reset: bool, training: bool
) -> dict[str, float]:
    """Move what was added on all ranks into the epoch's value; return what to show, by final name."""
    shown: dict[str, float] = {}
    count = float(sum(counts))
    combine = COMBINE[entry.reduce_fx]
    total = float(combine(numbers))
    entry.number, entry.count, entry.seen = entry.start, entry.no_count, 0.0
    both = entry.on_step and entry.on_epoch
    step_name = of_kind(entry.name, "step") if both else entry.name
    is_mean = entry.reduce_fx == "mean"
    if count:
        if entry.on_step and (not epoch_end or not entry.on_epoch or training):  # at the end the rest of the interval
            shown[step_name] = total / count if is_mean else total
        if entry.metric is None:
            entry.epoch_value = combine([entry.epoch_value, total])
            entry.epoch_count += count
    if epoch_end:
        if entry.on_epoch and entry.epoch_count:
            name = of_kind(entry.name, "epoch") if both else entry.name
            if entry.metric is not None:
                shown.update(_metric_values(name, entry.metric))
            else:
                shown[name] = entry.epoch_value / entry.epoch_count if is_mean else entry.epoch_value
        if reset:
            entry.epoch_value, entry.epoch_count = float(entry.start), 0.0
    return shown


def of_kind(name: str, kind: str) -> str:
    """The name of a value of each "step" or "epoch"; the number of a loader stays at its end."""
    name, loader, number = name.partition("/dataloader_idx_")
    return f"{name}_{kind}{loader}{number}"


def _metric_values(name: str, metric: Any) -> dict[str, float]:
    with warnings.catch_warnings():
        if not metric._update_count:  # here: other ranks have, and their states come with `compute`
            warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        value = metric.compute()
    if isinstance(value, dict):
        named = {key if key.startswith(name) else f"{name}/{key}": item for key, item in value.items()}
    else:
        named = {name: value}
    return {key: _number(name, item) for key, item in named.items()}


def _number(name: str, value: Any) -> float:
    what = type(value).__name__
    if isinstance(value, Tensor) and value.numel() != 1:
        what = f"tensor of shape {list(value.shape)}"
    else:
        with suppress(TypeError, ValueError):
            return float(value)
    raise ValueError(f"the metric logged as {name!r} computes a {what}; log its elements under names of their own")


def _weighed_by_samples(
    store: MetricStore, entry: Entry, numbers: list[float], counts: list[float], samples: list[int]
) -> tuple[list[float], list[float]]:
    """What ranks have logged outside of batches, each rank's mean weighted by its samples; a rank without any counts
    nothing."""
    if not any(samples):  # before the first batch
        samples = [1] * len(samples)
    if entry.reduce_fx != "mean":
        numbers, counts = [[*map(float, values)] for values in (numbers, counts)]
        gone = [not number or not count for number, count in zip(samples, counts, strict=True)]
        return [entry.start if g else n for g, n in zip(gone, numbers, strict=True)], [
            0.0 if g else c for g, c in zip(gone, counts, strict=True)
        ]
    pairs = [(n / c, s) for n, c, s in zip(numbers, counts, samples, strict=True) if c and s]
    if not pairs:
        return [0.0], [0.0]
    times = {float(c) for c, s in zip(counts, samples, strict=True) if c and s}
    count = times.pop() if len(times) == 1 else 1.0  # as on one process
    values = {value for value, _ in pairs}
    if len(values) == 1:
        return [values.pop() * count], [count]
    if store.exact:
        raise RuntimeError(
            f"{entry.name!r} was logged outside of a batch with another value on each rank, so that its mean would "
            "depend on their number; log it in the step, or log a torchmetrics Metric"
        )
    store.noticed.add(entry.name)
    mean = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    return [mean * count], [count]


def _say_what_was_averaged(names: list[str]) -> None:
    """One line, once a run and name, of what ranks logged by hand with values of their own."""
    if names:
        print(
            f"logged outside of a batch with another value on each rank: {_quoted(names)}. Shown is the mean weighted "
            "by each rank's samples, which is exact for a mean over samples; for anything else log a torchmetrics "
            "Metric, or call all_gather first",
            file=sys.stderr,
        )


def _agree_on_names(store: MetricStore, strategy: Strategy) -> list[int]:
    """Return the samples of each rank. Raise RuntimeError where ranks have logged different names.

    A rank without a sample (of each loader that has any), or that does not report, takes the others' names.
    """
    reports, lone = int(strategy.topology.is_reporting_rank), len(_of_rank_zero(store))
    row = torch.tensor([store.keys_hash, store.samples, reports, store.num_loaders, lone])
    gathered = strategy.all_gather(row).tolist()
    _tell_of_rank_zero(store, strategy, gathered)
    seen = [number if reports else 0 for _, number, reports, *_ in gathered]
    of_all = max((row[3] for row, number in zip(gathered, seen, strict=True) if number), default=0)
    speakers = [rank for rank, number in enumerate(seen) if number and gathered[rank][3] == of_all]
    speakers = speakers or [rank for rank, row in enumerate(gathered) if row[2]]
    source = speakers[0]
    if len({gathered[rank][0] for rank in speakers}) > 1:
        raise RuntimeError(_other_names(store, strategy, {rank: gathered[rank][0] for rank in speakers}))
    names: set[str] = set()
    if len(speakers) < len(gathered) and any(row[0] != gathered[source][0] for row in gathered):
        logged = [[e.name, *e.flags(), e.by_hand, store.path(e.metric)] for e in store.shared()]
        for name, *flags, by_hand, metric in strategy.broadcast(logged, source):
            names.add(name)
            if name not in store.entries:
                entry = store.new(name, *flags)
                entry.by_hand = by_hand
                if metric is not None:
                    entry.metric = store.module.get_submodule(metric)  # type: ignore[union-attr]
        if not strategy.topology.is_reporting_rank:
            store.entries = {n: entry for n, entry in store.entries.items() if n in names or entry.rank_zero_only}
        elif unknown := [entry.name for entry in store.shared() if entry.name not in names]:
            raise RuntimeError(
                f"rank {strategy.topology.rank}, which has seen no sample of a loader, logged {_quoted(unknown)}, and "
                "the other ranks did not; every rank must log the same names"
            )
    return seen


def _of_rank_zero(store: MetricStore) -> list[Entry]:
    """What this rank has logged with `rank_zero_only` since the last reduction."""
    return [entry for entry in store.of_rank_zero() if entry.count or entry.seen]


def _tell_of_rank_zero(store: MetricStore, strategy: Strategy, gathered: list[list[int]]) -> None:
    """Let every rank have what rank 0 has logged for itself, so that all decide alike by it. In a pipeline what steps
    log is that of the first rank that reports, for rank 0 does not run them to their end."""
    found: dict[str, list[Any]] = {}
    reporting = next(rank for rank, row in enumerate(gathered) if row[2])
    for source in {0: None, reporting: None}:
        if gathered[source][4]:
            mine = [[e.name, *store.saved(e), e.by_hand, e.seen] for e in _of_rank_zero(store)]
            for name, *held in strategy.broadcast(mine, source):
                found.setdefault(name, held)
    for entry in store.of_rank_zero():
        entry.forget()
        entry.seen = 0.0
    for name, (*flags, metric, number, count, by_hand, seen) in found.items():
        entry = store.entries.get(name) or store.new(name, *flags)
        entry.put_saved(number, count)
        entry.by_hand, entry.seen = by_hand, seen
        if metric is not None:
            entry.metric = store.module.get_submodule(metric)  # type: ignore[union-attr]


def _other_names(store: MetricStore, strategy: Strategy, hashes: dict[int, int]) -> str:
    """What to say where ranks have logged different names. Every rank calls it."""
    numbers = list(hashes.values())
    usual = max(set(numbers), key=numbers.count)
    typical = next(rank for rank, number in hashes.items() if number == usual)
    odd = [rank for rank, number in hashes.items() if number != usual]
    theirs, others = (set(strategy.broadcast(store.names(), rank)) for rank in (odd[0], typical))
    differing = [
        f"{verb} {_quoted(sorted(names))}"
        for verb, names in (("logged", theirs - others), ("did not log", others - theirs))
        if names
    ]
    return (
        f"rank {', '.join(map(str, odd))} logged other metric names than the rest: rank {odd[0]} "
        f"{' and '.join(differing)}, "
        f"unlike rank {typical}; every rank must log the same names"
    )


def _pack(entries: list[Entry]) -> Tensor:
    """`[3 * len(entries)]` float64 on CPU: value, count, and whether a metric was logged, of each."""
    on_device = [e for e in entries if e.total is not None]
    if on_device:
        groups: dict[torch.device, list[Entry]] = {}
        for entry in on_device:
            groups.setdefault(entry.total.device, []).append(entry)  # type: ignore[union-attr]
        for group in groups.values():  # host sync: one a logging interval and device
            totals = torch.stack([e.total for e in group]).tolist()  # type: ignore[misc]
            for entry, total in zip(group, totals, strict=True):
                entry.take_total(total)
    return torch.tensor([x for e in entries for x in (e.number, e.count, e.seen)], dtype=torch.float64)


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
