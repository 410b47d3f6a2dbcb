"""What a program has changed in modules since it imported them.

Ranks import the user's modules again, so `config.LR = 0.1`, `Net.dropout = 0`, an item put into a module's dict or a
function that was replaced would be on the ranks what the files say. Where a file binds a name to a constant or a
function, the program compares what it holds with the file, and sends what differs. What a file computes is sent as it
is, and a rank compares it with what it has computed itself.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import operator
import os
import sys
from collections.abc import Iterator, Mapping
from enum import EnumMeta
from importlib import metadata
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.strategies.launch.payload import dumps
from lockstep.strategies.launch.program.edits import refuse_edited
from lockstep.strategies.launch.program.source import (
    Binding,
    Class,
    Computed,
    Constant,
    Function,
    Import,
    bindings_of,
    is_of_process,
)
from lockstep.strategies.launch.program.values import (
    FUNCTIONS,
    MAX_BYTES,
    NotComparable,
    parts_of,
    state_of,
)


class Change(NamedTuple):
    """What the program holds by a name that importing its module again may bind to another value."""

    module: str
    owner: str
    """The class in the module, or the member of an enumeration in it; empty for the module itself."""
    name: str
    value: Any
    file: Constant | None = None
    """What the file says. A rank that has another value than this has set it itself, and keeps it."""
    added: bool = False
    """The file does not bind the name. A rank that has it has set it itself, and keeps it."""

    @property
    def path(self) -> str:
        return ".".join(part for part in self[:3] if part)


class At:
    """Says as it is unpickled which change is next."""

    last = ""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return _note, (self._path,)


def _note(path: str) -> None:
    At.last = path


_log = logging.getLogger("lockstep")
_PACKAGES = f"-packages{os.sep}"
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MAX_ITEMS = 10_000


def changes() -> dict[str, bytes]:
    """What modules of the program hold, and importing them again may not give: by module, pickled, so that a rank
    imports nothing for a module that it does not import.

    Raises TypeError for a replaced function, class or value that cannot be pickled, with its name, and ValueError for a
    file that was edited since.
    """
    own = own_modules()
    for module in own.values():
        refuse_edited(module)
    found = {name: _sendable([*_of_module(module, own)]) for name, module in own.items()}
    for change in _sendable([*_in_packages(own)]):
        found.setdefault(change.module, []).append(change)
    return {name: dumps([(At(each.path), each) for each in own]) for name, own in found.items() if own}


def own_modules() -> dict[str, ModuleType]:
    """The modules of the program that a rank imports by their names."""
    return {name: module for name, module in [*sys.modules.items()] if _is_own(name, module)}


def is_own_class(cls: type) -> bool:
    """Whether the program defines it, not an installed package."""
    return is_own_name(str(cls.__module__))


def is_own_name(name: str) -> bool:
    """Whether a module of this name is the program's; cheaper than `own_modules`, which reads all: in a rank that
    copies pages."""
    return name == "__main__" or _is_own(name, sys.modules.get(name))


def _is_own(name: str, module: Any) -> bool:
    """Whether a rank imports this file by its name, and it belongs to no installed package."""
    if name == "__main__" or name.partition(".")[0] == "lockstep" or not isinstance(module, ModuleType):
        return False
    file, spec = str(vars(module).get("__file__")), vars(module).get("__spec__")
    if not file.endswith(".py") or file.startswith(_LIBRARY) or _is_installed(file):
        return False
    return getattr(spec, "name", None) == name


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether a package manager has put it where it is: into an environment, or a folder of `pip install --target`."""
    if _PACKAGES in file or file.startswith(_LIBRARY) or not os.path.isabs(file):
        return _PACKAGES in file
    folders = {Path(os.path.abspath(folder)) for folder in sys.path}.intersection(Path(file).parents)
    return any(Path(file).relative_to(folder).parts[0] in _installed_into(folder) for folder in folders)


@functools.cache
def _installed_into(folder: Path) -> frozenset[str]:
    """Packages and modules in a folder that it has a record of."""
    installed = map(metadata.Distribution.at, folder.glob("*.dist-info"))
    return frozenset(file.parts[0] for distribution in installed for file in distribution.files or ())


def _of_module(module: ModuleType, own: Mapping[str, ModuleType]) -> Iterator[Change]:
    bindings = bindings_of(str(module.__file__))
    yield from _differences(module, "", vars(module), bindings, own)
    for name, binding in bindings.items():
        cls: Any = vars(module).get(name)
        if not isinstance(binding, Class) or not _is_named(cls, module, name):
            continue
        if isinstance(cls, EnumMeta):
            yield from _of_members(module, name, cls)
        else:
            yield from _differences(module, name, vars(cls), binding.bindings, own)


def _of_members(module: ModuleType, name: str, kind: EnumMeta) -> Iterator[Change]:
    """The attributes of the members of an enumeration."""
    members: dict[str, Any] = {**kind.__members__}
    for key, member in members.items():
        for attribute, value in [*vars(member).items()]:
            is_pythons = attribute.startswith("_") and attribute.endswith("_")
            if not is_pythons and not is_of_process(attribute, value) and _is_compared(value, calls=False):
                yield Change(module.__name__, f"{name}.{key}", attribute, value)


def _differences(
    module: ModuleType,
    owner: str,
    held: Mapping[str, Any],
    bindings: dict[str, Binding],
    own: Mapping[str, ModuleType],
) -> Iterator[Change]:
    for name, value in [*held.items()]:
        if name.startswith("__") or is_of_process(name, value):
            continue
        binding = bindings.get(name)
        change = Change(module.__name__, owner, name, value)
        if name not in bindings:
            is_new = _is_data(value) or isinstance(value, type) or _is_from_elsewhere(value, module, own)
            if "*" not in bindings and is_new:
                yield change._replace(added=True)
        elif isinstance(binding, Constant):
            if not are_equal(value, binding.value) and (type(value) is FunctionType or not _is_descriptor(value)):
                yield change._replace(file=binding)
        elif isinstance(binding, (Function, Class)):
            if _is_replaced(value, binding, module, name, own):
                yield change
            elif type(value) is FunctionType and vars(value):
                yield from _parts(change)
        elif isinstance(binding, Import):
            if _is_other_import(value, binding, module):
                yield change
        elif isinstance(binding, Computed):
            yield from [change] if _is_compared(value, binding.calls) else _parts(change)


def _parts(change: Change) -> Iterator[Change]:
    """What of a value can be compared, if not all of it."""
    if isinstance(change.value, dict) and len(change.value) > _MAX_ITEMS:
        return
    parts = parts_of(change.value, is_own_class, functools.partial(_is_compared, calls=False))
    if parts is not None:
        yield change._replace(value=parts)


def _is_replaced(
    value: Any, binding: Function | Class, module: ModuleType, name: str, own: Mapping[str, ModuleType]
) -> bool:
    """Whether it is neither what the file defines nor a library's wrapper of that."""
    if isinstance(binding, Class):
        return isinstance(value, type) and not binding.decorated and not _is_named(value, module, name)
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if type(function) is not FunctionType:
        return callable(value)
    if function.__globals__ is vars(module):
        return function.__code__.co_firstlineno != binding.line
    return _is_from_elsewhere(function, module, own)


def _is_other_import(value: Any, binding: Import, module: ModuleType) -> bool:
    """Whether a rank may import another value there: it is data, or the name now refers to another function."""
    if not isinstance(value, FUNCTIONS):
        return _is_compared(value, calls=False)
    package = vars(module).get("__package__") or ""
    try:
        origin = sys.modules.get(importlib.util.resolve_name(binding.module, package))
    except ImportError:
        return False
    return origin is not None and getattr(origin, binding.name, value) is not value


def _is_from_elsewhere(value: Any, module: ModuleType, own: Mapping[str, ModuleType]) -> bool:
    """Whether it is a function that the program, or the text of a library, defines outside of this module."""
    if type(value) is not FunctionType or value.__globals__ is vars(module):
        return False
    defined_in = value.__globals__.get("__name__")
    is_text = value.__module__ == defined_in and "<locals>" not in value.__qualname__
    return is_text or defined_in in own or defined_in == "__main__"


def _is_named(cls: Any, module: ModuleType, name: str) -> bool:
    return isinstance(cls, type) and (cls.__module__, cls.__qualname__) == (module.__name__, name)


def _is_descriptor(value: Any) -> bool:
    """Whether a class has made it of what its body says, as of the fields of a NamedTuple."""
    return hasattr(type(value), "__get__")


def _is_data(value: Any) -> bool:
    try:
        state_of(value, is_own_class, contents=False)
    except NotComparable:
        return False
    return True


def _is_compared(value: Any, calls: bool) -> bool:
    """Whether a rank can tell that its own is another one. A name or a flag that a call gave may be the rank's."""
    if calls and isinstance(value, (bool, str, bytes, PurePath, type(None))):
        return False
    if type(value) is FunctionType and not calls:
        return True
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes <= MAX_BYTES and _is_data(value)
    is_large = isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > _MAX_ITEMS
    return not is_large and _is_data(value)


def are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(state_of(one, is_own_class) == state_of(other, is_own_class))
    except NotComparable:
        return False


class _Package(NamedTuple):
    """What a module of an installed package held when it was searched."""

    owners: list[Any]
    """The module and its classes."""
    held: list[Any]
    found: list[Change]


_searched: dict[str, _Package] = {}


def _in_packages(own: Mapping[str, ModuleType]) -> Iterator[Change]:
    """Functions and classes of the program in the place of those of an installed package, such as an activation of
    `torch.nn.functional`. A module that holds what it held is not searched again."""
    program = {"__main__", *own}
    globals_ = {id(vars(module)) for name, module in [*sys.modules.items()] if name in program}
    for name, module in [*sys.modules.items()]:
        if not isinstance(module, ModuleType) or not _is_installed(str(vars(module).get("__file__"))):
            continue
        last = _searched.get(name)
        if last is not None and last.owners[0] is module:
            held = _held_by(last.owners)
            if len(held) == len(last.held) and all(map(operator.is_, held, last.held)):
                yield from last.found
                continue
        owners, found = [module], [*_placed(name, "", module, globals_)]
        for key, cls in [*vars(module).items()]:
            if not issubclass(type(cls), type):
                continue
            if cls.__module__ == name:
                owners.append(cls)
                found += _placed(name, key, cls, globals_)
            elif cls.__module__ in program:
                found.append(Change(name, "", key, cls))
        _searched[name] = _Package(owners, _held_by(owners), found)
        yield from found


def _placed(module: str, name: str, owner: Any, globals_: set[int]) -> Iterator[Change]:
    """The functions in a module or class that have one of these dicts for their globals."""
    for key, value in [*vars(owner).items()]:
        if type(value) is FunctionType and id(value.__globals__) in globals_:
            yield Change(module, name, key, value)


def _held_by(owners: list[Any]) -> list[Any]:
    return [*itertools.chain.from_iterable(map(operator.methodcaller("values"), map(vars, owners)))]


def _sendable(found: list[Change]) -> list[Change]:
    """What of the changes of a module ranks get: all, or nothing if it has been filled with what only this process can
    hold, such as a connection."""
    sent, kept = [], []
    for change in found:
        value = change.value
        if type(value) is FunctionType and f"{value.__module__}.{value.__qualname__}" == change.path:
            change = change._replace(value=_renamed(value))  # by its name a rank would find what it replaces
        is_data = change.file is None and not change.added and not isinstance(value, (FunctionType, type))
        try:
            dumps(change.value, [])
        except Exception as error:
            if is_data:  # as the file has computed it, for all that is known
                continue
            if not isinstance(error, TypeError):
                raise
            if change.file is not None and not change.file.value:  # a cache, which each process fills for itself
                kept.append(change)
                continue
            raise TypeError(
                f"{change.path} was replaced since its file was imported, and ranks import the file again, but what is "
                f"there now cannot be sent to them ({error}); write it in the file"
            ) from error
        sent.append(change)
    decided = [change for change in sent if change.file is not None or change.added]
    if kept and decided:
        _log.warning(
            "ranks import %s as its file says, without the changes to %s, because %s cannot be sent to them; set what "
            "ranks need in a hook, such as setup()",
            kept[0].module,
            ", ".join(change.path for change in decided),
            ", ".join(change.path for change in kept),
        )
    return [] if kept else sent


def _renamed(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    copy.__dict__.update(vars(function))
    copy.__qualname__ = f"{function.__qualname__}.<locals>.{function.__name__}"
    return copy
