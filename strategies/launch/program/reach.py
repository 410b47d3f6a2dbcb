"""What a call of a function or object of the user's may change: whether it can be tried, and its state put back."""

from __future__ import annotations

import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import IOBase
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from lockstep.strategies.launch.program.functions import codes_of, named_by, variables_of
from lockstep.strategies.launch.program.values import slots

_MANY, _MOST, _MOST_BYTES = 256, 20_000, 1 << 20
_OTHERS = frozenset({"torch", "numpy", "lockstep", "builtins", "collections", "functools", "random"})
"""Packages whose functions and classes are not read, besides those of the standard library."""
_HOLDERS = frozenset({"types", "argparse"})
"""Modules of the standard library whose objects hold what users put into them."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OPAQUE = ("ctypes", "multiprocessing")
"""Packages of objects whose state cannot be put back."""
_LEAVES = (str, bytes, int, float, complex, type(None), CodeType)
_ARRAYS = (torch.Tensor, np.ndarray)


def can_be_tried(value: Any) -> bool:
    """Whether `kept_state` can put back all that a call of a function or an object of the user's changes: it, what it
    calls and what it holds has no random generator and no iterator as a variable, an attribute, a default or an item.
    Not if it holds too much to search or cannot be read."""
    try:
        return not any(map(_is_opaque, _reached_by(value)))
    except Exception:  # attributes of lazy objects
        return False


@contextmanager
def kept_state(value: Any) -> Iterator[None]:
    """Give variables, attributes and containers that `value` can reach their content back at the end, and tensors and
    arrays; larger ones are taken to be data, and parameters are not changed by it."""
    put_back = [restore for held in _reached_by(value) for restore in _restorers(held)]
    try:
        yield
    finally:
        for restore in put_back:
            restore()


def _is_opaque(value: Any) -> bool:
    generators = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
    kind = type(value)
    is_iterator = hasattr(kind, "__next__") and not isinstance(value, IOBase)
    return isinstance(value, generators) or is_iterator or _package(kind.__module__) in _OPAQUE


def _reached_by(value: Any) -> list[Any]:
    """Raises RecursionError if it is too much."""
    shared = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}
    seen: dict[int, Any] = {}
    found = deque([value])  # objects are kept, so that no other one gets their id
    while found:
        now = found.popleft()
        if id(now) in seen or id(now) in shared or isinstance(now, _LEAVES):
            continue
        if len(seen) > _MOST:
            raise RecursionError
        seen[id(now)] = now
        found.extend([] if isinstance(now, _ARRAYS) else _held_by(now))
    return [*seen.values()]


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return _held_by_function(value)
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, ModuleType):
        return []
    if isinstance(value, staticmethod | classmethod | property):
        return [value.fget if isinstance(value, property) else value.__func__]
    if isinstance(value, type):
        return [] if _is_other(value.__module__) else [*vars(value).values()]
    if isinstance(value, _CONTAINERS) or not _is_closed(type(value).__module__):
        return _held_by_object(value)
    return [getattr(value, "__self__", None), getattr(value, "__wrapped__", None)]


def _held_by_object(value: Any) -> list[Any]:
    held = [getattr(value, "__self__", None), *type(value).__mro__]
    if isinstance(value, partial):
        held += [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        held += islice(dict.values(value), _MANY)
    elif isinstance(value, _CONTAINERS):
        held += islice(value, _MANY)
    names = {name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))}
    for name in ("__dict__", *sorted(names)):
        with suppress(AttributeError):
            held.append(object.__getattribute__(value, name))
    return held


def _names(found: Any) -> Iterable[str]:
    return [found] if isinstance(found, str) else [*found]


def _package(module: Any) -> str:
    return str(module).partition(".")[0]


def _is_other(module: Any) -> bool:
    return _package(module) in _OTHERS or _package(module) in sys.stdlib_module_names


def _is_closed(module: Any) -> bool:
    """Whether objects of a class of this module are not read: those of Lockstep lead to all of the run, and those of
    the standard library to what a program has one of, such as its streams and logging handlers."""
    package = _package(module)
    return package == "lockstep" or (package in sys.stdlib_module_names and package not in {*_HOLDERS, "functools"})


def _held_by_function(function: FunctionType) -> list[Any]:
    held = [getattr(function, "__wrapped__", None)]
    if _is_other(function.__globals__.get("__name__")):
        return held
    return [*held, *named_by(function), function.__defaults__, function.__kwdefaults__, vars(function)]


def _restorers(held: Any) -> list[Callable[[], None]]:
    """What puts the content of an object itself back."""
    kind: Any = type(held)
    if isinstance(held, _ARRAYS):
        is_plain = type(held) in _ARRAYS and getattr(held, "layout", torch.strided) == torch.strided
        return [_array_restorer(held)] if is_plain and held.nbytes <= _MOST_BYTES else []
    if isinstance(held, FunctionType):
        return _variable_restorers(held)
    if isinstance(held, type):
        data = {name: value for name, value in vars(held).items() if isinstance(value, (*_LEAVES, tuple, frozenset))}
        data = {name: value for name, value in data.items() if not name.startswith("__")}
        return [] if _is_other(held.__module__) else [partial(_put_attributes, held, data, type.__setattr__)]
    base = base_of(held)
    if base is not None:
        return [partial(refill, held, base, content_of(held, base))]
    in_slots = {name: getattr(held, name) for name in slots(kind) if hasattr(held, name)}
    return [partial(_put_attributes, held, in_slots, object.__setattr__)] if in_slots else []


def base_of(value: Any) -> Any:
    """The container that it is or that its class is made of; None of another object."""
    return next((base for base in (OrderedDict, dict, list, set, deque) if isinstance(value, base)), None)


def content_of(held: Any, base: Any) -> list[Any]:
    """By no code of its class; of a dict keys and values in turn."""
    return [part for item in base.items(held) for part in item] if issubclass(base, dict) else [*base.__iter__(held)]


def refill(held: Any, base: Any, before: list[Any]) -> None:
    """Give a container the content that it had, by no code of its class."""
    now = content_of(held, base)
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    base.clear(held)
    if issubclass(base, dict):
        for key, item in zip(before[::2], before[1::2], strict=True):
            base.__setitem__(held, key, item)
    else:
        (base.update if base is set else base.extend)(held, before)


def _array_restorer(held: Any) -> Callable[[], None]:
    if isinstance(held, np.ndarray):
        before = held.copy()
        return lambda: None if held.tobytes() == before.tobytes() else held.__setitem__(..., before)
    values, version = held.detach().clone(), held._version
    return lambda: None if held._version == version and torch.equal(held, values) else held.data.copy_(values)


def _variable_restorers(function: FunctionType) -> list[Callable[[], None]]:
    """Of those of its closure, and of the globals that it names."""
    found: list[Callable[[], None]] = []
    for _, cell, value in variables_of(function):
        found.append(partial(setattr, cell, "cell_contents", value))
    owner = function.__globals__
    if not _is_other(owner.get("__name__")):
        names = {name for code in codes_of(function) for name in code.co_names if name in owner}
        found.append(partial(owner.update, {name: owner[name] for name in names}))
    return found


def _put_attributes(owner: Any, before: dict[str, Any], put: Callable[[Any, str, Any], None]) -> None:
    for name, value in before.items():
        if getattr(owner, name, None) is not value:
            put(owner, name, value)
