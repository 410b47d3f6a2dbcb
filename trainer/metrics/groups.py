"""Which metrics of a MetricCollection of torchmetrics share one state: what they count decides it, not the samples."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn


def fix_groups(model: nn.Module) -> None:
    """Form the compute groups of the collections in `model` that have none yet.

    A collection forms them after its first update, of metrics whose states are equal by then. Two that count different
    things can be so by chance, the sooner the fewer samples a rank or slice has, and are then one for good. Here those
    share a state whose `update` is the same function, with the same attributes to read.
    """
    collections = sys.modules.get("torchmetrics.collections")
    if collections is None:
        return
    for collection in model.modules():
        if not isinstance(collection, collections.MetricCollection):
            continue
        if collection._enable_compute_groups is not True or collection._groups_checked:
            continue
        groups: list[list[str]] = []
        for name, metric in collection._modules.items():
            like = next((group for group in groups if _count_alike(collection._modules[group[0]], metric)), None)
            groups.append([name]) if like is None else like.append(name)
        collection._groups = dict(enumerate(groups))
        collection._groups_checked = True


def _count_alike(one: Any, other: Any) -> bool:
    """Whether two metrics have the same state after the same updates, and have it now."""
    if not one._defaults or one._defaults.keys() != other._defaults.keys() or one._modules or other._modules:
        return False
    update = type(one).update
    if update is not type(other).update or not hasattr(update, "__code__"):
        return False
    read, pending = set[str](), [update.__code__]
    while pending:
        for name in _names(pending.pop()) - read:
            read.add(name)
            mine = getattr(type(one), name, None)
            if mine is not getattr(type(other), name, None):
                return False
            pending += filter(None, [getattr(mine, "__code__", None)])
    counted = {*one._defaults, "_update_count"}
    own, others = ({**vars(metric), **metric._buffers} for metric in (one, other))
    return all(_same(own.get(name), others.get(name)) for name in counted | read & (own.keys() | others.keys()))


def _names(code: CodeType) -> set[str]:
    """The names that a function and those within it use."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return type(one) is type(other) and (one is other or bool(one == other))
    except Exception:  # arrays say it of each item
        return False
