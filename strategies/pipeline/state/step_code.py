"""The code of the user's that a step runs, and what it names."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from lockstep.strategies.launch.program.functions import codes_of, is_users_class, variables_of


def functions_of(modules: Iterable[nn.Module], steps: Iterable[str]) -> list[FunctionType]:
    """The functions of the user's that steps of `modules` may call, by the names in their code."""
    found: dict[FunctionType, type | None] = {}
    for kind in dict.fromkeys(map(type, modules)):
        for name in (*steps, "forward"):
            found |= dict.fromkeys(_methods(kind, name), kind)
        waiting = [*found]
        for function in waiting:  # grows
            owner = found[function]
            called = [
                method
                for name in sorted(names_in(function))
                for method in (_methods(owner, name) if owner is not None else ())
            ]
            named = *globals_of(function), *enclosed_by(function)
            called += (each for _, each in named if isinstance(each, FunctionType))
            new = [each for each in called if each not in found and is_users_function(each)]
            found |= dict.fromkeys(new, owner)
            waiting += new
    return [*found]


def is_users_function(function: Any) -> bool:
    """Whether the program or an installed package defines it."""
    return isinstance(function, FunctionType) and is_read(function)


def is_read(defined: Any) -> bool:
    """Whether a class or function may hold in its attributes or globals what a step changes."""
    return is_users_class(defined) and defined.__module__.partition(".")[0] not in sys.stdlib_module_names


def _methods(kind: type, name: str) -> list[FunctionType]:
    member: Any = inspect.getattr_static(kind, name, None)
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return [member] if is_users_function(member) else []


def names_in(function: FunctionType) -> set[str]:
    """The names of attributes and globals in its code."""
    return {name for code in codes_of(function) for name in code.co_names}


def globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """The globals that it names, with their values."""
    return [(name, function.__globals__[name]) for name in sorted(names_in(function)) if name in function.__globals__]


def enclosed_by(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function of the user's holds: variables of its closure, arguments of a partial, its owner."""
    if isinstance(function, functools.partial):
        yield from {**dict(zip("0123456789", function.args, strict=False)), **function.keywords}.items()
        yield "func", function.func
    elif isinstance(function, MethodType):
        yield "__self__", function.__self__
    else:
        yield from ((name, value) for name, _, value in variables_of(function))
