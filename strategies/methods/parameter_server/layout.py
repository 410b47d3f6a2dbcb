"""Which server has which tensor, and where each tensor begins in the messages between workers and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: a view of a message as any dtype must begin at a multiple of its size."""


class Place(NamedTuple):
    """The bytes of a tensor in a message."""

    start: int
    end: int
    dtype: torch.dtype
    shape: torch.Size


class Layout:
    """A flat message of tensors of known shapes, each of which may be missing: one byte a tensor says whether it is
    there."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names = list(tensors)
        end = _aligned(len(self.names))
        self.places: list[Place] = []
        for tensor in tensors.values():
            start, end = end, end + tensor.numel() * tensor.element_size()
            self.places.append(Place(start, end, tensor.dtype, tensor.shape))
            end = _aligned(end)
        self.nbytes = end

    @torch.no_grad()
    def write(self, tensors: Sequence[Tensor | None], flat: Tensor) -> None:
        """Fill `flat` (uint8, `nbytes`). Raises ValueError for a tensor of another shape or dtype."""
        for i, (tensor, view) in enumerate(zip(tensors, self._views(flat), strict=True)):
            flat[i] = tensor is not None
            if tensor is None:
                continue
            if tensor.layout != torch.strided or tensor.shape != view.shape or tensor.dtype != view.dtype:
                raise ValueError(
                    "a parameter server takes dense tensors of the shape and dtype of the parameter, but "
                    f"{self.names[i]} has one of shape {list(tensor.shape)}, {tensor.dtype}, {tensor.layout}"
                )
            view.copy_(tensor)

    def read(self, flat: Tensor) -> list[Tensor | None]:
        """Views of what `write` has put into `flat`."""
        there = flat[: len(self.names)].tolist()
        return [view if found else None for view, found in zip(self._views(flat), there, strict=True)]

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[p.start : p.end].view(p.dtype).view(p.shape) for p in self.places]


def spread(tensors: Mapping[str, Tensor], num_servers: int) -> list[dict[str, Tensor]]:
    """The tensors of each server, about equally many bytes: a function of their names, sizes and order."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(num_servers)]
    load = [0] * num_servers
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].numel() * item[1].element_size()):
        least = load.index(min(load))
        parts[least][name] = tensor
        load[least] += tensor.numel() * tensor.element_size()
    return [{name: part[name] for name in tensors if name in part} for part in parts]


def _aligned(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT
