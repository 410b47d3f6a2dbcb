"""Values that processes can compare: what settings are made of."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import hashlib
import random
import re
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.strategies.launch.program.source import is_of_process

FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
MAX_BYTES = 64 << 20
"""Of the tensors that are sent to be compared with what a rank has computed."""
_SIMPLE = (
    *(type(None), bool, int, float, complex, str, bytes, PurePath, np.generic, torch.dtype, torch.device),
    *(Decimal, Fraction, range, slice, re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
)
_MAX_DEPTH = 20
_OF_PICKLE = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


class NotComparable(Exception):
    """This value, or a part of it, is not of the types that settings are made of."""


def state_of(value: Any, is_own: Callable[[type], bool], contents: bool = True, depth: int = 0) -> Any:
    """What `value` holds, in types that compare by value in any process. Raises NotComparable.

    `is_own`: whether a class belongs to the program, so that its objects are compared by their attributes.
    `contents=False`: of tensors and arrays only dtype and shape.
    """

    def part(item: Any) -> Any:
        return state_of(item, is_own, contents, depth + 1)

    kind = type(value).__qualname__
    if depth > _MAX_DEPTH:
        raise NotComparable
    if isinstance(value, Enum):
        return kind, value.name
    if isinstance(value, _SIMPLE):
        return kind, value
    if isinstance(value, FUNCTIONS):
        return _name_of(value) or _made(value, is_own, part)
    if isinstance(value, functools.partial):
        return kind, part(value.func), part(value.args), part(value.keywords)
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        return kind, _drawn(value)
    if isinstance(value, deque):
        return kind, value.maxlen, part([*value])
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return kind, str(value.dtype), tuple(value.shape), _digest(value) if contents else None
    if isinstance(value, dict):
        return kind, {key: part(item) for key, item in value.items() if not is_of_process(key, item)}
    if isinstance(value, (list, tuple)):
        if _is_a_librarys_tuple(value, is_own):
            raise NotComparable
        return kind, [part(item) for item in value]
    if isinstance(value, (set, frozenset)):
        if not all(isinstance(item, (int, float, str)) for item in value):
            raise NotComparable
        return kind, set(value)
    if is_config(value):
        return kind, sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=False)
    if isinstance(value, torch.nn.Module):
        return kind, _layers(value, part), part(dict(value.state_dict(keep_vars=True)))
    if has_settings(value, is_own):
        return kind, part(attributes_of(value))
    raise NotComparable


def _layers(module: torch.nn.Module, part: Callable[[Any], Any]) -> list[Any]:
    """The settings of a module and the layers in it, where they are small."""
    if sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())) > MAX_BYTES:
        raise NotComparable
    layers = []
    for layer in module.modules():
        held = {}
        for key, item in vars(layer).items():
            if not key.startswith("_"):
                with suppress(NotComparable):  # a logger, say: the rest tells layers apart
                    held[key] = part(item)
        layers.append((type(layer).__qualname__, held))
    return layers


def _made(function: Any, is_own: Callable[[Any], bool], part: Callable[[Any], Any]) -> tuple[Any, ...]:
    """What tells functions apart that a function of the program has made."""
    if type(function) is not FunctionType or not is_own(function):
        raise NotComparable
    try:
        variables = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # of a variable that has no value yet
        raise NotComparable from None
    defaults = function.__defaults__, function.__kwdefaults__
    return function.__code__, part(variables), part(defaults), part(vars(function))


def _drawn(generator: Any) -> Any:
    """The state of a generator of random numbers, unless it is the stream of the process."""
    if isinstance(generator, random.SystemRandom) or generator is torch.default_generator:
        raise NotComparable
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    return generator.getstate()


def attributes_of(value: Any) -> dict[str, Any]:
    """Also those in slots, by no code of the class."""
    kind: Any = type(value)
    held = dict(getattr(value, "__dict__", {}))
    for name, slot in slots(kind).items():
        with suppress(AttributeError):  # nothing is there
            held[name] = slot.__get__(value, kind)
    return held


def pickles_itself(kind: type) -> bool:
    """Whether a class or one of its bases says what is pickled of its objects, which may not be all attributes."""
    return any(name in vars(base) for base in kind.__mro__[:-1] for name in _OF_PICKLE)


def put_attribute(owner: Any, name: str, value: Any) -> None:
    """Past whatever its class does as an attribute is set, as a frozen one does."""
    kind: Any = type(owner)
    place = slots(kind).get(name)
    if place is None:
        vars(owner)[name] = value
    else:
        place.__set__(owner, value)


def put_attributes(owner: Any, held: dict[str, Any], attributes: Callable[[Any], dict[str, Any]]) -> None:
    """Let it have these of the attributes that `attributes` gives, and no others."""
    kind: Any = type(owner)
    now = attributes(owner)
    for name in now.keys() - held.keys():
        place = slots(kind).get(name)
        if place is None:
            del vars(owner)[name]
        else:
            place.__delete__(owner)
    for name, item in held.items():
        if name not in now or now[name] is not item:
            put_attribute(owner, name, item)


def _is_a_librarys_tuple(value: Any, is_own: Callable[[type], bool]) -> bool:
    """Whether it is of a library's subclass of tuple with a state of its own, as `unittest.mock.call` is, which a copy
    of its items would lose."""
    cls = type(value)
    is_plain = cls in (tuple, torch.Size) or hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields")
    return isinstance(value, tuple) and not is_plain and not is_own(cls)


def has_settings(value: Any, is_own: Callable[[type], bool]) -> bool:
    """Whether it is an object that is compared by its attributes: of a class of the program, or of one that is made to
    hold settings."""
    cls: Any = type(value)
    if isinstance(value, torch.nn.Module) or issubclass(cls, (type, ModuleType)):
        return False
    if not hasattr(value, "__dict__") and not slots(cls):
        return False
    return is_own(cls) or dataclasses.is_dataclass(cls) or cls in (argparse.Namespace, SimpleNamespace)


@functools.cache
def slots(kind: Any) -> dict[str, MemberDescriptorType]:
    """The places of a class and its bases for attributes outside of `__dict__`."""
    of_bases = [vars(cls) for cls in reversed(kind.__mro__) if "__slots__" in vars(cls)]
    return {name: slot for own in of_bases for name, slot in own.items() if isinstance(slot, MemberDescriptorType)}


def is_config(value: Any) -> bool:
    """Whether it is of omegaconf, which is not imported for this."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and omegaconf.OmegaConf.is_config(value)


def _name_of(function: Any) -> tuple[str, str] | None:
    """Its module and name, if they lead to it in any process."""
    module, name = getattr(function, "__module__", None) or "", function.__qualname__
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return None if found is not function or module == "__main__" else (module, name)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor in a row, to be seen as another dtype: torch lets a single one have any stride."""
    tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _digest(value: torch.Tensor | np.ndarray) -> str:
    if isinstance(value, torch.Tensor):
        if not value.is_cpu or not value.is_leaf or value.is_sparse or value.is_quantized:
            raise NotComparable
        value = elements(value.detach()).view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        raise NotComparable
    return hashlib.blake2b(np.ascontiguousarray(value).view(np.uint8).data, digest_size=16).hexdigest()


class Parts(NamedTuple):
    """What can be compared of an object, a dict or the attributes of a function."""

    kind: str
    data: dict[Any, Any]
    others: dict[Any, str]
    """The types of the rest, such as a lock: a rank that has made the same by itself takes over the data."""


def parts_of(value: Any, is_own: Callable[[type], bool], is_compared: Callable[[Any], bool]) -> Parts | None:
    """None of a value that has no parts that can be compared."""
    if not (isinstance(value, (dict, FunctionType)) or has_settings(value, is_own)):
        return None
    held = {key: item for key, item in _held_by(value).items() if not is_of_process(key, item)}
    if isinstance(value, FunctionType):
        held.pop("hooked", None)  # by which torch would take the step of an optimizer on a rank for one with hooks
    data = {key: item for key, item in held.items() if is_compared(item)}
    others = {key: _kind(item) for key, item in held.items() if key not in data}
    return Parts(_kind(value), data, others) if data else None


def _held_by(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else attributes_of(value)


def put_parts(current: Any, parts: Parts, are_equal: Callable[[Any, Any], bool]) -> None:
    """Nothing, if the rest is of other types: a program that has opened a connection holds data that belongs to it."""
    if _kind(current) != parts.kind:
        return
    held = _held_by(current)
    if {key: _kind(held[key]) for key in parts.others if key in held} == parts.others:
        missing = object()
        changed = {key: item for key, item in parts.data.items() if not are_equal(held.get(key, missing), item)}
        _update(current, changed, {key: held[key] for key in held if key not in parts.data and key not in parts.others})


def put_into(current: Any, value: Any, is_own: Callable[[type], bool]) -> bool:
    """Let one object hold what another of its type does, as other modules may have imported it. Returns whether it can
    be."""
    if type(current) is not type(value) or (isinstance(value, deque) and current.maxlen != value.maxlen):
        return False
    if isinstance(value, (list, set, deque)):
        current.clear()
        (current.update if isinstance(value, set) else current.extend)(value)
    elif isinstance(value, torch.Generator):
        current.set_state(value.get_state())
    elif isinstance(value, np.random.Generator):
        current.bit_generator.state = value.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        current.set_state(value.get_state())
    elif isinstance(value, random.Random):
        current.setstate(value.getstate())
    elif is_config(value):
        vars(current).update(vars(value))
    elif isinstance(value, (dict, torch.nn.Module)) or has_settings(value, is_own):
        held, given = _held_by(current), _held_by(value)
        _update(current, given, {key: item for key, item in held.items() if key not in given})
    else:
        return False
    return True


def _update(owner: Any, given: dict[Any, Any], removed: dict[Any, Any]) -> None:
    """Without what each process has of its own."""
    held = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    for key in [key for key, item in removed.items() if not is_of_process(key, item)]:
        held.pop(key, None)
    for key, item in given.items():
        if is_of_process(key, item):
            continue
        if isinstance(owner, dict):
            held[key] = item
        else:
            put_attribute(owner, key, item)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
