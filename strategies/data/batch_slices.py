"""Cutting a batch along its samples, and bringing it to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep.strategies.data.batch_rows import refuse_derived
from lockstep.strategies.data.sample_axis import (
    ACROSS,
    JOINED,
    ROWS,
    WHOLE,
    Repeated,
    Shown,
    is_container,
    is_tensor,
    items_of,
    moves_itself,
    named_items,
    parts_of,
    sized,
    with_items,
    with_tensors,
)
from lockstep.strategies.precision import dtype_of


class Rows:
    """Which values of the batches of a run have a row a sample: as the collate function has `shown`, else by their
    number of rows in the first batch."""

    def __init__(self, shown: Shown | None = None) -> None:
        self._shown, self.repeated = shown, Repeated()
        self._first: dict[tuple[str, int], bool] = {}

    def of(self, value: Any, path: str) -> int | None:
        """What the collate function has shown of a tensor, array, list or tuple. Raises ValueError if its samples are
        not along its first dimension."""
        shown = None if self._shown is None else self._shown.of(path, value)
        if shown in (ACROSS, JOINED):
            where = "in another dimension than the first" if shown == ACROSS else "joined, several rows for each"
            size = f"a {type(value).__name__} of {len(value)}"
            size = size if isinstance(value, list | tuple) else f"of shape {list(value.shape)}"
            raise ValueError(
                f"a pipeline splits batches along the first dimension of their tensors, but {path} ({size}) has the "
                f"samples {where}; put samples first and pad them in collate_fn, or give Pipeline(num_micro_batches=1)"
            )
        return shown

    def any_in(self, batch: Any, num_rows: int) -> bool:
        """Whether anything in `batch` can be cut."""
        return has_rows(batch, num_rows) or any(
            len(value) == num_rows and self.of(value, path) == ROWS for path, value in sized(batch, "batch")
        )

    def has(self, value: Any, path: str, num_rows: int) -> bool:
        """Whether a tensor or array is to be cut in a batch of `num_rows` samples. Raises ValueError if it seemed so
        in the first batch, but cannot be."""
        fits, shown = len(value) == num_rows, self.of(value, path)
        if shown is not None:
            return fits and shown == ROWS
        first = self._first.setdefault((path, value.ndim), fits)
        if first and not fits:
            raise ValueError(
                f"{path} had as many rows as samples in an earlier batch, along which a pipeline has split it, but has "
                f"{len(value)} in a batch of {num_rows} samples, so its rows were not samples; make it in "
                "training_step or keep it in the module, or repeat it for each sample in the loader"
            )
        if first and fits:
            self.repeated.see(path, value)
        return first


def cut(batch: Any, num_rows: int, num_parts: int, rows: Rows | None = None) -> list[tuple[Any, int]]:
    """`batch` in at most `num_parts` parts, larger ones first, with the number of rows of each.

    Tensors and arrays whose first dimension is `num_rows` are cut, as are lists and tuples of one item a sample; so is
    what named tuples, dataclasses, mappings, other lists and objects with a `to` of their own hold. All else is given
    to each part whole, and so is what `rows` knows to be the same for all samples. Raises ValueError for an object with
    a tensor of another first dimension, and for a list of which it is not clear what its items are.
    """
    num_parts = max(1, min(num_parts, num_rows))
    if num_parts == 1:
        return [(batch, num_rows)]
    size, larger = divmod(num_rows, num_parts)
    parts, start, rows = [], 0, rows or Rows()
    for i in range(num_parts):
        stop = start + size + (i < larger)
        parts.append((_Part(rows, num_rows, start, stop).of(batch, "batch"), stop - start))
        start = stop
    rows.repeated.end_batch("pipeline")
    return parts


_NOTHING_KNOWN = Rows()


def rebuilt(batch: Any) -> Any:
    """The same tensors in containers of their own, where `cut` can make these."""
    return _Part(_NOTHING_KNOWN, 0, 0, 0).of(batch, "batch")


def copied(batch: Any) -> Any:
    """A copy that a step may change; `batch` itself, where its class does not let it be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


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
    return any(has_rows(item, num_rows) for item in items_of(batch))


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors that `batch` holds."""
    return [batch] if isinstance(batch, Tensor) else [t for item in items_of(batch) for t in tensors_of(item)]


def signature(batch: Any) -> Any:
    """What the shapes within a step follow from: types, and shapes and dtypes of tensors, to compare and to look up."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch.shape, batch.dtype
    items = items_of(batch)
    if not items:
        return type(batch)
    keys = tuple(map(str, batch)) if isinstance(batch, Mapping) else ()
    return type(batch), keys, tuple(map(signature, items))


@dataclasses.dataclass
class _Part:
    """Rows from `start` to `stop` of a batch of `num_rows` samples; of no samples: all, in containers of its own."""

    rows: Rows
    num_rows: int
    start: int
    stop: int

    def of(self, batch: Any, path: str, owner: str = "") -> Any:
        """`owner`: the class of the object that holds it, of which only tensors with a row a sample make clear what its
        parts are."""
        if isinstance(batch, Tensor | np.ndarray):
            return self._tensor(batch, path, owner)
        if isinstance(batch, list | tuple) and self._has_samples(batch, path):
            return with_items(batch, batch[self.start : self.stop])
        if not is_container(batch):
            return batch
        if not isinstance(batch, Mapping | list | tuple):
            if not dataclasses.is_dataclass(batch):
                owner = type(batch).__name__
            elif self.num_rows:
                refuse_derived(batch, parts_of(batch), path, self.num_rows, "give Pipeline(num_micro_batches=1)")
        return with_items(batch, [self.of(item, at, owner) for at, item in named_items(batch, path)])

    def _tensor(self, batch: Any, path: str, owner: str) -> Any:
        if batch.ndim == 0 or not self.num_rows:
            return batch
        if not self.rows.has(batch, path, self.num_rows):
            if owner and self.rows.of(batch, path) != WHOLE:
                raise ValueError(
                    f"a batch of class {owner} cannot be split, as the first dimension of {path} (shape "
                    f"{list(batch.shape)}) is not the number of samples, {self.num_rows}; return a dict, a named tuple "
                    "or a dataclass from the loader"
                )
            return batch
        own = batch[self.start : self.stop]
        # with its own version: changing it changes no other rows
        return own if isinstance(own, np.ndarray) or own.requires_grad else own.data

    def _has_samples(self, batch: Any, path: str) -> bool:
        """Whether a list or tuple has one item a sample."""
        if not self.num_rows or hasattr(batch, "_fields"):
            return False
        shown = self.rows.of(batch, path)
        if len(batch) != self.num_rows:
            return False
        if shown is None and has_rows(batch, self.num_rows):
            _check_items(batch, self.num_rows)
            return False
        return shown in (ROWS, None)


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


# ---- devices --------------------------------------------------------------------------------------


def move(
    batch: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    copies: torch.cuda.Stream | None = None,
    kept: str | None = None,
) -> Any:
    """`batch` with its tensors on `device`, floating point ones cast to `dtype` where it is given.

    Copies from the host run on the stream `copies`; the caller then lets the current stream wait for it. Tensors on a
    device of the type `kept` stay there.
    """
    if isinstance(batch, Tensor):
        to = None if dtype is None else dtype_of(batch, dtype)
        if kept is not None and batch.device.type == kept:
            return batch
        if batch.device == device and (to is None or batch.dtype == to):
            return batch
        if copies is None or batch.device.type != "cpu" or type(batch) is not Tensor or batch.layout != torch.strided:
            return batch.to(device, to, non_blocking=True)
        with torch.cuda.stream(copies):
            moved = batch.to(device, to, non_blocking=True)
        moved.record_stream(torch.cuda.current_stream())
        return moved
    if isinstance(batch, (str, bytes, int, float, type(None))):
        return batch
    if isinstance(batch, PackedSequence):  # a part of which stays on the host
        data, whole = batch.data, cast(Any, batch)
        if kept is not None and data.device.type == kept:
            return batch
        return whole.to(device, data.dtype if dtype is None else dtype_of(data, dtype))
    moves = callable(getattr(batch, "to", None))
    if isinstance(batch, Mapping | list | tuple) or (is_container(batch) and not moves):
        return with_items(batch, [move(item, device, dtype, copies, kept) for item in items_of(batch)])
    if moves:
        moved = batch.to(device)
        return batch if moved is None else moved
    return batch


def move_in_place(value: Any, device: torch.device) -> Any:
    """`value`, which a layer is given or returns, with its tensors on `device`: in the same containers, as far as they
    can be changed, as the layer and its caller may write to them."""

    def to_device(item: Any) -> Any:
        return item if all(t.device == device for t in tensors_of(item)) else move(item, device, None)

    return with_tensors(value, to_device, moves_whole)


def moves_whole(value: Any) -> bool:
    """Whether `move` makes one value of it, whatever it holds."""
    return isinstance(value, Tensor | PackedSequence) or (moves_itself(value) and not isinstance(value, Mapping))


class Replaced:
    """Stand-ins for the tensors in the containers that a layer is called with.

    They are there while the layer runs. After the call each container holds the caller's tensors again, except where
    the layer has written to it, or to the stand-in.
    """

    def __init__(self, is_leaf: Callable[[Any], bool] = is_tensor) -> None:
        self._is_leaf = is_leaf
        self._calls: list[dict[int, tuple[Any, Any, list[int]]]] = []
        """For each running call, by the id of the stand-in: the caller's tensor, the stand-in, and its versions."""

    def begin(self, given: Any, replace: Callable[[], Any]) -> Any:
        """Called before a layer: return what `replace` makes of `given`, which is None if there is nothing to give
        back."""
        self._calls.append({})
        if given is None:
            return replace()
        before = self._held(given)
        made = replace()
        pairs = self._pairs(before, made)
        self._calls[-1] = {id(new): (own, new, _versions(new)) for own, new in pairs if new is not own}
        return made

    def end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook, which is to run after a failure, too."""
        replaced = self._calls.pop() if self._calls else {}

        def own(value: Any) -> Any:
            mine, new, versions = replaced.get(id(value), (value, None, None))
            return mine if new is None or _versions(new) == versions else value  # else the layer has written to it

        if replaced:
            with_tensors((args, kwargs), own, lambda value: id(value) in replaced or self._is_leaf(value))

    def _held(self, value: Any) -> Any:
        """What is in containers, in lists of the same order."""
        return value if self._is_leaf(value) else [self._held(item) for item in items_of(value)]

    def _pairs(self, before: Any, made: Any) -> list[tuple[Any, Any]]:
        if type(before) is not list:
            return [(before, made)]
        return [pair for one, other in zip(before, items_of(made), strict=True) for pair in self._pairs(one, other)]


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(value) if not tensor.is_inference()]
