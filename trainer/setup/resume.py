"""What the code of a run says of its optimizers, schedulers and frozen parameters, kept to be compared when it is
resumed.

A resumed run continues with the values of the checkpoint, since schedulers have moved them. If the code now asks for
another optimizer or other initial values, one of the two would be skipped, so that is an error.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import Strategy
from lockstep.strategies.optimizers.saved_groups import HOW
from lockstep.trainer.checkpoint.store import CheckpointError
from lockstep.trainer.setup.optimizers import SchedulerConfig

_log = logging.getLogger("lockstep")

_MOVING = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose")
"""What a scheduler of torch counts, and no option of it."""


def configured(optimizers: Mapping[str, Optimizer], schedulers: Sequence[SchedulerConfig]) -> dict[str, Any]:
    """Classes and initial values as the code gives them, as JSON data."""
    return {
        "optimizers": {
            name: {
                "class": type(optimizer).__name__,
                "groups": [_options(group) for group in optimizer.param_groups],
            }
            for name, optimizer in optimizers.items()
        },
        "schedulers": [
            {
                "class": type(config.scheduler).__name__,
                "options": {
                    name: value
                    for name, value in _plain(config.scheduler.state_dict() or {}).items()
                    if name not in _MOVING
                },
            }
            for config in schedulers
        ],
    }


def are_assigned(configured: Any) -> bool:
    """Whether what a run, or a saved one, has `configured` is what a hook assigns as it starts."""
    return isinstance(configured, dict) and configured.get("assigned") is True


def check_ranks(
    strategy: Strategy,
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    schedulers: Sequence[SchedulerConfig],
    rule: str,
) -> None:
    """Raise RuntimeError, on all ranks, unless the code of each rank has made the same optimizers and schedulers of the
    same parameters; `rule` says how. Every rank calls it, before the strategy sets them up."""
    topology = strategy.topology
    if topology.world_size == 1:
        return
    names = {parameter: name for name, parameter in module.named_parameters()}
    stepped = {
        name: [sorted(names.get(parameter, "") for parameter in group["params"]) for group in optimizer.param_groups]
        for name, optimizer in optimizers.items()
    }
    said = json.dumps([configured(optimizers, schedulers), stepped])
    mine = torch.tensor(zlib.crc32(said.encode()), device=topology.device)
    first, *others = strategy.all_gather(mine).flatten().tolist()
    odd = [str(rank) for rank, number in enumerate(others, 1) if number != first]
    if odd:
        raise RuntimeError(
            f"the ranks disagree on their optimizers and schedulers: on rank {', '.join(odd)} classes, options or "
            f"parameters are others than on rank 0; {rule} on every rank"
        )


def check_virtual_ranks(path: Any, saved: int, now: int) -> None:
    """Raise CheckpointError unless a run continues with the shares with which it began: others are another
    experiment."""
    if saved != now:
        began, wants = (f"virtual_ranks={number}" if number else "no virtual_ranks" for number in (saved, now))
        raise CheckpointError(
            f"checkpoint {path} is of a run with {began}, but this one has {wants}, which cuts steps in another way; "
            f"give {'virtual_ranks=' + str(saved) if saved else 'no virtual_ranks'}, or begin a new run from its "
            "weights (load_from_checkpoint, and fit without ckpt_path)"
        )


def check(path: Any, saved: Any, now: dict[str, Any], same_world: bool, reports: bool) -> None:
    """Compare what the saved run's code configured with what this run's does.

    Raises CheckpointError for another class, and for another initial value of an optimizer if the run has the number of
    ranks that it had (else a value may have been scaled by it: one line says that the saved one holds). Other options
    of a scheduler, whose length may follow `max_epochs`, are one line too, on the rank that `reports`.
    """
    if not isinstance(saved, dict):  # of a version that did not save it
        return
    lines = []
    for name, mine in now["optimizers"].items():
        theirs = saved["optimizers"].get(name)
        if theirs is None:
            continue  # another error names it
        if theirs["class"] != mine["class"]:
            raise CheckpointError(
                f"checkpoint {path} holds the state of {theirs['class']} for optimizer {name!r}, but "
                f"configure_optimizers returned {mine['class']}: "
                f"return {theirs['class']} to continue that run, or begin a new one from its weights "
                "(load_from_checkpoint, and fit without ckpt_path)"
            )
        for i, (old, new) in enumerate(zip(theirs["groups"], mine["groups"], strict=False)):
            different = _difference(old, new)
            if different is None:
                continue
            key, was, is_now = different
            where = f"optimizer {name!r} ({mine['class']})" + (
                f", parameter group {i}" if len(mine["groups"]) > 1 else ""
            )
            if same_world:
                raise CheckpointError(
                    f"checkpoint {path} is of a run that configured {where} with {key}={was!r}, but "
                    f"configure_optimizers gives {key}={is_now!r} now: "
                    f"give {key}={was!r} to continue that run, and to train on with another value set it in "
                    "on_train_start "
                    "(self.optimizers().param_groups), which holds over the saved one"
                )
            lines.append(
                f"{where} continues with the checkpoint's values, in which {key} began at {was!r}, not {is_now!r}"
            )
    for i, (theirs, mine) in enumerate(zip(saved["schedulers"], now["schedulers"], strict=False)):
        if theirs["class"] != mine["class"]:
            raise CheckpointError(
                f"checkpoint {path} holds the state of the scheduler {theirs['class']}, but configure_optimizers "
                f"returned {mine['class']}: "
                f"return {theirs['class']} to continue that run, or begin a new one from its weights "
                "(load_from_checkpoint, and fit without ckpt_path)"
            )
        different = _difference(theirs["options"], mine["options"])
        if different is not None:
            key, was, is_now = different
            lines.append(
                f"scheduler {i} ({mine['class']}) continues with the checkpoint's {key}={was!r}, not with "
                f"{key}={is_now!r}, which configure_optimizers "
                f"gives now; to take that one set it in on_train_start (self.lr_schedulers().{key})"
            )
    for line in lines if reports else ():
        _log.info(line)


def trainability(module: nn.Module) -> dict[str, bool]:
    """Which parameters of this rank are trained, by name."""
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def restore_trainability(module: nn.Module, changed: Mapping[str, Any]) -> None:
    """Freeze and unfreeze what had been frozen and unfrozen when the checkpoint was saved."""
    for name, parameter in module.named_parameters():
        if type(changed.get(name)) is bool:
            parameter.requires_grad_(changed[name])


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name not in ("params", "param_names", *HOW)}
    if "initial_lr" in options:  # a scheduler has moved the rate already
        options["lr"] = options.pop("initial_lr")
    return _plain(options)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, strings, flags and lists of them; anything else is not compared."""
    found = {}
    for name, value in values.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        value = list(value) if isinstance(value, tuple) else value
        items = value if isinstance(value, list) else [value]
        if all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
            found[str(name)] = [_builtin(item) for item in items] if isinstance(value, list) else _builtin(value)
    return found


def _builtin(value: Any) -> Any:
    """`value` as the plain type, which a number of numpy is only a subclass of."""
    if value is None or isinstance(value, bool):
        return value
    return str(value) if isinstance(value, str) else int(value) if isinstance(value, int) else float(value)


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first option that both have and that differs: its name, the old and the new value."""
    for name in old.keys() & new.keys() if isinstance(old, Mapping) else ():
        was, now = old[name], new[name]
        pairs = (
            list(zip(was, now, strict=True))
            if isinstance(was, list) and isinstance(now, list) and len(was) == len(now)
            else [(was, now)]
        )
        if not all(_equal(a, b) for a, b in pairs):
            return name, was, now
    return None


def _equal(one: Any, other: Any) -> bool:
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return one == other or (numbers and (math.isclose(one, other, rel_tol=1e-9) or (one != one and other != other)))
