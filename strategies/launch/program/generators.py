"""Generators of random numbers that user code holds: what they are, and how their state is kept."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


@functools.cache
def generators() -> tuple[type, ...]:
    """The classes of generators whose state can be saved."""
    return torch.Generator, np.random.Generator, np.random.RandomState, random.Random


def generator_content(generator: Any) -> dict[str, Any] | None:
    """The state of a generator of random numbers as tensors, arrays and JSON data; None of another class than
    those of `generators`, or over bits that are not numpy's."""
    kind = type(generator)
    if kind is torch.Generator:
        return {"kind": generator.device.type, "state": generator.get_state()}
    if kind is random.Random:
        return {"kind": "random", "state": generator.getstate()}
    if kind is np.random.RandomState:
        return {"kind": "RandomState", "state": generator.get_state(legacy=False)}
    if kind is np.random.Generator and type(generator.bit_generator).__name__ in _BITS:
        return {"kind": "numpy", "state": generator.bit_generator.state}
    return None


_BITS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def generator_of(content: Mapping[str, Any], now: Any) -> Any:
    """The generator whose `generator_content` this is: `now`, if it is of the same class, else a new one."""
    kind, state = content["kind"], content["state"]
    found: Any
    if kind == "random":
        found = now if type(now) is random.Random else random.Random()
        found.setstate(state)
    elif kind == "RandomState":
        found = now if type(now) is np.random.RandomState else np.random.RandomState()
        found.set_state(state)
    elif kind == "numpy":
        name = str(state["bit_generator"])
        is_alike = type(now) is np.random.Generator and type(now.bit_generator).__name__ == name
        found = now if is_alike else np.random.Generator(getattr(np.random, _BITS[_BITS.index(name)])())
        found.bit_generator.state = state
    else:
        is_other = type(now) is torch.Generator and now.device.type != kind
        if is_other or (kind == "cuda" and not torch.cuda.is_available()):
            return now  # the run draws on another device than it did
        found = now if type(now) is torch.Generator else torch.Generator(kind)
        found.set_state(state.to(torch.uint8).cpu())
    return found
