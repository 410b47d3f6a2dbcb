"""The options of ModelCheckpoint: which go together, its folder, and the names that its template makes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lockstep.callbacks._support.monitored_metric import Checks, is_count, is_moment, is_number
from lockstep.callbacks.base import check_local, check_number

_PLACEHOLDER = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
_LONGEST = 255 - len("..tmp-01234567")
"""Bytes of a name: the folder of a checkpoint that is being written adds to it."""


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _are_ranked(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(item, list | tuple) and len(item) == 2 for item in value)
    return pairs and all(_is_path(path) and is_number(score) for path, score in value)


SAVED: Checks = {
    "dirpath": lambda value: value is None or _is_path(value),
    "best_k_models": _are_ranked,
    "last_model_path": _is_path,
    "current_score": lambda value: value is None or is_number(value),
    "considered_step": is_count,
    "save_on_train_epoch_end": is_moment,
}
"""What the state of ModelCheckpoint holds."""


def check_options(
    dirpath: str | os.PathLike[str] | None,
    mode: str,
    save_top_k: int,
    every_n_train_steps: int | None,
    every_n_epochs: int | None,
    train_time_interval: timedelta | None,
    save_on_train_epoch_end: bool | None,
) -> None:
    """Raise ValueError for options that are out of range or contradict each other."""
    if dirpath is not None and not isinstance(dirpath, str | os.PathLike):
        raise ValueError(f"dirpath of ModelCheckpoint must be a path, or None, got {dirpath!r}")
    if dirpath is not None:
        check_local("dirpath of ModelCheckpoint", dirpath)
    if mode not in ("min", "max"):
        raise ValueError(f"mode of ModelCheckpoint must be 'min' or 'max', got {mode!r}")
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise ValueError(f"save_top_k of ModelCheckpoint must be at least 0, or -1 to keep all, got {save_top_k!r}")
    periods = {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs}
    for name, period in periods.items():
        check_number("ModelCheckpoint", name, period, 1, whole=True, optional=True)
    if train_time_interval is not None and not (
        isinstance(train_time_interval, timedelta) and train_time_interval >= timedelta()
    ):
        raise ValueError(
            "train_time_interval of ModelCheckpoint must be a timedelta of at least 0, or None, got "
            f"{train_time_interval!r}; give one such as timedelta(minutes=10)"
        )
    given = [
        name for name, value in {**periods, "train_time_interval": train_time_interval}.items() if value is not None
    ]
    if len(given) > 1:
        raise ValueError(
            f"ModelCheckpoint saves by steps, by epochs or by time, got {' and '.join(given)}: add one "
            "ModelCheckpoint for each"
        )
    if save_on_train_epoch_end is not None and given and given != ["every_n_epochs"]:
        raise ValueError(
            f"ModelCheckpoint with {given[0]} does not save at the end of epochs, but got "
            f"save_on_train_epoch_end={save_on_train_epoch_end}"
        )


def make_writable(folder: str) -> None:
    """Create the folder of the checkpoints; raises ValueError if that fails or it is not writable."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the checkpoint folder {folder} cannot be created ({error.strerror}): set another dirpath of "
            "ModelCheckpoint"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"the checkpoint folder {folder} is not writable: set another dirpath of ModelCheckpoint")


def placeholders(template: str) -> list[str]:
    """The names in a template such as "{epoch}-{val/loss:.3f}"."""
    return [match[1] for match in _PLACEHOLDER.finditer(template)]


def filled(template: str, values: Mapping[str, Any], with_names: bool, equals: str = "=") -> str:
    """The folder's name for these values, as "name=value" or the value alone; one that is missing is written as nan."""

    def fill(match: re.Match[str]) -> str:
        name, spec = match[1], match[2] or ""
        value = values.get(name, math.nan)
        value = value.item() if isinstance(value, Tensor) else value
        try:
            text = format(value, spec)
        except ValueError:  # an integer's specification does not fit: a plain name rather than no checkpoint
            text = format(value)
        return f"{name}{equals}{text}" if with_names else text

    return _PLACEHOLDER.sub(fill, template).replace("/", "_").replace(os.sep, "_")


def versioned(path: str, extension: str, first: int = 1) -> str:
    """`path`, or the first of `path-v1`, `path-v2`, … that nothing has, each followed by `extension`."""
    free, version = path + extension, first - 1
    while os.path.lexists(free):
        version += 1
        free = f"{path}-v{version}{extension}"
    return free


def check_template(filename: str) -> None:
    """Raise ValueError for another type than str, and a template with an invalid format or brace."""
    if not isinstance(filename, str) or filename.startswith("."):
        raise ValueError(f"filename of ModelCheckpoint must be a name that begins with no dot, got {filename!r}")
    for match in _PLACEHOLDER.finditer(filename):
        spec = match[2] or ""
        for value in (0, 0.0):
            try:
                format(value, spec)
                break
            except ValueError:
                continue
        else:
            raise ValueError(
                f"filename={filename!r} of ModelCheckpoint has the format {spec!r}, which is invalid for a number: use "
                "one such as ':.3f'"
            )
    if "{" in _PLACEHOLDER.sub("", filename) or "}" in _PLACEHOLDER.sub("", filename):
        raise ValueError(
            f"filename={filename!r} of ModelCheckpoint has an unmatched brace: write placeholders like '{{epoch}}' or "
            f"'{{val/loss:.3f}}'"
        )
    if (length := len(_PLACEHOLDER.sub("", filename).encode())) > _LONGEST:
        raise ValueError(
            f"filename of ModelCheckpoint must make names of at most {_LONGEST} bytes, but {filename!r} has {length} "
            "besides its placeholders: shorten it"
        )


def exact(value: float) -> Tensor:
    """A score as it is kept."""
    return torch.tensor(value, dtype=torch.float64)
