"""What may be in a checkpoint: dense tensors of known dtypes under plain names, JSON data, and finite numbers where
they are asked for."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint.manifest import MAX_JSON_BYTES, CheckpointError, name_fault
from lockstep.trainer.checkpoint.safetensors_file import CODES

_MAX_DEPTH = 64
_MAX_INT_BITS = 4096
"""Python refuses to parse integers of more than 4300 digits."""


def check_tensor(path: Path, name: str, shard: TensorShard) -> None:
    """Raise CheckpointError for a name, dtype, layout or piece that cannot be stored."""
    fault = name_fault(name)
    if fault:
        raise refusal(path, repr(name), fault, "rename it")
    tensor = shard.tensor
    if tensor.layout != torch.strided or tensor.device.type == "meta" or hasattr(tensor, "__tensor_flatten__"):
        raise refusal(
            path,
            name,
            f"<type {type(tensor).__name__}, layout {tensor.layout}, device {tensor.device}>",
            "pass a dense tensor with data",
        )
    if tensor.dtype not in CODES:
        raise refusal(path, name, f"<dtype {tensor.dtype}>", "convert it first")
    if not tensor.dim() == len(shard.offsets) == len(shard.global_shape) or any(
        first < 0 or first + size > whole
        for first, size, whole in zip(shard.offsets, tensor.shape, shard.global_shape, strict=True)
    ):
        raise refusal(
            path,
            name,
            f"a piece of shape {tuple(tensor.shape)} at {tuple(shard.offsets)} is outside of the global shape "
            f"{tuple(shard.global_shape)}",
            "correct the shard",
        )


def check_json(path: Path, where: str, value: Any, depth: int = 0) -> None:
    """Raise CheckpointError with the key path for what JSON cannot hold."""
    if value is None or isinstance(value, bool | float | str):
        return
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise refusal(
                path,
                where,
                f"<int of {value.bit_length()} bits>",
                f"keep integers below {_MAX_INT_BITS} bits or save a string",
            )
    elif depth > _MAX_DEPTH:
        raise refusal(
            path,
            where[:200] + "...",
            f"<nested deeper than {_MAX_DEPTH}>",
            "flatten it, or check for a container that contains itself",
        )
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise refusal(path, where, f"<key {key!r} of type {type(key).__name__}>", "use str keys")
            check_json(path, f"{where}.{key}", inner, depth + 1)
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            check_json(path, f"{where}[{position}]", inner, depth + 1)
    elif isinstance(value, Tensor):
        raise refusal(
            path,
            where,
            f"<type {type(value).__name__}>",
            "put tensors among the tensors, or save tensor.item() or tensor.tolist()",
        )
    else:
        raise refusal(
            path, where, f"<type {type(value).__name__}>", "save only dict, list, str, int, float, bool and None"
        )


def check_finite(path: Path, tensors: Mapping[str, TensorShard], finite: Container[str], whose: str) -> None:
    """Raise FloatingPointError for a NaN or an infinity where only finite numbers may be.

    A sum is finite only if all are; one that is not may have overflowed, so that tensor is checked again.
    One host sync for each device that holds tensors.
    """
    names = [
        name
        for name, s in tensors.items()
        if name in finite and (s.tensor.is_floating_point() or s.tensor.is_complex())
    ]
    sums: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name in names:
        tensor = tensors[name].tensor.detach()
        tensor = (
            tensor.float()
            if tensor.element_size() == 1
            else torch.view_as_real(tensor.resolve_conj())
            if tensor.is_complex()
            else tensor
        )
        sums.setdefault(tensor.device, []).append((name, tensor.sum().to(torch.float64)))
    for found in sums.values():
        for (name, _), fine in zip(found, torch.stack([total for _, total in found]).isfinite().tolist(), strict=True):
            tensor = tensors[name].tensor.detach()
            if not fine and not (tensor.float() if tensor.element_size() == 1 else tensor).isfinite().all():
                raise FloatingPointError(
                    f"cannot save the checkpoint {path}: {name} holds NaN or infinite values {whose}; "
                    "go back to an older checkpoint, which is intact, with a lower learning rate or gradient_clip_val"
                )


def refusal(path: Path, where: str, what: str, remedy: str) -> CheckpointError:
    """The error for something that cannot be stored."""
    return CheckpointError(f"cannot save the checkpoint {path}: {where}: {what}; {remedy}")


def encode(path: Path, name: str, value: Any) -> bytes:
    """`value` as the content of the JSON file `name`; raises CheckpointError if that is too large."""
    content = json.dumps(value).encode("ascii")
    if len(content) > MAX_JSON_BYTES:
        advice = f"keep it below {MAX_JSON_BYTES} bytes and save large data as tensors"
        raise refusal(path, name, f"<{len(content)} bytes of JSON>", advice)
    return content


def host_copies(shards: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
    """Copies in memory of their own on the CPU.

    Those of tensors on GPUs are started one after the other into page-locked memory, which torch keeps for the next
    save, and waited for together.
    """
    copies = {name: replace(shard, tensor=_start_copy(shard.tensor.detach())) for name, shard in shards.items()}
    for device in {shard.tensor.device for shard in shards.values() if shard.tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def _start_copy(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        with suppress(RuntimeError):  # no more memory can be locked: pageable memory will do
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone(memory_format=torch.contiguous_format)


def global_step_of(state: Mapping[str, Any]) -> int:
    """The step that a state was saved at, 0 if it does not say."""
    progress = state.get("progress")
    step = progress.get("global_step") if isinstance(progress, dict) else None
    return step if isinstance(step, int) and step >= 0 else 0
