"""Which attributes methods read before they set them, and what functions name and set."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from itertools import chain, pairwise
from types import CodeType, FunctionType
from typing import Any

from lockstep.strategies.launch.program.functions import OTHERS

_LOADS = ("LOAD_FAST", "LOAD_DEREF")
_COPIES = ("COPY", "DUP_TOP")
_CHANGES = ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF")
_READING = ("__getitem__", "__getitems__", "__call__", "__iter__", "__next__", "forward")
"""Methods by which others read a dataset, or call a transform."""
_IS_NONE = (["LOAD_CONST", "IS_OP"], ["LOAD_CONST", "COMPARE_OP"])


@functools.lru_cache(1000)  # a model has many layers of one class
def read_first(kind: type, methods: tuple[str, ...], in_order: bool = True) -> frozenset[str]:
    """The attributes of an object of class `kind` that one of its `methods`, with those that it calls on the object,
    reads where no line above sets them, as `self.mean = 0.9 * self.mean + …` does.

    Without `in_order` nobody knows which of the methods is called before which: then one does not count that only
    others set, such as a loss that `forward` leaves for the caller. `if self.mean is None` does not count. What
    functions do that the object is given to is not seen.
    """
    found = list[dict[str, list[bool]]]()
    for method in methods:
        found.append({})
        _follow(kind, method, found[-1], set())
    left = set() if in_order else {name for uses in found for name, reads in uses.items() if not all(reads)}
    return frozenset(
        name for uses in found for name, reads in uses.items() if reads[0] and (name not in left or not all(reads))
    )


def _follow(kind: type, method: str, found: dict[str, list[bool]], called: set[str]) -> None:
    """Note for each attribute of each use in `method` whether it reads it."""
    function = _function(kind, method)
    if function is None or method in called or not function.__code__.co_argcount:
        return
    called.add(method)
    for name, is_read in _uses(function.__code__, function.__code__.co_varnames[0]):
        if _function(kind, name) is None:
            found.setdefault(name, []).append(is_read)
        else:
            _follow(kind, name, found, called)


def _function(kind: type, name: str) -> FunctionType | None:
    """What a method or a property of the user's runs."""
    member: Any = inspect.getattr_static(kind, name, None)
    member = member.fget if isinstance(member, property) else getattr(member, "__wrapped__", member)
    is_users = isinstance(member, FunctionType) and str(member.__module__).partition(".")[0] not in OTHERS
    return member if is_users else None


def _uses(code: CodeType, own: str) -> Iterator[tuple[str, bool]]:
    """Each use of an attribute of the variable `own`, in the order of the code: its name, and whether it is read."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _COPIES]
    for at, (step, then) in enumerate(pairwise(steps)):
        loads = any(load in step.opname for load in _LOADS)  # also at the end of a store in one with it
        held = step.argval[-1] if loads and isinstance(step.argval, tuple) else step.argval  # of two loads in one
        if not loads or held != own:
            continue
        after = [each.opname for each in steps[at + 2 : at + 4]]
        if then.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if after not in _IS_NONE and not after[0].endswith("NONE"):
                yield then.argval, True
        elif then.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield then.argval, False
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and own in inner.co_freevars:
            yield from _uses(inner, own)


@functools.cache
def is_carried(kind: type, name: str) -> bool:
    """Whether methods of a class read an attribute before they set it, so that what one call has left the next one may
    use; so they may with one that only others set."""
    codes = _codes_of(kind)
    if not any(name in _set_by(code) for code in codes.values()):
        return True
    called = {each for code in codes.values() for each in names_in(code)[0]}
    first = [key for key in codes if key in _READING or (not key.startswith("__") and key not in called)]
    return name in read_first(kind, tuple(sorted(first)))


@functools.cache
def is_set_by_reading(kind: type, name: str) -> bool:
    """Whether a method by which others read a dataset or call a transform, or one of its class that this may call, sets
    an attribute. Of a class without such methods any."""
    codes = _codes_of(kind)
    found = [key for key in _READING if key in codes] or [key for key in codes if key != "__init__"]
    for key in found:  # grows
        found += (each for each in names_in(codes[key])[0] & codes.keys() if each not in found)
    return any(name in _set_by(codes[key]) for key in found)


def _codes_of(kind: type) -> dict[str, CodeType]:
    """The methods of a class by name."""
    members = {key: value for base in reversed(kind.__mro__) for key, value in vars(base).items()}
    functions = {key: value.fget if isinstance(value, property) else value for key, value in members.items()}
    return {key: value.__code__ for key, value in functions.items() if isinstance(value, FunctionType)}


def _set_by(code: CodeType) -> set[str]:
    """The attributes that a function sets, of whatever object."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    return own.union(*map(_set_by, inner))


@functools.lru_cache(4096)
def names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """What a function names of globals and attributes, and the variables outside of it that it sets."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    changed = {each.argval for each in dis.get_instructions(code) if each.opname in _CHANGES}
    named = chain(code.co_names, *(names for names, _ in inner))
    return frozenset(named), frozenset(changed.union(*(names for _, names in inner)))
