"""Telling whether tensors hold the same, here and on other ranks."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.strategies.launch.program.values import elements


def checksum(tensor: Tensor, known: int = 0) -> int:
    """A number below 2**32 of a tensor's bytes, continuing `known`. Waits for the device."""
    # Cloned, as torch does not resize what numpy has seen.
    data = elements(tensor.detach().clone().cpu()).view(torch.uint8).numpy()
    return zlib.crc32(data.data, known)


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The wrapped sum of the bits of what this rank holds of a tensor, which changes with them; on its device."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat, size = tensor.contiguous().view(-1), tensor.element_size()
    if flat.nbytes % 8 == 0:  # whole words are summed several times as fast as smaller numbers
        return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64).sum()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return flat.view(bits).sum(dtype=torch.int64)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, a row for each element."""
    return elements(tensor.resolve_conj()).unsqueeze(1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, on any devices, have one dtype, one shape and the same bits: the sign of a zero and what NaN
    it is count too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    flats = [elements(tensor.detach()).view(torch.uint8) for tensor in (one, other)]
    numbers = flats[0].numel(), *(flat.storage_offset() for flat in flats)
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the wider, the faster
    dtype = next(dtype for dtype in words if not any(number % dtype.itemsize for number in numbers))
    return torch.equal(*(flat.view(dtype) for flat in flats))


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether values are the same; NaN is the same as NaN, which is rare enough to be looked for afterwards."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def generator_state(value: Any) -> Any:
    """What tells whether something was drawn from a generator of random numbers; None of anything else."""
    if isinstance(value, torch.Generator):
        return checksum(value.get_state())
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return None
