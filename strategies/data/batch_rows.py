"""How many samples a batch holds that a collate function has made of those it was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

_NUMBERS = bool | int | float | complex | np.number


def count_samples(batch: Any, asked: int) -> int | None:
    """The samples in `batch`, whose collate function was given `asked` of them and may have left some out.

    `asked` if a tensor (or array) has so many rows, or a list so many items. Otherwise the number of rows on which all
    tensors agree, or of items on which all lists of equal things agree, if that is smaller. 0 for None and what is
    empty. None if nothing tells: the samples are in another dimension, or joined in fewer or more rows.
    """
    if batch is None:
        return 0
    if _is_list_of_samples(batch):
        return min(len(batch), asked)
    tensors: list[Any] = []
    lists: list[Any] = []
    for value in _walk(batch):
        if isinstance(value, list | tuple):
            lists.append(value)
        elif value.ndim:
            tensors.append(value)
    lengths = {len(items) for items in lists if not hasattr(items, "_fields") and _alike(items)}
    rows = {int(tensor.shape[0]) for tensor in tensors}
    if not tensors and not lists:
        return 0 if isinstance(batch, Mapping) and not batch else asked
    if asked in rows:
        return asked
    if len(rows) == 1:
        return _agreed(rows.pop(), asked, tensors, lengths)
    if asked in lengths:
        return asked
    columns = {int(tensor.shape[0]) for tensor in tensors if tensor.ndim == 1 and tensor.shape[0] < asked}
    fewer = {length for length in lengths if length < asked}
    for found in (columns & fewer, columns, fewer):
        if len(found) == 1:
            return found.pop()
    return None


def _agreed(rows: int, asked: int, tensors: list[Any], lengths: set[int]) -> int | None:
    """The samples where every tensor has `rows` rows, which is not what was asked for."""
    images = all(tensor.ndim > 2 for tensor in tensors)
    if rows == 0:
        return 0
    if rows > asked:  # joined rows, several for each sample, or a list of samples with `rows` features
        fewer = {length for length in lengths if length <= asked}
        if asked in lengths or (not fewer and rows % asked == 0):
            return asked
        return fewer.pop() if len(fewer) == 1 and rows % asked else None
    if asked in lengths:
        return asked if images and rows > 1 else None
    if lengths - {rows} and images:
        return None
    column = any(tensor.ndim == 1 for tensor in tensors) or rows in lengths
    across = any(tensor.ndim > 1 and tensor.shape[1] == asked for tensor in tensors)
    return rows if column or (rows > 1 and not across) else None


def rows_each(batch: Any, asked: int) -> float:
    """Rows for each of the `asked` samples where all tensors have equally many, and nothing else tells how many samples
    there are; else 0."""
    if batch is None or _is_list_of_samples(batch):
        return 0.0
    values = list(_walk(batch))
    tensors = [value for value in values if not isinstance(value, list | tuple) and value.ndim]
    lists = [value for value in values if isinstance(value, list | tuple) and not hasattr(value, "_fields")]
    rows = {int(tensor.shape[0]) for tensor in tensors}
    tells = any(len(items) <= asked and _alike(items) for items in lists)
    across = any(tensor.ndim > 1 and tensor.shape[1] == asked for tensor in tensors)
    return rows.pop() / asked if len(rows) == 1 and not tells and not across else 0.0


def _is_list_of_samples(batch: Any) -> bool:
    """Whether `batch` lists (input, label, …) tuples or dicts of which a part is a single number or text."""
    if not isinstance(batch, list | tuple) or not batch or not _alike(batch):
        return False
    first = batch[0]
    if not isinstance(first, Mapping | list | tuple) or (not isinstance(first, Mapping) and _alike(first)):
        return False
    parts = first.values() if isinstance(first, Mapping) else first
    return any(isinstance(part, _NUMBERS | str) or getattr(part, "ndim", 1) == 0 for part in parts)


def _walk(value: Any) -> Iterator[Any]:
    """Every tensor, array, list and tuple in `value`."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        yield value
        for item in value:
            yield from _walk(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk(getattr(value, field.name))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for item in vars(value).values():
            yield from _walk(item)


def _alike(items: Any) -> bool:
    """Whether a list holds equal things, as samples are, and not the different parts of one batch."""
    first = _kind(items[0]) if items else None
    return all(_kind(item) == first for item in items)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim, value.dtype
    if isinstance(value, Mapping):
        return dict, tuple(value)
    if isinstance(value, list | tuple):
        return list, tuple(_kind(item) for item in value[:8])
    return int if isinstance(value, _NUMBERS) else type(value)


def guess_batch_size(batch: Any) -> int:
    """The number of samples of a batch whose making is unknown: the first dimension of its first tensor.

    Looks through mappings, sequences and dataclasses, then asks `size` and `len`; a list of strings
    counts them; 1 where nothing tells.
    """
    found = _first_length(batch)
    return 1 if found is None else found


def _first_length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else 1
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return None
    if isinstance(value, Mapping):
        return _first_known(value.values())
    if isinstance(value, list) and value and all(isinstance(element, str) for element in value):
        return len(value)
    if isinstance(value, list | tuple):
        return _first_known(value)
    if is_dataclass(value):
        return _first_known(getattr(value, field.name) for field in fields(value))
    size = getattr(value, "size", None)
    if callable(size):
        size = size()
    if isinstance(size, int):
        return size
    if isinstance(size, Sequence) and size:
        return int(size[0])
    return len(value) if hasattr(value, "__len__") else None


def _first_known(values: Iterable[Any]) -> int | None:
    return next((found for value in values if (found := _first_length(value)) is not None), None)


def refuse_derived(value: Any, parts: Mapping[str, Any], path: str, num_samples: int, advice: str) -> None:
    """Raise ValueError if a dataclass that is to be cut has, among its `parts`, one that is not an argument of its
    constructor and has no row a sample: a slice would have what was made of all samples."""
    known = {field.name: field for field in fields(value)}
    for name, part in parts.items():
        is_given = name in known and (known[name].init or part is known[name].default)
        if not is_given and not _is_of_samples(part, num_samples):
            raise ValueError(
                f"{type(value).__name__}.{name} ({path}.{name}) is set in __post_init__ or later from the whole batch, "
                f"which is to be split; compute it in training_step, or {advice}"
            )


def _is_of_samples(value: Any, num_samples: int) -> bool:
    """Whether all in `value` has a row or an item a sample, or is of a kind that does not depend on samples."""
    if value is None or isinstance(value, str | bytes | Enum | torch.dtype | torch.device):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 0 and len(value) == num_samples
    if isinstance(value, Mapping):
        return all(_is_of_samples(item, num_samples) for item in value.values())
    if isinstance(value, list | tuple):
        return len(value) == num_samples or all(_is_of_samples(item, num_samples) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_of_samples(getattr(value, field.name, None), num_samples) for field in fields(value))
    return False
