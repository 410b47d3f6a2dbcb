"""Configuration: YAML files and `key=value` overrides, checked against the signatures that they configure.

    module:                              # required: a Module
      class: examples.digits.Digits      # an import path; every other key is an argument of the class
      width: 64
    data: {class: examples.digits.DigitsData, batch_size: 32}
    trainer:                             # the Trainer's arguments
      max_epochs: 5
      strategy: {class: DDP, static_graph: true}
      callbacks: [{class: LRWarmup, steps: 100}]
    optimizer: {class: AdamW, lr: 1e-3}  # short for module.optimizer; lr_scheduler likewise
    ckpt_path: auto
    seed: 0                              # at the top level every Trainer argument is short for trainer.<name>

Files are merged in order, then overrides in order. A mapping that names another `class` replaces the one
before, since the arguments of one class mean nothing to another; other mappings merge, lists replace.
`${trainer.seed}` and `${oc.env:HOME}` are omegaconf's interpolations.

A class can be named only where the signature asks for a Module, DataModule, Callback, Strategy, Dataset,
or, as `Callable[..., Optimizer]`, for a factory of optimizers or LR schedulers; it must be a subclass.
Callbacks, strategies, optimizers and schedulers also go by their short names.
"""

from __future__ import annotations

import collections.abc
import datetime
import difflib
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from lockstep.callbacks.base import Callback
from lockstep.strategies.base import Strategy
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.module import Module
from lockstep.trainer.seeding import seed_everything
from lockstep.trainer.trainer import Trainer

Key = tuple[str, ...]
P = ParamSpec("P")
T = TypeVar("T")

SHORT_FOR_MODULE = ("optimizer", "lr_scheduler")
"""Top-level sections that are arguments of the module."""

SECTIONS = ("module", "data", "trainer", "ckpt_path", "output", *SHORT_FOR_MODULE)

BASES: dict[type, str | None] = {
    Module: None,
    DataModule: None,
    Callback: "callbacks",
    Strategy: "strategies",
    Optimizer: "torch.optim",
    LRScheduler: "torch.optim.lr_scheduler",
    Dataset: None,
}
"""What a config may name a class of, and the package in which a name without a dot is looked up."""


class ConfigError(ValueError):
    """A config that cannot be run; the message is one line with the key and where it was set."""


@dataclass(frozen=True)
class Resolved:
    """A merged config: plain dicts, lists and scalars, without interpolations."""

    values: dict[str, Any]
    origins: dict[Key, str]
    """Where a key was set: "file.yaml:3" or "command line"."""

    @property
    def text(self) -> str:
        """The config as YAML."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(self.values))

    def error(self, key: Key, message: str) -> ConfigError:
        """The error of `key`, with where the key or the nearest section around it was set."""
        origin = next((self.origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.origins), None)
        return _error(key, origin, message)


class Run(NamedTuple):
    """What a config describes."""

    trainer: Trainer
    module: Module
    datamodule: DataModule | None
    ckpt_path: str | None


def _bounded(fn: Callable[P, T]) -> Callable[P, T]:
    """`fn` with a ConfigError in place of the RecursionError of a config that is nested too deeply."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except RecursionError:
            raise ConfigError(
                "the config is nested too deeply to be read; flatten it, or look for an anchor or interpolation that refers to itself"
            ) from None

    return call


@_bounded
def resolve(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Resolved:
    """Merge YAML files, then `key=value` overrides, in order. Raises ConfigError; imports no class."""
    values: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    for file in files:
        tree, lines = _read(Path(file))
        tree, lines = _canonical(tree, lines)
        values = _merge(values, tree)
        origins |= lines
    for override in overrides:
        key, value = _parse_override(override)
        _check_top_level(key[0], "command line")
        key = _prefix(key[0]) + key
        _assign(values, key, value, "command line")
        origins = {known: origin for known, origin in origins.items() if known[: len(key)] != key} | {
            key: "command line"
        }
    return Resolved(_interpolate(Resolved(values, origins)), origins)


def check(resolved: Resolved) -> None:
    """Raise ConfigError unless every key fits the signature that it configures. Imports the classes named."""
    _plan_run(resolved)


def build(resolved: Resolved) -> Run:
    """Check everything, then make Trainer, module and datamodule, in this order; the weights follow `trainer.seed`."""
    plan = _plan_run(resolved)
    trainer = _make(plan.trainer)
    trainer.config = resolved.text
    if plan.seed is not None:
        seed_everything(plan.seed)
    return Run(trainer, _make(plan.module), _make(plan.data), plan.ckpt_path)


# ---- files and overrides -----------------------------------------------------------------------------


def _read(file: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """The file's tree and, for every key, "file:line"."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = file.read_text(encoding="utf-8")
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text.strip() else {}
        lines = dict(_lines(yaml.compose(text), (), str(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file '{file}': {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{file}: a config is a mapping of sections ({', '.join(SECTIONS)}), not a {type(tree).__name__}"
        )
    return _string_keys(tree), lines


def _lines(node: Any, key: Key, file: str) -> collections.abc.Iterator[tuple[Key, str]]:
    if node is None:
        return
    children = [(name.value, name, child) for name, child in node.value] if node.id == "mapping" else []
    children += [(str(i), child, child) for i, child in enumerate(node.value)] if node.id == "sequence" else []
    for name, at, child in children:
        yield (*key, name), f"{file}:{at.start_mark.line + 1}"
        yield from _lines(child, (*key, name), file)


def _string_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(name): _string_keys(value) for name, value in tree.items()}
    return [_string_keys(value) for value in tree] if isinstance(tree, list) else tree


def _canonical(tree: dict[str, Any], lines: dict[Key, str]) -> tuple[dict[str, Any], dict[Key, str]]:
    """Move the short spellings of the top level to where they belong."""
    result: dict[str, Any] = {}
    for name in sorted(tree, key=lambda name: bool(_prefix(name))):
        origin, section = lines[(name,)], _prefix(name)
        _check_top_level(name, origin)
        if name in ("module", "data") and isinstance(tree[name], str):
            result[name] = {"class": tree[name]}
        elif not section:
            result[name] = tree[name]
        elif isinstance(given := result.get(section[0]), dict) and name in given:
            raise _error(
                (name,),
                origin,
                f"is short for {section[0]}.{name}, which the same file sets as well ({lines[(*section, name)]}); keep one of them",
            )
        else:
            _assign(result, (*section, name), tree[name], origin)
    return result, {_prefix(key[0]) + key: origin for key, origin in lines.items()}


def _prefix(name: str) -> Key:
    """The section that a top-level `name` is short for, or ()."""
    if name in SHORT_FOR_MODULE:
        return ("module",)
    return ("trainer",) if name in _trainer_arguments() and name not in SECTIONS else ()


def _check_top_level(name: str, origin: str) -> None:
    known = [*SECTIONS, *_trainer_arguments()]
    if name not in known:
        raise _error(
            (name,),
            origin,
            f"no such key{_nearest(name, known)}; sections are {', '.join(SECTIONS)}, or any argument of the Trainer",
        )


@functools.cache
def _trainer_arguments() -> dict[str, tuple[inspect.Parameter, Any]]:
    return _arguments(Trainer, object)[0]


def _parse_override(text: str) -> tuple[Key, Any]:
    import yaml
    from omegaconf import OmegaConf

    name, equals, value = text.partition("=")
    name = re.sub(r"\[(\d+)\]", r".\1", name)
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[^.\s]+)*", name):
        raise ConfigError(f"'{text}' (command line): an override is key=value, such as trainer.max_epochs=3")
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except yaml.YAMLError as error:
        raise _error(
            tuple(name.split(".")),
            "command line",
            f"'{value}' is not valid YAML: {getattr(error, 'problem', None) or error}",
        ) from error
    return tuple(name.split(".")), _string_keys(tree)["value"]


def _merge(old: Any, new: Any) -> Any:
    """`new` laid over `old`; see the module's docstring."""
    if not (isinstance(old, dict) and isinstance(new, dict)) or new.get("class", old.get("class")) != old.get("class"):
        return new
    return {**old, **{name: _merge(old[name], value) if name in old else value for name, value in new.items()}}


def _assign(tree: dict[str, Any], key: Key, value: Any, origin: str) -> None:
    """Set one key in place, as an override does; sections on the way come into being, list elements do not."""
    node: Any = tree
    for depth, name in enumerate(key):
        last = depth == len(key) - 1
        here = key[: depth + 1]
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                raise _error(here, origin, f"the list has {len(node)} elements; name one by its number, from 0")
            index: Any = int(name)
        elif isinstance(node, dict):
            index = name
            if not last and node.get(index) is None:
                node[index] = {}
        else:
            raise _error(here, origin, f"{'.'.join(key[:depth])} is {node!r}, which has no keys")
        if last:
            node[index] = _merge(node.get(index) if isinstance(node, dict) else node[index], value)
        node = node[index]


def _interpolate(raw: Resolved) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(raw.values), resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        name = re.sub(r"\[(\d+)\]", r".\1", getattr(error, "full_key", None) or "")
        message = (
            "missing: it is '???', give it a value" if isinstance(error, MissingMandatoryValue) else _first_line(error)
        )
        raise raw.error(tuple(name.split(".")), message) from error


# ---- checking ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A class to be called with arguments once everything has been checked."""

    target: Any
    arguments: dict[str, Any]
    as_factory: bool = False


@dataclass(frozen=True)
class _Plan:
    trainer: _Call
    module: _Call
    data: _Call | None
    ckpt_path: str | None
    seed: int | None


class _Mismatch(Exception):
    """A value that does not fit an annotation."""


@_bounded
def _plan_run(resolved: Resolved) -> _Plan:
    values = resolved.values
    if not values.get("module"):
        raise ConfigError("module: missing; name the class to train, such as module.class=examples.digits.Digits")
    for name in ("trainer", "module", "data"):
        if not isinstance(values.get(name) or {}, dict):
            raise resolved.error((name,), f"must be a mapping of arguments, but it is {values[name]!r}")
    for name in ("ckpt_path", "output"):
        if not isinstance(values.get(name), str | None):
            raise resolved.error((name,), f"must be a string or null, but it is {values[name]!r}")
    settings = values.get("trainer") or {}
    return _Plan(
        trainer=_Call(
            Trainer, _fit_arguments(resolved, ("trainer",), "Trainer", settings, _trainer_arguments(), open_ended=False)
        ),
        module=_plan_class(resolved, ("module",), values["module"], Module),
        data=_plan_class(resolved, ("data",), values["data"], DataModule) if values.get("data") else None,
        ckpt_path=values.get("ckpt_path"),
        seed=settings.get("seed"),
    )


def _plan_class(
    resolved: Resolved, key: Key, given: dict[str, Any] | str, base: type, as_factory: bool = False
) -> _Call:
    """Find the class that `given` names, a subclass of `base`, and check its arguments."""
    given = {"class": given} if isinstance(given, str) else given
    if "class" not in given:
        raise resolved.error((*key, "class"), f"missing; name a subclass of {base.__name__} by its import path")
    target = _import(resolved, (*key, "class"), given["class"], base)
    arguments, open_ended = _arguments(target, base)
    if as_factory:  # whoever calls the factory gives the first argument: parameters or optimizer
        arguments.pop(next(iter(arguments), ""), None)
    values = {name: value for name, value in given.items() if name != "class"}
    return _Call(target, _fit_arguments(resolved, key, target.__name__, values, arguments, open_ended), as_factory)


def _import(resolved: Resolved, key: Key, path: Any, base: type) -> type:
    package = next(package for known, package in BASES.items() if issubclass(base, known))
    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", path):
        raise resolved.error(key, f"must be an import path such as package.file.Class, but it is {path!r}")
    module_name, _, name = path.rpartition(".")
    module_name = module_name or package or ""
    if not module_name:
        raise resolved.error(key, f"'{path}' is not an import path; write package.file.{path}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise resolved.error(
            key, f"cannot import {module_name}: {type(error).__name__}: {_first_line(error)}{_raised_at(error)}"
        ) from error
    target = getattr(module, name, None)
    if target is None:
        classes = [n for n, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
        raise resolved.error(key, f"{module_name} has no class '{name}'{_nearest(name, classes)}")
    if not isinstance(target, type) or not issubclass(target, base):
        raise resolved.error(key, f"{path} is not a subclass of {base.__name__}, which this place asks for")
    if inspect.isabstract(target):
        raise resolved.error(key, f"{path} is abstract; name a subclass of it")
    return target


def _arguments(target: type, base: type) -> tuple[dict[str, tuple[inspect.Parameter, Any]], bool]:
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


def _fit_arguments(
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
                takes = f"; it takes {', '.join(arguments)}" if 0 < len(arguments) <= 12 else ""
                raise resolved.error(
                    (*key, name), f"{owner} has no argument '{name}'{_nearest(name, arguments) or takes}"
                )
            planned[name] = value
            continue
        annotation = arguments[name][1]
        try:
            planned[name] = _fit(resolved, (*key, name), value, annotation)
        except _Mismatch:
            raise resolved.error(
                (*key, name), f"must be {_describe(annotation).rstrip(',')}, but it is {value!r}"
            ) from None
    for name, (parameter, annotation) in arguments.items():
        if parameter.default is parameter.empty and name not in planned:
            raise resolved.error((*key, name), f"missing; {owner} needs it ({_describe(annotation)})")
    return planned


def _fit(resolved: Resolved, key: Key, value: Any, annotation: Any) -> Any:
    """`value` as an argument annotated with `annotation`, with classes as `_Call`. Raises _Mismatch or ConfigError."""
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
        if _is_slot(made) and isinstance(value, dict | str):
            return _plan_class(resolved, key, value, typing.get_origin(made) or made, as_factory=True)
        raise _Mismatch
    kind = origin or annotation
    if _is_slot(kind):
        # A bare name stands for a class without arguments, except where the name is the strategy's own business.
        if isinstance(value, dict) or (isinstance(value, str) and not issubclass(kind, Strategy)):
            return _plan_class(resolved, key, value, kind)
        raise _Mismatch
    if kind is None:
        return _accept(value, value is None)
    if not isinstance(kind, type) or kind is object:
        return value
    if kind in (bool, str, types.NoneType):
        return _accept(value, isinstance(value, kind))
    if kind in (int, float):
        return _accept(value, isinstance(value, (int, kind)) and not isinstance(value, bool))
    if kind is datetime.timedelta and isinstance(value, dict):
        return _Call(kind, _fit_arguments(resolved, key, "timedelta", value, _TIMEDELTA, open_ended=False))
    if issubclass(Path, kind) and isinstance(value, str):
        return Path(value)
    if is_dataclass(kind) and isinstance(value, dict):
        arguments, open_ended = _arguments(kind, object)
        return _Call(kind, _fit_arguments(resolved, key, kind.__name__, value, arguments, open_ended))
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


def _is_slot(annotation: Any) -> bool:
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, tuple(BASES))


def _accept(value: Any, fits: bool) -> Any:
    if not fits:
        raise _Mismatch
    return value


def _make(plan: Any) -> Any:
    if isinstance(plan, _Call):
        arguments = {name: _make(value) for name, value in plan.arguments.items()}
        return functools.partial(plan.target, **arguments) if plan.as_factory else plan.target(**arguments)
    if isinstance(plan, dict):
        return {name: _make(value) for name, value in plan.items()}
    return type(plan)(_make(value) for value in plan) if isinstance(plan, list | tuple) else plan


# ---- messages ----------------------------------------------------------------------------------------


def _error(key: Key, origin: str | None, message: str) -> ConfigError:
    return ConfigError(f"{'.'.join(key)}{f' ({origin})' if origin else ''}: {message}")


def _nearest(name: str, known: collections.abc.Iterable[str]) -> str:
    """A question that names the known name most like `name`, or nothing."""
    names = list(known)
    lower = {n.lower(): n for n in names}
    found = difflib.get_close_matches(name.lower(), lower, n=1)
    return f"; did you mean '{lower[found[0]]}'?" if found else ""


def _describe(annotation: Any) -> str:
    """An annotation in words, for "must be ...": "an integer or null"."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(_describe(part) for part in parts))
        return " or ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is typing.Annotated:
        return _describe(parts[0])
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is collections.abc.Callable:
        return (
            f"a mapping with the class of a {parts[-1].__name__}"
            if parts and _is_slot(parts[-1])
            else "a callable, which a config cannot give"
        )
    kind = origin or annotation
    if _is_slot(kind):
        return f"a mapping with the class of a {kind.__name__}"
    scalars: dict[Any, str] = {
        int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null", None: "null", dict: "a mapping",
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
            f"a list, each {_describe(parts[0])},"
            if len(parts) == 1 or parts[1:] == (...,)
            else f"a list of {len(parts)} values"
            if parts
            else "a list"
        )
    if isinstance(kind, type) and issubclass(Path, kind):
        return "a path"
    return f"a {getattr(kind, '__name__', kind)}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _raised_at(error: Exception) -> str:
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
