"""Collectives on tensors, JSON data and gradients, which may be DTensors: a rank then works on its part."""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.launch import environment, payload
from lockstep.strategies.launch.process_group import new_group
from lockstep.strategies.sync.collective_fingerprint import counting_once
from lockstep.strategies.sync.contents import sum_of_bits


def all_reduce(tensor: Tensor, op: str) -> Tensor:
    """A new tensor, the "sum", "mean", "max" or "min" over all ranks."""
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor, {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM))
    return tensor / dist.get_world_size() if op == "mean" else tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensors of all ranks of the group, stacked in rank order."""
    tensor = tensor.detach().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


def broadcast(value: Any, src: int, group: dist.ProcessGroup | None = None) -> Any:
    """Rank `src`'s value on all ranks of the group: a tensor, or JSON data."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
        dist.broadcast(value, src, group)
        return value
    sends = dist.get_rank() == src or dist.get_backend() == "fake"
    data = torch.frombuffer(bytearray(json.dumps(value).encode() if sends else b"?"), dtype=torch.uint8)
    size = torch.tensor(data.numel())
    dist.broadcast(size, src, group)
    data = data if sends else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src, group)
    return json.loads(bytes(data.tolist()))


def first_held(value: Any) -> Any:
    """The first rank's batch that is not None, for a rank that has none. Every rank calls it. Raises TypeError on all
    of them for one that cannot be pickled."""
    source = int(all_gather(torch.tensor(int(value is not None))).argmax())
    is_source = dist.get_rank() == source
    held: list[Any] = [b"", ""]
    if is_source:
        try:
            held[0] = pickle.dumps(value)
        except Exception as error:  # of any class; all ranks raise it below
            held[1] = str(error) or type(error).__name__
    dist.broadcast_object_list(held, source)
    if held[1]:
        raise TypeError(
            f"a rank that has no batch computes with one of another rank, with weight zero, but rank {source}'s cannot "
            f"be pickled ({held[1]}); let batches hold tensors and other data alone, or give each rank samples"
        )
    return value if is_source else pickle.loads(held[0])


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of the group, any objects, with tensors on the CPU."""
    found: list[Any] = [None] * dist.get_world_size(group)
    own = _dumps(value)
    dist.all_gather_object(found, own, group=group)
    return [pickle.loads(each) for each in found]


def broadcast_object(value: Any, group_src: int, group: dist.ProcessGroup | None) -> Any:
    """The value of a rank of the group, any object, on the others, with tensors on the CPU."""
    is_source = dist.get_rank(group) == group_src
    held = [_dumps(value) if is_source else b""]
    dist.broadcast_object_list(held, group_src=group_src, group=group)
    return value if is_source else pickle.loads(held[0])


class _Pickler(payload.Pickler):
    """Sends classes by name where each rank runs the program itself, and so has them."""

    def reducer_override(self, obj: Any) -> Any:
        by_name = isinstance(obj, type) and getattr(sys.modules.get(obj.__module__), obj.__qualname__, None) is obj
        return NotImplemented if by_name and not environment.started_by_lockstep() else super().reducer_override(obj)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, None).dump(value)
    return file.getvalue()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def presence(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """For each parameter 1 if it has a gradient, else 0, in `like`'s dtype on its device; made there if all have
    one."""
    if all(p.grad is not None for p in parameters):
        return like.new_ones(len(parameters))
    return torch.tensor([float(p.grad is not None) for p in parameters]).to(like)


@torch.no_grad()
def sum_gradients(
    parameters: Sequence[nn.Parameter],
    groups: Sequence[dist.ProcessGroup | None] = (None,),
    all_reduce: Callable[..., Any] = dist.all_reduce,
    multiple: int = 1,
    write: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
) -> None:
    """Sum what ranks hold of the gradients of these parameters over each of `groups`, in one `all_reduce` for each
    dtype and device, of a `multiple` of elements. `write(gradient, sum)` puts each back.

    A gradient that some rank lacks counts as zeros there; one that no rank has stays None.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in by_kind.values():
        sparse = next((p for p in members if p.grad is not None and p.grad.layout != torch.strided), None)
        if sparse is not None:
            raise ValueError(
                f"a parameter of shape {list(sparse.shape)} has a sparse gradient, which only strategy='ddp' with "
                "automatic optimization sums over ranks; use that, or give its embedding sparse=False and an optimizer "
                "of dense gradients"
            )
        parts = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in members]
        has = presence(members, parts[0])
        numel = len(members) + sum(part.numel() for part in parts)
        flat = torch.cat([has, *(part.reshape(-1) for part in parts), has.new_zeros(-numel % multiple)])
        for group in groups:
            all_reduce(flat, group=group)
        sums = flat[len(members) : numel].split([part.numel() for part in parts])
        missing = any(p.grad is None for p in members)
        found = flat[: len(members)].tolist() if missing else None  # a host synchronization, only where one is missing
        for i, (parameter, total) in enumerate(zip(members, sums, strict=True)):
            if parameter.grad is None:
                if not abs(found[i]):  # type: ignore[index]
                    continue
                parameter.grad = torch.zeros_like(parameter)
            part = local(parameter.grad)
            write(part, total.view_as(part))


@torch.no_grad()
@counting_once()
def clip_by_norm(
    gradients: Mapping[Any, Sequence[Tensor]], max_norm: float, device: torch.device, copies: Sequence[Tensor] = ()
) -> Tensor:
    """Scale gradients to a global 2-norm of at most `max_norm`; return the norm before (0-dim), equal on all ranks.

    `gradients`: what this rank holds of them, by the tuple of process groups over which their elements are sharded;
    (None,) is all ranks. Each group costs an all-reduce of one number on `device`. Ranks give the same groups in the
    same order. `copies` are scaled too, but counted by another rank.
    """
    squares = [torch.zeros((), dtype=torch.float64, device=device)]
    dtype = torch.float32
    for groups, parts in gradients.items():
        norm = torch.nn.utils.get_total_norm(parts)
        dtype = torch.promote_types(dtype, norm.dtype)
        square = norm.to(device, torch.float64).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum().sqrt().to(dtype)
    torch.nn.utils.clip_grads_with_norm_(holders([*_all(gradients), *copies]), max_norm, total)
    return total


def clip_by_value(gradients: Mapping[Any, Sequence[Tensor]], value: float) -> None:
    """Clamp each element of what this rank holds of the gradients to [-value, value]."""
    clip_values(holders(_all(gradients)), value)


def clip_values(parameters: Sequence[Any], value: float) -> None:
    """torch's `clip_grad_value_`. Raises ValueError for a complex parameter, whose gradient has no order."""
    found = next((p.grad for p in parameters if p.grad is not None and p.grad.is_complex()), None)
    if found is not None:
        raise ValueError(
            f"gradient_clip_algorithm='value' bounds real numbers, but a parameter of shape {list(found.shape)} is "
            "complex; use gradient_clip_algorithm='norm', or clamp torch.view_as_real(parameter.grad) in "
            "on_before_optimizer_step"
        )
    torch.nn.utils.clip_grad_value_(parameters, value)


class _Holder:
    """A parameter as torch's functions that clip see it."""

    def __init__(self, gradient: Tensor) -> None:
        self.grad = gradient


def holders(gradients: Sequence[Tensor]) -> Any:
    """Gradients as torch's functions that clip take them."""
    return [_Holder(gradient) for gradient in gradients]


def _all(gradients: Mapping[Any, Sequence[Tensor]]) -> list[Tensor]:
    return [gradient for parts in gradients.values() for gradient in parts]


def differing(tensors: Sequence[Tensor], ranks: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Places of those of which the ranks of the group, so many, hold other bits. Every rank of it calls it."""
    if ranks == 1 or not tensors or environment.in_plan():
        return []  # in a plan other ranks hold nothing
    mine = torch.stack([sum_of_bits(tensor) for tensor in tensors]).cpu()
    rows = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(rows, mine, group=group)
    return [place for place, differ in enumerate((torch.stack(rows) != rows[0]).any(0).tolist()) if differ]


def own_group(rows: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup | None:
    """Make a process group of each of `rows` and return the one that this rank is in. Every rank calls it alike."""
    mine = None
    for ranks in rows:
        group = new_group(ranks, None if dist.get_backend() == "fake" else backend)
        mine = group if dist.get_rank() in ranks else mine
    return mine
