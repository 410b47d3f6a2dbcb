"""Parameter groups of a checkpoint, compared with those of a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.modules.model_changes import shortened

if TYPE_CHECKING:
    from lockstep.strategies.checkpoint_state import Reader


def check_optimizers(names: Iterable[str], reader: Reader) -> None:
    """Raise KeyError where the optimizers have other names than those saved."""
    have, saved = sorted(names), sorted(reader.meta["optimizers"])
    if have != saved:
        raise KeyError(f"the checkpoint holds optimizers {saved}, but this run has {have}")


def saves_itself(optimizer: Optimizer) -> bool:
    """Whether its `state_dict` may have other keys than torch's."""
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(optimizer._optimizer_state_dict_post_hooks)


def others_of(key: str, optimizer: Optimizer, saved: dict[str, Any], is_spread: bool) -> dict[str, Any]:
    """What the `state_dict` of a class, or a hook of it, has besides state and parameter groups; as "state" what state
    it has that is of no parameter.

    Raises ValueError where it lacks these, and where `is_spread`, as each rank steps other parameters.
    """
    others = {name: value for name, value in saved.items() if name not in ("state", "param_groups")}
    whose = f"the state_dict of optimizer {key!r} ({type(optimizer).__name__})"
    if len(saved) - len(others) < 2:
        raise ValueError(
            f"{whose} has the keys {sorted(map(str, saved))}, but a checkpoint needs 'state' and 'param_groups' among "
            "them; add to what super().state_dict() returns"
        )
    if of_none := {key: value for key, value in saved["state"].items() if not isinstance(key, int)}:
        others["state"] = of_none
    if others and is_spread:
        names = [*(str(name) for name in others if name != "state"), *(f"state[{key!r}]" for key in of_none)]
        raise ValueError(
            f"{whose} has {shortened(sorted(names))} besides state and param_groups, which each rank has of the "
            "parameters that it steps; keep it in the state of parameters or in param_groups, or use strategy='ddp'"
        )
    return others


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
