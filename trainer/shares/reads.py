"""What a search has read, by which the next one sees at once whether it would find the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, repeat
from operator import is_
from typing import Any

_GONE = object()


class Reads:
    """Attributes of objects and what functions returned. Holds all of it, so that no `id` is reused meanwhile."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._tables: list[dict[Any, Any]] = []
        self._lengths: list[int] = []
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        """What each of `_dicts` holds at the same place of `_keys`."""
        self._contents: list[Mapping[Any, Any]] = []
        self._inner: list[Any] = []
        """The keys and values of `_contents`."""
        self._calls: list[Callable[[], Any]] = []
        self._called: list[Any] = []
        self._objects: list[tuple[Callable[[Any], Iterable[Any]], Any, list[Any]]] = []
        self._results: list[tuple[Callable[[Any], Any], Any, Any]] = []

    def entries(self, owner: Any, but: Collection[str]) -> list[tuple[str, Any]]:
        """The attributes of an object, but for some names."""
        held = vars(owner)
        found = [(key, value) for key, value in held.items() if key not in but]
        self._owners.append(owner)
        self._tables.append(held)
        self._lengths.append(len(held))
        self._dicts += repeat(held, len(found))
        self._keys += (key for key, _ in found)
        self._values += (value for _, value in found)
        return found

    def contents(self, held: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """What a dict, or the view of one, holds."""
        self._contents.append(held)
        self._inner += (*held, *held.values())
        return [*held.items()]

    def value(self, read: Callable[[], Any]) -> Any:
        """What `read()` returns, to be the same object again."""
        self._calls.append(read)
        self._called.append(found := read())
        return found

    def objects(self, read: Callable[[Any], Iterable[Any]], of: Any) -> list[Any]:
        """The objects that `read(of)` gives, to be the same ones again."""
        found = [*read(of)]
        self._objects.append((read, of, found))
        return found

    def result(self, read: Callable[[Any], Any], of: Any) -> Any:
        """What `read(of)` returns, to be equal again."""
        found = read(of)
        self._results.append((read, of, found))
        return found

    def hold(self) -> bool:
        """Whether all that was read is there still."""
        return (
            all(map(is_, map(vars, self._owners), self._tables))
            and [*map(len, self._tables)] == self._lengths
            and all(map(is_, map(dict.get, self._dicts, self._keys, repeat(_GONE)), self._values))
            and all(map(is_, [read() for read in self._calls], self._called))
            and _are(chain.from_iterable((*held, *held.values()) for held in self._contents), self._inner)
            and all(_are(read(of), held) for read, of, held in self._objects)
            and all(read(of) == held for read, of, held in self._results)
        )


def _are(now: Iterable[Any], held: list[Any]) -> bool:
    objects = [*now]
    return len(objects) == len(held) and all(map(is_, objects, held))
