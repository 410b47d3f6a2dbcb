"""What hooks of modules count in beside the modules: variables that they enclose, globals, objects."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lockstep.strategies.launch.program.functions import variables_of
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.parameter_hooks import OF_MODULE, users_hooks
from lockstep.strategies.pipeline.shapes.fake_tensors import is_plain_object

_MOST = 1000
"""Items of a list or dict that are read."""


class Enclosed:
    """A hook, whose attributes are the variables that it shares with other code: numbers, and dicts of them in the
    place of lists, dicts and objects. A tensor shows as its version; floats, such as times, do not."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return _without_floats({name: _numbered(value) for name, value in _variables(self.hook, 3)})


def hook_holders(modules: list[nn.Module], known: list[Enclosed]) -> list[nn.Module | Enclosed]:
    """The modules that have hooks of the user's, and these; those that are `known` already remain the same objects."""
    by_hook = {id(each.hook): each for each in known}
    found: list[nn.Module | Enclosed] = []
    for module in modules:
        hooks = [hook for kind in OF_MODULE if getattr(module, kind) for _, hook in users_hooks(module, kind)]
        if hooks:
            found += [module, *(by_hook.get(id(hook)) or Enclosed(hook) for hook in hooks)]
    return found


def _variables(function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from {**dict(zip("0123456789", function.args, strict=False)), **function.keywords}.items()
        function = function.func
    owner = getattr(function, "__self__", None) if isinstance(function, MethodType) else function
    if not isinstance(owner, nn.Module | Tensor | FunctionType | BuiltinFunctionType | type):
        yield from getattr(owner, "__dict__", {}).items()
    inner = getattr(function, "__func__", function)
    if not isinstance(inner, FunctionType):
        return
    found = {name: value for name, _, value in variables_of(inner)}
    names = inner.__code__.co_names
    found |= {name: inner.__globals__[name] for name in names if name in inner.__globals__}
    for name, value in found.items():
        if depth and isinstance(value, FunctionType | functools.partial):
            yield from _variables(value, depth - 1)
        else:
            yield name, value


def _numbered(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value._version if is_here(value) and not value.is_inference() else None
    if isinstance(value, list | tuple | deque):
        return {"length": len(value), **_without_floats(dict(enumerate(list(value)[:_MOST])))}
    if isinstance(value, Mapping):
        return _without_floats(value) if len(value) <= _MOST else {"length": len(value)}
    if is_plain_object(value) and not isinstance(value, ModuleType):
        return _without_floats(vars(value))
    return value


def _without_floats(held: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in held.items() if not isinstance(value, float)}
