"""What an optimizer's parameter groups hold besides parameters."""

from __future__ import annotations

import copy
import marshal
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

_NUMBERS = (bool, int, float, str, list, tuple, Tensor)
_READ: Any = WeakTensorKeyDictionary()
"""Of a tensor on an accelerator its version and what the host has read of it, for which it waits."""


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group's options and of what its steps count."""
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.copy(value) if isinstance(value, list) else value
        for key, value in group.items()
        if key not in ("params", "param_names") and isinstance(value, _NUMBERS)
    }


def same(one: Any, other: Any) -> bool:
    """Whether two of them, or two values of them, are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


def changes(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """As JSON data, which keeps every bit of a number, what is other in `now`."""
    return {
        key: {"tensor": value.tolist(), "dtype": str(value.dtype)[6:]} if isinstance(value, Tensor) else value
        for key, value in now.items()
        if not same(value, before.get(key))
    }


def put(group: dict[str, Any], changed: dict[str, Any]) -> None:
    """Take over what `changes` of another rank returned."""
    for key, value in changed.items():
        now = group.get(key)
        if isinstance(value, dict):
            given = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
            value = now.copy_(given) if isinstance(now, Tensor) and now.shape == given.shape else given
        group[key] = tuple(value) if isinstance(now, tuple) else value


def put_back(group: dict[str, Any], before: dict[str, Any]) -> None:
    """Let a group hold again what `numbers_of` has copied; a tensor stays the same object."""
    for key, value in before.items():
        now = group.get(key)
        if same(now, value):
            continue
        if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
            now.copy_(value)
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else copy.copy(value)


def hash_of_rates(optimizers: Iterable[Optimizer]) -> int:
    """A hash of what each rank is to step with alike."""
    names = "lr", "momentum", "betas", "weight_decay"
    rates = [group.get(name) for optimizer in optimizers for group in optimizer.param_groups for name in names]
    try:
        return zlib.crc32(marshal.dumps(rates, 2))  # later versions write which objects are shared, too
    except ValueError:  # of a rate that is a tensor, or another object
        return zlib.crc32(marshal.dumps([*map(_plain, rates)], 2))


def _plain(rate: Any) -> Any:
    """A rate as numbers; None if it is something else."""
    if isinstance(rate, list | tuple):
        return [*map(_plain, rate)]
    if isinstance(rate, np.generic | np.ndarray):
        return rate.tolist()
    if type(rate) not in (Tensor, nn.Parameter) or rate.is_meta:
        return rate if isinstance(rate, bool | int | float | str) else None
    if rate.is_cpu or rate.is_inference():
        return rate.tolist()
    version, held = _READ.get(rate, (None, None))
    if version != rate._version:
        held = rate.tolist()
        _READ[rate] = rate._version, held
    return held
