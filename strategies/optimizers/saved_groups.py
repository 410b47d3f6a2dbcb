"""What a checkpoint has of a model and its optimizers: compared with those of a run, and loaded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import (
    Reader,
    Take,
    check_names,
    check_shape,
    names_of,
    parameter_names,
    unpack,
)
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.sync.collectives import local


def restore_model(model: nn.Module, reader: Reader, take: Take) -> None:
    """Load parameters and buffers in place, and by the module's `load_state_dict` what else its state dict has. The
    names must be the same on both sides."""
    own = model.state_dict()
    check_names(own, reader)
    held = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    others: dict[str, Any] = {}
    with torch.no_grad():
        for name, value in own.items():
            if name not in reader.meta["model"]:  # frozen, and not saved
                continue
            if not isinstance(value, Tensor) or is_extra(name):
                others[name] = read_extra(reader, name)
                continue
            check_shape(name, value.shape, reader)
            if not is_here(value):
                continue
            saved = take(reader, f"model/{name}", value)
            value.copy_(saved)
            if _memory(value) not in held:
                others[name] = saved
    load_others(model, others)


def load_others(model: nn.Module, others: dict[str, Any]) -> None:
    """Load what is in the module's state dict besides parameters and buffers. Raises ValueError for a tensor that the
    module does not take."""
    if not others:
        return
    model.load_state_dict(others, strict=False)
    tensors = {name: t for name, t in others.items() if isinstance(t, Tensor) and not is_extra(name)}
    now = model.state_dict() if tensors else {}
    for name, tensor in tensors.items():
        if not _is_value(now.get(name), tensor):
            raise ValueError(
                f"the state_dict of {type(model).__name__} has {name}, which is not the tensor of a parameter or "
                "buffer, and load_state_dict does not take it; register it as a buffer, or load it in load_state_dict"
            )


def is_extra(name: str) -> bool:
    """Whether it is the name in a state dict of what a module's `get_extra_state` returns."""
    return name.rpartition(".")[2] == "_extra_state"


def read_extra(reader: Reader, name: str) -> Any:
    """A saved value that is not one of parameters or buffers."""
    key, value = f"model/{name}", reader.meta["model"][name]
    return reader.read(key) if value is None and key in reader.names(key) else unpack(value, reader.read)


def _memory(tensor: Tensor) -> int:
    """Where the elements are; 0 for what has no memory of one place."""
    mine = local(tensor)
    return mine.untyped_storage().data_ptr() if is_here(mine) and mine.layout is torch.strided else 0


def _is_value(now: Any, loaded: Tensor) -> bool:
    """Whether `now` is a tensor with the elements of `loaded`, cast to its dtype."""
    if not isinstance(now, Tensor) or now.shape != loaded.shape:
        return False
    mine, wanted = local(now), local(loaded).to(local(now))
    return bool(((mine == wanted) | ((mine != mine) & (wanted != wanted))).all())


def check_optimizers(names: Iterable[str], reader: Reader) -> None:
    """Raise KeyError where the optimizers have other names than those saved."""
    have, saved = sorted(names), sorted(reader.meta["optimizers"])
    if have != saved:
        raise KeyError(f"the checkpoint holds optimizers {saved}, but this run has {have}")


def saves_itself(optimizer: Optimizer) -> bool:
    """Whether its `state_dict` may have other keys than torch's."""
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(optimizer._optimizer_state_dict_post_hooks)


def restore_state(
    model: nn.Module,
    optimizers: dict[str, Optimizer],
    reader: Reader,
    take: Take,
    owned: Mapping[int, str],
) -> None:
    """Load what any strategy saved, in place; without `optimizers` the weights alone.

    `owned` is as in `gather_state`. Raises KeyError or ValueError by name.
    """
    restore_model(model, reader, take=take)
    if not optimizers:
        return
    names = {**parameter_names(model), **owned}
    check_optimizers(optimizers, reader)
    for key, optimizer in optimizers.items():
        saved = reader.meta["optimizers"][key]
        add_saved_groups(model, optimizer, saved["param_groups"])
        current = optimizer.state_dict()
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        order = [names_of(parameter, names, key) for parameter in held]
        groups = saved_groups(reader, key, [[order[i] for i in group["params"]] for group in current["param_groups"]])
        index, parameters = {name: i for i, name in enumerate(order)}, dict(zip(order, held, strict=True))
        state = {
            name: unpack(entry, partial(take, reader, like=parameters[name]))
            for name, entry in saved["state"].items()
            if name not in parameters or is_here(parameters[name])
        }
        others = unpack(saved.get("others", {}), reader.read)
        optimizer.load_state_dict(
            {
                "state": {index[name]: entry for name, entry in state.items()} | others.pop("state", {}),
                "param_groups": [
                    taken(optimizer, key, group, now)
                    for group, now in zip(groups, current["param_groups"], strict=True)
                ],
                **others,
            }
        )
        for name, entry in state.items():
            if parameters[name] in optimizer.state:
                dtype = reader.dtype(f"model/{name}") if name in reader.meta["model"] else parameters[name].dtype
                _keep_dtypes(optimizer.state, parameters[name], entry, dtype)


def _keep_dtypes(state: Any, key: Any, saved: Any, dtype: torch.dtype) -> None:
    """Let `state[key]` have the dtypes that were saved, where `load_state_dict` of torch, which casts to that of the
    parameter, has cast them. `dtype` is that of the saved parameter, which what was saved in it follows."""
    loaded = state[key]
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.dtype not in (dtype, loaded.dtype) and _is_value(loaded, saved):
            state[key] = saved.to(loaded.device)
    elif isinstance(saved, dict) and isinstance(loaded, dict):
        for name in (saved.keys() & loaded.keys()) - {"step"}:  # of which torch decides by the kernels of this run
            _keep_dtypes(loaded, name, saved[name], dtype)
    elif isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        items = dict(enumerate(loaded))
        for i, item in enumerate(saved):
            _keep_dtypes(items, i, item, dtype)
        if any(items[i] is not item for i, item in enumerate(loaded)):
            state[key] = type(loaded)(items.values())


def saved_groups(reader: Reader, key: str, have: list[list[str]]) -> list[dict[str, Any]]:
    """The saved parameter groups of optimizer `key`; `have` are the names in each group now, which must be the same."""
    groups = [unpack(group, reader.read) for group in reader.meta["optimizers"][key]["param_groups"]]
    check_saved_groups(key, groups, have)
    return groups


def check_saved_groups(key: str, groups: list[dict[str, Any]], have: list[list[str]]) -> None:
    """Raise ValueError where the saved groups of optimizer `key` have other parameters than `have`, the names in each
    group now."""
    saved = [group["params"] for group in groups]
    if saved != have:
        raise ValueError(
            f"optimizer {key!r} holds other parameters or groups than were saved: {_first_difference(saved, have)}"
        )


def add_saved_groups(model: nn.Module, optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Add the parameter groups that the saved run added to its optimizer. Their options come with the state."""
    parameters = dict(model.named_parameters())
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for group in saved[len(optimizer.param_groups) :]:
        added = [parameters.get(name) for name in group["params"]]
        if any(parameter is None or id(parameter) in held for parameter in added):
            return  # another order of groups: `check_saved_groups` says so
        held |= {id(parameter) for parameter in added}
        optimizer.add_param_group({"params": added})


HOW = ("capturable", "differentiable", "foreach", "fused")
"""Options of torch's optimizers that choose the kernels of a step: those of this run hold, not those saved."""
_MOST = torch.finfo(torch.float32).max


def taken(optimizer: Optimizer, key: str, saved: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A saved parameter group, with what it lacks as it is now: another version of torch may have had fewer options."""
    own = type(optimizer).__module__.startswith("torch.optim")
    for name, value in now.items():
        if name in ("params", *HOW) or name not in saved or isinstance(saved[name], Tensor):
            continue
        # Nothing but the code changes a flag of torch's optimizers, and their state depends on it.
        is_changed = own and isinstance(value, bool) and saved[name] != value
        if not is_alike(saved[name], value) or is_changed or (own and not _fits_tensors(saved[name])):
            raise ValueError(f"optimizer {key!r} has {name}={value!r}, but {saved[name]!r:.60} was saved")
    if own:  # its own constructor knows what its options may be; the rate is a scheduler's business
        takes = inspect.signature(type(optimizer)).parameters.keys() - {"params", "lr", *HOW}
        options = {name: saved[name] for name in takes if name in saved}
        type(optimizer)([torch.zeros(1, 1, requires_grad=True)], **options)
    return {**now, **saved, **{name: now[name] for name in ("params", *HOW) if name in now}}


def is_alike(saved: Any, now: Any) -> bool:
    """Whether a saved value may stand for one of this run: of the same kind, and in lists of the same length."""
    if isinstance(now, bool):
        return isinstance(saved, bool)
    if isinstance(now, int | float):
        return isinstance(saved, int | float) and not isinstance(saved, bool)
    if isinstance(now, str):
        return isinstance(saved, str)
    if isinstance(now, list | tuple):
        return isinstance(saved, list | tuple) and (
            len(saved) != len(now) or all(is_alike(a, b) for a, b in zip(saved, now, strict=True))
        )
    if isinstance(now, dict):
        return isinstance(saved, dict) and all(is_alike(saved[key], now[key]) for key in saved.keys() & now.keys())
    return True


def _fits_tensors(option: Any) -> bool:
    """Whether torch can compute a step with it: an int of at most 64 bits, a finite float in the range of float32."""
    if isinstance(option, list | tuple):
        return all(map(_fits_tensors, option))
    if isinstance(option, int):
        return -(1 << 63) <= option < 1 << 63
    return not isinstance(option, float) or not _MOST < abs(option) < math.inf


def _first_difference(saved: list[list[str]], have: list[list[str]]) -> str:
    if len(saved) != len(have):
        return f"{len(saved)} groups saved, {len(have)} now"
    for i, (a, b) in enumerate(zip(saved, have, strict=True)):
        if a != b:
            return f"group {i} had {sorted(set(a) - set(b))[:3] or a[:3]}, now {sorted(set(b) - set(a))[:3] or b[:3]}"
    return "none"
