"""Which metrics of a MetricCollection of torchmetrics share one state: those that count the same, by any samples."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.strategies.launch.program.functions import codes_of, variables_of

_NOT_OF_USERS = ("torch", "torchmetrics")
_CHECKS_ONLY = {"validate_args"}
"""What `update` reads that changes no state."""


def fix_groups(model: nn.Module) -> None:
    """Let the collections in `model` that form compute groups put metrics together only if they count the same.

    A collection forms them after its first update, of metrics whose states are equal by then. Two that count different
    things can be so by chance, the sooner the fewer samples a rank or slice has, and are then one for good. Here those
    share a state whose `update` is the same function too, with the same attributes to read.
    """
    collections = sys.modules.get("torchmetrics.collections")
    if collections is None:
        return
    for collection in model.modules():
        if isinstance(collection, collections.MetricCollection) and collection._enable_compute_groups is True:
            collection._equal_metric_states = _count_alike


def _count_alike(one: Any, other: Any) -> bool:
    """Whether two metrics have the same state and, after the same updates, will."""
    from torchmetrics import MetricCollection

    return MetricCollection._equal_metric_states(one, other) and _update_alike(one, other)


def _update_alike(one: Any, other: Any) -> bool:
    if one._modules or other._modules or type(one).update is not type(other).update:
        return False
    read, pending = set[str](), [type(one).update]
    while pending:
        function = inspect.unwrap(pending.pop())
        if not isinstance(function, FunctionType):
            return False
        pending += (held for _, _, held in variables_of(function) if isinstance(held, FunctionType))
        for name in {name for code in codes_of(function) for name in code.co_names} - read:
            read.add(name)
            mine = getattr(type(one), name, None)
            if mine is not getattr(type(other), name, None):
                return False
            mine = mine.fget if isinstance(mine, property) else mine
            if isinstance(mine, FunctionType):
                pending.append(mine)
            used = function.__globals__.get(name)
            if isinstance(used, FunctionType) and used.__module__.partition(".")[0] not in _NOT_OF_USERS:
                pending.append(used)
    own, others = ({**vars(metric), **metric._buffers} for metric in (one, other))
    attributes = read & (own.keys() | others.keys()) - one._defaults.keys() - _CHECKS_ONLY
    return all(_same(own.get(name), others.get(name)) for name in attributes)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return type(one) is type(other) and (one is other or bool(one == other))
    except Exception:  # arrays say it of each item
        return False
