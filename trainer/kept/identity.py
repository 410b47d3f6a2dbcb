"""Which objects attributes are: known again later, without keeping them alive where Python can tell."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor, nn

from lockstep.trainer.kept.fields import fields
from lockstep.trainer.kept.owners import shown
from lockstep.trainer.kept.values import MOST_ITEMS, SAVED, attributes


class _Held:
    """Holds a list or dict, to which Python has no weak references."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


Reference = weakref.ref[Any] | _Held | int
_held = weakref.WeakValueDictionary[int, _Held]()
"""By id the one holder of an object, so that others who hold it can be counted."""


def _let_go(phase: str, info: Mapping[str, int]) -> None:
    """Before a full collection: hold nothing that nobody else holds, as it may hold large tensors."""
    if phase == "start" and info["generation"] == 2:
        for key, held in [*_held.items()]:
            if sys.getrefcount(held.value) == 2:
                _held.pop(key, None)
                held.value = object()


gc.callbacks.append(_let_go)


def reference(value: Any) -> Reference | None:
    """What identifies an object later: its id if it is a large list or dict, or one of other things than numbers and
    words; None if nobody can change it."""
    if isinstance(value, (*SAVED, np.generic, tuple, frozenset)):
        return None
    if type(value) not in (list, dict):
        with suppress(TypeError):
            return weakref.ref(value)
        return id(value)
    items = [*value.values()] if type(value) is dict else value  # at once, as another thread may change it
    if len(value) > MOST_ITEMS or not all(isinstance(item, SAVED) for item in items):
        return id(value)
    found = _held.get(id(value))
    if found is None:
        found = _held[id(value)] = _Held(value)
    return found


def is_object(reference: Reference, value: Any) -> bool:
    if isinstance(reference, int):
        return reference == id(value)
    return (reference.value if isinstance(reference, _Held) else reference()) is value


def is_replaced(reference: Reference, value: Any) -> bool:
    """Whether `value` is another object, while somebody still holds the former, or that is not known."""
    if isinstance(reference, int):
        return reference != id(value)
    if isinstance(reference, _Held):
        return reference.value is not value and sys.getrefcount(reference.value) > 2
    first = reference()
    return first is not None and first is not value


def references(owners: Mapping[str, Any]) -> dict[str, Reference]:
    found = {shown(path, n): reference(value) for path, own in owners.items() for n, value in attributes(own).items()}
    return {place: each for place, each in found.items() if each is not None}


def replaced(former: Mapping[str, Reference], owners: Mapping[str, Any]) -> dict[str, list[str]]:
    """By owner the names of what is another object than the `former`."""
    return {
        path: [
            name
            for name, value in fields(owner).items()
            if (place := shown(path, name)) in former and not is_object(former[place], value)
        ]
        for path, owner in owners.items()
    }


def shared(values: Mapping[str, Mapping[str, Any]], owners: Mapping[str, Any]) -> list[list[list[str]]]:
    """The names, by owner, of values that are one and the same object."""
    groups: dict[int, list[list[str]]] = {}
    for path, own in values.items():
        for name in own if path in owners else ():
            value = fields(owners[path]).get(name)
            if reference(value) is not None:
                groups.setdefault(id(value), []).append([path, name])
    return [group for group in groups.values() if len(group) > 1]


def names_of(
    owners: Iterable[tuple[str, Any]], module: nn.Module, metrics: Mapping[str, Iterable[Any]], of_run: Iterable[Any]
) -> dict[int, str]:
    """By id the names of what a checkpoint holds by itself."""
    held = (*owners, *module.named_modules(), *module.named_parameters())
    numbered = ((f"{name} {number}", each) for name, found in metrics.items() for number, each in enumerate(found))
    return {id(each): name for name, each in (*held, *numbered, *((str(i), each) for i, each in enumerate(of_run)))}


def in_state_dict(module: nn.Module) -> Iterator[Tensor]:
    """What the state dict holds."""
    yield from module.parameters()
    for layer in module.modules():
        yield from (
            buffer
            for n, buffer in layer._buffers.items()
            if n not in layer._non_persistent_buffers_set and buffer is not None
        )
