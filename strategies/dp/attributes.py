"""What user code holds in attributes of modules, besides parameters and buffers: copies for a replica, and what becomes
of them after a step."""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.data.sample_axis import with_items
from lockstep.strategies.launch.program.values import slots
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.sync.contents import same_values

T = TypeVar("T")
_CONTAINERS = (list, dict, set, deque)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_OF_LIBRARIES = (sys.stdlib_module_names | {"torch", "torchmetrics", "numpy", "lockstep"}) - {
    *("abc", "argparse", "collections", "contextlib", "types", "typing")  # in which bases are that hold data alone
}
MISSING = object()
"""Of an attribute that is not there."""


class Copies:
    """Copies of what a model holds, for its replica on `device`; what is held in several places is copied once.

    Tensors, arrays, containers, bound methods and objects of users' classes are copied. All else is shared: functions,
    generators, objects of libraries, and tensors that require a gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, tuple[Any, Any]] = {}
        """By its id, what is copied, which lives as long, and the copy."""

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._known

    def add(self, value: Any, made: T) -> T:
        """Let `made` be the copy of `value`."""
        self._known[id(value)] = value, made
        return made

    def of(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        if issubclass(kind, Tensor):
            return self._of_tensor(value)
        if issubclass(kind, np.ndarray):
            return self.add(value, copy.copy(value))
        if kind is MethodType:
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is functools.partial:
            args, keywords = [self.of(item) for item in value.args], self.of(value.keywords)
            return functools.partial(self.of(value.func), *args, **keywords)
        if issubclass(kind, tuple):
            items = [self.of(item) for item in value]
            return value if all(map(_is, items, value)) else with_items(value, items)
        return self._of_object(value) if issubclass(kind, _CONTAINERS) or _is_of_users(value) else value

    def _of_tensor(self, value: Tensor) -> Tensor:
        if value.requires_grad or value.layout is not torch.strided:
            return value
        base = value._base
        if base is not None and base.is_contiguous() and not base.requires_grad:  # so that both change together
            whole = self.of(base)
            return self.add(value, whole.as_strided(value.size(), value.stride(), value.storage_offset()))
        own = value.detach().clone()
        return self.add(value, own if own.device.type == "cpu" else own.to(self._device))

    def _of_object(self, value: Any) -> Any:
        kind: Any = type(value)
        try:
            made = copy.copy(value) if issubclass(kind, (*_CONTAINERS, SimpleNamespace)) else object.__new__(kind)
        except Exception:  # its class does not let it be copied
            return value
        self.add(value, made)
        if issubclass(kind, dict):
            for key, item in dict.items(value):
                dict.__setitem__(made, key, self.of(item))
        elif issubclass(kind, list):
            list.__setitem__(made, slice(None), [self.of(item) for item in list.__iter__(value)])
        elif issubclass(kind, deque):
            deque.clear(made)
            deque.extend(made, [self.of(item) for item in deque.__iter__(value)])
        for name, item in _attributes(value).items():
            _put(made, name, self.of(item))
        return made


def joined(value: Any, others: list[Any], name: str) -> Any:
    """`value`, which an attribute has after the step, if replicas have the same (`others`). What differs is replaced by
    what refuses any use: in place in lists, dicts and objects."""
    if all(is_same(value, other) for other in others):
        return value
    alike = all(type(value) is type(other) for other in others)
    if alike and type(value) is dict and all(list(value) == list(other) for other in others):
        value.update((key, joined(item, [other[key] for other in others], name)) for key, item in value.items())
        return value
    if alike and type(value) is list and all(len(value) == len(other) for other in others):
        value[:] = [joined(item, [other[i] for other in others], name) for i, item in enumerate(value)]
        return value
    if alike and _is_of_users(value):
        return _joined_object(value, others, name)
    return Refusing(
        f"{name} was set by training_step, which strategy 'dp' runs on slices of a batch, so there is one for each "
        "slice and none of the batch; return it from training_step or log it, or use strategy='single' or 'ddp'"
    )


def _joined_object(value: Any, others: list[Any], name: str) -> Any:
    own, theirs = _attributes(value), [_attributes(other) for other in others]
    for key, item in own.items():
        found = [held.get(key, MISSING) for held in theirs]
        if not all(is_same(item, other) for other in found):
            _put(value, key, Refusing(""))  # in place of a part that leads back here
            _put(value, key, joined(item, found, f"{name}.{key}"))
    return value


def is_same(one: Any, other: Any, seen: Sequence[tuple[int, int]] = ()) -> bool:
    """Whether two replicas hold the same. `seen`: pairs of objects that are being compared."""
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
        return one.__func__ is other.__func__ and is_same(one.__self__, other.__self__, seen)
    if kind is functools.partial:
        own, its = ([part.func, part.args, part.keywords] for part in (one, other))
        return is_same(own, its, seen)
    pair = id(one), id(other)
    if pair in seen:
        return True
    seen = [*seen, pair]
    if issubclass(kind, dict):
        alike = list(one) == list(other) and all(is_same(one[key], other[key], seen) for key in one)
    elif issubclass(kind, list | tuple | deque):
        alike = len(one) == len(other) and all(is_same(item, its, seen) for item, its in zip(one, other, strict=True))
    elif _is_of_users(one):
        alike = True
    else:
        return _equal(one, other)
    return alike and _same_attributes(one, other, seen)


def _same_attributes(one: Any, other: Any, seen: Sequence[tuple[int, int]]) -> bool:
    own, theirs = _attributes(one), _attributes(other)
    return own.keys() == theirs.keys() and all(is_same(item, theirs[name], seen) for name, item in own.items())


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


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_of_users(value: Any) -> bool:
    """Whether it is copied by its attributes: an object of a class of the user's without a library's base, and without
    `__del__`, which would close what copies share."""
    kind: Any = type(value)
    return _is_users_class(kind)


@functools.lru_cache(1000)
def _is_users_class(kind: Any) -> bool:
    packages = {cls.__module__.partition(".")[0] for cls in kind.__mro__ if cls is not object}
    return not packages & _OF_LIBRARIES and not hasattr(kind, "__del__")


def _attributes(value: Any) -> dict[str, Any]:
    """Also those in slots, by no code of the class."""
    kind: Any = type(value)
    held = dict(getattr(value, "__dict__", {}))
    for name, slot in slots(kind).items():
        with suppress(AttributeError):  # nothing is there
            held[name] = slot.__get__(value, kind)
    return held


def _put(owner: Any, name: str, value: Any) -> None:
    """Past whatever its class does as an attribute is set, as a frozen one does."""
    kind: Any = type(owner)
    if name in slots(kind):
        slots(kind)[name].__set__(owner, value)
    else:
        vars(owner)[name] = value
