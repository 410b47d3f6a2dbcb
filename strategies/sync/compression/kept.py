"""What a compressor of a user's own keeps beside its options, which no checkpoint holds and shares of a rank share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.sync.compression.compressor import Compressor, Encoding
from lockstep.strategies.sync.contents import checksum, generator_state

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


def encoded(compressor: Compressor, tensor: Tensor, encoding: Encoding) -> list[Tensor]:
    """What `encode` gives, with contiguous tensors. Raises TypeError for what is not a list of tensors or cannot be
    averaged or saved, RuntimeError if the tensor was changed."""
    before, payload = tensor._version, compressor.encode(tensor, encoding)
    if _is_ours(compressor):
        return list(payload)
    if not isinstance(payload, list | tuple) or not all(isinstance(each, Tensor) for each in payload):
        raise TypeError(
            f"{type(compressor).__name__}.encode must return a tuple or list of tensors, but returned "
            f"{type(payload).__name__}"
        )
    if compressor.linear and (wrong := [each.dtype for each in payload if not each.is_floating_point()]):
        raise TypeError(
            f"{type(compressor).__name__} says linear = True, so its payloads are averaged, but encode returned a "
            f"tensor of {wrong[0]}; return floating-point tensors, or say linear = False"
        )
    _refuse_written(compressor, tensor, before, "encode")
    _check_kind_of_memory(compressor, encoding)
    return [each.contiguous() for each in payload]


def decoded(compressor: Compressor, payload: Sequence[Tensor], encoding: Encoding, source: Tensor | None) -> Tensor:
    """What `decode` gives. Raises TypeError or ValueError if that is not of the gradient's shape, RuntimeError if
    it has changed `source`, of which the payload may be a view."""
    if _is_ours(compressor):
        return compressor.decode(payload, encoding)
    before = 0 if source is None else source._version
    found: Any = compressor.decode(payload, encoding)
    if not isinstance(found, Tensor):
        raise TypeError(f"{type(compressor).__name__}.decode must return a tensor, but returned {type(found).__name__}")
    if found.shape != torch.Size(encoding.shape):
        raise ValueError(
            f"{type(compressor).__name__}.decode must return a tensor of encoding.shape={list(encoding.shape)}, but "
            f"returned one of {list(found.shape)}"
        )
    if source is not None:
        _refuse_written(compressor, source, before, "decode")
    _check_kind_of_memory(compressor, encoding)
    return found.to(encoding.dtype)


def _refuse_written(compressor: Compressor, tensor: Tensor, before: int, method: str) -> None:
    if tensor._version != before:
        raise RuntimeError(
            f"{type(compressor).__name__}.{method} changed the tensor that is encoded in place, so that what was not "
            "sent of it would be lost; compute another tensor, or clone it"
        )


def _check_kind_of_memory(compressor: Compressor, encoding: Encoding) -> None:
    memory: Mapping[Any, Any] = encoding.memory
    for key, value in memory.items():
        if not isinstance(value, Tensor) or not isinstance(key, str) or "/" in key:
            raise TypeError(
                f"{type(compressor).__name__} has put encoding.memory[{key!r}], of type {type(value).__name__}, which "
                "no checkpoint can hold; put tensors there, under names without '/'"
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
    return torch.frombuffer(bytearray(known.to_bytes(4, "big")), dtype=torch.uint8).to(like.device)


def check_memory(compressor: Compressor, marks: Sequence[Tensor]) -> None:
    """Raises RuntimeError, on all ranks, if `encode` has left in a memory what is not the same of all shares."""
    if not _is_ours(compressor) and not all(torch.equal(mark, marks[0]) for mark in marks):
        raise RuntimeError(
            f"{type(compressor).__name__}.encode has put into encoding.memory what only its own share has, and the "
            "memory of a parameter is common to all shares; let decode put there what follows from payloads"
        )


def check_means(
    compressor: Compressor,
    inputs: Sequence[Tensor],
    means: Mapping[str, Tensor],
    num_ranks: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Raises FloatingPointError or RuntimeError, on all ranks, if a user's `decode` has made of `inputs` that are
    finite `means` that are not, or not the same on all ranks, by the name of the parameter. Every rank calls it."""
    if _is_ours(compressor):
        return
    were_finite = all(bool(tensor.isfinite().all()) for tensor in inputs)
    facts = [[checksum(mean), bool(mean.isfinite().all())] for mean in means.values()]
    mine = torch.tensor([*facts, [0, were_finite]])
    rows = [torch.empty_like(mine) for _ in range(num_ranks)] if num_ranks > 1 else [mine]
    if num_ranks > 1:
        dist.all_gather(rows, mine, group=group)
    if not all(row[-1, 1] for row in rows):  # a loss or the end of training says so, by the learner
        return
    for i, name in enumerate(means):
        if not all(row[i, 1] for row in rows):
            raise FloatingPointError(
                f"{type(compressor).__name__} has made NaN or infinite numbers of what learners have moved {name}, "
                "which was finite; look for a division by zero, or an overflow, in its encode and decode"
            )
        if any(row[i, 0] != rows[0][i, 0] for row in rows):
            raise RuntimeError(
                f"{type(compressor).__name__}.decode has given {name} other values on some ranks, which would start "
                "the next round from different weights; let it follow from the payload and from encoding alone"
            )


def _is_ours(compressor: Compressor) -> bool:
    return type(compressor).__module__.startswith(_OURS)


def _marks(compressor: Compressor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in reversed(type(compressor).__mro__):
        if issubclass(kind, Compressor) and not kind.__module__.startswith(_OURS):
            _mark("", {name: value for name, value in vars(kind).items() if not name.startswith("_")}, found, _DEPTH)
    _mark("", vars(compressor), found, _DEPTH)
    return found


def _mark(name: str, value: Any, found: dict[str, Any], depth: int) -> None:
    """By path what tells whether a value was changed; of None, in whose place one is yet to be put, nothing."""
    if isinstance(value, Tensor):
        found[name] = value.dtype, value.shape, checksum(value)
    elif isinstance(value, np.ndarray):
        found[name] = value.dtype, value.shape, value.tobytes()
    elif (state := generator_state(value)) is not None:
        found[name] = state
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
