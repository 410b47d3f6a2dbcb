"""Checkpoints without frozen weights: adapters alone, beside a base model that the user's code builds.

What is omitted is known by a number, a sum over elements that does not depend on how ranks shard it. A checkpoint
is loaded only beside the very weights that it was saved beside.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from lockstep.strategies.checkpoint_state import Reader, State, TensorShard, gather_state

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy
    from lockstep.trainer.run.state import RunState

_AT_ONCE = 1 << 20
"""Elements of which the number is computed at once: some 40 MB."""


def note(run: RunState, module: nn.Module) -> None:
    """Remember the frozen weights as the code has built them, if a ModelCheckpoint is to omit them. Every rank
    calls it, before a checkpoint is restored. Raises ValueError if two of them disagree."""
    savers = [callback for callback in run.callbacks if hasattr(callback, "save_trainable_only")]
    asked = {callback.save_trainable_only for callback in savers}
    if len(asked) > 1:
        raise ValueError(
            "save_trainable_only must be the same for every ModelCheckpoint of a run, as it is for all checkpoints of "
            "the run; call trainer.save_checkpoint in a run without it for a whole one"
        )
    run.frozen_at_start = None
    if asked == {True}:
        frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        run.frozen_at_start = _numbers(run.strategy.state_dict(run.wrapped, {}), frozen, run.strategy)


def omit(run: RunState, state: State, *, alone: bool) -> None:
    """Take the weights that are still as `note` has seen them out of what a checkpoint is made of. Every rank calls it,
    or with `alone` one."""
    if run.frozen_at_start is None:
        return
    now = _numbers(state, run.frozen_at_start, None if alone else run.strategy)
    same = {name: number for name, number in run.frozen_at_start.items() if now.get(name) == number}
    _take_out(state, same, same)


def omit_alike(state: State, names: set[str], trained: set[str], strategy: Strategy | None) -> None:
    """Take these weights out of what a checkpoint is made of; those that are not `trained` must be the same where it is
    loaded. Every rank calls it, or without `strategy` one."""
    _take_out(state, names, _numbers(state, names - trained, strategy))


def _take_out(state: State, names: Iterable[str], numbers: dict[str, int]) -> None:
    for name in names:
        state.tensors.pop(f"model/{name}", None)
        del state.meta["model"][name]
    state.meta["frozen"] = state.meta.get("frozen", {}) | numbers


def check(reader: Reader, strategy: Strategy, wrapped: nn.Module) -> None:
    """Raise ValueError if the weights that a checkpoint was saved without are other ones here. Every rank calls it."""
    if reader.meta.get("frozen"):
        _compare(reader, strategy.state_dict(wrapped, {}), strategy)


def check_module(reader: Reader, module: nn.Module) -> None:
    """`check` of a module that nothing has wrapped, on one process."""
    if reader.meta.get("frozen"):
        _compare(reader, gather_state(module, {}), None)


def _compare(reader: Reader, state: State, strategy: Strategy | None) -> None:
    saved = reader.meta["frozen"]
    now = _numbers(state, saved, strategy)
    other = sorted(name for name in saved if now.get(name) != saved[name])
    if other:
        shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        raise ValueError(
            f"it was saved without the weights that save_trainable_only or a hook omitted, and {shown} of the module "
            "at hand are not those that it was saved beside; build the module on the same base model"
        )


def _numbers(state: State, names: Container[str], strategy: Strategy | None) -> dict[str, int]:
    """A number of each of these tensors, from the shards of all ranks; of this process alone without `strategy`."""
    mine: dict[str, int] = {}
    for name, shard in sorted(state.tensors.items()):
        if name.startswith("model/") and name.removeprefix("model/") in names:
            mine[name.removeprefix("model/")] = _number(shard)
    if strategy is None:
        return mine
    total: dict[str, int] = {}
    for rank in range(strategy.topology.world_size):
        theirs = strategy.broadcast(mine if rank == strategy.topology.rank else None, rank)
        for name, number in theirs.items():
            total[name] = (total.get(name, 0) + number) % 2**64
    return total


def _number(shard: TensorShard) -> int:
    """The sum, modulo 2**64, of a hash of each element's value and place in the global tensor."""
    values = shard.tensor.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.unsqueeze(-1)
    values = values.unsqueeze(0) if values.dim() == 1 else values
    inner = values.dim() - 1 - len(shard.global_shape)  # 1 for a number, which has got a first dimension
    sizes = (*[1] * inner, *shard.global_shape, values.shape[-1])
    starts = (*[0] * inner, *shard.offsets, 0)
    rows = max(1, _AT_ONCE // max(1, values[0].numel() if len(values) else 1))
    total = 0
    for first in range(0, len(values), rows):
        block = values[first : first + rows].cpu()
        place = np.zeros((), dtype=np.uint64)
        for d, (size, start) in enumerate(zip(sizes, starts, strict=True)):
            along = np.arange(block.shape[d], dtype=np.uint64) + np.uint64(start + (first if d == 0 else 0))
            place = place[..., None] * np.uint64(size) + along
        exact = (
            block.double() if block.is_floating_point() else block.long()
        )  # the same in every precision that holds it
        bits = exact.contiguous().view(torch.int64).numpy().view(np.uint64)
        total += int(_mixed(bits ^ (place * np.uint64(0x9E3779B97F4A7C15))).sum(dtype=np.uint64))
    return total % 2**64


def _mixed(z: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: bits that differ anywhere change about half of the result."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
