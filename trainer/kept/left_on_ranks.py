"""What a run leaves on its ranks, and ends with these: hooks on layers and parameters, and state of optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.strategies.launch.program.functions import OTHERS
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES, OF_MODULE
from lockstep.trainer.shares.optimizer_values import OptimizerValues

_log = logging.getLogger("lockstep")
_PLACE = "_left_hooks"
"""Where a module has the number of hooks that its layers and parameters would have without ranks, by name."""
_MADE = "_left_made"
"""Where it has the names of what it or others hold since and could not be sent."""
_STEPPED = "_left_optimizers"
"""Where it has the `id` of optimizers that would have another state without ranks, by name."""


def hooks_of(module: nn.Module) -> dict[str, set[int]]:
    """The numbers of the hooks of the user's, by the name of the layer or parameter."""
    found: dict[str, set[int]] = {}
    for kind, name, hooks in _hooked(module):
        found.setdefault(name, set()).update(hash((kind, key)) for key, hook in hooks.items() if _is_theirs(hook))
    return found


def left(module: nn.Module, at_setup: Mapping[str, set[int]]) -> dict[str, int]:
    """How many hooks were registered on each since `setup`, which every run calls."""
    new = {name: len(held - at_setup.get(name, set())) for name, held in hooks_of(module).items()}
    return {name: number for name, number in new.items() if number}


def note_left(module: nn.Module, numbers: dict[str, int]) -> None:
    vars(module).pop(_PLACE, None)
    if numbers:
        now = hooks_of(module)
        vars(module)[_PLACE] = {name: len(now.get(name, ())) + number for name, number in numbers.items()}


def refuse_left(module: nn.Module) -> None:
    """Raise RuntimeError for a module whose last run has registered hooks that are not here."""
    now = hooks_of(module)
    missing = [name for name, number in vars(module).get(_PLACE, {}).items() if len(now.get(name, ())) < number]
    if missing:
        names = ", ".join(name or type(module).__name__ for name in missing[:4])
        raise RuntimeError(
            f"the last run has registered hooks on {names} on its ranks, which have ended, so that this one would run "
            "without them; register them on this module before the run, or in __init__, configure_model or setup, or "
            "remove them as the run ends"
        )


def optimizers_of(module: nn.Module) -> dict[str, Optimizer]:
    """Those in attributes of the module and in lists, tuples and dicts there, by name."""
    found = dict[str, Optimizer]()
    for name, held in vars(module).items():
        if isinstance(held, (list, tuple)):
            found |= {f"{name}[{number}]": each for number, each in enumerate(held) if isinstance(each, Optimizer)}
        elif isinstance(held, dict):
            found |= {f"{name}[{k!r}]": v for k, v in held.items() if isinstance(v, Optimizer) and isinstance(k, str)}
        elif isinstance(held, Optimizer):
            found[name] = held
    return found


def watched(module: nn.Module) -> dict[str, tuple[Optimizer, OptimizerValues]]:
    """Those, with what tells later whether they were stepped."""
    return {name: (each, OptimizerValues([each], True)) for name, each in optimizers_of(module).items()}


def stepped(module: nn.Module, before: Mapping[str, tuple[Optimizer, OptimizerValues]]) -> list[str]:
    """The names of those that are still there and remember something else than `before` the run."""
    now = optimizers_of(module)
    return [name for name, (each, values) in before.items() if now.get(name) is each and values.are_changed(False)]


def note_stepped(module: nn.Module, names: list[str]) -> None:
    held = optimizers_of(module)
    if numbers := {name: id(held[name]) for name in names if name in held}:
        vars(module).setdefault(_STEPPED, {}).update(numbers)


def refuse_stepped(module: nn.Module, resumes: bool) -> None:
    """Raise RuntimeError for a module that still holds optimizers which an earlier run has stepped on ranks, unless the
    run resumes a checkpoint."""
    held, marked = optimizers_of(module), vars(module).get(_STEPPED, {})
    names = [name for name, number in marked.items() if id(held.get(name)) == number]
    if resumes:
        marked.clear()
    elif names:
        raise RuntimeError(
            f"the last run has stepped {', '.join(names)} of {type(module).__name__} on its ranks, where what an "
            "optimizer remembers (momenta, learning rates) has ended with these, so that this run would begin without "
            "it; make the optimizer in configure_optimizers, or resume with ckpt_path"
        )


def note_made(module: nn.Module, names: list[str]) -> None:
    vars(module).pop(_MADE, None)
    if names:
        vars(module)[_MADE] = names


def warn_of_made(module: nn.Module) -> None:
    """Name what the last run has made on its ranks and could not send back."""
    if names := vars(module).pop(_MADE, None):
        _log.warning(
            f"the last run has made {', '.join(names)} on its ranks, which have ended, and this one begins without, as "
            "it cannot be sent back; make it again in setup or on_fit_start, or keep it in numbers, tensors or objects "
            "that can be pickled"
        )


def _hooked(module: nn.Module) -> Iterator[tuple[str, str, Mapping[int, Any]]]:
    for name, layer in module.named_modules():
        yield from ((kind, name, getattr(layer, kind, None) or {}) for kind in OF_MODULE)
    for name, parameter in module.named_parameters():
        yield from ((kind, name, getattr(parameter, kind, None) or {}) for kind in ATTRIBUTES)


def _is_theirs(hook: Any) -> bool:
    """Whether it belongs neither to torch nor to an engine or logger."""
    while hasattr(hook, "func"):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] not in (*OTHERS, "deepspeed")
