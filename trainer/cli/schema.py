"""`lockstep schema`: a JSON schema of configs, with which an editor completes and checks YAML files."""

from __future__ import annotations

import argparse
import collections.abc
import datetime
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lockstep import callbacks, strategies
from lockstep.callbacks.base import Callback, Logger
from lockstep.strategies.base import Strategy
from lockstep.strategies.precision import ALIASES, PRECISIONS
from lockstep.strategies.registry import STRATEGIES
from lockstep.trainer.cli.config.load import SHORT_FOR_MODULE
from lockstep.trainer.cli.config.signatures import is_slot, trainer_arguments
from lockstep.trainer.cli.parser import page
from lockstep.trainer.cli.parser import trainer_arguments as described

USAGE = "lockstep schema"

EXAMPLES = """
examples:
  lockstep schema > lockstep.schema.json
  # yaml-language-server: $schema=lockstep.schema.json       as the first line of a config
"""

_INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
"""`${vars.width}` may stand for any value, and `???` for one that is given later."""
_SUGGESTED: dict[str, Sequence[str]] = {
    "strategy": ["auto", *STRATEGIES],
    "precision": [*PRECISIONS, *ALIASES],
    "accelerator": ("auto", "cpu", "gpu"),
    "gradient_clip_algorithm": ("norm", "value"),
}


def main(words: Sequence[str]) -> int:
    """Print the schema."""
    parse(words)
    print(json.dumps(schema(), indent=1))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. Raises ConfigError for a wrong one."""
    return page(USAGE, __doc__, EXAMPLES).parse_args(words)


def schema() -> dict[str, Any]:
    """The schema, from the Trainer's argument record: names, types, defaults and descriptions."""
    arguments = {name: _argument(name) for name in trainer_arguments()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Lockstep config",
        "type": "object",
        "definitions": {"trainer": {"type": "object", "properties": arguments, "additionalProperties": False}},
        "properties": {
            "module": _object("the Module to train, and the arguments of its class"),
            "data": _object("the DataModule, and the arguments of its class"),
            **{name: _object(f"short for module.{name}") for name in SHORT_FOR_MODULE},
            "trainer": {"$ref": "#/definitions/trainer"},
            "vars": {"type": "object", "description": "values of your own, for ${vars.name}"},
            "ckpt_path": {"type": ["string", "null"], "description": "a checkpoint, last, auto or null"},
            "output": {"type": ["string", "null"], "description": "file for the predictions of lockstep predict"},
            **{name: {"$ref": f"#/definitions/trainer/properties/{name}"} for name in arguments},
        },
        "additionalProperties": False,
    }


def _argument(name: str) -> dict[str, Any]:
    parameter, annotation = trainer_arguments()[name]
    kinds: list[dict[str, Any]] = [{"enum": list(_SUGGESTED[name])}] if name in _SUGGESTED else []
    kinds += [kind for part in _parts(annotation) for kind in _kinds(part)]
    if name in _SUGGESTED and name != "strategy":  # whose names may be meshes, or another package's
        kinds.remove({"type": "string"})
    found: dict[str, Any] = {"anyOf": [*_unique(kinds), _INTERPOLATION], "description": described()[name].text}
    if parameter.default is None or isinstance(parameter.default, str | int | float):
        found["default"] = parameter.default
    return found


def _parts(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _kinds(annotation: Any) -> list[dict[str, Any]]:
    """What a config may have for a part of an annotation."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    kind = origin or annotation
    if origin is Literal:
        return [{"enum": list(parts)}]
    if is_slot(kind):
        named = {"type": "string", "anyOf": [{"enum": _classes(kind)}, {"pattern": r"\."}]}
        mapping = {"type": "object", "properties": {"class": named}, "required": ["class"]}
        return [mapping] if issubclass(kind, Strategy) else [mapping, named]
    scalars: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object"}
    scalars |= {types.NoneType: "null", Path: "string", datetime.timedelta: "object"}
    if kind in scalars:
        return [{"type": scalars[kind]}]
    if kind in (list, tuple, set, collections.abc.Sequence):
        items = [each for part in parts[:1] for each in _kinds(part)]
        return [{"type": "array", "items": {"anyOf": [*items, _INTERPOLATION]}} if items else {"type": "array"}]
    return [{}]


def _classes(base: type) -> list[str]:
    """Short names of the subclasses of `base` in this package."""
    package = strategies if issubclass(base, Strategy) else callbacks
    found = {name: getattr(package, name) for name in package.__all__}
    abstract = (base, Callback, Logger, strategies.SPMDStrategy)
    return sorted(
        name
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, base) and value not in abstract
    )


def _object(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "anyOf": [
            {"type": "string"},
            {"type": "object", "properties": {"class": {"type": "string"}}},
            {"type": "null"},
        ],
    }


def _unique(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
