"""A look-alike of a module whose forward can be run without a trace on the original."""

from __future__ import annotations

import operator
import os
import random
import sys
import sysconfig
from abc import ABC
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache, partial
from types import MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

M = TypeVar("M", bound=nn.Module)


def shadow(module: M, convert: Callable[[Tensor], Tensor]) -> M:
    """Return a module of the same structure and code that holds `convert(tensor)` for every parameter, buffer and other
    tensor in its attributes.

    Hooks are skipped, so those that a strategy or a user has hung in do not run. What forward assigns to an attribute,
    or changes in a list, dict, set, array, generator or object of the user's classes that an attribute holds, stays
    on the copy; other objects are shared with the original. What occurs twice is copied once. Calls no collective if
    `convert` does not. Raises what a container raises that cannot be copied.
    """
    return _Copies(convert).module(module)  # type: ignore[return-value]


class _Copies:
    """Copies of modules and of what their attributes hold, each made once."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._made: dict[int, Any] = {}

    def module(self, original: nn.Module) -> nn.Module:
        if id(original) in self._made:
            return self._made[id(original)]
        # object.__new__: `fully_shard` gives the module a class whose own __new__ makes another one.
        twin = self._made[id(original)] = object.__new__(type(original))
        for name, value in original.__dict__.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                twin.__dict__[name] = type(value)()
            elif name in ("_parameters", "_buffers", "_modules"):  # an engine may have put dicts of its own there
                twin.__dict__[name] = {key: self.value(item) for key, item in value.items()}
            else:
                twin.__dict__[name] = self.value(value)
        twin.__dict__["_compiled_call_impl"] = None
        if hasattr(type(original), "metric_state"):  # of torchmetrics, whose methods know the original
            for name in ("update", "compute"):
                twin.__dict__.pop(name, None)
            twin.__setstate__({})
        return twin

    def value(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _FIXED:
            return value
        if id(value) not in self._made:
            if isinstance(value, nn.Module):
                return self.module(value)
            if isinstance(value, _CONTAINERS):
                return self._container(value, kind)
            if _is_all_users(kind):
                return self._object(value, kind)
            self._made[id(value)] = self._other(value, kind)
        return self._made[id(value)]

    def _container(self, value: Any, kind: Any) -> Any:
        """Filled by the methods of Python's class, as those of a subclass may do anything."""
        base = next(cls for cls in kind.__mro__ if cls in _CONTAINERS)
        twin = self._made[id(value)] = base.__new__(kind)
        if base is deque:
            base.__init__(twin, (), value.maxlen)
        elif base is defaultdict:
            base.__init__(twin, value.default_factory)
        self._attributes(value, kind, twin)
        if issubclass(base, dict):
            for key, item in base.items(value):
                base.__setitem__(twin, self.value(key), self.value(item))
        else:
            (base.update if base is set else base.extend)(twin, [*map(self.value, base.__iter__(value))])
        return twin

    def _object(self, value: Any, kind: Any) -> Any:
        base: Any = SimpleNamespace if issubclass(kind, SimpleNamespace) else object
        twin = self._made[id(value)] = base.__new__(kind)
        self._attributes(value, kind, twin)
        return twin

    def _attributes(self, value: Any, kind: Any, twin: Any) -> None:
        for name, item in getattr(value, "__dict__", {}).items():
            twin.__dict__[name] = self.value(item)
        for slot in [slot for cls in kind.__mro__ if "__slots__" in vars(cls) for slot in vars(cls).values()]:
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # nothing is there
                    slot.__set__(twin, self.value(slot.__get__(value, kind)))

    def _other(self, value: Any, kind: Any) -> Any:
        if isinstance(value, Tensor):
            return self._convert(value)
        if isinstance(value, tuple | frozenset):
            items = [self.value(item) for item in value]
            if all(map(operator.is_, items, value)):
                return value
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        if kind is MethodType:
            return MethodType(value.__func__, self.value(value.__self__))
        if kind is partial:
            return partial(self.value(value.func), *self.value(value.args), **self.value(value.keywords))
        if kind is torch.Generator:
            return value.clone_state()
        return deepcopy(value) if f"{kind.__module__}.{kind.__name__}" in _COPIED else value


_CONTAINERS = (list, set, deque, OrderedDict, defaultdict, dict)
_COPIED = (
    "random.Random",
    "numpy.ndarray",
    "numpy.random._generator.Generator",
    "numpy.random.mtrand.RandomState",
)
"""By name, as nothing else needs numpy's generators."""
_FIXED = (type(None), bool, int, float, complex, str, bytes)


@cache
def _is_all_users(kind: type) -> bool:
    """Whether a class and its bases are of the user's program; not one that does something as an object ends, as its
    copy would too."""
    own = [cls for cls in kind.__mro__[:-1] if cls not in (Generic, Protocol, ABC, SimpleNamespace)]
    return kind is not object and not hasattr(kind, "__del__") and all(map(_is_of_user, own))


def _is_of_user(kind: type) -> bool:
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    installed = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
    is_library = file is None or os.path.realpath(file).startswith(installed)
    return not is_library and kind.__module__.partition(".")[0] != "lockstep"


def fitting(module: nn.Module, example_input: Any, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Return `example_input` with `convert`ed tensors on the device of `module`, floating point ones in its dtype."""
    like = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), torch.empty(0))
    return tree_map_only(
        Tensor,
        lambda tensor: convert(tensor).to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype),
        example_input,
    )


def call(module: nn.Module, example_input: Any) -> Any:
    """Run forward on `example_input`: a tuple is its positional arguments, a dict its keyword arguments."""
    if isinstance(example_input, Mapping):
        return module(**example_input)
    return module(*example_input) if isinstance(example_input, tuple) else module(example_input)


@contextmanager
def restored_rng() -> Iterator[None]:
    """Put the CPU generators of torch, random and numpy back where they were."""
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = torch.get_rng_state(), random.getstate(), numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy_random:
            numpy_random.set_state(states[2])
