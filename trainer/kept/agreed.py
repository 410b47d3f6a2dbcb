"""What ranks agree on of what each of them has kept."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.strategies.sync.contents import same_values
from lockstep.trainer.kept.fields import fields
from lockstep.trainer.kept.owners import shown
from lockstep.trainer.kept.values import is_record


def alike(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the states of several ranks what those that have it agree on; what they do not is lost."""
    lost = {name for state in states for name in state.get("lost", [])}
    values = _agreed([state.get("values", {}) for state in states], lost)
    begun = _agreed([state.get("begun", {}) for state in states], {*lost})
    on_device = [name for state in states for name in state.get("on_device", [])]
    replaced = [name for state in states for name in state.get("replaced", []) if name not in lost]
    groups = states[0].get("shared", []) if states else []
    groups = [kept for group in groups if len(kept := [each for each in group if shown(*each) not in lost]) > 1]
    found = {"values": values, "lost": sorted(lost), "on_device": on_device, "begun": begun}
    left = [name for state in states for name in state.get("left", []) if name not in lost]
    caches = [*{name: None for state in states for name in state.get("caches", [])}]
    gone = [
        each
        for each in (states[0].get("gone", ()) if states else ())
        if all(each in state.get("gone", ()) for state in states)
    ]
    return found | {"replaced": replaced, "left": left, "shared": groups, "caches": caches, "gone": gone}


def completed(own: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Any]:
    """What a rank has saved, with the buffers of layers that were on other ranks."""
    elsewhere, others = {*own["elsewhere"]}, alike(states)
    values = {path: dict(held) for path, held in own["values"].items()}
    for path, held in others["values"].items():
        found = {name: value for name, value in held.items() if shown(path, name) in elsewhere}
        values |= {path: values.get(path, {}) | found} if found else {}
    on_device = [*own["on_device"], *elsewhere.intersection(others["on_device"])]
    caches = [*own["caches"], *elsewhere.intersection(others["caches"])]
    return own | {"values": values, "on_device": on_device, "caches": caches}


def _agreed(found: list[dict[str, dict[str, Any]]], lost: set[str]) -> dict[str, dict[str, Any]]:
    """What is not `lost`, to which those are added that differ."""
    values: dict[str, dict[str, Any]] = {}
    for path, name, value in ((path, *item) for each in found for path, own in each.items() for item in own.items()):
        if not is_equal(values.setdefault(path, {}).setdefault(name, value), value):
            lost.add(shown(path, name))
    return {path: {name: v for name, v in own.items() if shown(path, name) not in lost} for path, own in values.items()}


def is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and same_values(one, other.to(one.device))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    if is_record(one):
        return is_equal(fields(one), fields(other))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other) or (one != one and other != other)
