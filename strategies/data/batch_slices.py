"""Cutting a batch along its samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn


def cut(batch: Any, num_rows: int, num_parts: int) -> list[tuple[Any, int]]:
    """`batch` in at most `num_parts` parts, larger ones first, with the number of rows of each.

    Tensors and arrays whose first dimension is `num_rows` are cut, as are lists and tuples of one item a sample; so is
    what named tuples, dataclasses, mappings, other lists and objects with a `to` of their own hold. All else is given
    to each part whole. Raises ValueError for an object with a tensor of another first dimension, and for a list of
    which it is not clear what its items are.
    """
    num_parts = max(1, min(num_parts, num_rows))
    if num_parts == 1:
        return [(batch, num_rows)]
    size, larger = divmod(num_rows, num_parts)
    parts, start = [], 0
    for i in range(num_parts):
        stop = start + size + (i < larger)
        parts.append((_rows(batch, num_rows, start, stop), stop - start))
        start = stop
    return parts


def rebuilt(batch: Any, num_rows: int) -> Any:
    """The same tensors in containers of their own, where `cut` can make these."""
    try:
        return _rows(batch, num_rows, 0, num_rows)
    except ValueError:
        return batch


def copied(batch: Any) -> Any:
    """A copy that a step may change; `batch` itself, where its class does not let it be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


def parts_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, then what else it or another object has in attributes."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = [field.name for field in fields if hasattr(value, field.name)]
    names += sorted(getattr(value, "__dict__", {}).keys() - names)
    return {name: getattr(value, name) for name in names}


def made_of(kind: type, parts: Mapping[str, Any]) -> Any:
    """An object of class `kind` with what `parts_of` gives: without what its `__init__` would do to the fields."""
    base: Any = SimpleNamespace if issubclass(kind, SimpleNamespace) else object
    made = base.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made


def has_rows(batch: Any, num_rows: int) -> bool:
    """Whether a tensor somewhere in `batch` has `num_rows` rows."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch.ndim > 0 and len(batch) == num_rows
    return any(has_rows(item, num_rows) for item in _items(batch))


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors that `batch` holds."""
    return [batch] if isinstance(batch, Tensor) else [t for item in _items(batch) for t in tensors_of(item)]


def signature(batch: Any) -> Any:
    """What the shapes within a step follow from: types, and shapes and dtypes of tensors, to compare and to look up."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch.shape, batch.dtype
    items = _items(batch)
    if not items:
        return type(batch)
    keys = tuple(map(str, batch)) if isinstance(batch, Mapping) else ()
    return type(batch), keys, tuple(map(signature, items))


def _items(batch: Any) -> list[Any]:
    """What `batch` holds; nothing if it is not a container."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    return [*vars(batch).values()] if _is_plain_object(batch) else []


def _is_plain_object(batch: Any) -> bool:
    """Whether it is an object of a class of the user's that moves itself to a device, as batches do."""
    return (
        not isinstance(batch, (Tensor, nn.Module, type))
        and callable(getattr(batch, "to", None))
        and hasattr(batch, "__dict__")
    )


def _rows(batch: Any, num_rows: int, start: int, stop: int) -> Any:
    part: Any
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim == 0 or len(batch) != num_rows:
            return batch
        own = batch[start:stop]
        return (
            own if isinstance(own, np.ndarray) or own.requires_grad else own.data
        )  # with its own version: changing it changes no other rows
    if isinstance(batch, Mapping):
        rows = {key: _rows(value, num_rows, start, stop) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return rows
        part = copy.copy(batch)
        part.update(rows)
        return part
    if isinstance(batch, (list, tuple)):
        if len(batch) == num_rows and not has_rows(batch, num_rows):  # one item a sample
            return batch[start:stop]
        _check_items(batch, num_rows)
        items = [_rows(item, num_rows, start, stop) for item in batch]
        return items if isinstance(batch, list) else type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        part = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(part, field.name, _rows(getattr(batch, field.name), num_rows, start, stop))
        return part
    if _is_plain_object(batch):
        return _object_rows(batch, num_rows, start, stop)
    return batch


def _check_items(batch: Sequence[Any], num_rows: int) -> None:
    """Raise ValueError for as many tensors as there are samples, of which some happen to have as many rows too."""
    if len(batch) != num_rows or hasattr(batch, "_fields") or not all(isinstance(t, Tensor) and t.dim() for t in batch):
        return
    if len({(t.dim(), t.dtype) for t in batch}) == 1 and not all(len(t) == num_rows for t in batch):
        raise ValueError(
            f"a {type(batch).__name__} of {num_rows} tensors whose first dimensions differ cannot be split into "
            f"{num_rows} samples: it may hold one tensor a sample, or tensors of one row a sample; let the loader pad "
            "and stack them, or return a dict"
        )


def _object_rows(batch: Any, num_rows: int, start: int, stop: int) -> Any:
    """A shallow copy with the rows of each tensor; only where every tensor has one row a sample is it clear what the
    object's parts are."""
    for name, value in vars(batch).items():
        odd = [t for t in tensors_of(value) if t.dim() and len(t) != num_rows]
        if odd:
            raise ValueError(
                f"a batch of class {type(batch).__name__} cannot be split, as the first dimension of its {name} "
                f"(shape {list(odd[0].shape)}) is not the number of samples, {num_rows}; return a dict, a named tuple "
                "or a dataclass from the loader"
            )
    part = copy.copy(batch)
    for name, value in vars(batch).items():
        part.__dict__[name] = _rows(value, num_rows, start, stop)
    return part
