"""Attributes that user code has set on a rank, brought back to the process that started it; and those that it has
changed in a run, kept for one that continues it."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from io import IOBase
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.strategies.modules.blocks import is_of_user
from lockstep.strategies.sync.contents import generator_content, generator_of, generator_state, generators

_PLAIN = {type(None), bool, int, float, complex, str, bytes, Tensor, np.ndarray}
_CONTAINERS = {list, tuple, set, frozenset, deque}
_MAPPINGS = {dict, OrderedDict, defaultdict, Counter}
_NOT_OURS = frozenset(vars(nn.Module())) | {"_trainer", "_module", "_toggled", "trainer"}

_HPARAMS = "_hparams"
"""Made, with nothing in it, when `hparams` is first read, as the first save does."""


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


_SAVED = (type(None), bool, int, float, str)
_KEPT = (list, tuple, dict, deque, set, frozenset)
"""Containers that are saved, of values that are."""
_MOST_BYTES, _MOST_ITEMS, _MOST_BITS = 2**26, 2**14, 4000
"""Larger tensors, arrays, containers and integers are not saved beside the weights."""


class Changes:
    """What user code has changed since a fit was set up in the attributes of the module and of layers of its own
    classes: numbers, strings, tensors, arrays, and small lists and dicts of them, which are saved, and other objects,
    which are not."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_start = _marks_of(module)
        self._had: dict[nn.Module, set[str]] = {}
        """The attributes that every run has as its first step begins."""
        self._by_hook: set[tuple[nn.Module, str]] = set()
        """What `on_load_checkpoint` has taken up."""
        self._begun: dict[str, dict[str, Any]] = {}
        """By layer and name the values that hooks of the start have left as the run was new."""
        self._resumed: dict[tuple[str, str], Any] | None = None
        """Of those what the run that is resumed has made of them; None in a new run."""

    def note_loaded(self) -> None:
        """Called once `on_load_checkpoint` has been."""
        self._by_hook = {(layer, name) for _, layer, name, *_ in self._changed()}

    def begin(self) -> None:
        """Called once `configure_optimizers` has been: what is as it left it each run makes again."""
        self._at_start = _marks_of(self._module)
        for layer, name in self._by_hook:
            self._at_start.get(layer, {}).pop(name, None)

    def note_begun(self) -> None:
        """Called once `on_train_start` has been, which every run calls. What it has left as when the run was new is
        again what the run that is resumed had made of it."""
        layers = dict(_of_users(self._module))
        self._had = {
            layer: {name for name, value in vars(layer).items() if value is not None} for layer in layers.values()
        }
        if self._resumed is None:
            for path, _, name, value, mark in self._changed():
                if _is_savable(mark):
                    self._begun.setdefault(path, {})[name] = _copied(value)
            return
        for (path, name), value in self._resumed.items():
            now, made = vars(layers[path]).get(name), self._begun[path].pop(name)
            if not _is_savable(_mark(now, _MOST_ITEMS)):
                continue
            self._begun[path][name] = _copied(now)
            if _is_equal(self._begun[path][name], made):
                _take(layers[path], name, value)
        self._resumed = {}

    def state_dict(self) -> dict[str, Any]:
        """What is saved by layer and name; the names of what is not; and which tensors are on the model's device.

        Of a layer in which steps have made an object that cannot be saved nothing is, as a flag may say that it is
        there.
        """
        values: dict[str, dict[str, Any]] = {}
        lost, apart, on_device = [], set(), []
        for path, layer, name, value, mark in self._changed():
            if not _is_savable(mark):
                lost.append(_shown(path, name))
                apart |= {path} if name not in self._had.get(layer, (name,)) else set()
                continue
            if any(tensor.device.type != "cpu" for tensor in _tensors(value)):
                on_device.append(_shown(path, name))
            values.setdefault(path, {})[name] = _detached(value)
        lost += [_shown(path, name) for path in apart for name in values.pop(path, ())]
        lost += [_shown(path, name) for path, layer in _of_users(self._module) for name in _iterators(layer)]
        state = {"values": values, "lost": lost, "on_device": on_device} if values or lost else {}
        begun = {path: found for path in self._begun if path not in apart and (found := self._since_begun(path))}
        return {"values": values, "lost": lost, "on_device": on_device, "begun": begun} if begun else state

    def _since_begun(self, path: str) -> dict[str, Any]:
        """What hooks of the start have left in a layer and is no longer so."""
        now = vars(dict(_of_users(self._module)).get(path, nn.Module()))
        return {
            name: value
            for name, value in self._begun[path].items()
            if name in now and _is_savable(_mark(now[name], _MOST_ITEMS)) and not _is_equal(_copied(now[name]), value)
        }

    def load_state_dict(self, state: Mapping[str, Any], device: Any) -> None:
        """Take up the values of a run that is continued, but for what a hook has taken up already."""
        layers = dict(_of_users(self._module))
        for path, values in state.get("values", {}).items():
            for name, value in values.items():
                layer = layers.get(path)
                if layer is None or (layer, name) in self._by_hook or not _is_free(layer, name):
                    continue
                _take(layer, name, _moved(value, device) if _shown(path, name) in state["on_device"] else value)
                self._at_start.get(layer, {}).pop(name, None)  # it is saved again, whatever the module began with
        self._begun = state.get("begun", {})
        self._resumed = {
            (path, name): copy.deepcopy(_detached(vars(layers[path])[name]))
            for path, values in self._begun.items()
            for name in values
            if path in layers and name in vars(layers[path])
        }

    def lost(self, state: Mapping[str, Any]) -> list[str]:
        """The names of what `state` does not hold and no hook has taken up."""
        layers = dict(_of_users(self._module))
        parts = [(shown, *shown.rpartition(".")[::2]) for shown in state.get("lost", [])]
        return [shown for shown, path, name in parts if (layers.get(path), name) not in self._by_hook]

    def _changed(self) -> Iterator[tuple[str, nn.Module, str, Any, _Mark]]:
        weights = _storages((*self._module.parameters(), *self._module.buffers()))
        for path, layer in _of_users(self._module):
            if layer not in self._at_start:  # built by a hook
                continue
            before = self._at_start[layer]
            for name, mark in _marks(layer).items():
                value = vars(layer)[name]
                if _is_same(before.get(name, _NOTHING), mark):
                    continue
                if not _is_savable(mark) or weights.isdisjoint(_storages(_tensors(value))):
                    yield path, layer, name, value, mark
                elif name not in before or before[name] == (type(None), None):  # a copy would not follow the weights
                    yield path, layer, name, value, (None, id(value))


def alike(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the states of several ranks what those that have it agree on; what they do not is lost."""
    lost = {name for state in states for name in state.get("lost", [])}
    values = _agreed([state.get("values", {}) for state in states], lost)
    begun = _agreed([state.get("begun", {}) for state in states], set())
    on_device = [name for state in states for name in state.get("on_device", [])]
    return {"values": values, "lost": sorted(lost), "on_device": on_device, "begun": begun}


def _agreed(found: list[dict[str, dict[str, Any]]], lost: set[str]) -> dict[str, dict[str, Any]]:
    """What is not `lost`, to which those are added that differ."""
    values: dict[str, dict[str, Any]] = {}
    for path, name, value in ((path, *item) for each in found for path, own in each.items() for item in own.items()):
        if not _is_equal(values.setdefault(path, {}).setdefault(name, value), value):
            lost.add(_shown(path, name))
    return {
        path: {name: v for name, v in own.items() if _shown(path, name) not in lost} for path, own in values.items()
    }


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other) or (one != one and other != other)


def _shown(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _iterators(layer: nn.Module) -> Iterator[str]:
    """The names of those of which nobody can tell where they are."""
    for name, value in vars(layer).items():
        if hasattr(type(value), "__next__") and not isinstance(value, IOBase):
            yield name


_Mark = tuple[Any, Any]
"""What tells whether a value was changed or replaced: its kind, None if it is not saved, and what it holds."""
_NOTHING: _Mark = ("", 0)


def _of_users(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in module.named_modules():
        if is_of_user(layer) and not hasattr(layer, "metric_state"):  # metrics are saved by themselves
            yield path, layer


def _marks_of(module: nn.Module) -> dict[nn.Module, dict[str, _Mark]]:
    return {layer: _marks(layer) for _, layer in _of_users(module)}


def _marks(layer: nn.Module) -> dict[str, _Mark]:
    return {
        name: _mark(value, _MOST_ITEMS)
        for name, value in vars(layer).items()
        if name not in _NOT_OURS and name.isidentifier() and not isinstance(value, nn.Module)
        if name != _HPARAMS or value
    }


def _mark(value: Any, most: int) -> _Mark:
    kind = type(value)
    if kind in _SAVED:
        return (None if kind is int and value.bit_length() > _MOST_BITS else kind), value
    if isinstance(value, Tensor):
        if kind is not Tensor or not _is_plain(value):
            return None, id(value)
        return weakref.ref(value), object() if value.is_inference() else value._version
    if isinstance(value, np.ndarray | np.generic):
        if kind is not np.ndarray and not isinstance(value, np.generic):
            return None, id(value)
        fits = value.dtype.kind in "biufc" and value.dtype.itemsize <= 16 and value.nbytes <= _MOST_BYTES
        return (kind, (value.dtype, value.shape, hash(value.tobytes()))) if fits else (None, id(value))
    if kind in generators():
        return None if generator_content(value) is None else kind, generator_state(value)
    if kind in _KEPT and len(value) <= most:
        items = [*value.keys(), *value.values()] if kind is dict else value
        marks = tuple(_mark(item, most // (len(value) + 1)) for item in items)  # of bounded depth
        return (kind if _fits(value, marks) else None), marks
    return None, len(value) if isinstance(value, list | deque | dict | set) else id(value)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a checkpoint can hold it: it has memory of its own, in a layout and format of the file."""
    strided = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return strided and tensor.nbytes <= _MOST_BYTES and _storage(tensor) is not None


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of another layout, or made within a function of torch.func
        return None


def _fits(container: Any, marks: Iterable[_Mark]) -> bool:
    """Whether a container can be saved: numbers of numpy would be those of Python there, generators, deques and sets
    are not in others, and tensors all on one device."""
    kinds, alone = [mark[0] for mark in marks], (np.generic, *generators(), deque, set, frozenset)
    if None in kinds or any(isinstance(kind, type) and issubclass(kind, alone) for kind in kinds):
        return False
    if type(container) is dict and any(type(key) not in _SAVED for key in container):
        return False
    tensors = _tensors(container)
    return len({tensor.device.type for tensor in tensors}) < 2 and sum(t.nbytes for t in tensors) <= _MOST_BYTES


def _is_savable(mark: _Mark) -> bool:
    return mark[0] is not None


def _is_same(before: _Mark, now: _Mark) -> bool:
    if isinstance(before[0], weakref.ref) and isinstance(now[0], weakref.ref):
        return before[0]() is now[0]() and before[1] == now[1]
    if before[0] != now[0]:
        return False
    if now[0] in (None, *_KEPT) and isinstance(before[1], tuple) and isinstance(now[1], tuple):
        return len(before[1]) == len(now[1]) and all(map(_is_same, before[1], now[1]))
    return bool(before[1] == now[1]) or (before[1] != before[1] and now[1] != now[1])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> set[int | None]:
    found = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return {_storage(tensor) for tensor in found if type(tensor) in (Tensor, nn.Parameter)} - {None, 0}


_GENERATOR, _ITEMS = "__generator__", "__items__"
"""The keys under which the state of a generator is saved, and what is in a deque or set."""


def _detached(value: Any) -> Any:
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, generators()):
        return {_GENERATOR: generator_content(value)}
    if isinstance(value, deque):
        return {_ITEMS: [*map(_detached, value)], "maxlen": value.maxlen}
    if isinstance(value, set | frozenset):
        return {_ITEMS: sorted(value, key=repr), "kind": type(value).__name__}
    return tree_map_only(Tensor, Tensor.detach, value)


def _copied(value: Any) -> Any:
    return copy.deepcopy(tree_map_only(Tensor, Tensor.cpu, _detached(value)))


def _take(layer: nn.Module, name: str, value: Any) -> None:
    now = vars(layer).get(name)
    if type(now) is Tensor and isinstance(value, Tensor) and _is_like(now, value):
        now.detach().copy_(value)  # who else holds it sees that too
    elif isinstance(value, np.ndarray) and not value.shape:
        vars(layer)[name] = value[()]
    elif isinstance(value, dict) and _GENERATOR in value:
        vars(layer)[name] = generator_of(value[_GENERATOR], now)
    elif isinstance(value, dict) and _ITEMS in value:
        items = value[_ITEMS]
        kept = {"set": set, "frozenset": frozenset}[value["kind"]](items) if "kind" in value else None
        take_data(layer, {name: deque(items, value["maxlen"]) if kept is None else kept})
    else:
        take_data(layer, {name: value})


def _moved(value: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _is_free(layer: nn.Module, name: str) -> bool:
    """Whether a value may be set there: a class has no method or property of the name."""
    return name.isidentifier() and name not in _NOT_OURS and _is_data(getattr(type(layer), name, None))


def _is_like(now: Tensor, value: Tensor) -> bool:
    owns = (
        now.grad_fn is None
        and now.is_leaf
        and not now.is_inference()
        and 0 not in (s for s, n in zip(now.stride(), now.shape, strict=True) if n > 1)
    )
    return owns and (now.shape, now.dtype, now.device) == (value.shape, value.dtype, value.device)
