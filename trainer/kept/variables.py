"""What functions of the user's name outside of themselves: variables that they close over, globals of the program,
default arguments and attributes of functions and classes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum, EnumMeta
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.strategies.launch.program.changes import is_own_class, is_own_name
from lockstep.strategies.launch.program.functions import codes_of, variables_of
from lockstep.strategies.launch.program.source import is_of_process
from lockstep.strategies.modules.parameter_hooks import OF_MODULE
from lockstep.trainer.kept.fields import dict_of, fields
from lockstep.trainer.kept.opaque import fingerprint
from lockstep.trainer.kept.owners import MANY, items
from lockstep.trainer.kept.values import MOST_ITEMS, Mark, is_same, is_savable, mark_of

_CACHED = type(functools.lru_cache(len))
_CODE = (FunctionType, MethodType, functools.partial, staticmethod, classmethod, property, _CACHED)
_HELD_OTHERWISE = (nn.Module, DataLoader, Dataset, Sampler)
MISSING: Any = object()


class Variable(NamedTuple):
    """Where a value is: a global, a variable of a closure or of a context, an attribute of a class, of a member of an
    enumeration or of a function, a default argument."""

    owner: Any
    key: Any

    def read(self) -> Any:
        """`MISSING` if nothing is there."""
        if isinstance(self.owner, type | Enum):
            return vars(self.owner).get(self.key, MISSING)
        if isinstance(self.owner, ContextVar):
            return self.owner.get(MISSING)
        if isinstance(self.owner, dict):
            return self.owner.get(self.key, MISSING)
        try:
            return self.owner[self.key] if isinstance(self.owner, tuple) else self.owner.cell_contents
        except ValueError:  # a variable that has no value
            return MISSING

    def write(self, value: Any) -> None:
        if isinstance(self.owner, type):
            type.__setattr__(self.owner, self.key, value)
        elif isinstance(self.owner, Enum):
            vars(self.owner)[self.key] = value
        elif isinstance(self.owner, ContextVar):
            self.owner.set(value)
        elif isinstance(self.owner, dict):
            self.owner[self.key] = value
        elif not isinstance(self.owner, tuple):  # of default arguments only the content can change
            self.owner.cell_contents = value


def variables(owners: Mapping[str, Any]) -> tuple[dict[str, Variable], dict[str, Any], dict[str, FunctionType]]:
    """By name those of the methods of these objects, of the functions that they hold, and of hooks of layers, and the
    program's classes, members of enumerations and functions that these name; in the same order and with the same names
    in any process that holds the same."""
    search = _Search()
    for path, owner in owners.items():
        search.held_by(owner, path)
    return search.found, search.classes, search.functions


class Watched:
    """Variables of functions that these objects lead to, to name those that a run has changed."""

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._names = {id(each): name for name, each in owners.items()}
        self._owners = [*owners.values()]  # which keep their ids
        found, classes, _ = variables(owners)
        self._before = {name: (each, self._mark(each)) for name, each in found.items()}
        self._had = {name: (each, {*vars(each)}) for name, each in classes.items()}

    def changed(self) -> list[str]:
        made = [(name, of, key) for name, (of, had) in self._had.items() for key in sorted({*vars(of)} - had)]
        changed = [name for name, (each, mark) in self._before.items() if not is_same(mark, self._mark(each))]
        return changed + [f"{name}.{key}" for name, of, key in made if _is_theirs(of, key)]

    def _mark(self, variable: Variable) -> Mark:
        value = variable.read()
        mark = mark_of(value, MOST_ITEMS)
        made = None if is_savable(mark) else fingerprint(value, self._names, samples=True)
        return mark if made is None else (None, made)


class _Search:
    """Goes to each function and class of the program once."""

    def __init__(self) -> None:
        self.found: dict[str, Variable] = {}
        self.classes: dict[str, Any] = {}
        """With members of enumerations."""
        self.functions: dict[str, FunctionType] = {}
        self._seen = set[int]()
        self._places = set[tuple[int, Any]]()
        self._is_own = functools.cache(is_own_name)

    def held_by(self, owner: Any, path: str) -> None:
        self._class(type(owner))
        for name, value in sorted(fields(owner).items(), key=lambda item: str(item[0])):
            if callable(value) and not isinstance(value, nn.Module):
                self._variable(Variable(dict_of(owner), name), f"{path}.{name}")
            for place, part in items(value) if type(value) in (list, tuple, dict) and len(value) <= MANY else ():
                self._held(part, f"{path}.{name}.{place}")
            self._held(value, f"{path}.{name}")
        for name in OF_MODULE if isinstance(owner, nn.Module) else ():
            for i, hook in enumerate(dict_of(owner).get(name, {}).values()):
                self._code(hook, f"{path}.{name}.{i}")

    def _held(self, value: Any, path: str) -> None:
        """The class of what an object holds, and the functions that are it or that it was given."""
        self._class(type(value))
        if isinstance(value, defaultdict):
            self._code(value.default_factory, f"{path}.default_factory")
        elif isinstance(value, _CODE):
            self._code(value, path)

    def _class(self, of: type) -> None:
        for kind in of.__mro__:
            if id(kind) in self._seen or not is_own_class(kind):
                continue
            self._seen.add(id(kind))
            path = f"{kind.__module__}.{kind.__qualname__}"
            while path in self.classes:  # as of two that a function has made
                path += "'"
            self._attributes(kind, path)
            members: dict[str, Any] = {**kind.__members__} if isinstance(kind, EnumMeta) else {}
            for name, member in members.items():
                if member.name == name:  # not another name of it
                    self._attributes(member, f"{path}.{name}")

    def _attributes(self, owner: Any, path: str) -> None:
        """Those of a class, or of a member of an enumeration."""
        self.classes[path] = owner
        for name, value in sorted(vars(owner).items()):
            if isinstance(value, _CODE):
                self._code(value, f"{path}.{name}")
            elif _is_theirs(owner, name):
                self._variable(Variable(owner, name), f"{path}.{name}")

    def _variable(self, variable: Variable, path: str) -> None:
        if isinstance(value := variable.read(), ContextVar):
            variable = Variable(value, "")
            value = variable.read()
        place = id(variable.owner), variable.key
        if isinstance(value, (*_CODE, type)):
            self._code(value, path)
        elif place not in self._places and not isinstance(value, (ModuleType, *_HELD_OTHERWISE)):
            self._places.add(place)
            while path in self.found:
                path += "'"
            self.found[path] = variable
            self._class(type(value))

    def _code(self, value: Any, path: str) -> None:
        if isinstance(value, functools.partial):
            self._code(value.func, f"{path}.func")
            for i in range(len(value.args)):
                self._variable(Variable(value.args, i), f"{path}.{i}")
            for name in sorted(value.keywords):
                self._variable(Variable(value.keywords, name), f"{path}.{name}")
        elif isinstance(value, MethodType):
            self._code(value.__func__, path)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self._code(part, path)
        elif isinstance(value, (staticmethod, classmethod)):
            self._code(value.__func__, path)
        elif isinstance(value, _CACHED):
            self._code(value.__wrapped__, path)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, FunctionType) and id(value) not in self._seen:
            self._seen.add(id(value))
            if self._is_own(str(value.__globals__.get("__name__"))):
                while path in self.functions:
                    path += "'"
                self.functions[path] = value
                self._function(value, path)

    def _function(self, function: FunctionType, path: str) -> None:
        for name, cell, _ in variables_of(function):
            self._variable(Variable(cell, ""), f"{path}.{name}")
        names = sorted({name for code in codes_of(function) for name in code.co_names if name.isidentifier()})
        for owner in (function.__globals__, *self._imported(function.__globals__, names)):
            module = owner.get("__name__")
            for name in names:
                if name in owner and not name.startswith("__") and not is_of_process(name, owner[name]):
                    self._variable(Variable(owner, name), f"{module}.{name}")
        for i in range(len(function.__defaults__ or ())):
            self._variable(Variable(function.__defaults__, i), f"{path}.defaults.{i}")
        for held in (function.__kwdefaults__ or {}, vars(function)):
            for name in sorted(map(str, held)):
                self._variable(Variable(held, name), f"{path}.{name}")
        self._code(vars(function).get("__wrapped__"), path)

    def _imported(self, of: Mapping[str, Any], names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The globals of modules of the program that a function may name."""
        modules = [of[name] for name in names if isinstance(of.get(name), ModuleType)]
        for module in modules:  # grows by modules within packages
            if self._is_own(module.__name__):
                yield vars(module)
                inner = [vars(module).get(name) for name in names]
                modules += (each for each in inner if isinstance(each, ModuleType) and each not in modules)


def _is_theirs(owner: Any, name: str) -> bool:
    """Whether the user's code may have set an attribute of a class, or of a member of an enumeration, of that name."""
    if isinstance(owner, Enum) and isinstance(getattr(type(owner), name, None), functools.cached_property):
        return False  # it is made when it is first read
    if isinstance(owner, Enum | EnumMeta):
        return name == "_value_" or not (name.startswith("_") and name.endswith("_"))
    return not name.startswith("__")
