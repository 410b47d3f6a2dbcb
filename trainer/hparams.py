"""`save_hyperparameters`: the arguments of `__init__`, kept for logs, checkpoints and `load_from_checkpoint`."""

from __future__ import annotations

import builtins
import enum
import inspect
import re
import typing
from collections.abc import Mapping
from types import FrameType
from typing import Any


class Namespace(dict):
    """A dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __reduce__(self) -> Any:
        return (type(self), (dict(self),))


class HyperParameters:
    """Mix-in of Module and DataModule."""

    @property
    def hparams(self) -> Namespace:
        """The saved hyperparameters, a dict with attribute access; empty before `save_hyperparameters`."""
        return self.__dict__.setdefault("_hparams", Namespace())

    @property
    def saved_hparams(self) -> dict[str, Any]:
        """Of `hparams` what checkpoints and loggers get: tensors, numbers, strings, paths, lists and dicts of them."""
        return {name: value for name, value in self._given_hparams.items() if _savable(value)}

    @property
    def unsaved_hparams(self) -> list[str]:
        """Names in `hparams` that checkpoints do not hold, but for those whose value is the default of `__init__`."""
        takes, saved = inspect.signature(type(self)).parameters, self.saved_hparams
        defaults = {name: parameter.default for name, parameter in takes.items()}
        given = self._given_hparams
        return [name for name, value in given.items() if name not in saved and defaults.get(name) is not value]

    @property
    def _given_hparams(self) -> dict[str, Any]:
        """As `hparams`, which is not made here: a save in a hook leaves the module as it is."""
        return self.__dict__.get("_hparams", {})

    @property
    def logs_hparams(self) -> bool:
        """Whether loggers are given the hyperparameters."""
        return self.__dict__.get("_log_hparams", True)

    @property
    def hparams_name(self) -> str | None:
        """The argument of `__init__` that was given to `save_hyperparameters` as a whole, where one was."""
        return self.__dict__.get("_hparams_name")

    def save_hyperparameters(
        self,
        *names: Any,
        ignore: str | list[str] | tuple[str, ...] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments that `__init__` was called with, or those in `names`; call it in `__init__`.

        A dict (or an object with a `__dict__`) given in place of a name is kept entry by entry. `ignore` names what
        is not kept, in later calls too (of a base class, or of a subclass), unless they ask for the argument by name.
        What is not JSON data or tensors, such as modules, functions, partials, types and objects of your own, stays in
        `hparams` but is not saved: `load_from_checkpoint` needs it as an argument. `logger` False keeps all out of the
        loggers. `frame` is that of the `__init__`, or of what it called; the caller's by default.
        """
        own = inspect.currentframe()
        caller = frame or (own.f_back if own else None)
        asked = {name for name in names if isinstance(name, str)}
        skipped = self.__dict__.setdefault("_hparams_ignored", set())
        skipped -= asked
        skipped |= {ignore} if isinstance(ignore, str) else set(ignore or ())
        if names and not all(isinstance(name, str) for name in names):
            values: dict[str, Any] = {}
            for value in names:
                values.update(_entries(value))
            given = _init_arguments(self, caller)
            whole = next((name for name, value in given.items() if len(names) == 1 and value is names[0]), None)
            is_all = self._given_hparams.keys() <= values.keys()  # then the newest name of them holds
            self.__dict__["_hparams_name"] = whole if is_all else None
        else:
            self.__dict__["_hparams_name"] = None
            values = _init_arguments(self, caller)
            unknown = [name for name in names if name not in values]
            if unknown:
                raise ValueError(
                    f"save_hyperparameters({', '.join(map(repr, names))}) names {unknown[0]!r}, which is not an "
                    f"argument of __init__ ({', '.join(values)})"
                )
            values = {name: value for name, value in values.items() if not names or name in names}
        self.__dict__["_log_hparams"] = logger
        self.hparams.update(values)
        for name in skipped & self.hparams.keys():
            del self.hparams[name]


def _savable(value: Any) -> bool:
    from lockstep.strategies.checkpoint_state import pack  # `from lockstep import Module` does not need it

    try:
        pack(value, "", {})
    except TypeError:
        return False
    return True


_HOLD = (type(None), list, tuple, dict, inspect.Parameter.empty)
"""What an annotation names beside an Enum that may be all that it holds."""


def restored(cls: type, saved: dict[str, Any]) -> dict[str, Any]:
    """Saved hyperparameters as arguments of `cls`, members of an Enum among them.

    A checkpoint holds the value of a member and names no class. The class is that of the argument's annotation,
    or of its default; other classes in the annotation may have other values, which stay. Raises ValueError for a value
    that the Enum does not have.
    """
    result = dict(saved)
    for name, parameter in inspect.signature(cls).parameters.items():
        kinds = [type(parameter.default), *_classes(parameter.annotation, cls)]
        kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)), None)
        if kind is not None and result.get(name) is not None:
            alone = not any(isinstance(other, type) and other not in (kind, *_HOLD) for other in kinds[1:])
            result[name] = _members(result[name], kind, strict=alone)
    return result


def _members(value: Any, kind: type[enum.Enum], strict: bool) -> Any:
    """`value`, or what a container holds, as members of the Enum; with `strict` False what it lacks stays."""
    if isinstance(value, (list, tuple)):
        return type(value)(_members(item, kind, strict) for item in value)
    if isinstance(value, dict):
        return {key: _members(item, kind, strict) for key, item in value.items()}
    try:
        return kind(value)
    except ValueError:
        if strict:
            raise
        return value


def built(
    cls: Any, saved: dict[str, Any], name: str | None, unsaved: list[str] | None, overrides: dict[str, Any], path: Any
) -> Any:
    """An object of saved hyperparameters; a base class may have been given more than `cls` takes. `name` is the
    argument that they are together. `unsaved` names those that were given and not saved, None all of them: their
    defaults would be another object."""
    from lockstep.trainer.checkpoint.manifest import refused  # `from lockstep import Module` needs neither
    from lockstep.trainer.lightning_names import nearest

    if name is not None:
        saved, unsaved = {name: Namespace(saved)}, [name] if unsaved else []
    takes = inspect.signature(cls).parameters
    unsaved = [*takes] if unsaved is None else unsaved
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if not takes_any:
        saved = {key: value for key, value in saved.items() if key in takes}
    with refused(path):
        saved = restored(cls, saved)
    given = saved | overrides
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in takes.values() if p.kind in named and (p.default is p.empty or p.name in unsaved)]
    lacking = [name for name in needed if name not in given or (name in unsaved and name not in overrides)]
    if strange := [key for key in overrides if key not in takes and not takes_any]:
        raise TypeError(f"{cls.__name__} takes no argument {strange[0]!r}{nearest(strange[0], takes)}")
    if lacking:
        raise TypeError(
            f"{cls.__name__} needs {', '.join(lacking)}, which checkpoint {path} does not hold; give them to "
            "load_from_checkpoint"
        )
    return cls(**given)


def _classes(annotation: Any, cls: type) -> list[Any]:
    """What an annotation names; one that is a string is looked up where `__init__` was written, and never evaluated."""
    if not isinstance(annotation, str):
        return [annotation, *typing.get_args(annotation)]
    scope = getattr(cls.__init__, "__globals__", {})  # type: ignore[misc]
    found = []
    for path in re.findall(r"[^\W\d][\w.]*", annotation):
        first, *rest = path.split(".")
        value = scope.get(first, getattr(builtins, first, None))
        for name in rest:
            value = getattr(value, name, None)
        found.append(value)
    return found


def _entries(value: Any) -> dict[str, Any]:
    """The hyperparameters in an object that was given in place of names. Raises ValueError if it has none."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, str) or not hasattr(value, "__dict__"):
        raise ValueError(
            "save_hyperparameters takes names of arguments, or a dict, a Namespace or a config in place of them, "
            f"got {value!r}"
        )
    return vars(value)


def _init_arguments(owner: Any, frame: FrameType | None) -> dict[str, Any]:
    """Arguments of the `__init__` frames of `owner`, the outermost class winning."""
    found: dict[str, Any] = {}
    while frame is not None:
        code, local = frame.f_code, frame.f_locals
        if (
            code.co_name == "__init__"
            and local.get("self", local.get(code.co_varnames[0] if code.co_varnames else "")) is owner
        ):
            info = inspect.getargvalues(frame)
            for name in info.args[1:]:
                found[name] = local[name]
            if info.keywords:
                found.update(local[info.keywords])
        elif found:
            break
        frame = frame.f_back
    return found
