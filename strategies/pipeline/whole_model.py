"""The whole model on every rank of a pipeline, for code that reads or changes weights and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.mesh.whole_model import take_hooks
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.pipeline.staged_module import Staged


@contextmanager
def whole(wrapped: Staged, group: dist.ProcessGroup | None, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """While it lasts modules and optimizers of every rank hold plain tensors in the place of what is absent or sharded.

    What the rank that holds a parameter has changed in its value, gradient or `requires_grad` holds afterwards.
    Costs a broadcast of each tensor and gradient, and the memory of the whole model.
    """
    if wrapped.is_whole:
        yield
        return
    model = wrapped.model
    staged = wrapped.tensors.staged()
    have = torch.tensor([is_here(t) and t.grad is not None for _, t, _ in staged], dtype=torch.int8).to(wrapped.device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    made: dict[int, tuple[Tensor, Tensor]] = {}
    """By `id` of what it stands for: that, and the whole tensor."""
    for (_, tensor, source), has_gradient in zip(staged, have.tolist(), strict=True):
        value = _everywhere(tensor.detach(), tensor, source, group)
        gradient = (
            _everywhere(tensor.grad if is_here(tensor) else None, tensor, source, group) if has_gradient else None
        )
        if is_here(tensor) and not hasattr(tensor, "full_tensor"):
            continue
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            value.grad = gradient
        made[id(tensor)] = tensor, value
    _exchange(model, optimizers, {key: value for key, (_, value) in made.items()})
    hooks = [] if wrapped.shards is None else take_hooks(model)
    wrapped.is_whole = True
    try:
        yield
    finally:
        wrapped.is_whole = False
        for held, theirs in hooks:
            held.update(theirs)
        _exchange(model, optimizers, {id(value): tensor for tensor, value in made.values()})
        with torch.no_grad():
            for tensor, value in made.values():
                _give_back(tensor, value)


def _everywhere(mine: Tensor | None, like: Tensor, source: int, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor of the rank `source` of the group, whole."""
    if not is_here(like):
        found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    else:
        assert mine is not None
        found = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        found = found.contiguous()
    dist.broadcast(found, group=group, group_src=source)
    return found


def _exchange(model: nn.Module, optimizers: Iterable[Optimizer], others: dict[int, Tensor]) -> None:
    """Put other tensors in the place of those with these ids."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if id(tensor) in others:
                    holder[name] = others[id(tensor)]  # type: ignore[assignment]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [others.get(id(p), p) for p in group["params"]]


def _give_back(tensor: Tensor, value: Tensor) -> None:
    """Let what was made of a whole tensor hold for the one that it stood for."""
    if tensor.requires_grad != value.requires_grad:
        tensor.requires_grad_(value.requires_grad)
    if not is_here(tensor):
        return
    from lockstep.strategies.pipeline.sharded_stages import shard_like

    tensor.copy_(shard_like(value.detach(), tensor))
    tensor.grad = None if value.grad is None else shard_like(value.grad, tensor)
