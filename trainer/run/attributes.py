"""Attributes that user code has set on a rank, brought back to the process that started it."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor, nn

_PLAIN = {type(None), bool, int, float, complex, str, bytes, Tensor, np.ndarray}
_CONTAINERS = {list, tuple, set, frozenset, deque}
_MAPPINGS = {dict, OrderedDict, defaultdict, Counter}
_NOT_OURS = frozenset(vars(nn.Module())) | {"_trainer", "_module", "_toggled", "trainer"}


def own_data(owner: Any) -> dict[str, Any]:
    """The attributes of a module, DataModule or callback that are data: numbers, strings, tensors, arrays, and
    containers and dataclasses of them."""
    return {name: value for name, value in vars(owner).items() if name not in _NOT_OURS and _is_data(value)}


def take_data(owner: Any, attributes: dict[str, Any]) -> None:
    """Give `owner` what `own_data` returned on rank 0; lists, dicts and sets that it has stay the same objects."""
    for name, value in attributes.items():
        now = vars(owner).get(name)
        if now is value:  # `load_state_dict` has taken it from the state that came home with it
            continue
        if type(now) is type(value) and isinstance(now, (list, deque, dict, set)):
            now.clear()
            now.extend(value) if isinstance(now, (list, deque)) else now.update(value)
        else:
            vars(owner)[name] = value


def _is_data(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, (np.generic, PurePath)):
        return True
    if kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return all(map(_is_data, value))
    if kind in _MAPPINGS:
        return all(_is_data(key) and _is_data(item) for key, item in value.items())
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and all(map(_is_data, vars(value).values()))
