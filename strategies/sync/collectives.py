"""Collectives on tensors, JSON data and gradients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def all_reduce(tensor: Tensor, op: str) -> Tensor:
    """A new tensor, the "sum", "mean", "max" or "min" over all ranks."""
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor, {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM))
    return tensor / dist.get_world_size() if op == "mean" else tensor


def all_gather(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, stacked in rank order."""
    tensor = tensor.detach().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def broadcast(value: Any, src: int) -> Any:
    """Rank `src`'s value: a tensor, or JSON data."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
        dist.broadcast(value, src)
        return value
    sends = dist.get_rank() == src
    data = torch.frombuffer(bytearray(json.dumps(value).encode() if sends else b"?"), dtype=torch.uint8)
    size = torch.tensor(data.numel())
    dist.broadcast(size, src)
    data = data if sends else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src)
    return json.loads(bytes(data.tolist()))


def presence(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """For each parameter 1 if it has a gradient, else 0, in `like`'s dtype on its device; made there if all have
    one."""
    if all(p.grad is not None for p in parameters):
        return like.new_ones(len(parameters))
    return torch.tensor([float(p.grad is not None) for p in parameters]).to(like)


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum the plain gradients of these parameters over the ranks of `group`, in one all-reduce for each dtype and
    device.

    A gradient that some rank lacks counts as zeros there; one that no rank has stays None.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in by_kind.values():
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        has = presence(members, parts[0])
        flat = torch.cat([has, *(part.reshape(-1) for part in parts)])
        dist.all_reduce(flat, group=group)
        sums = flat[len(members) :].split([part.numel() for part in parts])
        missing = any(p.grad is None for p in members)
        found = flat[: len(members)].tolist() if missing else None  # a host synchronization, only where one is missing
        for i, (parameter, part, total) in enumerate(zip(members, parts, sums, strict=True)):
            if parameter.grad is None:
                if not abs(found[i]):  # type: ignore[index]
                    continue
                parameter.grad = part
            parameter.grad.copy_(total.view_as(part))


def own_group(rows: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup | None:
    """Make a process group of each of `rows` and return the one that this rank is in. Every rank calls it alike."""
    mine = None
    for ranks in rows:
        group = dist.new_group(list(ranks), backend=backend)
        mine = group if dist.get_rank() in ranks else mine
    return mine
