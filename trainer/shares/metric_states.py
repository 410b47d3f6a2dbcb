"""torchmetrics objects of which each share has states of its own, which meet where a metric computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.trainer.checkpoint.rank_state import torchmetrics_of
from lockstep.trainer.metrics.beside import watched_updates
from lockstep.trainer.metrics.gathering import gather_values
from lockstep.trainer.metrics.sync import of_all_samples, refuse_windows, uncached
from lockstep.trainer.metrics.updates import (
    as_sent,
    counted_updates,
    growing,
    joined,
    leader_of,
    put_rows,
    reduced,
    rows_of,
)

if TYPE_CHECKING:
    from lockstep.trainer.shares.shares import Shares


class MetricState:
    """What a torchmetrics object has counted."""

    def __init__(self, values: dict[str, Any], count: int, added: list[list[int]] | None = None) -> None:
        self.values, self.count, self.added = values, count, added

    @classmethod
    def of(cls, metric: Any) -> MetricState:
        values = {key: getattr(metric, key) for key in metric._defaults}
        copied = {key: [*v] if isinstance(v, list) else v for key, v in values.items()}
        return cls(copied, metric._update_count, rows_of(metric))

    def entry(self) -> dict[str, Any]:
        return {"state": self.values, "count": self.count, "added": self.added}

    def put(self, metric: Any) -> None:
        for key, value in self.values.items():
            setattr(metric, key, value)
        metric._update_count, metric._computed = self.count, None
        put_rows(metric, self.added)


@contextmanager
def shared_metrics(shares: Shares, module: nn.Module) -> Iterator[None]:
    """While it lasts the metrics of `module` compute over the states of all shares, and reset all of them."""
    num_shares = shares._run.strategy.virtual_ranks or 1
    refuse_windows(torchmetrics_of(module), num_shares)
    found = {name: metric for name, metric in torchmetrics_of(module).items() if metric.dist_sync_fn is None}
    refuse_of_one_rank(found, num_shares)
    metrics = [*found.values()]
    for metric in metrics:
        metric._sync_dist, metric.reset = _Together(shares, metric), _ResetAll(shares, metric)
        metric.distributed_available_fn = _yes
    try:
        with uncached(metrics), counted_updates(metrics), watched_updates(found, num_shares, False):
            yield
    finally:
        for metric in metrics:
            del metric._sync_dist, metric.reset
            metric.distributed_available_fn = None


def refuse_of_one_rank(metrics: Mapping[str, Any], num_shares: int) -> None:
    """Raise ValueError for a metric that is to gather in each step, which the shares of a rank run one after the other,
    or never, so that it would have what is of one share."""
    for name, metric in metrics.items() if num_shares > 1 else ():
        if metric.dist_sync_on_step or not metric.sync_on_compute:
            given = "dist_sync_on_step=True" if metric.dist_sync_on_step else "sync_on_compute=False"
            raise ValueError(
                f"{name} ({type(metric).__name__}) has {given}, but a rank runs its shares of {num_shares} one after "
                "the other, so that a value would be of some of them; remove it, or virtual_ranks"
            )


class _OfShares:
    """A method of a metric of which each share has states of its own."""

    def __init__(self, shares: Shares, metric: Any) -> None:
        self._shares, self._metric = shares, metric

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"{type(self._metric).__name__} was copied during a run in which a rank stands for several shares, "
            "learners or workers, each with sums of its own, which a copy would not have; make all metrics before fit "
            "(MetricTracker copies them), or give each share a rank of its own and no virtual_ranks"
        )


class _Together(_OfShares):
    """`metric._sync_dist`: put the states of all shares together, in their order, as torchmetrics does with ranks'."""

    def __call__(self, *_: Any, **__: Any) -> None:
        metric, shares = self._metric, self._shares
        own = shares.states_of(metric).items()
        rows = {
            share: held["added"] or [] for share, held in shares.states_of(leader_of(metric, shares._module)).items()
        }
        sent = {
            str(share): {
                "count": held["count"],
                "state": as_sent(metric, held["state"], held["count"], rows.get(share, [])),
            }
            for share, held in own
        }
        gathered = gather_values(shares._run.strategy, sent)
        by_share: dict[int, Any] = {}
        for share, entry in (item for rank in gathered for item in rank.items()):
            if entry["count"] > by_share.get(int(share), {"count": 0})["count"]:  # of stages the one that updates it
                by_share[int(share)] = entry
        states = [by_share[share]["state"] for share in sorted(by_share)]
        together = joined([{name: state[name] for name in growing(metric)} for state in states])
        for name, reduction in of_all_samples(metric).items() if states else ():
            if name in together:
                value = reduced(together[name], getattr(metric, name), reduction)
            else:
                value = torch.stack([state[name] for state in states])
                value = value if reduction is None else reduction(value)
            setattr(metric, name, value)


class _ResetAll(_OfShares):
    def __call__(self) -> None:
        self._shares.forget(self._metric)


def _yes() -> bool:
    return True
