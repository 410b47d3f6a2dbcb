"""Values of attributes as a checkpoint keeps them: what tells whether one was changed, and how it is written and put
back."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.strategies.launch.program.generators import generator_content, generator_of, generators
from lockstep.strategies.launch.program.values import slots
from lockstep.strategies.modules.absent import Refusing, is_here
from lockstep.strategies.modules.blocks import OF_TORCH, is_of_user
from lockstep.strategies.modules.parameter_hooks import of_engines
from lockstep.strategies.sync.contents import checksum, generator_state, sample_of
from lockstep.trainer.hparams import Namespace
from lockstep.trainer.kept.fields import caches_of, drop, fields, put

_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray, range, Tensor, np.ndarray, Fraction, Refusing}
_PLAIN |= {Decimal, UUID, date, datetime, time, timedelta, torch.dtype, torch.device, torch.Size}
_CONTAINERS = {list, tuple, set, frozenset, deque}
_MAPPINGS = {dict, OrderedDict, defaultdict, Counter}
_BARE = (SimpleNamespace, argparse.Namespace)
_LEAD_BACK = frozenset({"_trainer", "_module", "_toggled", "_left_hooks", "_left_made", "_left_optimizers", "trainer"})
_OF_MODULES = (OF_TORCH - {"training"}) | _LEAD_BACK


def attributes(owner: Any) -> dict[str, Any]:
    """The attributes that user code may set: of layers of torch's classes `training`, numbers, strings, tuples and
    buffers that are not in the state dict."""
    not_theirs, own = not_of_users(owner), fields(owner)
    if isinstance(owner, nn.Module) and not is_of_user(owner):
        caches = caches_of(owner)
        own = {name: value for name, value in own.items() if type(value) in (*SAVED, tuple) or name in caches}
    elif isinstance(owner, nn.Parameter):
        own = {name: value for name, value in own.items() if not name.startswith(of_engines(owner))}
    return {name: value for name, value in own.items() if name not in not_theirs and not isinstance(value, nn.Module)}


def own_data(owner: Any) -> dict[str, Any]:
    """The attributes of a layer, DataModule, callback or parameter that are data: numbers, strings, tensors, arrays,
    enumerations, dates, generators, containers, dataclasses and namespaces of them, and `Refusing`."""
    return {name: value for name, value in attributes(owner).items() if is_data(value)}


def take_data(owner: Any, attributes: dict[str, Any], replaced: Collection[str] = ()) -> None:
    """Give `owner` what `own_data` returned on rank 0: in the lists, dicts, sets, tensors and arrays that it has, but
    for those that were `replaced` there."""
    for name, value in attributes.items():
        now: Any = fields(owner).get(name)
        if now is not value:  # `load_state_dict` has taken it from the state that came home with it
            put(owner, name, value if name in replaced else filled(now, value))


def filled(now: Any, value: Any) -> Any:
    """`value`, in the container, tensor, array or generator that is there now if it is of the same type."""
    if type(now) is not type(value):
        return value
    if isinstance(now, (list, deque, dict, set)):
        if isinstance(now, dict):
            value = {key: filled(now.get(key), item) for key, item in value.items()}
        now.clear()
        now.extend(value) if isinstance(now, (list, deque)) else now.update(value)
        return now
    if is_record(now) and not getattr(getattr(now, "__dataclass_params__", None), "frozen", False):
        held, theirs = fields(now), fields(value)
        for name in held.keys() - theirs.keys():
            drop(now, name)
        for name, item in theirs.items():
            put(now, name, filled(held.get(name), item))
        return now
    if isinstance(now, bytearray | array) and getattr(now, "typecode", "") == getattr(value, "typecode", ""):
        now[:] = value
        return now
    if type(now) is Tensor and _is_like(now, value) and now.requires_grad == value.requires_grad:
        now.detach().copy_(value)
        return now
    if type(now) is np.ndarray and _is_like_array(now, value):
        now[...] = value
        return now
    if type(now) in generators() and (content := generator_content(value)) is not None:
        return generator_of(content, now)
    return value


def is_data(value: Any, within: tuple[int, ...] = ()) -> bool:
    """`within` are the ids of what holds it: what holds itself is not data."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, (np.generic, PurePath, Enum)):
        return True
    if kind in generators():  # on a GPU, the program would start CUDA for it
        return kind is not torch.Generator or value.device.type == "cpu"
    if id(value) in within:
        return False
    of_data = functools.partial(is_data, within=(*within, id(value)))
    if kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return all(map(of_data, value))
    if kind in _MAPPINGS:
        return all(of_data(key) and of_data(item) for key, item in value.items())
    return is_record(value) and all(map(of_data, fields(value).values()))


def is_record(value: Any) -> bool:
    """Whether it is a dataclass or a namespace, which is what its attributes are."""
    return type(value) in _BARE or (dataclasses.is_dataclass(value) and not isinstance(value, type))


SAVED = (type(None), bool, int, float, str)
_KEPT = (list, tuple, dict, deque, set, frozenset, Counter, OrderedDict, defaultdict)
"""Containers that are saved, of values that are."""
STATEFUL = (Optimizer, LRScheduler, torch.amp.GradScaler)
"""Objects that are saved by their `state_dict`."""
_MOST_BYTES, MOST_ITEMS, _MOST_BITS = 2**26, 2**14, 4000
"""Larger tensors, arrays, containers and integers are not saved beside the weights."""
_FEW_BYTES = 2**20
_NO_LIMIT = 2**40


Mark = tuple[Any, Any]
"""What tells whether a value was changed or replaced: its kind, None if it is not saved, and what it holds."""
NOTHING: Mark = ("", 0)


class Marks(NamedTuple):
    """Of what an owner holds, by name."""

    owner: Any
    marks: dict[str, Mark]


def mark_of(value: Any, most: int, of_state: bool = False) -> Mark:
    """`most`: how many items a container has at most. `of_state`: it is in the state of an optimizer, on which there is
    no limit, and which knows by itself on which device each part is to be."""
    kind = type(value)
    if kind in SAVED:
        return (None if kind is int and value.bit_length() > _MOST_BITS else kind), value
    if isinstance(value, Tensor):
        if kind is not Tensor or not _is_plain(value):
            return None, id(value)
        version: Any = object() if value.is_inference() else value._version
        if value.is_cpu and value.nbytes <= _FEW_BYTES and not of_state:  # `.data` and numpy write past the version
            version = version, checksum(value)
        is_saved = value.nbytes <= _MOST_BYTES or of_state
        return (weakref.ref(value), version) if is_saved else (None, [id(value), version])
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject or value.nbytes > _MOST_BYTES:
            return None, sample_of(value, most)
        fits = value.dtype.kind in "biufc" and value.dtype.itemsize <= 16
        content = value.dtype, value.shape, hash(value.tobytes())
        is_saved = fits and (kind is np.ndarray or isinstance(value, np.generic))
        return (kind, content) if is_saved else (None, hash(content))
    if issubclass(kind, STATEFUL):
        if (state := _state_of(value)) is None:
            return None, id(value)
        of_all, marks = mark_of(state, _NO_LIMIT, of_state=True)
        return (kind if of_all else None), marks
    if kind in generators():
        return None if generator_content(value) is None else kind, generator_state(value)
    if isinstance(value, Namespace):  # an owner, whose entries have marks of their own
        return None, id(value)
    if isinstance(value, _KEPT) and (number := _number_of_items(value)) <= most:
        marks = tuple(mark_of(item, most // (number + 1), of_state) for item in _items(value))  # of bounded depth
        is_saved = kind in _KEPT and _fits(value, marks) and (of_state or _are_alike(tensors_in(value)))
        return (kind if is_saved else None), marks
    return None, sample_of(value, most) if isinstance(value, list | deque | dict | set) else id(value)


def _items(container: Any) -> list[Any]:
    """What is in a container, of a dict its keys and then its values, by no code of the class of the user's."""
    kind = _kind_of(container)
    return [*kind.__iter__(container), *(dict.values(container) if kind is dict else ())]


def _number_of_items(container: Any) -> int:
    """How many `_items` returns; of a large container it would take as long as to copy it."""
    kind = _kind_of(container)
    return int(kind.__len__(container)) * (2 if kind is dict else 1)


def _kind_of(container: Any) -> Any:
    return next(base for base in (dict, list, tuple, deque, set, frozenset) if isinstance(container, base))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a checkpoint can hold it: it has memory of its own, in a layout and format of the file."""
    strided = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return strided and _storage(tensor) is not None


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of another layout, or made within a function of torch.func
        return None


def _fits(container: Any, marks: Iterable[Mark]) -> bool:
    """Whether a container can be saved: numbers of numpy would be those of Python there, and generators, deques,
    sets and optimizers are not in others."""
    kinds = [mark[0] for mark in marks]
    alone = (np.generic, *generators(), *STATEFUL, *{*_KEPT} - {list, tuple, dict})
    if None in kinds or any(isinstance(kind, type) and issubclass(kind, alone) for kind in kinds):
        return False
    if isinstance(container, dict) and any(type(key) not in SAVED for key in container):
        return False
    if isinstance(container, set | frozenset) and any(isinstance(item, Tensor) for item in container):
        return False
    return not isinstance(container, defaultdict) or container.default_factory in _FACTORIES.values()


def _are_alike(tensors: list[Tensor]) -> bool:
    """Whether they are all on one device, and not too large."""
    return len({tensor.device.type for tensor in tensors}) < 2 and sum(t.nbytes for t in tensors) <= _MOST_BYTES


def _state_of(value: Any) -> Any:
    """None of an object whose class has not set up what its base class needs, as a wrapper of an optimizer may not."""
    try:
        return value.state_dict()
    except Exception:
        return None


def is_savable(mark: Mark) -> bool:
    return mark[0] is not None


def is_same(before: Mark, now: Mark) -> bool:
    if isinstance(before[0], weakref.ref) and isinstance(now[0], weakref.ref):
        return before[0]() is now[0]() and before[1] == now[1]
    if before[0] != now[0]:
        return False
    holds_marks = now[0] is None or (isinstance(now[0], type) and issubclass(now[0], (*_KEPT, *STATEFUL)))
    if holds_marks and isinstance(before[1], tuple) and isinstance(now[1], tuple):
        return len(before[1]) == len(now[1]) and all(map(is_same, before[1], now[1]))
    return bool(before[1] == now[1]) or (before[1] != before[1] and now[1] != now[1])


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storages(tensors: Iterable[Tensor]) -> set[int | None]:
    found = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return {_storage(tensor) for tensor in found if type(tensor) in (Tensor, nn.Parameter)} - {None, 0}


_BY_NAME = {kind.__name__: kind for kind in (set, frozenset, Counter, OrderedDict)}
_FACTORIES = {getattr(kind, "__name__", None): kind for kind in (None, int, float, list, dict, set, str, bool)}

_STATE, _GENERATOR, _ITEMS = "__state__", "__generator__", "__items__"
"""The keys under which the state of an object of torch or of a generator is saved, and what is in a deque or set."""


def encoded(value: Any) -> Any:
    if isinstance(value, np.generic):
        return np.asarray(value)
    if issubclass(type(value), STATEFUL):
        return {_STATE: tree_map_only(Tensor, Tensor.detach, value.state_dict())}
    if isinstance(value, generators()):
        return {_GENERATOR: generator_content(value)}
    if isinstance(value, deque):
        return {_ITEMS: [*map(encoded, value)], "maxlen": value.maxlen}
    if isinstance(value, set | frozenset):
        return {_ITEMS: sorted(value, key=repr), "kind": type(value).__name__}
    if type(value) in (Counter, OrderedDict, defaultdict):
        factory = getattr(getattr(value, "default_factory", None), "__name__", None)
        return {_ITEMS: encoded(dict(value)), "kind": type(value).__name__, "factory": factory}
    return tree_map_only(Tensor, Tensor.detach, value)


def copied(value: Any) -> Any:
    return value if type(value) in SAVED else copy.deepcopy(on_host(encoded(value)))


def on_host(content: Any) -> Any:
    return tree_map_only(Tensor, Tensor.cpu, content)


def take(layer: Any, name: str, value: Any, fresh: bool = False, is_cache: bool = False) -> None:
    """Give an attribute a value of `encoded`: in the object that is there, as whoever else holds it sees that too, or
    with `fresh` in another. `is_cache`: it is a buffer that is not in the state dict."""
    if is_cache and name not in fields(layer):  # it was registered since
        layer.register_buffer(name, None, persistent=False)
    now: Any = fields(layer).get(name)
    if isinstance(now, Tensor) and not is_here(now):
        return
    if fresh and not (issubclass(type(now), STATEFUL) or (isinstance(value, dict) and _STATE in value)):
        if isinstance(now, Tensor) and isinstance(value, Tensor) and now.is_leaf and value.is_floating_point():
            value = value.detach().requires_grad_(now.requires_grad)
        now = now.clone_state() if isinstance(now, torch.Generator) else None
        put(layer, name, now)
    if type(now) is Tensor and isinstance(value, Tensor) and _is_like(now, value):
        now.detach().copy_(value)
    elif isinstance(value, np.ndarray) and not value.shape:
        put(layer, name, value[()])
    elif isinstance(value, dict) and _GENERATOR in value:
        put(layer, name, generator_of(value[_GENERATOR], now))
    elif isinstance(value, dict) and _STATE in value:
        if issubclass(type(now), STATEFUL):
            now.load_state_dict(copy.deepcopy(value[_STATE]))
    elif isinstance(value, dict) and _ITEMS in value:
        items, kind = value[_ITEMS], value.get("kind")
        if kind == "defaultdict":
            kept: Any = defaultdict(_FACTORIES[value["factory"]], items)
        else:
            kept = deque(items, value["maxlen"]) if kind is None else _BY_NAME[kind](items)
        take_data(layer, {name: kept})
    else:
        take_data(layer, {name: value})


def as_it_is(owner: Any, name: str) -> Callable[[bool], None]:
    """What gives an attribute the content back that it has now: in the object that it is now, or if it is called with
    True in that which it is then."""
    own = fields(owner)
    if name not in own:
        return lambda _: delattr(owner, name) if name in fields(owner) else None
    now = own[name]
    content = copy.deepcopy(encoded(now)) if is_savable(mark_of(now, MOST_ITEMS)) else None

    def put_back(stays: bool) -> None:
        if not stays:
            put(owner, name, now)
        if content is not None:
            take(owner, name, content)

    return put_back


def moved(value: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def is_small(value: Any) -> bool:
    """Whether a copy of it costs nothing."""
    if issubclass(type(value), STATEFUL):
        return False
    held = tensors_in(value) if isinstance(value, (*_KEPT, Tensor)) else [value]
    return sum(getattr(each, "nbytes", 0) for each in held) <= _FEW_BYTES


def not_of_users(owner: Any) -> frozenset[str]:
    """The attributes that are not the user's: of other objects than modules and callbacks only those that lead back."""
    if isinstance(owner, Namespace):
        return frozenset()
    if isinstance(owner, nn.Module):
        return _OF_MODULES
    return _LEAD_BACK | getattr(type(owner), "_not_kept", frozenset())  # a Trainer's


def is_free(layer: Any, name: str) -> bool:
    """Whether a value may be set there: a class has no method or property of the name that the object has not."""
    if isinstance(layer, Namespace):
        return True
    kind: Any = type(layer)
    of_class = getattr(kind, name, None)
    has_place = name in fields(layer) or name in slots(kind) or isinstance(of_class, functools.cached_property)
    return name.isidentifier() and name not in not_of_users(layer) and (has_place or is_data(of_class))


def _is_like(now: Tensor, value: Tensor) -> bool:
    owns = (
        now.grad_fn is None
        and now.is_leaf
        and not now.is_inference()
        and 0 not in (s for s, n in zip(now.stride(), now.shape, strict=True) if n > 1)
    )
    return owns and (now.shape, now.dtype, now.device) == (value.shape, value.dtype, value.device)


def _is_like_array(now: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    return now.flags.writeable and not now.dtype.hasobject and (now.shape, now.dtype) == (value.shape, value.dtype)
