"""Attributes that user code has set on a rank, brought back to the process that started it; and those that it has
changed in a run, kept for one that continues it."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
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


_SAVED = (type(None), bool, int, float, str, np.float64)
_LISTS = (list, deque, dict, set)
_MOST_BYTES = 2**26
"""Larger tensors are not saved beside the weights."""
_PACKAGES = ("torch", "lockstep", "torchmetrics")
"""Of whose modules nothing is read, nor of their metrics' state, which is saved by itself."""


class Changes:
    """What user code has changed since a fit was set up in the attributes of the module and of layers of its own
    classes: numbers, strings and tensors, which are saved, and lists, dicts and sets, which are not."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_start = {layer: _marks(layer) for _, layer in _of_users(module)}
        self._by_hook: set[tuple[nn.Module, str]] = set()
        """What `on_load_checkpoint` has taken up."""

    def note_loaded(self) -> None:
        """Called once `on_load_checkpoint` has been."""
        self._by_hook = {(layer, name) for _, layer, name, _ in self._changed()}

    def state_dict(self) -> dict[str, Any]:
        """What is saved by layer and name; the names of what is not; and which tensors are on the model's device."""
        values: dict[str, dict[str, Any]] = {}
        lost, on_device = [], []
        for path, _, name, value in self._changed():
            shown = f"{path}.{name}" if path else name
            if isinstance(value, _LISTS) or (isinstance(value, Tensor) and value.nbytes > _MOST_BYTES):
                lost.append(shown)
                continue
            if isinstance(value, Tensor) and value.device.type != "cpu":
                on_device.append(shown)
            values.setdefault(path, {})[name] = value.detach() if isinstance(value, Tensor) else value
        return {"values": values, "lost": lost, "on_device": on_device} if values or lost else {}

    def load_state_dict(self, state: Mapping[str, Any], device: Any) -> None:
        """Take up the values of a run that is continued, but for what a hook has taken up already."""
        layers = dict(_of_users(self._module))
        for path, values in state.get("values", {}).items():
            for name, value in values.items():
                layer, shown = layers.get(path), f"{path}.{name}" if path else name
                if layer is None or (layer, name) in self._by_hook or not _is_free(layer, name):
                    continue
                value = value.to(device) if shown in state["on_device"] else value
                now = vars(layer).get(name)
                if type(now) is Tensor and isinstance(value, Tensor) and _is_like(now, value):
                    now.detach().copy_(value)  # who else holds it sees that too
                else:
                    vars(layer)[name] = value

    def lost(self, state: Mapping[str, Any]) -> list[str]:
        """The names of what `state` does not hold and no hook has taken up."""
        layers = dict(_of_users(self._module))
        parts = [(shown, *shown.rpartition(".")[::2]) for shown in state.get("lost", [])]
        return [shown for shown, path, name in parts if (layers.get(path), name) not in self._by_hook]

    def _changed(self) -> Iterator[tuple[str, nn.Module, str, Any]]:
        for path, layer in _of_users(self._module):
            if layer not in self._at_start:  # built by a hook
                continue
            before = self._at_start[layer]
            for name, mark in _marks(layer).items():
                if not _is_same(before.get(name, _NOTHING), mark):
                    yield path, layer, name, vars(layer)[name]


def alike(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the states of several ranks what those that have it agree on; what they do not is lost."""
    values: dict[str, dict[str, Any]] = {}
    lost = {name for state in states for name in state.get("lost", [])}
    for state in states:
        for path, found in state.get("values", {}).items():
            for name, value in found.items():
                first = values.setdefault(path, {}).setdefault(name, value)
                if not _is_equal(first, value):
                    lost.add(f"{path}.{name}" if path else name)
    kept = {
        path: {name: v for name, v in found.items() if (f"{path}.{name}" if path else name) not in lost}
        for path, found in values.items()
    }
    on_device = [name for state in states for name in state.get("on_device", [])]
    return {"values": kept, "lost": sorted(lost), "on_device": on_device}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return _is_same((type(one), one), (type(other), other))


_NOTHING = ("", 0)


def _of_users(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in module.named_modules():
        if type(layer).__module__.partition(".")[0] not in _PACKAGES and not hasattr(layer, "metric_state"):
            yield path, layer


def _marks(layer: nn.Module) -> dict[str, tuple[Any, Any]]:
    """By name what tells whether an attribute was changed or replaced."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(layer).items():
        if name in _NOT_OURS:
            continue
        if type(value) in _SAVED:
            found[name] = (type(value), value)
        elif type(value) is Tensor and value.layout == torch.strided and not value.is_meta:
            found[name] = (weakref.ref(value), value._version)
        elif isinstance(value, _LISTS):
            found[name] = ("", len(value))
    return found


def _is_same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if isinstance(before[0], weakref.ref) and isinstance(now[0], weakref.ref):
        return before[0]() is now[0]() and before[1] == now[1]
    return before[0] == now[0] and (before[1] == now[1] or (before[1] != before[1] and now[1] != now[1]))


def _is_free(layer: nn.Module, name: str) -> bool:
    """Whether a plain value may be set there: a class has no method or property of the name."""
    return name.isidentifier() and name not in _NOT_OURS and type(getattr(type(layer), name, None)) in _SAVED


def _is_like(now: Tensor, value: Tensor) -> bool:
    owns = (
        now.grad_fn is None
        and now.is_leaf
        and 0 not in (s for s, n in zip(now.stride(), now.shape, strict=True) if n > 1)
    )
    return owns and (now.shape, now.dtype, now.device) == (value.shape, value.dtype, value.device)
