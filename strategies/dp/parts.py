"""Attributes of objects and contents of containers, one by one and all at once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, compress
from types import MethodType
from typing import Any

import numpy as np
from torch import nn

from lockstep.strategies.data.sample_axis import with_items
from lockstep.strategies.launch.program.reach import content_of, refill
from lockstep.strategies.launch.program.values import attributes_of, put_attributes, slots

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_OF_TORCH = (frozenset(vars(nn.Module())) - {"training"}) | {"_trainer"}
_ATTRIBUTES = operator.attrgetter("__dict__")


@dataclass(slots=True, eq=False)
class Part:
    """The attributes of an object, or the content of a container.

    `place`: the attribute it was found in. `keys`: names of attributes, or keys of a dict. `base`: of which class a
    container is made. `kind`: what is in a dict of a module, such as "buffer". `holder`: the module of such a dict,
    else the owner.
    """

    owner: Any
    place: str
    keys: list[Any]
    items: list[Any]
    holder: Any
    base: Any = None
    kind: str = ""

    def name(self, index: int) -> str:
        """Of one of the items."""
        is_named = self.base is None or self.kind
        return f"{self.place}.{self.keys[index]}".lstrip(".") if is_named else self.place

    def now(self) -> tuple[list[Any], list[Any]]:
        """Its keys and items at this moment."""
        if self.base is not None:
            return content(self.owner, self.base)
        held = attributes(self.owner)
        return [*held], [*held.values()]

    def swap(self, items: Iterable[Any]) -> None:
        """Let a dict hold these in the place of its items."""
        self.base.update(self.owner, zip(self.keys, items, strict=True))

    def put(self, of: Callable[[Any], Any] | None = None) -> None:
        """Let the owner hold these items and no others, or what `of` has in the place of them."""
        keys, items = (each if of is None or is_plain(each) else [*map(of, each)] for each in (self.keys, self.items))
        if self.base is None:
            put_attributes(self.owner, dict(zip(self.keys, items, strict=True)), attributes)
        elif not all(map(identical, content(self.owner, self.base), (keys, items))):
            pairs = [each for pair in zip(keys, items, strict=True) for each in pair] if keys else items
            refill(self.owner, self.base, pairs)


class Snapshot:
    """Which objects many parts hold at a moment, to be compared by identity with those of another moment."""

    def __init__(self, owners: dict[Any, list[Any]]) -> None:
        self._content: list[tuple[list[int], list[np.ndarray]]] = []
        for base, group in owners.items():
            if base is None or base is slots:
                group, base = [*map(_ATTRIBUTES if base is None else attributes_of, group)], dict
            sizes = [*map(base.__len__, group)]
            filled = [*compress(group, sizes)]
            readers = (base.keys, base.values) if issubclass(base, dict) else (base.__iter__,)
            streams = [chain.from_iterable(map(reader, filled)) for reader in readers]
            self._content.append((sizes, [np.fromiter(stream, object, sum(sizes)) for stream in streams]))

    def changed(self, other: Snapshot) -> list[tuple[int, int]]:
        """Which groups, and which owners in them, hold something else in `other`."""
        found: list[tuple[int, int]] = []
        for i, ((sizes, streams), (theirs, others)) in enumerate(zip(self._content, other._content, strict=True)):
            if sizes == theirs and all(map(_are_identical, streams, others)):
                continue
            begin, there = 0, 0
            for j, (size, its) in enumerate(zip(sizes, theirs, strict=True)):
                both = zip(streams, others, strict=True)
                if size != its or not all(
                    _are_identical(one[begin : begin + size], two[there : there + size]) for one, two in both
                ):
                    found.append((i, j))
                begin, there = begin + size, there + its
        return found


def _are_identical(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same objects, by their addresses."""
    return one.tobytes() == other.tobytes()


class Watched:
    """Parts that are read at once."""

    def __init__(self, parts: Iterable[Part]) -> None:
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            kind: Any = type(part.owner)
            has_dict = not slots(kind) and isinstance(getattr(part.owner, "__dict__", None), dict)
            groups.setdefault(slots if part.base is None and not has_dict else part.base, []).append(part)
        self._parts = [*groups.values()]
        self._owners = {base: [part.owner for part in group] for base, group in groups.items()}

    def now(self) -> Snapshot:
        """What they hold at this moment."""
        return Snapshot(self._owners)

    def changed(self, before: Snapshot, now: Snapshot) -> list[Part]:
        """Those that held something else before."""
        return [self._parts[i][j] for i, j in before.changed(now)]


class Replaced:
    """Replacements of values, found by the ids of these."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self._values: list[Any] = []
        """Those replaced, which live as long."""

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, value: Any, other: Any) -> Any:
        self._values.append(value)
        self._known[id(value)] = other
        return other

    def of_each(self, values: Collection[Any]) -> Iterator[Any]:
        """The replacements of values that are not made of parts, else these."""
        return map(self._known.get, map(id, values), values)

    def of(self, value: Any) -> Any:
        """The replacement of `value`; else `value`, with replaced parts in a tuple, a bound method or a partial."""
        known = self._known.get(id(value), self)
        if known is not self:
            return known
        parts = inside(value)
        if parts is None or is_plain(parts):
            return value
        items = [*map(self.of, parts)]
        if all(item is part for item, part in zip(items, parts, strict=True)):
            return value
        if type(value) is MethodType:
            return MethodType(*items)
        if type(value) is functools.partial:
            return functools.partial(items[0], *items[1], **items[2])
        return frozenset(items) if type(value) is frozenset else with_items(value, items)


def content(value: Any, base: Any) -> tuple[list[Any], list[Any]]:
    """Keys and items of a dict, or the items of another container, by no code of its class."""
    if issubclass(base, dict):
        return [*base.keys(value)], [*base.values(value)]
    return [], content_of(value, base)


def attributes(value: Any) -> dict[str, Any]:
    """Those of an object, but not torch's own of a module."""
    held = attributes_of(value)
    return {k: v for k, v in held.items() if k not in _OF_TORCH} if isinstance(value, nn.Module) else held


def identical(own: list[Any], theirs: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(own) == len(theirs) and all(map(operator.is_, own, theirs))


def inside(value: Any) -> tuple[Any, ...] | None:
    """What is in a value that is itself made again if a part is replaced; None of any other."""
    kind: Any = type(value)
    if kind is MethodType:
        return value.__func__, value.__self__
    if kind is functools.partial:
        return value.func, value.args, value.keywords
    return tuple(value) if issubclass(kind, tuple) or kind is frozenset else None


def is_plain(items: Iterable[Any]) -> bool:
    """Whether there are numbers and strings alone."""
    return set(map(type, items)) <= PLAIN
