"""Hooks that a run registers on layers and parameters on its ranks, where they end with these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lockstep.strategies.launch.program.functions import OTHERS
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES, OF_MODULE

_PLACE = "_left_hooks"
"""Where a module has the number of hooks that its layers and parameters would have without ranks, by name."""


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
