"""Cutting a batch along its samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def cut(batch: Any, num_rows: int, num_parts: int) -> list[tuple[Any, int]]:
    """`batch` in at most `num_parts` parts, larger ones first, with the number of rows of each.

    Tensors whose first dimension is `num_rows` are cut, as are lists and tuples of one item a sample; named tuples,
    dataclasses, mappings and other lists are looked into, and all else is given to each part whole.
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


def has_rows(batch: Any, num_rows: int) -> bool:
    """Whether a tensor somewhere in `batch` has `num_rows` rows."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and len(batch) == num_rows
    if isinstance(batch, Mapping):
        return any(has_rows(value, num_rows) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return any(has_rows(item, num_rows) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return any(has_rows(getattr(batch, f.name), num_rows) for f in dataclasses.fields(batch))
    return False


def _rows(batch: Any, num_rows: int, start: int, stop: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.dim() > 0 and len(batch) == num_rows else batch
    if isinstance(batch, Mapping):
        rows = {key: _rows(value, num_rows, start, stop) for key, value in batch.items()}
        if type(batch) is dict:
            return rows
        try:
            return type(batch)(rows)  # type: ignore[call-arg]
        except TypeError:
            return rows
    if isinstance(batch, (list, tuple)):
        if len(batch) == num_rows and not has_rows(batch, num_rows):  # one item a sample
            return batch[start:stop]
        items = [_rows(item, num_rows, start, stop) for item in batch]
        return items if isinstance(batch, list) else type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch,
            **{
                f.name: _rows(getattr(batch, f.name), num_rows, start, stop)
                for f in dataclasses.fields(batch)
                if f.init
            },
        )
    return batch
