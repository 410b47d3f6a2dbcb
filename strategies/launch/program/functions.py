"""What the code of a function can reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

OTHERS = (
    "torch",
    "lockstep",
    "torchmetrics",
    "numpy",
    "builtins",
    "logging",
    "threading",
    "concurrent",
    "tqdm",
    "rich",
    "wandb",
)
"""Packages of whose objects nothing is read that user code may have changed."""


def is_users_class(kind: type) -> bool:
    """Whether objects of a class, the program's or an installed package's, hold what user code may have changed."""
    return str(kind.__module__).partition(".")[0] not in OTHERS


def codes_of(function: FunctionType) -> list[CodeType]:
    """Its code, and that of the functions, comprehensions and classes within it."""
    codes = [function.__code__]
    for code in codes:  # grows
        codes += (inner for inner in code.co_consts if isinstance(inner, CodeType))
    return codes


def variables_of(function: FunctionType) -> Iterator[tuple[str, CellType, Any]]:
    """The variables of its closure that have a value: name, cell and value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # of a variable that has no value yet
            yield name, cell, cell.cell_contents


def named_by(function: FunctionType) -> Iterator[Any]:
    """The variables of its closure, the globals that it names, and what it may name of modules among these;
    nothing that pytest has put into an assertion."""
    yield from (value for _, _, value in variables_of(function))
    names = sorted({name for code in codes_of(function) for name in code.co_names if name.isidentifier()})
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from found
    modules = [value for value in found if isinstance(value, ModuleType)]
    for module in modules:  # grows by modules within packages
        inner = [vars(module)[name] for name in names if name in vars(module)]
        modules += (value for value in inner if isinstance(value, ModuleType) and value not in modules)
        yield from inner
