"""What user code holds in attributes of modules, besides parameters and buffers: copies for a replica, and what becomes
of them after a step."""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.data.sample_axis import with_items
from lockstep.strategies.dp.large import Large
from lockstep.strategies.launch.program.values import attributes_of, put_attribute
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.sync.contents import same_values

T = TypeVar("T")
_CONTAINERS = (list, dict, set, deque)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_OF_DATA = frozenset({"abc", "argparse", "collections", "contextlib", "types", "typing"})
"""Modules of the standard library in which bases are that hold data alone."""
_OF_LIBRARIES = (sys.stdlib_module_names | {"torch", "torchmetrics", "numpy", "lockstep"}) - _OF_DATA
MISSING = object()
"""Of an attribute that is not there."""


class Copies:
    """Copies of what a model holds, for its replica on `device`; what is held in several places is copied once.

    Tensors, arrays, containers, bound methods and objects of users' classes are copied. All else is shared: functions,
    generators, objects of libraries, tensors that require a gradient, objects without attributes, which a step asks
    for by identity, and what is large, which a step may not change. `before`: what was large in the step before.
    """

    def __init__(self, device: torch.device, before: Mapping[int, Large] | None = None) -> None:
        self._device = device
        self._known: dict[int, tuple[Any, Any]] = {}
        """By its id, what is copied, which lives as long, and the copy."""
        self._empty: list[tuple[str, Any]] = []
        """Shared objects that could be given attributes, each with the attribute that it was found in."""
        self.large: dict[int, Large] = {}
        """By its id, what is shared since it is large."""
        self._large_before = before or {}
        self._unfilled: list[tuple[Any, list[Any], list[Any] | None]] = []
        """Copied dicts with keys and items, and sets with theirs, to fill once keys have what their hash reads."""
        self.place = ""
        """The attribute whose value is being copied."""

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._known

    def add(self, value: Any, made: T) -> T:
        """Let `made` be the copy of `value`."""
        self._known[id(value)] = value, made
        return made

    def known(self, value: Any) -> Any:
        """The copy of what has one, else `value` itself."""
        return self._known.get(id(value), (value, value))[1]

    def refuse_changed(self) -> None:
        """Raise RuntimeError if an object that replicas share was given attributes, or is large and was changed."""
        for large in self.large.values():
            large.refuse_changed()
        for place, value in self._empty:
            if attributes_of(value):
                raise RuntimeError(
                    f"training_step gave attributes to an object in {place} that had none, and strategy 'dp' runs it "
                    "on slices, which share such an object; set its attributes before fit, or use strategy='single'"
                )

    def of(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        large = Large.of(value, self.place, self._device, self._large_before.get(id(value)))
        if large is not None:
            self.large[id(value)] = large
            return self.add(value, value)
        if issubclass(kind, Tensor):
            return self._of_tensor(value)
        if issubclass(kind, np.ndarray):
            return self.add(value, copy.copy(value))
        if kind is MethodType:
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else self.add(value, MethodType(value.__func__, owner))
        if kind is functools.partial:
            args, keywords = [self.of(item) for item in value.args], self.of(value.keywords)
            return functools.partial(self.of(value.func), *args, **keywords)
        if issubclass(kind, tuple) or kind is frozenset:
            items = [self.of(item) for item in value]
            if all(map(operator.is_, items, value)):
                return value
            return self.add(value, frozenset(items) if kind is frozenset else with_items(value, items))
        if kind is object:
            return value
        return self._of_object(value) if issubclass(kind, _CONTAINERS) or _is_of_users(value) else value

    def fill(self) -> None:
        """Give copied dicts and sets their content, at the end."""
        for made, keys, items in self._unfilled:
            if items is None:
                set.clear(made)
                set.update(made, keys)
                continue
            base: Any = OrderedDict if isinstance(made, OrderedDict) else dict
            base.clear(made)
            for key, item in zip(keys, items, strict=True):
                base.__setitem__(made, key, item)
        self._unfilled.clear()

    def _of_tensor(self, value: Tensor) -> Tensor:
        if value.requires_grad or value.layout is not torch.strided:
            return value
        base = value._base
        if base is not None and base.is_contiguous() and not base.requires_grad:  # so that both change together
            whole = self.of(base)
            if whole is base:
                return self.add(value, value)
            return self.add(value, whole.as_strided(value.size(), value.stride(), value.storage_offset()))
        own = value.detach().clone()
        return self.add(value, own if own.device.type == "cpu" else own.to(self._device))

    def _of_object(self, value: Any) -> Any:
        kind: Any = type(value)
        attributes = attributes_of(value)
        if not attributes and not issubclass(kind, _CONTAINERS) and kind.__module__ not in _OF_DATA:
            self._empty.append((self.place, value))
            return value
        try:
            made = copy.copy(value) if issubclass(kind, (*_CONTAINERS, SimpleNamespace)) else object.__new__(kind)
        except Exception:  # its class does not let it be copied
            return value
        self.add(value, made)
        if issubclass(kind, dict):
            keys = [self.of(key) for key in dict.keys(value)]
            self._unfilled.append((made, keys, [self.of(item) for item in dict.values(value)]))
        elif issubclass(kind, set):
            items = [self.of(item) for item in set.__iter__(value)]
            if not all(map(operator.is_, items, set.__iter__(value))):
                self._unfilled.append((made, items, None))
        elif issubclass(kind, list):
            list.__setitem__(made, slice(None), [self.of(item) for item in list.__iter__(value)])
        elif issubclass(kind, deque):
            deque.clear(made)
            deque.extend(made, [self.of(item) for item in deque.__iter__(value)])
        for name, item in attributes.items():
            put_attribute(made, name, self.of(item))
        return made


def joined(value: Any, others: list[Any], name: str, copies: list[Copies]) -> Any:
    """`value`, which an attribute has after the step, if replicas have the same (`others`). What differs is replaced by
    what refuses any use: in place in lists, dicts and objects. `copies`: those of each replica."""
    if _all_same(value, others, copies):
        return value
    alike = all(type(value) is type(other) for other in others)
    if alike and type(value) is dict and all(list(value) == list(other) for other in others):
        value.update((key, joined(item, [each[key] for each in others], name, copies)) for key, item in value.items())
        return value
    if alike and type(value) is list and all(len(value) == len(other) for other in others):
        value[:] = [joined(item, [each[i] for each in others], name, copies) for i, item in enumerate(value)]
        return value
    if alike and _is_of_users(value):
        return _joined_object(value, others, name, copies)
    return Refusing(
        f"{name} was set by training_step, which strategy 'dp' runs on slices of a batch, so there is one for each "
        "slice and none of the batch; return it from training_step or log it, or use strategy='single' or 'ddp'"
    )


def _joined_object(value: Any, others: list[Any], name: str, copies: list[Copies]) -> Any:
    own, theirs = attributes_of(value), [attributes_of(other) for other in others]
    for key, item in own.items():
        found = [held.get(key, MISSING) for held in theirs]
        if not _all_same(item, found, copies):
            put_attribute(value, key, Refusing(""))  # in place of a part that leads back here
            put_attribute(value, key, joined(item, found, f"{name}.{key}", copies))
    return value


def _all_same(value: Any, others: list[Any], copies: list[Copies]) -> bool:
    return all(Comparison(each).is_same(value, other) for other, each in zip(others, copies, strict=True))


class Comparison:
    """Tells whether a replica holds the same as the model. `copies`: those that the replica was made of."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._seen: set[tuple[int, int]] = set()
        """The ids of pairs that were or are being compared, which live as long: one that differs ends it all."""

    def is_same(self, one: Any, other: Any) -> bool:
        kind: Any = type(one)
        if one is other:
            return True
        if kind is not type(other):
            return False
        if issubclass(kind, Tensor):
            return _same_tensor(one, other)
        if issubclass(kind, np.ndarray):
            equal_nan = one.dtype.kind in "fc"
            return one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=equal_nan))
        if issubclass(kind, nn.Module):  # its own attributes are compared where it is a submodule
            return True
        if kind is MethodType:
            return one.__func__ is other.__func__ and self.is_same(one.__self__, other.__self__)
        if kind is functools.partial:
            own, its = ((part.func, *part.args) for part in (one, other))
            return self._same_items(own, its) and self.is_same(one.keywords, other.keywords)
        pair = id(one), id(other)
        if pair in self._seen:
            return True
        self._seen.add(pair)
        if issubclass(kind, dict):
            alike = self._same_items(dict.keys(one), dict.keys(other))
            alike = alike and self._same_items(dict.values(one), dict.values(other))
        elif issubclass(kind, list | tuple | deque):
            alike = self._same_items(one, other)
        elif issubclass(kind, set | frozenset):
            alike = self._same_sets(one, other)
        elif _is_of_users(one):
            alike = True
        else:
            return _equal(one, other)
        return alike and self._same_attributes(one, other)

    def _same_items(self, one: Collection[Any], other: Collection[Any]) -> bool:
        return len(one) == len(other) and all(map(self.is_same, one, other))

    def _same_sets(self, one: Any, other: Any) -> bool:
        copied = [self._copies.known(item) for item in one]
        return _equal(set(copied), set(other)) and all(map(self.is_same, one, copied))

    def _same_attributes(self, one: Any, other: Any) -> bool:
        own, theirs = attributes_of(one), attributes_of(other)
        return own.keys() == theirs.keys() and all(self.is_same(item, theirs[name]) for name, item in own.items())


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        return same_values(one.detach().to(other.device), other.detach())
    except RuntimeError:  # of a layout or dtype without a comparison
        return False


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a comparison of the user's, or of a library
        return False


def _is_of_users(value: Any) -> bool:
    """Whether it is copied by its attributes: an object of a class of the user's without a library's base, and without
    `__del__`, which would close what copies share."""
    kind: Any = type(value)
    return _is_users_class(kind)


@functools.lru_cache(1000)
def _is_users_class(kind: Any) -> bool:
    packages = {cls.__module__.partition(".")[0] for cls in kind.__mro__ if cls is not object}
    return not packages & _OF_LIBRARIES and not hasattr(kind, "__del__")
