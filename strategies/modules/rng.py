"""The random streams that user code draws from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_streams(seed: int) -> None:
    """Seed every generator that a step may draw from."""
    torch.random.default_generator.manual_seed(seed % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Give every generator its state back at the end."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if device is not None:
            torch.cuda.set_rng_state(device)
