"""What a compressor of a user's own keeps beside its options, which no checkpoint holds and shares of a rank share."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.strategies.sync.compression.compressor import Compressor, Encoding
from lockstep.strategies.sync.contents import checksum

_DEPTH = 5
"""How deep containers and objects within attributes are searched."""
_OURS = f"{Compressor.__module__.rpartition('.')[0]}."


@contextmanager
def keeping_nothing(compressor: Compressor) -> Iterator[None]:
    """Raises RuntimeError if a compressor changes an attribute within, or draws from torch's own random numbers.

    What it has not had yet, such as a matrix that it makes once for each shape, it may get.
    """
    if _is_ours(compressor):
        yield
        return
    before, stream = _marks(compressor), torch.get_rng_state()
    yield
    after = _marks(compressor)
    changed = sorted(name for name, mark in before.items() if after.get(name) != mark)
    if changed:
        raise RuntimeError(
            f"{type(compressor).__name__} changed {', '.join(changed[:3])} while it encoded or decoded, which is in no "
            "checkpoint, and which the shares of a rank have in common; let decode keep it in encoding.memory, or "
            "derive it from encoding.step, encoding.share and encoding.generator()"
        )
    if not torch.equal(stream, torch.get_rng_state()):
        raise RuntimeError(
            f"{type(compressor).__name__} drew from torch's own random numbers, which depend on the ranks; draw from "
            "encoding.generator()"
        )


def apart(encoding: Encoding, share: int, compressor: Compressor) -> Encoding:
    """That of a share, whose memory changes that of no other."""
    if _is_ours(compressor):
        return replace(encoding, share=share)
    return replace(encoding, share=share, memory={key: value.clone() for key, value in encoding.memory.items()})


def mark_memory(compressor: Compressor, encodings: Sequence[Encoding], like: Tensor) -> Tensor:
    """What tells whether `encode` has left the same in the memories of two shares: bytes, on the device of `like`."""
    if _is_ours(compressor):
        return like.new_empty(0)
    known = 0
    for encoding in encodings:
        for key, value in encoding.memory.items():
            known = checksum(value, zlib.crc32(f"{encoding.name} {key}".encode(), known))
    return torch.frombuffer(bytearray(known.to_bytes(4)), dtype=torch.uint8).to(like.device)


def check_memory(compressor: Compressor, marks: Sequence[Tensor]) -> None:
    """Raises RuntimeError, on all ranks, if `encode` has left in a memory what is not the same of all shares."""
    if not _is_ours(compressor) and not all(torch.equal(mark, marks[0]) for mark in marks):
        raise RuntimeError(
            f"{type(compressor).__name__}.encode has put into encoding.memory what only its own share has, and the "
            "memory of a parameter is common to all shares; let decode put there what follows from payloads"
        )


def _is_ours(compressor: Compressor) -> bool:
    return type(compressor).__module__.startswith(_OURS)


def _marks(compressor: Compressor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _mark("", vars(compressor), found, _DEPTH)
    return found


def _mark(name: str, value: Any, found: dict[str, Any], depth: int) -> None:
    """By path what tells whether a value was changed; of None, in whose place one is yet to be put, nothing."""
    if isinstance(value, Tensor):
        found[name] = value.dtype, value.shape, checksum(value)
    elif isinstance(value, np.ndarray):
        found[name] = value.dtype, value.shape, value.tobytes()
    elif isinstance(value, torch.Generator):
        found[name] = checksum(value.get_state())
    elif isinstance(value, random.Random):
        found[name] = value.getstate()
    elif isinstance(value, np.random.Generator):
        found[name] = repr(value.bit_generator.state)
    elif isinstance(value, (bool, int, float, complex, str, bytes, set, frozenset)):
        found[name] = repr(value)
    elif isinstance(value, dict) and depth:
        for key, item in value.items():
            _mark(f"{name}[{key!r}]" if name else str(key), item, found, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        found[name] = len(value)
        for i, item in enumerate(value):
            _mark(f"{name}[{i}]", item, found, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value) and depth:
        for attribute, item in vars(value).items():
            _mark(f"{name}.{attribute}", item, found, depth - 1)
