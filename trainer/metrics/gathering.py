"""Bringing values of all ranks together: tensors, numbers, strings, and lists, tuples and dicts of them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.base import Strategy
from lockstep.strategies.checkpoint_state import pack, unpack


def gather_values(strategy: Strategy, value: Any, name: str = "value") -> list[Any]:
    """The value of each rank, in rank order, with tensors on the CPU. Every rank calls it.

    Raises TypeError, with the place below `name`, for a value of another kind.
    """
    if strategy.topology.world_size == 1:
        return [value]
    pieces: dict[str, Any] = {}
    layout = pack(value, name, pieces)
    parts = [json.loads(text) for text in _gather_bytes(strategy, json.dumps(layout).encode())]
    tensors = _gather_tensors(strategy, {name: shard.tensor for name, shard in pieces.items()})
    return [unpack(part, read.__getitem__) for part, read in zip(parts, tensors, strict=True)]


def _gather_bytes(strategy: Strategy, data: bytes) -> list[bytes]:
    sizes = strategy.all_gather(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [bytes(row[:size].numpy()) for row, size in zip(strategy.all_gather(padded), sizes, strict=True)]


def _gather_tensors(strategy: Strategy, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    from safetensors.torch import load, save  # only few runs need it

    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return [load(part) for part in _gather_bytes(strategy, data)]
