"""Files that were edited after the program imported them."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_STARTED = time.time_ns()


def refuse_edited(module: ModuleType) -> None:
    """Raise ValueError for a module with a function that its file has no longer: ranks would run what is there now."""
    file, loader = str(module.__file__), getattr(module.__spec__, "loader", None)
    try:
        if type(loader) is not SourceFileLoader or os.stat(file).st_ctime_ns < _STARTED:
            return
        code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):  # a rank that imports it says so
        return
    there = defaultdict[str, list[Any]](list)
    codes = [code]
    for code in codes:  # grows
        there[code.co_name].append(_content(code))
        codes += (inner for inner in code.co_consts if isinstance(inner, CodeType))
    for function in _functions(module, vars(module)):
        code = function.__code__
        if code.co_filename == file and _content(code) not in there[code.co_name]:
            raise ValueError(
                f"{file} was edited after this program imported it, and ranks would import what is there now: "
                f"{function.__qualname__} is another one; start the program again"
            )


def _functions(module: ModuleType, held: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Those of a module and its classes."""
    for value in [*held.values()]:
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if type(function) is FunctionType and function.__globals__ is vars(module):
            yield function
        elif isinstance(value, type) and value.__module__ == module.__name__ and held is vars(module):
            yield from _functions(module, vars(value))


def _content(code: CodeType) -> tuple[Any, ...]:
    """What code does, wherever in the file it is."""
    constants = [_content(item) if isinstance(item, CodeType) else (type(item), item) for item in code.co_consts]
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, counts, names
