"""Telling whether tensors hold the same, here and on other ranks."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor


def checksum(tensor: Tensor, known: int = 0) -> int:
    """A number below 2**32 of a tensor's bytes, continuing `known`. Waits for the device."""
    # Cloned, as torch does not resize what numpy has seen.
    data = tensor.detach().clone().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(data.data, known)


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
