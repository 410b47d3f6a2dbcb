"""Values that processes can compare: what settings are made of."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from lockstep.strategies.launch.program.source import differs_by_process

FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, PurePath, np.generic, torch.dtype, torch.device)
_MAX_DEPTH = 20


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
        return _name_of(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return kind, str(value.dtype), tuple(value.shape), _digest(value) if contents else None
    if isinstance(value, dict):
        return kind, {key: part(item) for key, item in value.items() if not differs_by_process(key)}
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
    if has_settings(value, is_own):
        hidden = ("_",) if isinstance(value, torch.nn.Module) else ()
        return kind, part({key: item for key, item in vars(value).items() if not key.startswith(hidden)})
    raise NotComparable


def _is_a_librarys_tuple(value: Any, is_own: Callable[[type], bool]) -> bool:
    """Whether it is of a library's subclass of tuple with a state of its own, as `unittest.mock.call` is, which a copy
    of its items would lose."""
    cls = type(value)
    is_plain = cls in (tuple, torch.Size) or hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields")
    return isinstance(value, tuple) and not is_plain and not is_own(cls)


def has_settings(value: Any, is_own: Callable[[type], bool]) -> bool:
    """Whether it is an object that is compared by its attributes: of a class of the program, of one that is made to
    hold settings, or a layer without parameters and buffers, such as an activation."""
    cls = type(value)
    if isinstance(value, torch.nn.Module):
        return not any(True for _ in (*value.children(), *value.state_dict()))
    if not hasattr(value, "__dict__") or issubclass(cls, (type, ModuleType)):
        return False
    return is_own(cls) or dataclasses.is_dataclass(cls) or cls in (argparse.Namespace, SimpleNamespace)


def is_config(value: Any) -> bool:
    """Whether it is of omegaconf, which is not imported for this."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and omegaconf.OmegaConf.is_config(value)


def _name_of(function: Any) -> tuple[str, str]:
    module, name = getattr(function, "__module__", None) or "", function.__qualname__
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function or module == "__main__":
        raise NotComparable
    return module, name


def _digest(value: torch.Tensor | np.ndarray) -> str:
    if isinstance(value, torch.Tensor):
        if not value.is_cpu or not value.is_leaf or value.is_sparse or value.is_quantized:
            raise NotComparable
        value = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        raise NotComparable
    return hashlib.blake2b(np.ascontiguousarray(value).view(np.uint8).data, digest_size=16).hexdigest()
