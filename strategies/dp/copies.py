"""Tensors, arrays and metrics of a slice: copies, on its device, of those that the model holds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.data.batch_slices import tensors_of
from lockstep.strategies.data.sample_axis import with_items
from lockstep.strategies.dp.held import Held, inside, is_metric, is_plain
from lockstep.strategies.modules.blocks import holds_states, join_states
from lockstep.strategies.modules.parameter_hooks import copy_attributes
from lockstep.strategies.sync.contents import same_values

_BYTES, _VALUES = 1 << 20, 1000
"""Above how many bytes a value is large; how many values of a large tensor are compared."""


class Replaced:
    """Replacements of values, found by the ids of these."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        """With each value itself, which lives as long."""

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, value: Any, other: Any) -> Any:
        self._known[id(value)] = value, other
        return other

    def of(self, value: Any) -> Any:
        """The replacement of `value`; else `value`, with replaced parts in a tuple, a bound method or a partial."""
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        parts = inside(value)
        if parts is None or is_plain(parts):
            return value
        items = [*map(self.of, parts)]
        if all(item is part for item, part in zip(items, parts, strict=True)):
            return value
        if type(value) is MethodType:
            return MethodType(*items)
        if type(value) is functools.partial:
            return functools.partial(items[0], *items[1], **items[2])
        return frozenset(items) if type(value) is frozenset else with_items(value, items)


class Copies(Replaced):
    """Copies on `device` of what `held` has. Shared with the model are tensors of a graph, and what is in `large`."""

    def __init__(self, held: Held, device: torch.device, large: list[tuple[str, Any]]) -> None:
        super().__init__()
        self._device = device
        self._large = {id(value) for _, value in large}
        self.parameters: list[tuple[str, Tensor, Tensor]] = []
        """Each with its name and its copy, which has gradients of its own."""
        for place, value in held.values.values():
            if isinstance(value, Tensor):
                own = self._of_tensor(value)
                if own is not value and (isinstance(own, nn.Parameter) or own.requires_grad):
                    self.parameters.append((place, value, own))
            elif isinstance(value, np.ndarray):
                if id(value) not in self._large:
                    self.add(value, copy.copy(value))
            else:
                self._metric(value)

    def _of_tensor(self, value: Tensor) -> Tensor:
        if id(value) in self._known:
            return self.of(value)
        if id(value) in self._large or value.layout is not torch.strided or not value.is_leaf:
            return value
        base = value._base
        if base is not None and base.is_contiguous() and not base.requires_grad:  # so that both change together
            whole = self._of_tensor(base)
            own = whole.as_strided(value.size(), value.stride(), value.storage_offset())
            return value if whole is base else self.add(value, own)
        there = self._device if value.device.type == self._device.type else value.device
        own = value.detach().to(there, copy=True, non_blocking=True)
        if isinstance(value, nn.Parameter):
            own = nn.Parameter(own, requires_grad=value.requires_grad)
            copy_attributes(value, own)
        return self.add(value, own.requires_grad_(value.requires_grad))

    def _metric(self, metric: Any) -> None:
        copied = copy.deepcopy(metric)
        copied.reset()
        copied.to(self._device)
        for own, other in zip(metric.modules(), copied.modules(), strict=True):
            self.add(own, other)


def large_values(held: Held, devices: Sequence[torch.device]) -> list[tuple[str, Any]]:
    """The large tensors and arrays that are in no parameter or buffer and that slices on `devices` can share."""
    places = {torch.device("cpu"), *(devices[:1] if len({*devices}) == 1 else ())}
    values = [(place, value) for place, value in held.values.values() if id(value) not in held.buffers]
    return [(place, value) for place, value in values if _is_large(value, places)]


def _is_large(value: Any, places: set[torch.device]) -> bool:
    if type(value) is Tensor:
        is_dense = value.layout is torch.strided and value.is_contiguous() and not value.is_inference()
        is_whole = value._base is None and not value.requires_grad
        return value.nbytes > _BYTES and is_dense and is_whole and value.device in places
    if type(value) in (np.ndarray, np.memmap):
        is_own = value.flags.owndata or not (value.flags.writeable or isinstance(value.base, np.ndarray))
        return value.nbytes > _BYTES and is_own and not value.dtype.hasobject
    return False


@contextmanager
def unchanged(large: list[tuple[str, Any]]) -> Iterator[None]:
    """Raise RuntimeError if a step changes what slices share since it is large: arrays cannot be written within."""
    marks = [(place, value, value._version, _sample(value)) for place, value in large if isinstance(value, Tensor)]
    arrays = [(place, value) for place, value in large if isinstance(value, np.ndarray) and value.flags.writeable]
    for _, array in arrays:
        array.flags.writeable = False
    try:
        yield
    except ValueError as error:
        if not arrays or "read-only" not in str(error):
            raise
        raise _changed(arrays[0][0]) from error
    finally:
        for _, array in arrays:
            array.flags.writeable = True
    for place, value, version, sample in marks:
        if value._version != version or not same_values(sample, _sample(value)):
            raise _changed(place)


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    return flat[:: len(flat) // _VALUES + 1].clone()


def _changed(place: str) -> RuntimeError:
    return RuntimeError(
        f"training_step changed what {place} holds, which is large, and strategy 'dp' runs it on slices, "
        "which share that; change it in on_train_batch_end, register a tensor as a buffer, or use strategy='single'"
    )


def refuse_returned(output: Any, parameters: list[nn.Parameter]) -> None:
    """Raise RuntimeError for a weight, or a view of one, in what a step has returned beside the loss: it would not
    follow the weight through the optimizer's step, as on one device."""
    returned = [tensor for tensor in tensors_of(output) if tensor.layout is torch.strided and tensor.numel()]
    held = {parameter.untyped_storage().data_ptr() for parameter in parameters if returned and parameter.numel()}
    if any(tensor.untyped_storage().data_ptr() in held - {0} for tensor in returned):  # 0 where nothing is computed
        raise RuntimeError(
            "training_step returned a weight, or a view of one (.data, .detach() or a part), and strategy 'dp' joins "
            "what slices return, so that it would not follow the weight; read the weight in the hook, or return a copy "
            "(.clone())"
        )


def join(model: nn.Module, copies: list[Copies]) -> None:
    """Add up gradients and metrics, in the order of slices."""
    metrics: list[Any] = [
        m for m in model.modules() if is_metric(m) and hasattr(m, "_update_count") and holds_states(m)
    ]
    for copied in copies:
        for _, own, theirs in copied.parameters:
            if theirs.grad is not None:
                added = theirs.grad.to(own.device)
                own.grad = added if own.grad is None else own.grad.add_(added)
        for metric in metrics:
            other = copied.of(metric)
            if other._update_count:
                join_states(metric, other.to(metric.device), "use strategy='ddp'")
