"""What hooks of modules keep beside the modules, in variables that they enclose and objects: in a pipeline of a part of
a micro-batch, and on the rank that runs the module alone."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.launch.program.functions import is_users_class, variables_of
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.modules.parameter_hooks import OF_MODULE, users_hooks
from lockstep.strategies.pipeline.shapes.fake_tensors import is_fake
from lockstep.strategies.pipeline.state.marks import content_of, mark_of, put_content

_MOST, _DEPTH, _NESTED = 1000, 2, 3
"""Items that are read, how deep in containers and objects, and in functions."""
_OF_A_PART = (Tensor, float, complex, np.ndarray, np.floating, np.complexfloating)
"""What hooks measure; other numbers, that change again and again, are counts."""
Key = tuple[Any, ...]


class _Place(NamedTuple):
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


class HookSlots:
    """The places of the hooks of `modules`, by the path of the module and the number of the hook: alike on all
    ranks."""

    def __init__(self, named_modules: Callable[[], Iterable[tuple[str, nn.Module]]]) -> None:
        self._named_modules, self._registered, self._evaluations = named_modules, -1, 0
        self._hooks: dict[Key, Callable[..., Any]] = {}
        self._marks: dict[Key, Any] | None = None
        self._changed_once: set[Key] = set()
        self.partial: set[Key] = set()
        """Where hooks keep what holds for a part, and is on one rank."""

    def find(self) -> None:
        """Look for hooks, if some may have been registered since."""
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            self._hooks = {
                (path, kind, i): hook
                for path, module in self._named_modules()
                for kind in OF_MODULE
                if getattr(module, kind)
                for i, (_, hook) in enumerate(users_hooks(module, kind))
            }

    def begin(self, is_watched: bool) -> None:
        self._marks = self._now() if is_watched and self._hooks else None

    def _now(self) -> dict[Key, Any]:
        return {key: mark_of(place.now(), True) for key, place in self._places()}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation step. Raises RuntimeError for a count or a list that a hook changes again, in the first
        of them and in those whose number is a power of two."""
        self.find()
        number = self._evaluations
        self._evaluations += 1
        if not self._hooks or not (number < 4 or number & (number - 1) == 0):
            yield
            self.refuse()
            return
        self._marks = self._now()
        yield
        if (name := self.follow(counts=True)) is not None:
            raise RuntimeError(_sentence(name))
        self._marks = None
        self.refuse()

    def follow(self, counts: bool = False) -> str | None:
        """Note what has changed since the last call, a second time, of what is measured. With `counts` returns the name
        of something else that has."""
        found, marks = None, self._marks
        if marks is None:
            return None
        for key, place in [*self._places()]:
            value, before = place.now(), marks.get(key)
            now = marks[key] = mark_of(value, True)
            if now != before and (counts or isinstance(value, _OF_A_PART)):
                if key in self._changed_once and isinstance(value, _OF_A_PART):
                    self.partial.add(key)
                elif key in self._changed_once:
                    found = place.name
                self._changed_once.add(key)
        return found

    def refuse(self) -> None:
        """Let all that is partial refuse any use."""
        known = dict(self._places()) if self.partial else {}
        for key in self.partial & known.keys():
            if not isinstance(known[key].now(), Refusing):
                known[key].put(_refusing(known[key].name))

    def take(self, keys: Iterable[Key]) -> None:
        """Let what is partial on another rank refuse any use on this one."""
        self.partial |= {key for key in keys if key[:3] in self._hooks}
        holders: dict[Key, Any] = {}
        known = dict(self._places(holders))
        for key in self.partial - known.keys():
            name = ".".join(map(str, key[3:]))
            if key[:-1] not in holders:
                raise RuntimeError(_sentence(name))
            if isinstance(holders[key[:-1]], dict):
                holders[key[:-1]][key[-1]] = _refusing(name)
        self.refuse()

    def _places(self, holders: dict[Key, Any] | None = None) -> Iterator[tuple[Key, _Place]]:
        own = (value for _, module in self._named_modules() for value in vars(module).values()) if self._hooks else ()
        followed = {id(value) for value in own if isinstance(value, dict | list)}  # `found` and `watch` do
        for key, hook in self._hooks.items():
            reached = _Reached(key, followed)
            reached.function(hook, (), _NESTED)
            if holders is not None:
                holders.update(reached.holders)
            yield from reached.places.items()


def hidden_fakes(modules: list[nn.Module], elsewhere: set[nn.Module]) -> Callable[[], None]:
    """Called before hooks run on fake tensors. What it returns gives places that hold some then what they held; those
    of hooks of modules that are `elsewhere` refuse any use."""
    slots = HookSlots(lambda: ((str(i), module) for i, module in enumerate(modules)))
    slots.find()
    before = {key: (place, place.now()) for key, place in slots._places()}
    lists = [(held, content_of(held)) for _, held in before.values() if isinstance(held, list | deque)]
    numbers = {str(i) for i, module in enumerate(modules) if module in elsewhere}

    def hide() -> None:
        for held, content in lists:
            put_content(held, content)
        found = [*slots._places()]
        for key, place in sorted(found, key=lambda each: each[0][0] in numbers):
            value = None if isinstance(place.holder, dict) and place.key not in place.holder else place.now()
            if not is_fake(value) and not (isinstance(value, tuple) and any(map(is_fake, value))):
                continue
            if key[0] in numbers:
                place.put(_refusing(place.name))
            elif key in before:
                place.put(before[key][1])
            elif isinstance(place.holder, dict):
                del place.holder[place.key]

    return hide


def _refusing(name: str) -> Refusing:
    return Refusing(_sentence(name))


def _sentence(name: str) -> str:
    return (
        f"a hook of a layer has set {name}, but in a pipeline only the rank that runs the layer calls it, for each "
        "part of a micro-batch; return the value from the layer, measure times in on_train_batch_start and "
        "on_train_batch_end, or use strategy='ddp' or 'fsdp'"
    )


class _Reached:
    """The places that a hook may change: variables of its closure, attributes of its owner, arguments of a partial, and
    what containers and objects of the user's in these hold."""

    def __init__(self, root: Key, followed: set[int]) -> None:
        self._root, self._seen = root, {*followed}
        self.places: dict[Key, _Place] = {}
        self.holders: dict[Key, Any] = {}

    def function(self, function: Any, steps: Key, nested: int) -> None:
        if isinstance(function, functools.partial):
            given: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
            for key, value in given.items():
                self.within(value, (*steps, key), str(key), _DEPTH)
            self.function(function.func, (*steps, "func"), nested)
            return
        owner = function.__self__ if isinstance(function, MethodType) else function
        if not isinstance(owner, FunctionType | type):
            self.within(owner, steps, type(owner).__name__, _DEPTH)
        inner = getattr(function, "__func__", function)
        if not isinstance(inner, FunctionType):
            return
        found: list[tuple[str, Any, Any]] = [*variables_of(inner)]
        names = [name for name in inner.__code__.co_names if name in inner.__globals__]
        for name, cell, value in (*found, *((name, None, inner.__globals__[name]) for name in names)):
            if isinstance(value, FunctionType | functools.partial):
                if nested:
                    self.function(value, (*steps, name), nested - 1)
                continue
            if cell is not None and not isinstance(value, nn.Module | type):
                at = (*self._root, *steps, name)
                self.places[at] = _Place(cell, None, name)
            self.within(value, (*steps, name), name, _DEPTH)

    def within(self, value: Any, steps: Key, name: str, depth: int) -> None:
        """The items of a container, or attributes of an object of the user's."""
        held: Any = value if isinstance(value, dict | list) else _attributes_of(value)
        if held is None or id(value) in self._seen or not depth:
            return
        self._seen.add(id(value))
        at = (*self._root, *steps)
        self.holders[at] = held
        items = dict(held) if isinstance(held, dict) else dict(enumerate(held))
        for key, item in items.items() if len(items) <= _MOST else ():
            if isinstance(key, str | int) and not isinstance(item, nn.Module):
                shown = f"{name}[{key!r}]" if held is value else f"{name}.{key}"
                at = (*self._root, *steps, key)
                self.places[at] = _Place(held, key, shown)
                self.within(item, (*steps, key), shown, depth - 1)


def _attributes_of(value: Any) -> dict[str, Any] | None:
    is_theirs = is_users_class(type(value)) and not isinstance(value, nn.Module | Tensor | type | FunctionType)
    return getattr(value, "__dict__", None) if is_theirs else None
