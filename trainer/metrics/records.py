"""Named tuples and dataclasses in what ranks gather, which travel as data: the receiver finds their classes by name and
unpickles nothing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

from torch import Tensor

from lockstep.strategies.data import batch_slices


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
    return batch_slices.parts_of(record)


def make(kind: type, parts: Mapping[str, Any]) -> Any:
    """A record of class `kind`, without what its `__init__` would do to the fields."""
    if issubclass(kind, tuple):
        return kind._make(parts[name] for name in kind._fields)  # type: ignore[attr-defined]
    if issubclass(kind, Mapping):
        return kind(**parts)
    return batch_slices.made_of(kind, parts)


def plain(value: Any, kinds: list[str]) -> Any:
    """`value` with dicts of fields in the place of its records, whose classes are appended to `kinds` in the order in
    which `restored` meets them."""
    if is_record(value):
        kinds.append(f"{type(value).__module__}:{type(value).__qualname__}")
        return (_MARK, {name: plain(part, kinds) for name, part in parts_of(value).items()})
    if type(value) in (list, tuple):
        return type(value)([plain(item, kinds) for item in value])
    return {key: plain(item, kinds) for key, item in value.items()} if type(value) is dict else value


def restored(value: Any, kinds: Iterator[str], find: Callable[[str], type]) -> Any:
    """Undo `plain`; `find` gives the class of a name."""
    if type(value) is tuple and len(value) == 2 and isinstance(value[0], str) and value[0] == _MARK:
        kind = find(next(kinds))
        return make(kind, {name: restored(part, kinds, find) for name, part in value[1].items()})
    if type(value) in (list, tuple):
        return type(value)([restored(item, kinds, find) for item in value])
    return {key: restored(item, kinds, find) for key, item in value.items()} if type(value) is dict else value


def finder(known: Mapping[str, Any]) -> Callable[[str], type]:
    """Finds classes among the values of `known`, such as the globals of the function that makes them, and in modules
    that are imported."""
    named = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in known.values() if isinstance(kind, type)}

    def find(name: str) -> type:
        module, _, qualname = name.partition(":")
        found = named.get(name) or reduce(
            lambda owner, part: getattr(owner, part, None), qualname.split("."), sys.modules.get(module)
        )
        if isinstance(found, type) and (hasattr(found, "_fields") or dataclasses.is_dataclass(found)):
            return found
        raise TypeError(
            f"predictions of several ranks hold a {qualname}, whose class rank 0 does not find in {module}: define it "
            "at the top of a file that the step's file imports, or return a dict"
        )

    return find


_MARK = "\0record"


def on_host(output: Any) -> Any:
    """A prediction without its graph and on the CPU, so that those of a whole dataset do not fill the device. Waits for
    the device. Raises TypeError for an iterator, which would run after the stage: in the mode of training, with
    gradients and other random numbers."""
    if isinstance(output, Tensor):
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
    return type(output)(map(on_host, output)) if type(output) in (list, tuple) else output
