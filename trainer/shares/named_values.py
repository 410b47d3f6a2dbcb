"""What methods of a class name outside of its objects: globals of their file, variables that they close over, default
arguments and attributes of functions."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.strategies.launch.failure import libraries
from lockstep.strategies.launch.program.functions import codes_of, is_users_class, variables_of
from lockstep.strategies.sync.contents import generator_state
from lockstep.trainer.shares.marks import NUMBERS

_DATA = (
    *(*NUMBERS, bytearray, array, Tensor, np.ndarray),
    *(list, tuple, dict, set, deque, count, SimpleNamespace, Namespace),
)
_READ_BY_LOADERS = (DataLoader, Dataset, Sampler)
"""These change as batches are loaded, in any place."""
Place = tuple[str, Callable[[], Any]]
"""A name, and what returns its value."""


def is_watched(value: Any) -> bool:
    """Whether it is data that a step may change, or a class of the program: no function, dataset or network."""
    if isinstance(value, type):
        return is_of_program(value)
    if isinstance(value, _READ_BY_LOADERS) or (isinstance(value, nn.Module) and any(True for _ in value.parameters())):
        return False
    return isinstance(value, _DATA) or generator_state(value) is not None or is_of_program(type(value))


def is_of_program(kind: type) -> bool:
    """Whether the program defines a class, and no installed package, whose globals may be caches."""
    return is_users_class(kind) and _is_of_program(kind.__module__)


@cache
def _is_of_program(module: str) -> bool:
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return not os.path.realpath(path).startswith(libraries())


@cache
def places_of(kind: type) -> list[Place]:
    """Those of the methods of a class, and of functions of the same file that these call; of an installed package only
    generators of random numbers."""
    is_kept = is_watched if is_of_program(kind) else _is_generator
    members = [getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(kind).values()]
    functions, found = [member for member in members if isinstance(member, FunctionType)], dict[str, Place]()
    for function in functions:  # grows
        named = {key for code in codes_of(function) for key in code.co_names if key.isidentifier()}
        for key in sorted(named & function.__globals__.keys()):
            value = function.__globals__[key]
            if isinstance(value, FunctionType) and value.__module__ == kind.__module__:
                functions += [value] if value not in functions else []
            elif not key.startswith("__") and is_kept(value):
                name = f"{function.__module__}.{key}"
                found[name] = name, partial(function.__globals__.get, key)
        for name, read in _held_by(function):
            if is_kept(read()):
                found[name] = name, read
    return [*found.values()]


def _held_by(function: FunctionType) -> Iterator[Place]:
    name = function.__qualname__
    for key, cell, _ in variables_of(function):
        yield f"{key} in the closure of {name}", partial(_in_cell, cell)
    if function.__defaults__:
        yield f"default arguments of {name}", partial(getattr, function, "__defaults__")
    if function.__kwdefaults__:
        yield f"default arguments of {name} by name", partial(getattr, function, "__kwdefaults__")
    yield f"attributes of {name}", partial(vars, function)


def _in_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value now
        return None


def _is_generator(value: Any) -> bool:
    return generator_state(value) is not None
