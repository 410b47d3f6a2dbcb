"""Signatures: which arguments a class takes, with their annotations, and how an annotation reads."""

from __future__ import annotations

import collections.abc
import datetime
import functools
import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from lockstep.callbacks.base import Callback
from lockstep.strategies.base import Strategy
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.module import Module
from lockstep.trainer.trainer import Trainer

BASES: dict[type, str | None] = {
    Module: None,
    DataModule: None,
    Callback: "lockstep.callbacks",
    Strategy: "lockstep.strategies",
    Optimizer: "torch.optim",
    LRScheduler: "torch.optim.lr_scheduler",
    Dataset: None,
}
"""What a config may name a class of, and the package in which a name without a dot is looked up."""


@functools.cache
def trainer_arguments() -> dict[str, tuple[inspect.Parameter, Any]]:
    return arguments_of(Trainer, object)[0]


def arguments_of(target: type, base: type) -> tuple[dict[str, tuple[inspect.Parameter, Any]], bool]:
    """The arguments of `target` with their annotations, and whether it takes any other as well.

    `**kwargs` of an `__init__` stands for the arguments of the next one up to `base`.
    """
    arguments: dict[str, tuple[inspect.Parameter, Any]] = {}
    open_ended = seen = False
    for owner in target.__mro__:
        if owner is object or (owner is base and seen):
            break
        if "__init__" not in vars(owner):
            continue
        seen = True
        init = inspect.unwrap(vars(owner)["__init__"])
        try:
            parameters = list(inspect.signature(init).parameters.values())[1:]
        except ValueError:  # written in C without a signature
            return arguments, True
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                arguments.setdefault(
                    parameter.name, (parameter, _annotation(parameter, getattr(init, "__globals__", {})))
                )
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not open_ended:
            break
    return arguments, open_ended


def _annotation(parameter: inspect.Parameter, scope: dict[str, Any]) -> Any:
    """The annotation as an object; Any where it is missing or names what is known only to type checkers."""
    if parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    try:
        return eval(parameter.annotation, scope)
    except Exception:
        return Any


def is_slot(annotation: Any) -> bool:
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, tuple(BASES))


def describe(annotation: Any) -> str:
    """An annotation in words, for "must be ...": "an integer or null"."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(describe(part) for part in parts))
        return (
            " or ".join(words) if len(words) < 3 else f"{', '.join(w.rstrip(',') for w in words[:-1])} or {words[-1]}"
        )
    if origin is typing.Annotated:
        return describe(parts[0])
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is collections.abc.Callable:
        return (
            f"a mapping with the class of a {parts[-1].__name__}"
            if parts and is_slot(parts[-1])
            else "a callable, which a config cannot contain"
        )
    kind = origin or annotation
    if is_slot(kind):
        return f"a mapping with the class of a {kind.__name__}"
    scalars: dict[Any, str] = {
        int: "an integer", float: "a number", bool: "true or false", str: "a string",
        types.NoneType: "null", None: "null", dict: "a mapping",
        datetime.timedelta: "a mapping such as {minutes: 5}", Any: "any value",
    }  # fmt: skip
    if kind in scalars:
        return scalars[kind]
    if (
        isinstance(kind, type)
        and kind is not str
        and (issubclass(kind, list | tuple | set) or kind in (collections.abc.Sequence, collections.abc.Iterable))
    ):
        return (
            f"a list, each {describe(parts[0])},"
            if len(parts) == 1 or parts[1:] == (...,)
            else f"a list of {len(parts)} values"
            if parts
            else "a list"
        )
    if isinstance(kind, type) and issubclass(Path, kind):
        return "a path"
    return f"a {getattr(kind, '__name__', kind)}"
