"""The places that hooks of modules, and modules themselves, may change: by keys that are the same on all ranks."""

from __future__ import annotations

import dis
import functools
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.strategies.launch.program.functions import is_users_class, variables_of
from lockstep.strategies.modules.blocks import OF_TORCH

MOST, _DEPTH, _NESTED = 1000, 2, 3
"""Items that a container may have to be read, how deep in containers and objects, and in functions."""
Key = tuple[Any, ...]


class Place(NamedTuple):
    """A variable, attribute or item; `holder` is a cell, dict or list."""

    holder: Any
    key: Any
    name: str

    def now(self) -> Any:
        return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.key]

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value

    def delete(self) -> None:
        """Delete an item that is there."""
        if isinstance(self.holder, CellType):
            del self.holder.cell_contents
        elif self.key in self.holder if isinstance(self.holder, dict) else self.key < len(self.holder):
            del self.holder[self.key]


class OfModule(NamedTuple):
    """In a `Key`, of an item whose key is a module, by its path."""

    path: str


class Holder(NamedTuple):
    """A dict or list in which there may be more; `is_object`: of the attributes of an object."""

    held: Any
    name: str
    is_object: bool

    @property
    def is_large(self) -> bool:
        """Whether it is a container whose items are not read."""
        return not self.is_object and len(self.held) > MOST

    def shown(self, step: Any) -> str:
        """The name of an item."""
        step = step[0] if isinstance(step, OfModule) else step if self.is_object else repr(step)
        return f"{self.name}.{step}".lstrip(".") if self.is_object else f"{self.name}[{step}]"


class Reached:
    """The places that a hook may change: variables of its closure, attributes of its owner, arguments of a partial, and
    what containers and objects of the user's in these hold. `paths` are those of modules."""

    def __init__(self, root: Key, seen: set[int], paths: Mapping[nn.Module, str]) -> None:
        """`seen`: the ids of what is not to be searched."""
        self._root, self._seen, self._paths = root, seen, paths
        self.places: dict[Key, Place] = {}
        self.holders: dict[Key, Holder] = {}

    def module(self, module: nn.Module, name: str) -> None:
        """The attributes of a module beside torch's own."""
        own = vars(module)
        self.holders[self._root] = holder = Holder(own, name, is_object=True)
        for key, value in own.items():
            if key not in OF_TORCH and not isinstance(value, nn.Module):
                self._place(Place(own, key, holder.shown(key)), value, (key,), _DEPTH)

    def function(self, function: Any, steps: Key = (), nested: int = _NESTED) -> None:
        if isinstance(function, functools.partial):
            given: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
            for key, value in given.items():
                self._within(value, (*steps, key), str(key), _DEPTH)
            self.function(function.func, (*steps, "func"), nested)
            return
        owner = function.__self__ if isinstance(function, MethodType) else function
        if not isinstance(owner, FunctionType | type):
            self._within(owner, steps, type(owner).__name__, _DEPTH)
        inner = getattr(function, "__func__", function)
        if not isinstance(inner, FunctionType):
            return
        own, set_here = inner.__globals__, _globals_set_in(inner.__code__)
        found = [(name, value, Place(cell, None, name)) for name, cell, value in variables_of(inner)]
        found += [(n, own[n], Place(own, n, n)) for n in inner.__code__.co_names if n in own]
        for name, value, place in found:
            if isinstance(value, FunctionType | functools.partial):
                if nested:
                    self.function(value, (*steps, name), nested - 1)
            elif not isinstance(value, nn.Module | type) and (place.holder is not own or name in set_here):
                self._place(place, value, (*steps, name), _DEPTH)
            else:
                self._within(value, (*steps, name), name, _DEPTH)

    def _place(self, place: Place, value: Any, steps: Key, depth: int) -> None:
        self.places[self._root + steps] = place
        self._within(value, steps, place.name, depth)

    def _within(self, value: Any, steps: Key, name: str, depth: int) -> None:
        """The items of a container, or attributes of an object of the user's."""
        held: Any = value if isinstance(value, dict | list) else _attributes_of(value)
        if held is None or id(value) in self._seen or not depth:
            return
        self._seen.add(id(value))
        self.holders[self._root + steps] = holder = Holder(held, name, held is not value)
        items = dict(held) if isinstance(held, dict) else dict(enumerate(held))
        for key, item in items.items() if len(items) <= MOST else ():
            step = OfModule(self._paths.get(key, "")) if isinstance(key, nn.Module) else key
            if isinstance(step, str | int | OfModule) and not isinstance(item, nn.Module):
                self._place(Place(held, key, holder.shown(step)), item, (*steps, step), depth - 1)


@functools.cache
def _globals_set_in(code: CodeType) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}


def _attributes_of(value: Any) -> dict[str, Any] | None:
    is_theirs = is_users_class(type(value)) and not isinstance(value, nn.Module | Tensor | type | FunctionType)
    return getattr(value, "__dict__", None) if is_theirs else None
