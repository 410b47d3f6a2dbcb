"""Tensors, arrays and metrics of a slice: copies, on its device, of those that the model holds."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.data.batch_slices import tensors_of
from lockstep.strategies.dp.held import Held, is_metric
from lockstep.strategies.dp.parts import Replaced
from lockstep.strategies.modules.blocks import holds_states, join_states
from lockstep.strategies.modules.parameter_hooks import copy_attributes
from lockstep.strategies.sync.contents import same_values, sum_of_bits

_GRADIENT = operator.attrgetter("grad")
_BYTES, _VALUES = 1 << 20, 1000
"""Above how many bytes a value is large; how many values of a large tensor are compared."""


class Copies(Replaced):
    """Copies on `device` of what `held` has. Shared with the model are tensors of a graph, and what is in `large`."""

    @torch.no_grad()
    def __init__(self, held: Held, device: torch.device, large: list[tuple[str, Any]]) -> None:
        super().__init__()
        self._device, self.is_apart = device, False
        self._large = {id(value) for _, value in large}
        self.names: list[str] = []
        self.originals: list[Tensor] = []
        self.parameters: list[Tensor] = []
        """What has gradients of its own, beside the names and what these are copies of."""
        for place, value in held.values.values():
            if isinstance(value, Tensor):
                own = self._of_tensor(value)
                if own is not value and (isinstance(own, nn.Parameter) or own.requires_grad):
                    self.names.append(place)
                    self.originals.append(value)
                    self.parameters.append(own)
            elif isinstance(value, np.ndarray):
                if id(value) not in self._large:
                    self.add(value, copy.copy(value))
            else:
                self._metric(value)

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Each with its copy."""
        tensors = [value for value in self._values if isinstance(value, Tensor)]
        return [(own, theirs) for own, theirs in zip(tensors, self.of_each(tensors), strict=True) if own is not theirs]

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
        device = value.device
        if device == self._device:
            own = value.clone()
        else:
            there = self._device if device.type == self._device.type else device
            own = value.to(there, copy=True, non_blocking=True)
            self.is_apart |= own.device != device
        if isinstance(value, nn.Parameter):
            own = nn.Parameter(own, value.requires_grad)
            if vars(value):
                copy_attributes(value, own)
            return self.add(value, own)
        return self.add(value, own.requires_grad_(value.requires_grad))

    def _metric(self, metric: Any) -> None:
        copied = copy.deepcopy(metric)
        copied.reset()
        copied.to(self._device)
        for own, other in zip(metric.modules(), copied.modules(), strict=True):
            self.add(own, other)


@contextmanager
def followed(copies: list[Copies]) -> Iterator[None]:
    """Let tensors of slices, which have run forward, become what a hook makes of those that they are copies of: a
    backward reads them."""
    weights = {id(own) for copied in copies for own in copied.originals}
    pairs = [(own, theirs) for copied in copies for own, theirs in copied.tensors()]
    rest = {id(own): own for own, _ in pairs if id(own) not in weights}
    before = {key: int(sum_of_bits(own)) for key, own in rest.items()}
    places = {id(own): own.data_ptr() for own, _ in pairs}
    yield
    changed = {key for key, own in rest.items() if before[key] != int(sum_of_bits(own))}
    for own, theirs in pairs:
        if own.data_ptr() != places[id(own)]:  # what backward has kept of the one before is as it was
            theirs.data = own.detach().to(theirs.device, copy=True)
        elif id(own) in weights | changed:
            theirs.data.copy_(own.detach())


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


class Gradients:
    """Those of what slices have copies of: each slice finds the ones that the micro-batch found, and has its own."""

    def __init__(self, copies: list[Copies]) -> None:
        self._own: list[Tensor] = copies[0].originals if copies else []
        self._of_slices = [self._own, *(copied.parameters for copied in copies)]
        self._is_apart = any(copied.is_apart for copied in copies)
        self._found: list[list[Any]] = []
        self._before = [*map(_GRADIENT, self._own)]
        self._had_any = _are_any(self._before)
        for parameters in self._of_slices[1:] if self._had_any else ():
            self._put(parameters, self._before)

    def backward(self, index: int, losses: list[Tensor]) -> None:
        """Run backward from the losses of a slice."""
        tensors = self._of_slices[index]
        if not index:  # a hook before the backward may have cleared or set some
            self._before = [*map(_GRADIENT, tensors)]
            self._had_any |= _are_any(self._before)
        if self._had_any:
            self._put(tensors, [None] * len(tensors))
        for loss in losses:
            loss.backward()
        self._found.append([*map(_GRADIENT, tensors)])
        if not index:
            self._put(tensors, self._before)

    def add_up(self) -> None:
        """In the order of slices."""
        sums: list[Any] = self._before
        for found in self._found if sums else ():
            if self._is_apart:
                pairs = zip(found, self._own, strict=True)
                found = [None if gradient is None else gradient.to(own.device) for gradient, own in pairs]
            if _are_all(sums) and _are_all(found):
                torch._foreach_add_(sums, found)
                continue
            for i, gradient in enumerate(found):
                total = sums[i]
                sums[i] = gradient if total is None else total if gradient is None else total.add_(gradient)
        self._put(self._own, sums)

    def _put(self, tensors: list[Tensor], gradients: list[Tensor | None]) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient.to(tensor.device) if self._is_apart and gradient is not None else gradient


def _are_any(gradients: list[Tensor | None]) -> bool:
    return any(map(operator.is_not, gradients, repeat(None)))


def _are_all(gradients: list[Tensor | None]) -> bool:
    return all(map(operator.is_not, gradients, repeat(None)))


def join_metrics(held: Held, copies: list[Copies]) -> None:
    """Add up metrics, in the order of slices."""
    found = [metric for _, metric in held.values.values() if is_metric(metric)]
    metrics: list[Any] = [m for metric in found for m in metric.modules() if is_metric(m) and holds_states(m)]
    for copied in copies:
        for metric in metrics:
            other = copied.of(metric)
            if hasattr(metric, "_update_count") and other._update_count:
                join_states(metric, other.to(metric.device), "use strategy='ddp'")
