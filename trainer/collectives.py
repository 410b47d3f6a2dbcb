"""What a module asks of all ranks, in a step or a hook."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.strategies.sync.collective_fingerprint import counting_once

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

_MAX_SAID = 300
"""Bytes in which a rank says what it gathers."""


def all_gather(run: RunState, data: Any) -> Any:
    """`Module.all_gather`."""
    _refuse_parts(run, "all_gather")
    if run.metrics.is_padding and run.metrics.in_part:
        raise RuntimeError(
            "all_gather was called on a rank without samples in this batch, where another one stands in for it; "
            "use self.sum_over_ranks, which counts nothing for it, or drop_last=True in the DataLoader"
        )
    topology = run.strategy.topology
    data = _each(data, lambda v: v if isinstance(v, Tensor) else torch.tensor(v, device=topology.device))

    def stack(tensor: Tensor) -> Tensor:
        stacked = run.strategy.all_gather(tensor)
        return stacked if topology.data_size == topology.world_size else stacked[_with_other_samples(run)]

    with counting_once():
        _refuse_different(run, _kind(data))
        return _each(data, stack)


def _each(data: Any, call: Callable[[Any], Any]) -> Any:
    """`data` with what `call` makes of each value in its dicts, lists and tuples."""
    if isinstance(data, Mapping):
        return {key: _each(value, call) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        values = [_each(value, call) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    return call(data)


def _kind(data: Any) -> str:
    """The shapes and dtypes of tensors, and what holds them, in words that are equal on all ranks."""
    if isinstance(data, Mapping):
        items = [(key if isinstance(key, (str, int)) else type(key).__name__, _kind(v)) for key, v in data.items()]
        return "{" + ", ".join(f"{key}: {kind}" for key, kind in items) + "}"
    if isinstance(data, (list, tuple)):
        return "(" + ", ".join(map(_kind, data)) + ")"
    return f"{str(data.dtype)[len('torch.') :]}{list(data.shape)}"


def _refuse_different(run: RunState, kind: str) -> None:
    """Raise RuntimeError on all ranks unless what they gather is alike; a collective would end them, or mix it up."""
    strategy = run.strategy
    if strategy.topology.world_size == 1:
        return
    said = kind.encode()
    if len(set(strategy.all_gather(torch.tensor(zlib.crc32(said), device="cpu")).tolist())) == 1:
        return
    said = said[:_MAX_SAID]
    rows = strategy.all_gather(torch.tensor([*said, *[0] * (_MAX_SAID - len(said))], dtype=torch.uint8, device="cpu"))
    ranks: dict[str, list[int]] = {}
    for rank, row in enumerate(rows.tolist()):
        ranks.setdefault(bytes(row).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    which = " and ".join(
        f"{kind} on rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}" for kind, those in ranks.items()
    )
    raise RuntimeError(
        "self.all_gather stacks tensors, whose shapes and dtypes must be equal on all ranks, and was given "
        f"{which}; pad them to the longest and gather their lengths too, or join them in a CatMetric of torchmetrics"
    )


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
