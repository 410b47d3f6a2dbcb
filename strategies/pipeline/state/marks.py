"""What tells whether a value has changed, what it holds, and how containers are given back what they held."""

from __future__ import annotations

import datetime
import functools
import zlib
from collections import deque
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.strategies.launch.program.functions import is_users_class
from lockstep.strategies.launch.program.reach import base_of, refill
from lockstep.strategies.launch.program.values import attributes_of, put_attribute, slots
from lockstep.strategies.modules.absent import Refusing, is_here
from lockstep.strategies.modules.blocks import measures
from lockstep.strategies.pipeline.state.step_code import enclosed_by, is_users_function
from lockstep.strategies.sync.contents import checksum, sum_of_bits

PLAIN = (type(None), int, float, complex, str, np.generic, Enum, Fraction, Decimal)
"""Values that are followed from one run of a step to the next, where attributes or dicts in attributes hold them."""
_OF_TIME = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
SIMPLE = (*PLAIN, bytes, PurePath, torch.dtype, torch.device, range, slice, *_OF_TIME)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
FUNCTIONS = (FunctionType, MethodType, functools.partial)
_NOT_READ = (Optimizer, LRScheduler)
MOST = 2000
"""Items of a container that are read one by one."""
_FEW_BYTES, _MOST_BYTES = 2**20, 2**26


class Opaque(NamedTuple):
    """The mark of an object of which nothing is read: it has changed if another takes its place."""

    kind: type
    number: int


class _Numbers:
    """The mark of a large dict of numbers and strings: it may grow."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = dict(dict.items(held))

    def __eq__(self, later: object) -> bool:
        return isinstance(later, _Numbers) and self._held.items() <= later._held.items()

    __hash__ = None  # type: ignore[assignment]


def mark_of(value: Any, is_searched: bool) -> Any:
    """What tells whether it has changed, but for what is searched in it; None of nothing."""
    if isinstance(value, SIMPLE):
        return None if value is None else (type(value), repr(value))
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        few = not value.dtype.hasobject and value.nbytes <= _MOST_BYTES
        return value.dtype, value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes()) if few else id(value)
    if isinstance(value, list | tuple | deque) or (isinstance(value, set | frozenset) and len(value) > MOST):
        is_large = len(value) > MOST and not isinstance(value, set | frozenset) and is_of_atoms(value)
        return type(value), len(value), [*value] if is_large else None
    if isinstance(value, dict) and len(value) > MOST and is_of_atoms(value):
        return _Numbers(value)
    if isinstance(value, MethodType | BuiltinFunctionType):  # each look-up makes another object
        return type(value), value.__qualname__, id(value.__self__)
    if isinstance(value, FunctionType):
        return FunctionType, value.__code__
    return None if isinstance(value, Refusing) else (type(value) if is_searched else Opaque(type(value), id(value)))


def held_by(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the user's, and modules beside those of the model, or what a function of theirs
    encloses; None of what is not searched. Of containers nothing, as they are searched by themselves."""
    kind: Any = type(value)
    if isinstance(value, CONTAINERS):
        return {}
    if isinstance(value, (*SIMPLE, Tensor, np.ndarray, type, ModuleType, *_NOT_READ, Refusing)):
        return None
    if isinstance(value, FUNCTIONS):
        is_theirs = isinstance(value, functools.partial) or is_users_function(getattr(value, "__func__", value))
        return {**dict(enclosed_by(value)), **getattr(value, "__dict__", {})} if is_theirs else None
    if isinstance(value, nn.Module):
        return None if measures(value) else vars(value)
    if not is_users_class(kind) and not kind.__module__.startswith("torch.distributions."):
        return None
    return attributes_of(value) if hasattr(value, "__dict__") or slots(kind) else None


def content_of(holder: Any) -> Any:
    """What a dict, list, deque or set holds, in its order, by no code of its class."""
    base = base_of(holder)
    if issubclass(base, dict):
        return dict(base.items(holder))
    return {*set.__iter__(holder)} if base is set else [*base.__iter__(holder)]


def put_content(holder: Any, content: Any) -> None:
    """Give a dict, list, deque or set what `content_of` has returned, or an object with slots their content."""
    base = base_of(holder)
    if base is None:
        for name, value in content.items():
            put_attribute(holder, name, value)
    else:
        refill(holder, base, [*chain(*content.items())] if isinstance(content, dict) else [*content])


def is_of_atoms(container: Any) -> bool:
    held = dict.values(container) if isinstance(container, dict) else container
    return {*map(type, held)} <= _ATOMS


def _of_tensor(tensor: Tensor) -> Any:
    if not is_here(tensor):
        return type(tensor)
    version = 0 if tensor.is_inference() else tensor._version
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return type(tensor), id(tensor), version
    if tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return tensor.dtype, tensor.shape
    if tensor.nbytes > _MOST_BYTES:
        return id(tensor), version
    few = tensor.nbytes <= _FEW_BYTES
    return tensor.dtype, tensor.shape, checksum(tensor) if few else int(sum_of_bits(tensor))
