"""Generators of random numbers and numbers that a dataset, a transform or a collate function holds: what was found, and
the state of each."""

from __future__ import annotations

import itertools
from ast import literal_eval
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lockstep.strategies.launch.program.attributes import content_of, put_content
from lockstep.strategies.launch.program.generators import generator_content, generators
from lockstep.strategies.launch.program.reads import is_set_by_reading

_NUMBERS = (bool, int, float, type(None))


class Place(NamedTuple):
    """Where a generator or a number is held."""

    owner: str
    """The path of what holds it, from the dataset or collate function."""
    name: str
    shown: str
    kind: type | None
    """The class of the object whose attribute it is."""
    get: Callable[[], Any]
    put: Callable[[Any], None]
    is_of_run: bool = False
    """Whether a Module or DataModule holds it, whose steps and hooks use it too, and which is saved otherwise."""


@dataclass
class Held:
    """What was found at a time."""

    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    states: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By path of its owner and name what tells roughly whether an attribute that is not kept has changed."""
    owners: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By path the attributes of an object."""
    reseeds: bool = False
    """Whether code that was found names what seeds a generator."""

    def copied(self) -> Held:
        """What does not keep objects alive."""
        return Held(states=self.states, others=self.others)

    def may_put(self, key: tuple[str, str], state: Mapping[str, Any], then: Held) -> bool:
        """Whether what was held `then` can be had without what is not kept: a generator; a number beside which nothing
        else has changed, as it may be about that; and one that reading does not set."""
        if "generator" in state or self.others.get(key[0]) == then.others.get(key[0]):
            return True
        kind = self.places[key].kind
        return kind is not None and not is_set_by_reading(kind, key[1])


def is_number(state: Mapping[str, Any]) -> bool:
    """Whether it is that of a number, and of no flag, nor of what is None until it is made."""
    return "generator" not in state and type(state.get("value", 0)) not in (bool, type(None))


def put_state(place: Place, state: Mapping[str, Any]) -> None:
    now = place.get()
    put = put_into(now, state)
    if put is not now:
        place.put(put)


def state_of(value: Any) -> dict[str, Any] | None:
    """A copy of what a generator or a number holds, in data that a checkpoint holds; None of anything else."""
    kind = type(value)  # an object that stands for another one says that it is of the other's class
    if issubclass(kind, _NUMBERS):
        return {"value": value} if kind in _NUMBERS else None
    if kind is itertools.count:
        with suppress(ValueError, SyntaxError):  # of numbers that are not Python's
            return {"count": literal_eval(repr(value)[5:])}
        return None
    if issubclass(kind, (Tensor, np.ndarray)):
        return None if value.ndim else content_of(value)
    if issubclass(kind, generators()):
        found = generator_content(value)
        return None if found is None or found["kind"] == "cuda" else {"generator": found}
    if issubclass(kind, np.generic):
        return content_of(value)
    return {"shared": value.value} if _is_shared(value) and type(value.value) in _NUMBERS else None


def _is_shared(value: Any) -> bool:
    """Whether it is a `multiprocessing.Value`."""
    return type(value).__module__ == "multiprocessing.sharedctypes" and hasattr(type(value), "value")


def put_into(now: Any, state: Mapping[str, Any]) -> Any:
    """The object with that state: the one that it is now, if it is of the kind."""
    if "count" in state:
        start = state["count"]
        return itertools.count(*start) if isinstance(start, tuple) else itertools.count(start)
    if "shared" in state:
        if _is_shared(now):
            now.value = state["shared"]
        return now
    return put_content(now, state)
