"""What the source of a module says of its names."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Constant(NamedTuple):
    value: Any


class Computed(NamedTuple):
    """By an expression that is not a constant, or in several places."""

    calls: bool
    """Whether functions decide it, which may ask for what differs between processes."""


class Function(NamedTuple):
    line: int


class Class(NamedTuple):
    bindings: dict[str, Binding]
    decorated: bool


class Import(NamedTuple):
    """`from module import name`, with a dot before the module for each level."""

    module: str
    name: str


Binding = Constant | Computed | Function | Class | Import | None
"""None: the process or the rank decides."""


def bindings_of(file: str) -> dict[str, Binding]:
    """What the statements of a file bind, by name. A name `*` says that there may be other names."""
    try:
        changed = os.stat(file).st_mtime_ns
        if _read.get(file, (None, {}))[0] != changed:
            _read[file] = changed, _bindings(ast.parse(Path(file).read_bytes()).body)
        return _read[file][1]
    except (OSError, SyntaxError, ValueError):  # removed or edited since
        return {"*": None}


def differs_by_process(name: Any) -> bool:
    """Whether a name or expression is of what processes are to have different, such as RANK, world_size, getpid()."""
    return isinstance(name, str) and not _OF_PROCESS.isdisjoint(_words(name))


def _words(name: str) -> set[str]:
    """In lower case: `LOCAL_RANK`, `localRank` and `rank0` have the word rank."""
    return {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def is_of_process(name: Any, value: Any) -> bool:
    """Whether a process is to keep what it has by this name. A program that starts ranks is rank 0 itself, so a number
    above 1 is a setting, such as `lora_rank = 8`, and so is one that is not whole, such as `rank_weight = 0.5`."""
    if isinstance(value, float) or not isinstance(name, str):
        return False
    of_process = _OF_PROCESS - (_RANKS if isinstance(value, int) and value > 1 else set())
    return not of_process.isdisjoint(_words(name))


_RANKS = frozenset({"rank", "ranks", "nrank", "nranks"})
_OF_PROCESS = _RANKS | {"world", "worldsize", "pid", "pids", "ppid", "getpid", "getppid"}
_read: dict[str, tuple[int, dict[str, Binding]]] = {}
_CALLS = (ast.Call, ast.Await, ast.Yield, ast.comprehension, ast.JoinedStr)
_SIMPLE = ("staticmethod", "classmethod", "property")


def _bindings(body: list[ast.stmt]) -> dict[str, Binding]:
    found: dict[str, Binding] = {}
    for statement in body:
        for name in _bound(statement):
            if name in found:
                found[name] = None if found[name] is None or differs_by_process(name) else Computed(calls=True)
            else:
                found[name] = _binding(statement, name)
    return found


def _binding(statement: ast.stmt, name: str) -> Binding:
    if isinstance(statement, ast.ClassDef):
        return Class(_bindings(statement.body), bool(statement.decorator_list))
    if isinstance(statement, ast.FunctionDef):
        decorators = statement.decorator_list
        simple = all(isinstance(decorator, ast.Name) and decorator.id in _SIMPLE for decorator in decorators)
        return Function(decorators[0].lineno if decorators else statement.lineno) if simple else None
    if isinstance(statement, ast.ImportFrom):
        origin = next((alias.name for alias in statement.names if alias.asname == name), name)
        return Import("." * statement.level + (statement.module or ""), origin)
    of_process = differs_by_process(f"{name} {ast.unparse(statement)}")
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name):
            try:
                value = ast.literal_eval(statement.value)
                return None if of_process and is_of_process(name, value) else Constant(value)
            except ValueError:
                if of_process:
                    return None
                if isinstance(statement.value, ast.Lambda):
                    return Function(statement.value.lineno)
                return Computed(any(isinstance(node, _CALLS) for node in ast.walk(statement.value)))
    return None if of_process else Computed(calls=True)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds in the scope in which it stands."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif not isinstance(node, (ast.Lambda, ast.comprehension)) and getattr(node, "value", node) is not None:
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)
