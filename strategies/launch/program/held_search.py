"""Searches a dataset, its transforms and its collate function for generators of random numbers and for numbers."""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.launch.failure import libraries
from lockstep.strategies.launch.program.attributes import is_same
from lockstep.strategies.launch.program.functions import OTHERS, variables_of
from lockstep.strategies.launch.program.held_state import Held, Place, is_number, state_of
from lockstep.strategies.launch.program.reads import is_carried, names_in
from lockstep.strategies.launch.program.values import slots

_MOST, _MANY, _MOST_ITEMS = 4096, 1024, 2**16
"""The most objects that are searched, the most items of a list or dict that are, and of all of them."""
_LONGEST = 512
"""The longest path to what is searched: a checkpoint has it in names."""
_SCALARS = {str, bytes, int, float, bool, type(None)}
_LEAVES = (str, bytes, int, float, complex, type(None), Tensor, np.ndarray, np.generic, type, ModuleType)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_HOLDERS = (partial, SimpleNamespace, argparse.Namespace)
"""Classes of the standard library whose objects hold what users put into them."""
_OF_LAYERS = frozenset(vars(nn.Module())) - {"training"}
_RESEEDS = frozenset({"seed", "manual_seed", "set_state", "setstate"})
_NOTHING = object()


def search(roots: Mapping[str, Any]) -> Held:
    """What `roots` and all that they reach hold: attributes of objects, also in lists and dicts, variables of closures,
    globals, defaults and attributes of their functions, and what their classes have in common.

    Numbers are those of the program's classes and functions, of globals and closures those that a function sets; an
    installed package's may be about a file that it has opened. No code of theirs is called, and large lists and dicts,
    tensors and arrays are not read, but for about a thousand parts.
    """
    return _Search(roots).found


def moved(place: Place, held: Any, state: Mapping[str, Any], reseeds: bool) -> bool:
    """Whether what `held` is at a place has been drawn from, or counted, since it had `state`: not if a generator was
    made again or, which code does that `reseeds`, seeded, nor if a number that is an attribute of an object was set by
    what does not read it."""
    now = state_of(place.get())
    if now is None or now.keys() != state.keys() or is_same(now, state):
        return False
    if "generator" in state:
        before, after = state["generator"], now["generator"]
        return place.get() is held and before["kind"] == after["kind"] and (not reseeds or _follows(before, after))
    if "value" not in state or place.kind is None:
        return type(state.get("value", 0)) not in (bool, type(None))
    return is_number(state) and is_number(now) and is_carried(place.kind, place.name)


def _follows(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a generator has surely not been seeded in between, but for numpy's newer ones, which have no method for
    that."""
    one, other = before["state"], after["state"]
    if before["kind"] == "cpu":
        return torch.equal(one[:8], other[:8])  # the seed
    if before["kind"] == "random":
        return bool(one[1][:-1] == other[1][:-1])
    return before["kind"] != "RandomState" or np.array_equal(one["state"]["key"], other["state"]["key"])


def is_of_program(kind: Any) -> bool:
    """Whether the program defines a class or function, and no installed package."""
    name = str(kind.__module__)
    return name.partition(".")[0] not in OTHERS and _is_module_of_program(name)


@functools.cache
def _is_module_of_program(name: str) -> bool:
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:  # typed in, or built in
        return name.partition(".")[0] not in sys.stdlib_module_names
    return not os.path.realpath(path).startswith(libraries())


@functools.cache
def _is_searched(kind: type) -> bool:
    """Whether objects of a class may hold what user code draws from or counts."""
    package = str(kind.__module__).partition(".")[0]
    if package == "torch":
        return issubclass(kind, nn.Module) or str(kind.__module__).startswith("torch.utils.data.dataset")
    is_closed = package in OTHERS or (package in sys.stdlib_module_names and not is_of_program(kind))
    return issubclass(kind, _HOLDERS) or not is_closed


class _Search:
    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.found, self._room = Held(), _MOST_ITEMS
        shared = (random._inst, np.random.mtrand._rand, torch.default_generator)
        self._seen: dict[int, Any] = {id(each): each for each in shared}
        self._next: deque[tuple[str, Any]] = deque(roots.items())
        while self._next and len(self._seen) < _MOST:
            path, value = self._next.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value  # so that no other one gets its id
                self._visit(path, value)

    def _visit(self, path: str, value: Any) -> None:
        kind: Any = type(value)  # an object that stands for another one says that it is of the other's class
        if kind is FunctionType:
            self._function(path, value)
        elif kind in (MethodType, BuiltinMethodType):  # also that of a generator, without the generator
            self._place((path, ".__self__"), path, None, partial(_same, value.__self__), _leave, numbers=False)
            self._next.append((f"{path}()", getattr(value, "__func__", None)))
        elif issubclass(kind, partial):
            self._next += [(f"{path}.func", value.func), (f"{path}.args", value.args), (path, value.keywords)]
        elif issubclass(kind, _CONTAINERS):
            self._items(path, value)
        elif kind is functools._lru_cache_wrapper:
            self._next.append((path, value.__wrapped__))
        if _is_searched(kind):
            self._object(path, value)

    def _items(self, path: str, value: Any) -> None:
        """What a small container holds, by no code of its class."""
        base: Any = _base_of(type(value))
        length = base.__len__(value)
        self._room -= length if length <= _MANY else 0
        if length > _MANY or self._room < 0:
            return
        items = [*(base.items(value) if base is dict else enumerate(base.__iter__(value)))]
        if {type(item) for _, item in items} <= _SCALARS:
            return
        for i, (key, item) in enumerate(items):
            name = (
                f"[{key!r}]"
                if type(key) in (int, str) and len(repr(key)) < 64 and repr(key).isprintable()
                else f"[{i}]"
            )
            put = partial(base.__setitem__, value, key) if base in (list, dict) else _leave
            self._place((path, name), f"{path}{name}", None, partial(_same, item), put, numbers=False)

    def _object(self, path: str, value: Any) -> None:
        kind: Any = type(value)
        # a Module or DataModule leads to all of a run, and has its numbers saved otherwise
        is_of_run = any(str(base.__module__).startswith("lockstep.") for base in kind.__mro__)
        numbers, own = is_of_program(kind) and not is_of_run, _dict_of(value)
        self.found.owners.setdefault(path, own)
        of_layers = _OF_LAYERS if isinstance(value, nn.Module) else ()
        places = {name: (partial(own.get, name), partial(own.__setitem__, name)) for name in [*own]}
        places |= {
            name: (partial(_in_slot, slot, value), partial(slot.__set__, value)) for name, slot in slots(kind).items()
        }
        for name, (get, put) in places.items():
            if name not in of_layers:
                self._place((path, name), f"{kind.__name__}.{name}", kind, get, put, numbers, not is_of_run)
        if isinstance(value, nn.Module) and not is_of_run:
            self._next += [(f"{path}.{name}", part) for name, part in own.get("_modules", {}).items()]
        for base in kind.__mro__:
            if id(base) not in self._seen and is_of_program(base):
                self._seen[id(base)] = base
                self._class(base, kind if is_of_run else None)

    def _class(self, kind: Any, of_run: Any) -> None:
        """What objects of a class have in common; `of_run`: it is of an object of the run, whose steps and hooks are
        not called to read data."""
        called = {name for base in of_run.__mro__ if not is_of_program(base) for name in vars(base)} if of_run else ()
        path = f"{kind.__module__}.{kind.__qualname__}"
        for name, value in [*vars(kind).items()]:
            function = value.fget if isinstance(value, property) else value
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else function
            if name in called:
                continue
            if isinstance(function, FunctionType):
                self._next.append((f"{path}.{name}", function))
            elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                get, put = partial(vars(kind).get, name), partial(setattr, kind, name)
                self._place((path, name), f"{kind.__name__}.{name}", None, get, put, numbers=of_run is None)

    def _function(self, path: str, function: FunctionType) -> None:
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self._next.append((path, wrapped))
        if not is_of_program(function):
            return
        named, changed = names_in(function.__code__)
        self.found.reseeds |= not _RESEEDS.isdisjoint(named)
        shown, variables = function.__qualname__, function.__globals__
        for name, cell, _ in variables_of(function):
            get, put = partial(_in_cell, cell), partial(setattr, cell, "cell_contents")
            self._place((path, name), f"{name} in the closure of {shown}", None, get, put, name in changed)
        for name in sorted(named & variables.keys()):
            key, get = (str(function.__module__), name), partial(variables.get, name)
            self._place(
                key, f"{function.__module__}.{name}", None, get, partial(variables.__setitem__, name), name in changed
            )
        for name in [*vars(function)]:
            get = partial(vars(function).get, name)
            self._place((path, name), f"{shown}.{name}", None, get, partial(vars(function).__setitem__, name))
        defaults = f"default arguments of {shown}"
        self._next += [(defaults, function.__defaults__ or ()), (defaults, function.__kwdefaults__ or {})]

    def _place(
        self,
        key: tuple[str, str],
        shown: str,
        kind: type | None,
        get: Callable[[], Any],
        put: Callable[[Any], None],
        numbers: bool = True,
        continues: bool = True,
    ) -> None:
        """Note what is held there if it is a generator, or with `numbers` a number; else go to it."""
        value = get()
        is_leaf = issubclass(type(value), _LEAVES)
        if (is_leaf and not numbers) or (not is_leaf and id(value) in self._seen) or key in self.found.places:
            return
        state, (owner, name) = state_of(value), key
        if state is not None:
            self.found.places[key] = Place(owner, name, shown, kind, get, put, not continues)
            self.found.states[key] = state
            if not is_leaf:
                self._seen[id(value)] = value
            return
        if value is not _NOTHING and (numbers or not is_leaf):
            self.found.others.setdefault(owner, {})[name] = _roughly(value) if numbers else type(value)
        if continues and not is_leaf and len(owner) < _LONGEST:
            self._next.append((f"{owner}{name}" if name[0] in "[." else f"{owner}.{name}", value))


def _base_of(kind: type) -> Any:
    """Of which class of containers it is."""
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def _roughly(value: Any) -> Any:
    """What is equal while nothing changes, of containers and arrays about a thousand parts; of an open file, an
    iterator and the like, of which a number may tell how far they are read, nothing is."""
    kind: Any = type(value)
    if (base := _base_of(kind)) is not None:
        length = base.__len__(value)
        if kind in (list, tuple):
            return kind, length, [*map(id, value[:: length // _MANY + 1])]
        parts = iter(base.values(value)) if base is dict else base.__iter__(value)
        return kind, length, [*map(id, islice(parts, _MANY))]  # of which no code of another thread changes any
    if kind is Tensor:
        return kind, None if value.is_inference() else value._version
    if kind is np.ndarray:
        return kind, value.flat[:: value.size // _MANY + 1].tobytes() if value.flags.writeable else None
    return object() if _is_read_on(kind) else kind


@functools.cache
def _is_read_on(kind: type) -> bool:
    return not issubclass(kind, _LEAVES) and any(hasattr(kind, name) for name in ("read", "seek", "close", "__next__"))


def _dict_of(value: Any) -> dict[str, Any]:
    """Its attributes, by no code of its class."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:
        return {}
    return own if isinstance(own, dict) else {}


def _leave(_: Any) -> None:
    """What cannot be replaced is changed in place alone."""


def _same(value: Any) -> Any:
    return value


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _NOTHING


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING
