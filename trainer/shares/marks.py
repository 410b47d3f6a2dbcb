"""What tells whether a tensor, an array or an iterator was changed or read."""

from __future__ import annotations

import zlib
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.sync.contents import checksum, sum_of_bits

NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_READ_BYTES = 2**22
"""Larger tensors and arrays are not read: what torch notes of them is compared."""


def place_of(iterator: Any) -> Any:
    """What tells whether an iterator was read; None if nothing does."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        held = {key: value if isinstance(value, NUMBERS) else id(value) for key, value in frame.f_locals.items()}
        return frame.f_lasti, held
    if isinstance(iterator, count):
        return repr(iterator)
    if hasattr(iterator, "__length_hint__"):
        return iterator.__length_hint__()
    return getattr(iterator, "_num_yielded", None)  # of a DataLoader


def of_tensor(tensor: Tensor) -> Any:
    """What tells whether a tensor was changed, also by `.data`."""
    if not is_here(tensor):
        return None
    version = None if tensor.is_inference() else tensor._version
    if type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout == torch.strided:
        if tensor.numel() * tensor.element_size() > _READ_BYTES:
            return version, tensor.data_ptr()
        return tuple(tensor.shape), tensor.dtype, checksum(tensor)
    return version, id(tensor)


def bits_of(tensor: Tensor | None) -> Any:
    """The shape, dtype and a checksum of what this process has of a tensor of any size; None if that cannot be read."""
    own: Any = getattr(tensor, "_local_tensor", tensor)
    if hasattr(own, "__tensor_flatten__"):  # around others, such as a state of eight bits: it has no bits of its own
        return own.shape, own.dtype, [bits_of(getattr(own, name)) for name in own.__tensor_flatten__()[0]]
    if own is None or not is_here(own) or own.is_meta or own.layout != torch.strided or own.is_quantized:
        return None
    if own.numel() and not own.untyped_storage().size():  # an engine has freed it
        return None
    return own.shape, own.dtype, checksum(own) if own.is_cpu else int(sum_of_bits(own))


def noted(value: Any) -> Any:
    """What torch notes of a tensor; None for anything else."""
    return (value._version, id(value)) if isinstance(value, Tensor) and not value.is_inference() else None


def of_array(array: np.ndarray, most: int = _READ_BYTES) -> Any:
    """What tells whether an array of at most `most` bytes was changed."""
    if array.nbytes > most or array.dtype.hasobject:
        return id(array)
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
