"""Save and load what DeepSpeed's engine shards: whole tensors under canonical names, as every strategy saves them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.base import Topology
from lockstep.strategies.checkpoint_state import (
    Reader,
    State,
    TensorShard,
    check_names,
    check_shape,
    pack,
    unpack,
)
from lockstep.strategies.deepspeed.zero_step import ZeroStep
from lockstep.strategies.optimizers.saved_groups import (
    HOW,
    check_optimizers,
    is_extra,
    load_others,
    read_extra,
    saved_groups,
)


def save(wrapped: ZeroStep, optimizers: dict[str, Optimizer], topology: Topology) -> State:
    """Each rank contributes its rows of every tensor; the tensors are gathered one at a time. Every rank calls it."""
    wrapped.partitions.adopt_weights()
    state, shared = State(), State()  # `shared`: what all ranks hold alike, rank 0 writes
    model: dict[str, Any] = {}
    for name, value in _values(wrapped).items():
        cut = wrapped.partitions.cuts(value)
        if cut:
            _contribute(state, f"model/{name}", wrapped.partitions.whole(value), topology)
        packed = None if cut else pack(value, f"model/{name}", shared.tensors)
        model[name] = None if isinstance(value, Tensor) else packed
    state.meta = {
        "model": model,
        "optimizers": {
            key: _save_optimizer(wrapped, optimizer, key, state, shared, topology)
            for key, optimizer in optimizers.items()
        },
    }
    if topology.rank == 0:
        state.tensors.update(shared.tensors)
    return state


def load(wrapped: ZeroStep, optimizers: dict[str, Optimizer], state: Reader) -> None:
    """Each rank reads its own pieces only. Every rank calls it."""
    partitions = wrapped.partitions
    own = _values(wrapped)
    check_names(own, state)
    held, others = _ids(wrapped), {}
    with torch.no_grad():
        for name, value in own.items():
            if name not in state.meta["model"]:  # saved without
                continue
            if isinstance(value, Tensor) and not is_extra(name):
                shape = partitions.shape(value)
                check_shape(name, shape, state)
                partitions.fill(value, functools.partial(_read_range, state, f"model/{name}", shape))
            if id(value) not in held:
                others[name] = read_extra(state, name)
        load_others(wrapped.model, others)
        if optimizers:
            ((key, optimizer),) = optimizers.items()
            check_optimizers(optimizers, state)
            for group, saved in zip(optimizer.param_groups, saved_groups(state, key, wrapped.groups), strict=True):
                group.update({name: value for name, value in saved.items() if name not in ("params", *HOW)})
            _load_optimizer(wrapped, optimizer, key, state)
        partitions.refresh()


def _values(wrapped: ZeroStep) -> dict[str, Any]:
    """The state dict of the model. Raises ValueError where it has other tensors than the parameters and buffers."""
    values, held = wrapped.model.state_dict(keep_vars=True), _ids(wrapped)
    for name, tensor in (*wrapped.model.named_parameters(), *wrapped.model.named_buffers()):
        if name in values and id(values[name]) not in held:
            raise ValueError(
                f"the state_dict of {type(wrapped.model).__name__} has a copy in the place of {name}, of shape "
                f"{list(wrapped.partitions.shape(tensor))}, but DeepSpeed's engine holds the weights; return what "
                "super().state_dict() has, or use strategy='ddp' or 'fsdp'"
            )
    return values


def _ids(wrapped: ZeroStep) -> set[int]:
    return {id(tensor) for tensor in (*wrapped.model.parameters(), *wrapped.model.buffers())}


def _contribute(state: State, name: str, whole: Tensor, topology: Topology) -> None:
    """Add this rank's rows of a tensor that all ranks hold."""
    shape = tuple(whole.shape)
    rows = shape[0] if shape and whole.numel() else 1
    first, last = (rank * rows // topology.world_size for rank in (topology.rank, topology.rank + 1))
    if first < last:
        mine = whole[first:last] if rows > 1 else whole
        offsets = (first, *[0] * len(shape))[: len(shape)]
        state.tensors[name] = TensorShard(mine.detach().to("cpu", copy=True), shape, offsets)


def _save_optimizer(
    wrapped: ZeroStep, optimizer: Optimizer, key: str, state: State, shared: State, topology: Topology
) -> dict[str, Any]:
    """Split the flat tensors of the optimizer into those of parameters; returns the JSON part."""
    entries: dict[str, Any] = {}
    for name, parameter in wrapped.named_trained():
        for k, v in optimizer.state.get(wrapped.partitions.flat(parameter), {}).items():
            full = f"optimizer/{key}/{name}/{k}"
            if isinstance(v, Tensor) and v.dim():
                _contribute(state, full, wrapped.partitions.whole(parameter, v), topology)
                v = {"$tensor": full}
            else:
                v = pack(v, full, shared.tensors)
            entries.setdefault(name, {})[k] = v
    groups = [{**group, "params": names} for group, names in zip(optimizer.param_groups, wrapped.groups, strict=True)]
    return {
        "param_groups": [pack(group, f"optimizer/{key}/group{i}", shared.tensors) for i, group in enumerate(groups)],
        "state": entries,
    }


def _load_optimizer(wrapped: ZeroStep, optimizer: Optimizer, key: str, state: Reader) -> None:
    """Put saved optimizer state, a tensor a parameter, into the flat tensors that the engine steps."""
    saved = state.meta["optimizers"][key]["state"]
    if not saved:
        return
    optimizer.state.clear()
    for name, parameter in wrapped.named_trained():
        if name not in saved:
            raise ValueError(
                f"the checkpoint holds optimizer state, but none of {name}, and ZeRO steps all parameters together; "
                "use the strategy that saved it"
            )
        shape, flat = wrapped.partitions.shape(parameter), wrapped.partitions.flat(parameter)
        entry = optimizer.state[flat]
        for k, v in saved[name].items():
            full = f"optimizer/{key}/{name}/{k}"
            if isinstance(v, dict) and "$tensor" in v and k != "step" and tuple(state.shape(full)) == shape:
                if k not in entry:
                    is_like_weights = state.dtype(full) == state.dtype(f"model/{name}")
                    entry[k] = torch.zeros_like(flat, dtype=None if is_like_weights else state.dtype(full))
                wrapped.partitions.fill(parameter, functools.partial(_read_range, state, full, shape), entry[k])
                continue
            value = unpack(v, state.read)
            if isinstance(value, Tensor) and (optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")):
                value = value.to(flat.device)
            if not bool(entry.setdefault(k, value) == value):
                raise ValueError(
                    f"the checkpoint's {k} of {name} is {value}, but {entry[k]} of others, and ZeRO keeps one for all; "
                    "use the strategy that saved it"
                )


def _read_range(state: Reader, name: str, shape: tuple[int, ...], offset: int, numel: int) -> Tensor:
    """`numel` elements of a saved tensor from element `offset` on; reads the rows that hold them."""
    if not shape or not numel:
        return state.read(name).reshape(-1)[offset : offset + numel]
    row = math.prod(shape[1:])
    first, last = offset // row, -(-(offset + numel) // row)
    rows = state.read(name, (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    return rows.reshape(-1)[offset - first * row :][:numel]
