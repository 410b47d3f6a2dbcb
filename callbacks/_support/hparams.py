"""Hyperparameters as loggers need them: plain data, flat names, and a file that people read."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any

from lockstep.callbacks._support.files import replacing


def plain(value: Any) -> Any:
    """Return `value` as dicts with str keys, lists, str, int, float, bool and None; anything else becomes its `str`.

    Takes mappings, dataclasses, argparse-like namespaces, sequences, sets, one-element tensors and arrays.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):  # also of a class of its own: an Enum's member, a number of numpy
        return str.__str__(value) if isinstance(value, str) else int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if type(value).__name__ in ("Namespace", "SimpleNamespace"):
        return plain(vars(value))
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) is not None:
        try:
            return plain(value.item())
        except (RuntimeError, ValueError):  # more than one element, or none in memory (meta device)
            return str(value)
    return str(value)


def plain_params(params: Any) -> dict[str, Any]:
    """Return hyperparameters, a mapping or an argparse namespace, as `plain` data; one that cannot be converted costs a
    warning and is not logged."""
    found: dict[str, Any] = {}
    items = params.items() if callable(getattr(params, "items", None)) else vars(params).items()
    for key, value in items:
        try:
            found[str(key)] = plain(value)
        except Exception as error:  # of the value's own methods; or it contains itself
            warnings.warn(
                f"hyperparameter {key!r} is not logged: a {type(value).__name__} that cannot be converted to plain "
                f"data ({type(error).__name__}: {error})",
                stacklevel=3,
            )
    return found


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested `plain` data as one dict with names `a/b`; lists become their `str`, None stays out."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value) if isinstance(value, list) else value
    return flat


def to_yaml(params: Mapping[str, Any]) -> str:
    """Return `plain` data as YAML text, keys in the given order."""
    import yaml  # a dependency of omegaconf

    return yaml.safe_dump(dict(params), sort_keys=False, allow_unicode=True)


def write_hparams(log_dir: str, params: Mapping[str, Any]) -> None:
    """Write `plain` data to `hparams.yaml` in `log_dir`, whole or not at all. Raises OSError."""
    os.makedirs(log_dir, exist_ok=True)
    path = os.path.join(log_dir, "hparams.yaml")
    with replacing(path) as file:
        file.write(to_yaml(params))
