"""What a module asks of all ranks, in a step or a hook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.strategies.sync.collective_fingerprint import counting_once

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState


def all_gather(run: RunState, data: Any) -> Any:
    """`Module.all_gather`."""
    _refuse_parts(run, "all_gather")
    if run.metrics.is_padding and run.metrics.in_part:
        raise RuntimeError(
            "all_gather was called on a rank without samples in this batch, where another one stands in for it; "
            "use self.sum_over_ranks, which counts nothing for it, or drop_last=True in the DataLoader"
        )
    if isinstance(data, Mapping):
        return {key: all_gather(run, value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        gathered = [all_gather(run, value) for value in data]
        return type(data)(*gathered) if hasattr(data, "_fields") else type(data)(gathered)
    topology = run.strategy.topology
    with counting_once():
        stacked = run.strategy.all_gather(
            data if isinstance(data, Tensor) else torch.tensor(data, device=topology.device)
        )
        return stacked if topology.data_size == topology.world_size else stacked[_with_other_samples(run)]


def _with_other_samples(run: RunState) -> list[int]:
    """The ranks of whose samples the global batch consists: of those that share samples the one that reports."""
    if run.reporting_ranks is None:
        topology = run.strategy.topology
        mine = topology.data_rank if topology.is_reporting_rank else -1
        places = run.strategy.all_gather(torch.tensor(mine, device=topology.device)).tolist()
        run.reporting_ranks = [places.index(number) for number in range(topology.data_size)]
    return run.reporting_ranks


def sum_over_ranks(run: RunState, value: Tensor | float) -> Tensor:
    """`Module.sum_over_ranks`."""
    _refuse_parts(run, "sum_over_ranks")
    topology = run.strategy.topology
    value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device=topology.device)
    counts = topology.is_reporting_rank and not run.metrics.is_padding
    with counting_once():
        return run.strategy.all_reduce(value if counts else torch.zeros_like(value), "sum")


def _refuse_parts(run: RunState, call: str) -> None:
    """Raise RuntimeError where not all ranks meet in what runs now."""
    if run.metrics.is_padding or not run.metrics.in_batch:
        return
    has_shares = run.shares is not None and len(run.shares.own) > 1 and not run.window_is_open
    if run.metrics.in_part or has_shares:
        raise RuntimeError(
            f"{call} was called in a step, which {run.strategy.name} runs in parts, or not on all ranks alike; call it "
            "in on_train_epoch_end, or use another strategy"
        )
