"""Cutting a batch along its samples, if it is certain where these lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

_WHOLE = (str, bytes, bool, int, float, complex, type(None))


class SampleCutter:
    """Cuts the batches of a run into slices of samples; raises ValueError for a batch of which it does not know how.

    A tensor or array is split along its first dimension, which must be the number of samples; tensors without
    dimensions, numbers and strings go to every slice. A list is one of fields, each of which is split, or has an item
    for each sample. What a batch leaves open, as `[8, 8]` numbers or a list of two pairs do for two samples, an earlier
    batch may have shown.

    `stacks`: whether the loader is known to put samples first, as torch's own collate function does.
    `single`: returns batches of one sample, made as the loader makes its own, which show where samples are in a square
    one.
    """

    def __init__(self, stacks: bool = False, single: Callable[[], Iterator[Any]] = lambda: iter(())) -> None:
        self.stacks, self._single = stacks, single
        self._kinds: dict[str, str] = {}
        """What is known of the value at a path: its samples come first ("first"), or it is a list of "fields" or
        "samples"."""

    def cut(self, batch: Any, num_samples: int, num_slices: int) -> list[tuple[Any, int]]:
        """`batch` in at most `num_slices` slices, larger ones first, with the samples of each."""
        num_slices = max(1, min(num_slices, num_samples))
        if num_slices == 1:
            return [(batch, num_samples)]
        size, larger = divmod(num_samples, num_slices)
        sizes = [size + (i < larger) for i in range(num_slices)]
        slices = self._cut(batch, "batch", num_samples, sizes)
        return list(zip(slices, sizes, strict=True))

    def _cut(self, value: Any, path: str, num_samples: int, sizes: list[int]) -> list[Any]:
        if isinstance(value, _WHOLE):
            return [value] * len(sizes)
        if isinstance(value, Tensor | np.ndarray):
            if not value.ndim:
                return [value] * len(sizes)
            self._check_first(value, path, num_samples)
            return _ranges(value, sizes)
        if isinstance(value, Mapping):
            return self._fields(
                value, {key: (f"{path}[{key!r}]", item) for key, item in value.items()}, num_samples, sizes
            )
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = {name: (f"{path}.{name}", getattr(value, name)) for name in value._fields}
            return [type(value)(**fields) for fields in self._cut_each(fields, num_samples, sizes)]
        if isinstance(value, list | tuple):
            if self._kind_of_list(value, path, num_samples) == "samples":
                return _ranges(value, sizes)
            cuts = self._cut_each({i: (f"{path}[{i}]", item) for i, item in enumerate(value)}, num_samples, sizes)
            return [type(value)(fields.values()) for fields in cuts]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: (f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
            return [dataclasses.replace(value, **fields) for fields in self._cut_each(fields, num_samples, sizes)]
        raise ValueError(
            f"strategy 'dp' splits tensors, and lists, dicts and dataclasses of them, but {path} is of class "
            f"{type(value).__name__}, whose "
            "samples it does not know; return one of those from collate_fn, or use strategy='ddp'"
        )

    def _cut_each(
        self, values: Mapping[Any, tuple[str, Any]], num_samples: int, sizes: list[int]
    ) -> list[dict[Any, Any]]:
        cuts = {key: self._cut(value, path, num_samples, sizes) for key, (path, value) in values.items()}
        return [{key: parts[i] for key, parts in cuts.items()} for i in range(len(sizes))]

    def _fields(self, value: Any, fields: Any, num_samples: int, sizes: list[int]) -> list[Any]:
        cuts = self._cut_each(fields, num_samples, sizes)
        if type(value) is dict:
            return cuts
        try:
            return [type(value)(part) for part in cuts]
        except TypeError:
            return cuts

    def _check_first(self, value: Any, path: str, num_samples: int) -> None:
        if len(value) != num_samples:
            raise ValueError(
                f"strategy 'dp' splits along the first dimension, which must be the samples, but {path} has shape "
                f"{list(value.shape)} in a "
                f"batch of {num_samples} samples; put the samples first in collate_fn, or use strategy='ddp'"
            )
        if self.stacks or path in self._kinds:
            return
        if value.ndim > 1 and value.shape[1] == num_samples and not self._is_first_in_single(value, path):
            raise ValueError(
                f"strategy 'dp' splits along the first dimension, which must be the samples, but {path} has shape "
                f"{list(value.shape)} in a "
                f"batch of {num_samples} samples, where another dimension may be theirs; use another batch size, or "
                "strategy='ddp'"
            )
        self._kinds[path] = "first"

    def _is_first_in_single(self, value: Any, path: str) -> bool:
        """Whether batches of one sample show that the first dimension is the samples, and not another one."""
        for batch in self._single():
            shape = next((tuple(found.shape) for at, found in _tensors(batch, "batch") if at == path), ())
            if len(shape) == value.ndim and shape[:2] != (1, 1):
                return shape[0] == 1
        return False

    def _kind_of_list(self, value: Any, path: str, num_samples: int) -> str:
        """Whether a list or tuple has an item for each sample, or is one of fields."""
        known = self._kinds.get(path)
        if not value or (len(value) != num_samples and known != "samples" and any(map(_has_tensor, value))):
            return "fields"  # whose own paths say what does not fit
        samples, fields = len(value) == num_samples, any(not isinstance(item, _WHOLE) for item in value)
        fields = fields and all(isinstance(item, _WHOLE) or _is_field(item, num_samples) for item in value)
        if known is None and samples and fields and (self.stacks or len({_signature(item) for item in value}) > 1):
            samples = False  # they would be alike
        found = [kind for kind, fits in (("samples", samples), ("fields", fields)) if fits and known in (None, kind)]
        if len(found) == 1:
            self._kinds[path] = found[0]
            return found[0]
        raise ValueError(
            "strategy 'dp' splits lists with an item for each sample, and lists of tensors whose first dimension is "
            f"the samples, but {path} is a "
            f"{type(value).__name__} of {len(value)} in a batch of {num_samples} samples"
            + (", which may be either" if found else "")
            + "; return a dict of tensors from collate_fn, or use strategy='ddp'"
        )


def _is_field(value: Any, num_samples: int) -> bool:
    """Whether a value in a list may be a field of all samples."""
    if isinstance(value, Tensor | np.ndarray):
        return not value.ndim or len(value) == num_samples
    if isinstance(value, Mapping):
        return all(_is_field(item, num_samples) for item in value.values())
    if isinstance(value, list | tuple):
        return len(value) == num_samples or all(_is_field(item, num_samples) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_field(getattr(value, f.name), num_samples) for f in dataclasses.fields(value))
    return False


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor or array in a batch, with its path as `SampleCutter` names it."""
    if isinstance(value, Tensor | np.ndarray):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{path}.{value._fields[i]}" if hasattr(value, "_fields") else f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{path}.{field.name}")


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor | np.ndarray) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _signature(value: Any) -> Any:
    return (type(value), value.dtype, tuple(value.shape)) if isinstance(value, Tensor | np.ndarray) else type(value)


def _ranges(value: Any, sizes: list[int]) -> list[Any]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]


__all__ = ["SampleCutter"]
