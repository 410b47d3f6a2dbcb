"""The random streams that a share draws from, as one tensor that travels over the stages of a pipeline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.strategies.launch.rng import restore_streams, stream_states

_WORDS = 624 * 4
"""Bytes of the state of a Mersenne twister, beside its position."""


class Streams:
    """Torch's, Python's and numpy's streams, and `named` generators."""

    def __init__(self) -> None:
        self.named: dict[str, torch.Generator] = {}
        """By name; those of a device end with "@" and its type."""

    def state(self) -> Tensor:
        """The state of all of them: uint8 `[bytes]` on the CPU, the same for the same states."""
        states = stream_states()
        version, words, gauss = states["python"]
        kind, keys, *numbers = states["numpy"]
        tensors = {"torch": states["torch"]} | ({"cuda": states["cuda"]} if "cuda" in states else {})
        named = {name: generator.get_state() for name, generator in sorted(self.named.items())}
        sizes = [{name: state.numel() for name, state in held.items()} for held in (tensors, named)]
        facts = json.dumps([version, words[-1], gauss, kind, numbers, *sizes]).encode()
        head = np.frombuffer(len(facts).to_bytes(8, "little") + facts, np.uint8)
        arrays = [np.frombuffer(struct.pack("624I", *words[:-1]), np.uint8), keys.view(np.uint8)]
        arrays += [state.numpy() for state in (*tensors.values(), *named.values())]
        return torch.from_numpy(np.concatenate([head, *arrays]))

    def restore(self, state: Tensor) -> None:
        """Set all to what `state` returned, here or on another rank; named ones are those of then."""
        data = state.numpy()
        end = 8 + int.from_bytes(data[:8].tobytes(), "little")
        version, position, gauss, kind, numbers, sizes, named = json.loads(data[8:end].tobytes())
        words, keys = (data[end + i * _WORDS : end + (i + 1) * _WORDS].view(np.uint32) for i in (0, 1))
        start = end + 2 * _WORDS
        states: dict[str, Any] = {"python": (version, (*words.tolist(), position), gauss)}
        states["numpy"] = (kind, keys.copy(), *numbers)
        for name, size in sizes.items():
            states[name] = state[start : start + size].clone()
            start += size
        restore_streams(states)
        for name in self.named.keys() - named.keys():
            del self.named[name]
        for name, size in named.items():
            if name not in self.named:
                self.named[name] = torch.Generator(name.partition("@")[2] or "cpu")
            self.named[name].set_state(state[start : start + size].clone())
            start += size

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give all of them their state back at the end."""
        before = self.state()
        try:
            yield
        finally:
            self.restore(before)
