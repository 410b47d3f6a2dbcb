"""What a user's sampler or iterable dataset holds in its attributes: how it is kept, and put back."""

from __future__ import annotations

import hashlib
import io
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from lockstep.strategies.launch.program.generators import generator_content, generator_of, generators
from lockstep.strategies.launch.program.values import elements

_MOST_ITEMS, _MOST_BYTES, _DEPTH = 2**20, 2**24, 16
_EACH = 16
"""Items that take as long to copy as a list without items."""
_SCALARS = {type(None), bool, int, float, str}
_NOTHING = object()


class Attributes:
    """The state of a user's sampler or iterable dataset that has no `state_dict`: its attributes, and those of samplers
    in it, that are numbers, strings, lists, tuples and dicts of them, tensors, arrays and generators of random numbers,
    but for large ones. They are put into the objects that are there."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._first = self.state_dict()
        self._others = {path for path, _, _ in _attributes(owner)} - self._first.keys()
        self._known: set[str] = set()
        """Of what the run that is resumed had changed."""

    def state_dict(self) -> dict[str, Any]:
        found = ((path, content_of(value)) for path, _, value in _attributes(self._owner))
        return {path: content for path, content in found if content is not None}

    def lacks(self, state: Mapping[str, Any]) -> bool:
        """Whether an attribute has come to hold what is not kept in `state`, which is that of now, such as an open
        file: others may say that it is there, so that none can be put back without it."""
        return not {path for path, _, _ in _attributes(self._owner)} <= self._others | state.keys()

    def changed(self, state: Mapping[str, Any]) -> set[str]:
        """The names of what is not in `state` as it was at first."""
        names = {name for name, content in state.items() if not is_same(content, self._first.get(name))}
        return names | (self._known & state.keys())

    def resume(self, state: Mapping[str, Any], changed: Iterable[str]) -> None:
        """Take up the state of another run, which had changed these."""
        self._known.update(changed)
        self.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, content in state.items():
            holder, name = getattr(self._owner, "__dict__", None), path
            while "." in name and holder is not None:
                inner, name = name.split(".", 1)
                holder = getattr(holder.get(inner), "__dict__", None)
            if holder is not None and not is_same(content_of(holder.get(name)), content):
                holder[name] = put_content(holder.get(name), content)


def _attributes(owner: Any, before: str = "", depth: int = 3) -> Iterator[tuple[str, Any, Any]]:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, Sampler) and depth:
            yield from _attributes(value, f"{before}{name}.", depth - 1)
        else:
            yield f"{before}{name}", owner, value


def content_of(value: Any) -> dict[str, Any] | None:
    """A copy of what an attribute holds, in data that a checkpoint holds; None if it is not kept."""
    if isinstance(value, generators()):
        found = generator_content(value)
        return None if found is None or found["kind"] == "cuda" else {"generator": deepcopy(found)}
    if type(value) is Tensor:
        is_kept = value.is_cpu and value.layout == torch.strided and value.nbytes <= _MOST_BYTES
        return {"value": value.detach().clone()} if is_kept and not value.requires_grad else None
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8 or value.nbytes > _MOST_BYTES:
            return None
        if isinstance(value, np.generic):
            return {"number": np.array(value)}
        return {"value": value.copy()} if type(value) is np.ndarray else None
    if type(value) is list and len(value) <= _MOST_ITEMS and set(map(type, value)) == {int}:
        with suppress(OverflowError):
            return {"numbers": np.array(value, dtype=np.int64)}
    copied = _copied(value, [_MOST_ITEMS + _EACH])
    return None if copied is _NOTHING else {"value": copied}


def _copied(value: Any, room: list[int], depth: int = _DEPTH) -> Any:
    """A deep copy of data, which of many numbers and strings takes less time than Python's; `_NOTHING` of other things,
    and of more items than there is `room` for."""
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if kind not in (list, tuple, dict) or not depth or (kind is dict and not _are_scalars(value)):
        return _NOTHING
    room[0] -= len(value) + _EACH
    if room[0] < 0:
        return _NOTHING
    items = list(value.values()) if kind is dict else list(value)
    if not _are_scalars(items):
        for i, item in enumerate(items):
            items[i] = copied = _copied(item, room, depth - 1)
            if copied is _NOTHING:
                return _NOTHING
    return dict(zip(value, items, strict=True)) if kind is dict else kind(items)


def _are_scalars(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= _SCALARS


def is_same(one: Any, other: Any) -> bool:
    """Whether two contents are equal; NaN is equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or not one.is_floating_point():
            return one.dtype == other.dtype and torch.equal(one, other)
        return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    return bool(one == other or (one != one and other != other))


def put_content(now: Any, content: Mapping[str, Any]) -> Any:
    """The attribute with that content: the object that it is now, as others may hold it, if it is of the kind."""
    if "generator" in content:
        return generator_of(content["generator"], now)
    if "number" in content:
        return content["number"][()]
    value = content["numbers"].tolist() if "numbers" in content else deepcopy(content["value"])
    if type(now) is not type(value):
        return value
    if isinstance(now, list):
        now[:] = value
    elif isinstance(now, dict):
        now.clear()
        now.update(value)
    elif isinstance(now, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype) and 0 not in now.stride():
        now.copy_(value)
    elif isinstance(now, np.ndarray) and (now.shape, now.dtype) == (value.shape, value.dtype) and now.flags.writeable:
        now[...] = value
    else:
        return value
    return now


class _Plain(pickle.Pickler):
    """Of a tensor writes what it holds, not which memory it is in."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        held = elements(obj.detach().cpu()).view(torch.uint8).numpy().tobytes()
        return bytes, (f"{obj.dtype} {obj.shape}".encode() + held,)


def bits_of(value: Any) -> str:
    """What tells whether what a user's code holds or yields is the same as another; what cannot be pickled is not."""
    file = io.BytesIO()
    pickler = _Plain(file)
    pickler.fast = True  # what is equal need not be one object
    try:
        pickler.dump(value)
    except Exception:  # whatever the code of its classes raises
        return f"{id(file)} {time.monotonic_ns()}"
    return hashlib.blake2b(file.getvalue(), digest_size=16).hexdigest()
