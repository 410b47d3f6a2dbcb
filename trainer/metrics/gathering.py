"""Bringing values of all ranks together: tensors, numbers, strings, and lists, tuples and dicts of them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.base import Strategy
from lockstep.strategies.checkpoint_state import TensorShard, pack, unpack
from lockstep.trainer.metrics.records import finder, plain, restored

MESSAGE_BYTES = 2**24
"""What ranks send at once of a list that only rank 0 keeps, all of them together."""


def gather_values(strategy: Strategy, value: Any, name: str = "value") -> list[Any]:
    """The value of each rank, in rank order, with tensors on the CPU. Every rank calls it.

    Raises TypeError, with the place below `name`, for a value of another kind.
    """
    if strategy.topology.world_size == 1:
        return [value]
    pieces: dict[str, Any] = {}
    kinds: list[str] = []
    layout = pack(plain(value, kinds), name, pieces)
    parts = [json.loads(text) for text in _gather_bytes(strategy, json.dumps([layout, kinds]).encode())]
    tensors = _gather_tensors(strategy, {name: shard.tensor for name, shard in pieces.items()})
    return [
        restored(unpack(part, read.__getitem__), iter(kinds), finder({}))
        for (part, kinds), read in zip(parts, tensors, strict=True)
    ]


def gather_items(strategy: Strategy, items: list[Any], known: Mapping[str, Any]) -> list[list[Any]] | None:
    """The items of each rank, in rank order, on rank 0; None on other ranks. Empties `items`. Every rank calls it.
    Named tuples and dataclasses are of classes among the values of `known`, or of imported modules.

    Ranks send about `MESSAGE_BYTES` at once, so that beside its own items a rank other than 0 holds one message of all
    ranks and the item that it sends. Raises TypeError as `gather_values`, on the rank that has such an item.
    """
    keeps = strategy.topology.rank == 0
    gathered: list[list[Any]] = [[] for _ in range(strategy.topology.world_size)]
    find = finder(known)
    items.reverse()  # sent from the end, so that what was sent is free
    sent = 0
    while True:
        pieces: dict[str, TensorShard] = {}
        layout: list[Any] = []
        kinds: list[str] = []
        size = 0
        while items and size < MESSAGE_BYTES and len(layout) < 1000:
            added: dict[str, TensorShard] = {}
            layout.append(pack(plain(items.pop(), kinds), f"predictions.{sent + len(layout)}", added))
            size += sum(map(_size, added.values()))
            pieces |= added
        sent += len(layout)
        data = _as_bytes({key: shard.tensor for key, shard in pieces.items()}) if pieces else b""
        texts = _gather_bytes(strategy, json.dumps([layout, bool(items), kinds]).encode())
        parts = [json.loads(text) for text in texts]
        for rank, received in enumerate(_gather_bytes(strategy, data, keeps)):
            tensors = _from_bytes(received) if received else {}
            gathered[rank] += restored(unpack(parts[rank][0], tensors.__getitem__), iter(parts[rank][2]), find)
        if not any(more for _, more, _ in parts):
            return gathered if keeps else None


def _gather_bytes(strategy: Strategy, data: bytes, keeps: bool = True) -> list[bytes]:
    """The bytes of each rank, sent in messages of `MESSAGE_BYTES`; nothing on a rank that does not keep them."""
    sizes = strategy.all_gather(torch.tensor([len(data)])).flatten().tolist()
    found = [bytearray() for _ in sizes]
    length = max(1, MESSAGE_BYTES // len(sizes))
    for start in range(0, max(sizes), length):
        message = torch.zeros(min(length, max(sizes) - start), dtype=torch.uint8)
        own = data[start : start + length]
        message[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else message[:0]
        rows = strategy.all_gather(message)
        for row, size, part in zip(rows, sizes, found, strict=True):
            part += bytes(row[: max(0, size - start)].numpy()) if keeps else b""
    return [bytes(part) for part in found] if keeps else []


def _gather_tensors(strategy: Strategy, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [_from_bytes(part) for part in _gather_bytes(strategy, _as_bytes(tensors))]


def _size(shard: TensorShard) -> int:
    return shard.tensor.numel() * shard.tensor.element_size()  # of a sparse one too, which may be smaller


def _as_bytes(tensors: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, file)  # without what it views
    return file.getvalue()


def _from_bytes(data: bytes) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(io.BytesIO(data), weights_only=True)
    return found
