"""Telling whether tensors hold the same, here and on other ranks."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.strategies.launch.program.values import elements, pickles_itself


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


@dataclass(frozen=True)
class Sample:
    """What tells whether a large object was changed, unless few of its parts were."""

    of: int = field(compare=False)
    """The `id` of the object."""
    number: int


def sample_of(value: Any, most: int, known: Container[int] = ()) -> Sample:
    """Reads parts that are evenly spaced: a sixteenth of `most` at most, by no code of the class of an object. `known`
    are the ids of what is not read."""
    number = 0
    parts = _parts_of(value, min(max(most // 16, _FEW), _MANY), known, _DEPTH)
    for part in islice(parts, _MOST):
        number = zlib.crc32(part if isinstance(part, bytes) else repr(part).encode(), number)
    return Sample(id(value), number)


_FEW, _MANY, _MOST, _DEPTH = 4, 2**10, 2**13, 4
_ATOMS = type(None), bool, float, complex
_BASES: tuple[Any, ...] = dict, list, tuple, deque, set, frozenset


def _parts_of(value: Any, most: int, known: Container[int], depth: int) -> Iterator[Any]:
    kind: Any = type(value)
    if kind in _ATOMS:
        yield value
    elif kind is int:
        yield value.bit_length(), value % 2**64
    elif kind in (str, bytes):
        yield hash(value)
    elif kind is bytearray:
        yield len(value), value[:_MANY], value[-_MANY:]
    elif issubclass(kind, Tensor):
        yield id(value), None if value.is_inference() else value._version
    elif issubclass(kind, np.generic):
        yield value.tobytes()
    elif issubclass(kind, np.ndarray):
        yield value.dtype, value.shape
        if value.flags.writeable and value.size:  # else it may be a file, of which each part is read from a disk
            flat = np.ndarray.view(value, np.ndarray).flat
            yield flat[np.linspace(0, value.size - 1, min(most, value.size), dtype=np.int64)].tobytes()
    elif id(value) in known or not depth:
        yield id(value)
    elif (base := next((each for each in _BASES if issubclass(kind, each)), None)) is None:
        yield id(value)
        if not pickles_itself(kind):  # else its attributes may be caches, which fill as it is read
            yield from _parts_of(_attributes(value), most, known, depth - 1)
    else:
        size = base.__len__(value)
        yield kind.__qualname__, size
        step = max(1, size // most)
        if base in (list, tuple):
            found = base.__getitem__(value, slice(None, None, step))
        else:
            held = (base.__iter__(value), base.values(value)) if base is dict else (base.__iter__(value),)
            found = [item for each in held for item in islice(each, 0, None, step)]
        for item in found:  # which were taken at once, as a thread may change it
            yield from _parts_of(item, max(most // (size + 1), _FEW), known, depth - 1)
        if own := _attributes(value):
            yield from _parts_of(own, most, known, depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # an object without, such as a proxy of another
        return {}
    return own if isinstance(own, dict) else {}
