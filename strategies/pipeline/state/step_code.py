"""The code of the user's that a step runs, and what it names."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from lockstep.strategies.launch.failure import libraries
from lockstep.strategies.launch.program.functions import codes_of, is_users_class, variables_of
from lockstep.strategies.modules.blocks import OF_TORCH

_MANY = 64
"""Items of a container in which functions are searched."""


def functions_of(modules: Iterable[nn.Module | type], steps: Iterable[str]) -> list[FunctionType]:
    """The functions of the user's that steps of `modules`, or of classes of these, may call, by the names in their
    code, or in attributes."""
    modules = [*modules]
    found = {f: owner for each in modules if isinstance(each, nn.Module) for f, owner in _held_in(each)}
    for kind in dict.fromkeys(each if isinstance(each, type) else type(each) for each in modules):
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


def _held_in(module: nn.Module) -> Iterator[tuple[FunctionType, type | None]]:
    """The functions of the user's that a module has in attributes, and small containers there, and those of the
    program's objects there, with the class in which they find others."""
    for name, value in vars(module).items() if is_users_class(type(module)) else ():
        held = [*value.values()] if isinstance(value, dict) else value
        for each in (
            held if isinstance(held, list | tuple) and len(held) <= _MANY and name not in OF_TORCH else (value,)
        ):
            while isinstance(each, functools.partial):
                each = each.func
            function = getattr(each, "__func__", each)
            owner = type(each.__self__) if isinstance(each, MethodType) else None
            if is_users_function(function):
                yield function, owner
            elif is_of_program(type(each)) and not isinstance(each, nn.Module):
                members = (member for member in vars(type(each)).values() if is_users_function(member))
                yield from ((member, type(each)) for member in members)


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


_STORING = {
    *("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "DELETE_GLOBAL"),
    *("STORE_DEREF", "DELETE_DEREF"),
}
_LOADING, _STORING_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}, {"STORE_ATTR", "DELETE_ATTR"}
_STORING_METHODS = set(
    "add append appendleft clear copyto data discard extend extendleft fill insert itemset move_to_end pop popitem "
    "popleft put register_buffer remove reverse rotate setattr setdefault sort subtract update __setattr__ __setitem__ "
    "__dict__ _buffers _modules _parameters exec".split()
)


def stores(function: FunctionType) -> bool:
    """Whether its code shows that it changes more than local variables: it assigns to attributes or items, or calls
    what changes its object."""
    return any(
        not _STORING_METHODS.isdisjoint(code.co_names)
        or any(name.endswith("_") and name[0] != "_" for name in code.co_names)
        or any(each.opname in _STORING for each in dis.get_instructions(code))
        for code in codes_of(function)
    )


def keeps(kind: type) -> bool:
    """Whether the code that the forward of a class of the program runs shows that it changes attributes, or items of
    what these hold."""
    return is_of_program(kind) and any(
        any(map(_changes_attributes, codes_of(function))) for function in functions_of([kind], ()) if is_own(function)
    )


def _changes_attributes(code: CodeType) -> bool:
    before, reads_own = "", False
    for each in dis.get_instructions(code):
        reads_own &= not each.starts_line
        if before == "LOAD_ATTR" and each.opname in _LOADING and each.argval in _STORING_METHODS - {"data"}:
            return True
        if each.opname in _STORING_ATTRIBUTES or (reads_own and each.opname in _STORING):
            return True
        reads_own |= each.opname == "LOAD_ATTR" and "NULL" not in each.argrepr  # no method
        before = before if each.opname == "CACHE" else each.opname
    return not {"setattr", "__setattr__", "register_buffer"}.isdisjoint(code.co_names)


def is_of_program(kind: type) -> bool:
    """Whether a class is defined in the program, not in an installed package."""
    return is_read(kind) and _is_module_of_program(kind.__module__)


def is_own(function: FunctionType) -> bool:
    """Whether the program defines a function."""
    return not os.path.realpath(function.__code__.co_filename).startswith(libraries())


@functools.cache
def _is_module_of_program(name: str) -> bool:
    file = None if name == "__main__" else getattr(sys.modules.get(name), "__file__", None)
    return file is None or not os.path.realpath(file).startswith(libraries())


def enclosed_by(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function of the user's holds: variables of its closure, arguments of a partial, its owner."""
    if isinstance(function, functools.partial):
        yield from {**dict(zip("0123456789", function.args, strict=False)), **function.keywords}.items()
        yield "func", function.func
    elif isinstance(function, MethodType):
        yield "__self__", function.__self__
    else:
        yield from ((name, value) for name, _, value in variables_of(function))
