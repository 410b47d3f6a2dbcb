"""Where the samples of a batch lie, and cutting it along them if that is certain."""

from __future__ import annotations

import copy
import dataclasses
import operator
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.data.batch_rows import refuse_derived
from lockstep.strategies.launch.program.reach import can_be_tried, kept_state
from lockstep.strategies.launch.rng import kept_streams

_WHOLE = (str, bytes, bool, int, float, complex, type(None))

ROWS, WHOLE, ACROSS, JOINED = 1, 2, 3, 4
"""A value has a row (a list an item) for each sample; is the same for all samples; has its samples in another dimension
than the first; has the rows of all samples one after the other, several for each."""

_SLOTS = 4096
"""At most `REAL_NUMEL` of `strategies/planning/trial_mode.py`: a larger tensor is fake in a plan, and not shared."""

_COMPARED = 4
"""Batches whose tensors are compared to find those that are not of the samples."""


class Shown:
    """What a collate function shows of where the samples of its batches lie: once it makes two batches of the samples
    of one, and compares their shapes. Also in a DataLoader's workers, which share the table."""

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._found: dict[tuple[str, int], int] = {}

    def of(self, path: str, value: Any) -> int | None:
        """`ROWS`, `WHOLE`, `ACROSS` or `JOINED`; None for a tensor or list that was not in these batches."""
        at = path, -1 if isinstance(value, list | tuple) else value.ndim
        if self._table is None:
            return None
        if at not in self._found:
            key = _key(path, value)
            entry = int(self._table[key % _SLOTS])
            if entry >> 3 != key:
                return None
            self._found[at] = entry & 7
        return self._found[at]

    @property
    def is_taught(self) -> bool:
        """Whether anything has been learned, in any process."""
        return self._table is not None and bool(self._table.any())

    def collating(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`collate_fn`, learning from what it is given."""
        if self._table is None:
            self._table = torch.zeros(_SLOTS, dtype=torch.int64).share_memory_()
        return _Collate(collate_fn, self)

    def learn(self, batch: Any, n: int, parts: tuple[Any, Any], k: int) -> None:
        """Compare a batch of `n` samples with one of its first `k` samples and one of the others."""
        one, other = (dict(sized(part, "batch")) for part in parts)
        found: dict[int, int] = {}
        for path, value in sized(batch, "batch"):
            shapes = [_shape(held[path]) for held in (one, other) if path in held] + [_shape(value)]
            if len(shapes) < 3 or len({len(shape) for shape in shapes}) > 1:
                continue
            sizes = list(zip(*shapes, strict=True))
            along = [dim for dim, lengths in enumerate(sizes) if lengths == (k, n - k, n)]
            joined = sizes[0][0] + sizes[0][1] == sizes[0][2] > 0
            verdict = (ROWS if along[0] == 0 else ACROSS) if along else JOINED if joined else WHOLE
            found[_key(path, value)] = verdict
        if ROWS in found.values():  # else it makes batches of another size than it is asked for
            assert self._table is not None
            for key, verdict in found.items():
                self._table[key % _SLOTS] = key << 3 | verdict


class Repeated:
    """Warns of tensors that were split by their number of rows alone if the first batches have the same values there,
    and others elsewhere: as class weights and masks do. The labels of two small batches may be alike by chance."""

    def __init__(self) -> None:
        self._alike: dict[str, Any] = {}  # of the first batch, and the same in each later one
        self._now: dict[str, Any] = {}
        self._left, self._others = _COMPARED, False

    def see(self, path: str, value: Any) -> None:
        """A tensor or array of this batch is split."""
        if self._left:
            self._now[path] = torch.as_tensor(value)

    def end_batch(self, strategy: str) -> None:
        if not self._now:
            return
        now, self._now = self._now, {}
        first = self._alike if self._left < _COMPARED else now
        self._alike = {path: value for path, value in first.items() if path in now and _same(value, now[path])}
        self._others |= len(self._alike) < len(now)
        self._left = self._left - 1 if self._alike else 0
        named = [path for path, value in self._alike.items() if not _same(value, value[:1].expand_as(value))]
        if named and self._others and not self._left:
            warnings.warn(
                f"{', '.join(named)} had the same values in the first {_COMPARED} batches, and strategy {strategy!r} "
                "has split it, as it has as many rows as there are samples; if it is not of the samples, keep it in "
                "the module (register_buffer) instead of the batch, else ignore this",
                stacklevel=2,
            )
        if not self._left:
            self._alike = {}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


class _Collate:
    def __init__(self, collate_fn: Callable[[Any], Any], shown: Shown) -> None:
        self._collate_fn, self._shown = collate_fn, shown
        self._trials = 2 if not shown.is_taught and can_be_tried(collate_fn) else 0

    def __call__(self, samples: Any) -> Any:
        if self._trials == 2 and self._shown.is_taught:  # in another worker, or in an earlier epoch
            self._trials = 0
        if not self._trials or not isinstance(samples, list) or len(samples) < 2:
            return self._collate_fn(samples)
        self._trials -= 1
        k = len(samples) - 1
        try:
            with kept_streams(), kept_state(self._collate_fn):
                kept = copy.deepcopy(samples)  # which a collate function may change
                parts = self._collate_fn(kept[:k]), self._collate_fn(kept[k:])
        except Exception:  # some cannot make a batch of one sample, or be copied
            return self._collate_fn(samples)
        batch = self._collate_fn(samples)
        self._shown.learn(batch, len(samples), parts, k)
        return batch


def sized(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every list, and every tensor and array with a dimension, in a batch, with its path."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield path, value
        return
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        yield path, value
    for at, item in named_items(value, path):
        yield from sized(item, at)


def items_of(value: Any) -> list[Any]:
    """What a container holds; nothing of a value that holds none."""
    if isinstance(value, (list, tuple)):
        return [*value]
    if isinstance(value, Mapping):
        return [*value.values()]
    return [*parts_of(value).values()] if _has_parts(value) else []


def named_items(value: Any, path: str) -> list[tuple[str, Any]]:
    """What `items_of` gives, with paths, which take longer to make than the rest."""
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        names = [f".{name}" for name in getattr(value, "_fields", ())] or [f"[{i}]" for i in range(len(value))]
        return [(path + name, item) for name, item in zip(names, value, strict=True)]
    return [(f"{path}.{name}", item) for name, item in parts_of(value).items()] if _has_parts(value) else []


def is_container(value: Any) -> bool:
    """Whether `value` is of a kind that `items_of` looks into."""
    return isinstance(value, Mapping | list | tuple) or _has_parts(value)


def with_items(value: Any, items: Sequence[Any], in_place: bool = False) -> Any:
    """A container as `value` with `items` in the place of what `items_of` gives: a copy, made without its `__init__`,
    which could change them. With `in_place` it is `value` itself, if that can be changed."""
    if type(value) is list and not in_place:
        return [*items]
    if isinstance(value, tuple):
        return _tuple_of(value, items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        whole, kind = dict(zip(value, items, strict=True)), type(value)
        try:
            return cast(Any, kind)(whole)
        except TypeError:  # its class is made of other arguments
            return whole
    made = value if in_place and not _is_frozen(value) else _copy_of(value)
    if isinstance(value, list):
        made[:] = items
    elif isinstance(value, Mapping):
        for key, item in zip([*value], items, strict=True):
            made[key] = item
    else:
        for name, item in zip(parts_of(value), items, strict=True):
            object.__setattr__(made, name, item)
    return made


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def with_tensors(value: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = is_tensor) -> Any:
    """`value` with `change` of each tensor in it, in the same containers as far as they can be changed."""
    if is_leaf(value):
        return change(value)
    held = items_of(value)
    items = [with_tensors(item, change, is_leaf) for item in held]
    return value if all(map(operator.is_, items, held)) else with_items(value, items, in_place=True)


def parts_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, then what else it or another object has in attributes."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = [field.name for field in fields if hasattr(value, field.name)]
    names += sorted(getattr(value, "__dict__", {}).keys() - names)
    return {name: getattr(value, name) for name in names}


def _has_parts(value: Any) -> bool:
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or moves_itself(value)


def _is_frozen(value: Any) -> bool:
    return getattr(getattr(value, "__dataclass_params__", None), "frozen", False)


def _tuple_of(value: Any, items: Sequence[Any]) -> Any:
    try:
        made = tuple.__new__(type(value), items)
    except TypeError:  # a class of torch, such as torch.Size or what torch.max returns
        return type(value)(items)
    if hasattr(made, "__dict__"):
        vars(made).update(vars(value))
    return made


def _copy_of(value: Any) -> Any:
    made = copy.copy(value)
    if isinstance(value, Mapping):  # of the user's, which may keep its items in a dict of its own
        attributes = getattr(made, "__dict__", {})
        attributes.update({name: copy.copy(held) for name, held in attributes.items() if isinstance(held, dict)})
    return made


def moves_itself(batch: Any) -> bool:
    """Whether it is an object of a class of the user's that moves itself to a device, as batches do."""
    return (
        not isinstance(batch, (Tensor, nn.Module, type))
        and callable(getattr(batch, "to", None))
        and hasattr(batch, "__dict__")
    )


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value),) if isinstance(value, list | tuple) else tuple(value.shape)


def _key(path: str, value: Any) -> int:
    kind = "list" if isinstance(value, list | tuple) else str(value.ndim)
    return zlib.crc32(path.encode()) << 26 | zlib.crc32(f"{kind}{path}".encode()) >> 6


class SampleCutter:
    """Cuts the batches of a run into slices of samples; raises ValueError for a batch of which it does not know how.

    A tensor or array is split along its first dimension, which must be the number of samples; tensors without
    dimensions, numbers and strings go to every slice. A list is one of fields, each of which is split, or has an item
    for each sample. What a batch leaves open, as `[8, 8]` numbers or a list of two pairs do for two samples, an earlier
    batch may have shown.

    `stacks`: whether the loader is known to put samples first, as torch's own collate function does.
    `shown`: what the collate function shows of where samples are, as in a square tensor.
    """

    def __init__(self, stacks: bool = False, shown: Shown | None = None) -> None:
        self.stacks, self._shown, self._repeated = stacks, shown or Shown(), Repeated()
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
        self._repeated.end_batch("dp")
        return list(zip(slices, sizes, strict=True))

    def _cut(self, value: Any, path: str, num_samples: int, sizes: list[int]) -> list[Any]:
        if isinstance(value, _WHOLE):
            return [value] * len(sizes)
        if isinstance(value, Tensor | np.ndarray):
            if not value.ndim or self._shown.of(path, value) == WHOLE:
                return [value, *(value.clone() if isinstance(value, Tensor) else value.copy() for _ in sizes[1:])]
            self._check_first(value, path, num_samples)
            if self._shown.of(path, value) is None:
                self._repeated.see(path, value)
            return _ranges(value, sizes)
        is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
        if is_list and self._kind_of_list(value, path, num_samples) == "samples":
            return [with_items(value, part) for part in _ranges(value, sizes)]
        is_mapping = isinstance(value, Mapping | tuple)
        if not is_list and not is_mapping and dataclasses.is_dataclass(value):
            refuse_derived(value, parts_of(value), path, num_samples, "use strategy='ddp'")
        if is_list or is_mapping or dataclasses.is_dataclass(value):
            cuts = [self._cut(item, at, num_samples, sizes) for at, item in named_items(value, path)]
            return [with_items(value, [cut[i] for cut in cuts]) for i in range(len(sizes))]
        raise ValueError(
            f"strategy 'dp' splits tensors, and lists, dicts and dataclasses of them, but {path} is of class "
            f"{type(value).__name__}, whose "
            "samples it does not know; return one of those from collate_fn, or use strategy='ddp'"
        )

    def _check_first(self, value: Any, path: str, num_samples: int) -> None:
        shown = self._shown.of(path, value)
        if len(value) != num_samples or shown == JOINED:
            raise ValueError(
                f"strategy 'dp' splits along the first dimension, which must be the samples, but {path} has shape "
                f"{list(value.shape)} in a "
                f"batch of {num_samples} samples; put the samples first in collate_fn, or use strategy='ddp'"
            )
        if self.stacks or (path in self._kinds and shown != ACROSS):
            return
        if shown == ACROSS or (value.ndim > 1 and value.shape[1] == num_samples and shown is None):
            raise ValueError(
                f"strategy 'dp' splits along the first dimension, which must be the samples, but {path} has shape "
                f"{list(value.shape)} in a "
                f"batch of {num_samples} samples, where another dimension may be theirs; use another batch size, or "
                "strategy='ddp'"
            )
        self._kinds[path] = "first"

    def _kind_of_list(self, value: Any, path: str, num_samples: int) -> str:
        """Whether a list or tuple has an item for each sample, or is one of fields."""
        if (shown := self._shown.of(path, value)) in (ROWS, WHOLE):
            return "samples" if shown == ROWS else "fields"
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
    found = [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    # with versions of their own: changing one changes no rows of another
    return [part.data for part in found] if isinstance(value, Tensor) and not value.requires_grad else found
