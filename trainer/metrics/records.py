"""Named tuples, dataclasses and other values of a class in what ranks gather, which travel as data: the receiver finds
their classes by name and unpickles nothing."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.strategies.data import batch_slices, sample_axis


def is_record(value: Any) -> bool:
    return (isinstance(value, tuple) and hasattr(value, "_fields")) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def parts_of(record: Any) -> dict[str, Any]:
    """The fields of a record by name, and what else a dataclass has in attributes."""
    if isinstance(record, tuple):
        return dict(zip(record._fields, record, strict=True))  # type: ignore[attr-defined]
    if isinstance(record, Mapping):  # such as the outputs of Hugging Face's models
        return dict(record)
    return sample_axis.parts_of(record)


def make(kind: type, parts: Mapping[str, Any]) -> Any:
    """A record of class `kind`, without what its `__init__` would do to the fields."""
    if issubclass(kind, tuple):
        return kind._make(parts[name] for name in kind._fields)  # type: ignore[attr-defined]
    if issubclass(kind, Mapping):
        return kind(**parts)
    return batch_slices.made_of(kind, parts)


def plain(value: Any, kinds: list[str]) -> Any:
    """`value` with data in the place of what is of a class of its own, whose name is appended to `kinds` in the order
    in which `restored` meets them."""
    data = _data_of(value)
    if data is not None:
        kinds.append(f"{type(value).__module__}:{type(value).__qualname__}")
        return (_MARK, plain(data, kinds))
    if type(value) in (list, tuple):
        return type(value)([plain(item, kinds) for item in value])
    return {key: plain(item, kinds) for key, item in value.items()} if type(value) is dict else value


def restored(value: Any, kinds: Iterator[str], find: Callable[[str], type]) -> Any:
    """Undo `plain`; `find` gives the class of a name."""
    if type(value) is tuple and len(value) == 2 and isinstance(value[0], str) and value[0] == _MARK:
        return _made_of(find(next(kinds)), restored(value[1], kinds, find))
    if type(value) in (list, tuple):
        return type(value)([restored(item, kinds, find) for item in value])
    return {key: restored(item, kinds, find) for key, item in value.items()} if type(value) is dict else value


def _data_of(value: Any) -> Any:
    """What `_made_of` makes `value` of, given its class; None for what travels as it is, or not at all."""
    kind = type(value)
    if is_record(value):
        return parts_of(value)
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, enum.Flag) else value.name
    if isinstance(value, np.generic):
        number = value.item() if value.dtype.kind in "biufcU" else None
        return number if type(number) in _NUMBERS else None  # Python has no such number as a longdouble
    if kind in (set, frozenset, torch.Size) or _is_result(value):
        return list(value)
    if kind in (bytes, bytearray):
        return np.array(bytearray(value), np.uint8)
    if kind is complex:
        return [value.real, value.imag]
    if kind in (torch.device, *_CONSTANTS):
        return str(value)
    if kind is dict and not all(type(key) in _KEYS for key in value):
        return [[key, item] for key, item in value.items()]
    base: Any = next((base for base in _BASES if isinstance(value, base)), kind)
    if kind in (base, bool):
        return None
    if getattr(value, "__dict__", None):
        raise TypeError(
            f"a {kind.__qualname__} has attributes ({', '.join(vars(value))}), which would be lost: return them "
            "beside it"
        )
    return base(value)


def _is_result(value: Any) -> bool:
    """Whether it is what functions of torch return that return several tensors, such as `max` along a dimension."""
    return type(value).__module__ == "torch.return_types"


def _made_of(kind: Any, data: Any) -> Any:
    if issubclass(kind, enum.Enum):
        return kind(data) if issubclass(kind, enum.Flag) else kind[data]
    if kind in _CONSTANTS:
        return getattr(torch, data.removeprefix("torch."))
    if kind is complex:
        return complex(*data)
    if kind in (bytes, bytearray):
        return kind(data.tobytes())
    return make(kind, data) if isinstance(data, dict) else kind(data)


def finder(known: Mapping[str, Any]) -> Callable[[str], type]:
    """Finds classes among the values of `known`, such as the globals of the function that makes them, and in modules
    that are imported."""
    named = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in known.values() if isinstance(kind, type)}

    def find(name: str) -> type:
        module, _, qualname = name.partition(":")
        found = named.get(name) or reduce(
            lambda owner, part: getattr(owner, part, None), qualname.split("."), sys.modules.get(module)
        )
        if isinstance(found, type):
            return found
        raise TypeError(
            f"predictions of several ranks hold a {qualname}, whose class rank 0 does not find in {module}: define it "
            "at the top of a file that the step's file imports, or return a dict"
        )

    return find


_MARK = "\0record"
_NUMBERS = (bool, int, float, complex, str)
_KEYS = (bool, int, float, str, type(None))
_BASES = (str, int, float, list, tuple)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def on_host(output: Any) -> Any:
    """A prediction without its graph and on the CPU, so that those of a whole dataset do not fill the device. Waits for
    the device. Raises TypeError for a part of a sharded weight, and for an iterator, which would run after the stage:
    in the mode of training, with gradients and other random numbers."""
    if isinstance(output, Tensor):
        if hasattr(output, "full_tensor"):
            raise TypeError(
                "predict_step returned a weight that is sharded over ranks, or what follows from one, of which each "
                "has a part; return what a layer computes, or read weights after predict"
            )
        output = output.detach()
        return output if output.device.type == "cpu" else output.cpu()
    if isinstance(output, Iterator):
        raise TypeError(
            f"predict_step must return what it has computed, but returned a {type(output).__name__}, which computes "
            "when it is read, after the prediction; return a list of what it gives"
        )
    if isinstance(output, dict):
        return {key: on_host(value) for key, value in output.items()}
    if is_record(output):
        return make(type(output), {name: on_host(part) for name, part in parts_of(output).items()})
    parts = type(output) in (list, tuple) or _is_result(output)
    return type(output)([on_host(part) for part in output]) if parts else output
