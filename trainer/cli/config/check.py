"""Checking a config against the signatures that it configures."""

from __future__ import annotations

import collections.abc
import datetime
import importlib
import inspect
import re
import types
import typing
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep._lazy import without_collector
from lockstep.strategies.base import Strategy
from lockstep.trainer.cli.config.signatures import BASES, arguments_of, describe, is_slot, trainer_arguments
from lockstep.trainer.cli.errors import ConfigError, Key, Resolved, bounded, first_line
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.lightning_names import ARGUMENTS, missing, nearest
from lockstep.trainer.module import Module
from lockstep.trainer.trainer import Trainer


@dataclass(frozen=True)
class Call:
    """A class to be called with arguments once everything has been checked."""

    target: Any
    arguments: dict[str, Any]
    as_factory: bool = False


@dataclass(frozen=True)
class Calls:
    trainer: Call
    module: Call
    data: Call | None
    ckpt_path: str | None
    seed: int | None


class _Mismatch(Exception):
    """A value that does not fit an annotation."""


def check(resolved: Resolved) -> None:
    """Raise ConfigError unless every key fits the signature that it configures. Imports the classes named."""
    checked_calls(resolved)


@bounded
def checked_calls(resolved: Resolved) -> Calls:
    values = resolved.values
    if not values.get("module"):
        raise ConfigError("module: missing; name the class to train, such as module.class=examples.digits.Digits")
    for name in ("trainer", "module", "data", "vars"):
        if not isinstance(values.get(name) or {}, dict):
            raise resolved.error((name,), f"must be a mapping of arguments, but it is {values[name]!r}")
    for name in ("ckpt_path", "output"):
        if not isinstance(values.get(name), str | None):
            raise resolved.error((name,), f"must be a string or null, but it is {values[name]!r}")
    settings = values.get("trainer") or {}
    return Calls(
        trainer=Call(
            Trainer, fit_arguments(resolved, ("trainer",), "Trainer", settings, trainer_arguments(), open_ended=False)
        ),
        module=check_class(resolved, ("module",), values["module"], Module),
        data=check_class(resolved, ("data",), values["data"], DataModule) if values.get("data") else None,
        ckpt_path=values.get("ckpt_path"),
        seed=settings.get("seed"),
    )


def check_class(
    resolved: Resolved, key: Key, given: dict[str, Any] | str, base: type, as_factory: bool = False
) -> Call:
    """Find the class that `given` names, a subclass of `base`, and check its arguments."""
    given = {"class": given} if isinstance(given, str) else given
    if "class" not in given:
        if "class_path" in given:
            raise resolved.error((*key, "class_path"), "is LightningCLI's; write class, with the arguments beside it")
        raise resolved.error((*key, "class"), f"missing; name a subclass of {base.__name__} by its import path")
    target = _import(resolved, (*key, "class"), given["class"], base)
    arguments, open_ended = arguments_of(target, base)
    if as_factory:  # whoever calls the factory gives the first argument: parameters or optimizer
        arguments.pop(next(iter(arguments), ""), None)
    values = {name: value for name, value in given.items() if name != "class"}
    return Call(target, fit_arguments(resolved, key, target.__name__, values, arguments, open_ended), as_factory)


def _import(resolved: Resolved, key: Key, path: Any, base: type) -> type:
    package = next(package for known, package in BASES.items() if issubclass(base, known))
    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", path):
        raise resolved.error(key, f"must be an import path such as package.file.Class, but it is {path!r}")
    module_name, _, name = path.rpartition(".")
    module_name = module_name or package or ""
    if not module_name:
        raise resolved.error(key, f"'{path}' is not an import path; write package.file.{path}")
    try:
        with without_collector():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that ends itself would end the command as if it were done
        raise resolved.error(
            key, f"cannot import {module_name}: {type(error).__name__}: {first_line(error)}{_raised_at(error)}"
        ) from error
    target = getattr(module, name, None)
    if target is None:
        found = {name: getattr(module, name, None) for name in dir(module)}
        classes = [n for n, value in found.items() if isinstance(value, type) and issubclass(value, base)]
        raise resolved.error(key, f"{module_name} has no class '{name}'{nearest(name, classes)}")
    if not isinstance(target, type) or not issubclass(target, base):
        raise resolved.error(key, f"{path} is not a subclass of {base.__name__}, which is required here")
    if inspect.isabstract(target):
        raise resolved.error(key, f"{path} is abstract; name a subclass of it")
    return target


def _raised_at(error: BaseException) -> str:
    """The file and line at which an import failed, unless the message has them or no file was reached."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    file = traceback.tb_frame.f_code.co_filename if traceback else ""
    return (
        ""
        if traceback is None or file.startswith("<frozen") or isinstance(error, SyntaxError)
        else f" ({file}, line {traceback.tb_lineno})"
    )


def fit_arguments(
    resolved: Resolved,
    key: Key,
    owner: str,
    values: dict[str, Any],
    arguments: dict[str, tuple[inspect.Parameter, Any]],
    open_ended: bool,
) -> dict[str, Any]:
    planned = {}
    for name, value in values.items():
        if name not in arguments:
            if not open_ended:
                said = missing(f"{owner} has no argument", name, ARGUMENTS if owner == "Trainer" else {}, arguments)
                if ";" not in said and 0 < len(arguments) <= 12:
                    said += f"; it takes {', '.join(arguments)}"
                raise resolved.error((*key, name), said)
            planned[name] = value
            continue
        annotation = arguments[name][1]
        try:
            planned[name] = _fit(resolved, (*key, name), value, annotation)
        except _Mismatch:
            raise resolved.error(
                (*key, name),
                f"must be {describe(annotation).rstrip(',')}, but it is {value!r}"
                + resolved.from_environment((*key, name)),
            ) from None
    for name, (parameter, annotation) in arguments.items():
        if parameter.default is parameter.empty and name not in planned:
            raise resolved.error((*key, name), f"missing; {owner} needs it ({describe(annotation)})")
    return planned


def _fit(resolved: Resolved, key: Key, value: Any, annotation: Any) -> Any:
    """`value` as an argument annotated with `annotation`, with classes as `Call`. Raises _Mismatch or ConfigError."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, typing.TypeVar | str):
        return value
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            try:
                return _fit(resolved, key, value, part)
            except _Mismatch:
                continue
        raise _Mismatch
    if origin is typing.Annotated:
        return _fit(resolved, key, value, parts[0])
    if origin is Literal:
        return _accept(value, any(value == part and type(value) is type(part) for part in parts))
    if origin is collections.abc.Callable:
        made = parts[-1] if parts else object
        if is_slot(made) and isinstance(value, dict | str):
            return check_class(resolved, key, value, typing.get_origin(made) or made, as_factory=True)
        raise _Mismatch
    kind = origin or annotation
    if is_slot(kind):
        # A bare name stands for a class without arguments, except where the name is the strategy's own business.
        if isinstance(value, dict) or (isinstance(value, str) and not issubclass(kind, Strategy)):
            return check_class(resolved, key, value, kind)
        raise _Mismatch
    if kind is None:
        return _accept(value, value is None)
    if not isinstance(kind, type) or kind is object:
        return value
    if kind in (bool, str, types.NoneType):
        return _accept(value, isinstance(value, kind))
    if kind in (int, float):
        return _accept(value, isinstance(value, (int, kind)) and not isinstance(value, bool))
    return _fit_class(resolved, key, value, kind, parts)


def _fit_class(resolved: Resolved, key: Key, value: Any, kind: type, parts: tuple[Any, ...]) -> Any:
    """`_fit` for a class that takes the value as an argument, an element or itself; `parts` are its type arguments."""
    if kind is datetime.timedelta and isinstance(value, dict):
        return Call(kind, fit_arguments(resolved, key, "timedelta", value, _TIMEDELTA, open_ended=False))
    if issubclass(Path, kind) and isinstance(value, str):
        return Path(value)
    if is_dataclass(kind) and isinstance(value, dict):
        arguments, open_ended = arguments_of(kind, object)
        return Call(kind, fit_arguments(resolved, key, kind.__name__, value, arguments, open_ended))
    if issubclass(kind, tuple) and isinstance(value, list):
        each = parts[:1] * len(value) if len(parts) == 2 and parts[1] is ... else parts or (Any,) * len(value)
        _accept(value, len(each) == len(value))
        return tuple(
            _fit(resolved, (*key, str(i)), v, part) for i, (v, part) in enumerate(zip(value, each, strict=True))
        )
    if isinstance(value, list) and issubclass(list, kind):
        return [_fit(resolved, (*key, str(i)), v, parts[0] if parts else Any) for i, v in enumerate(value)]
    if isinstance(value, list) and issubclass(kind, set | frozenset):
        return kind(value)
    if isinstance(value, dict) and issubclass(dict, kind):
        return {
            name: _fit(resolved, (*key, name), v, parts[1] if len(parts) == 2 else Any) for name, v in value.items()
        }
    try:
        return _accept(
            value, isinstance(value, kind) and kind not in (collections.abc.Sequence, collections.abc.Iterable)
        )
    except TypeError:  # a Protocol that cannot be asked
        return value


_TIMEDELTA = {
    name: (inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=0), float)
    for name in ("weeks", "days", "hours", "minutes", "seconds", "milliseconds")
}


def _accept(value: Any, fits: bool) -> Any:
    if not fits:
        raise _Mismatch
    return value
