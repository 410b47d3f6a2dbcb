"""Numbers that a step keeps in the model's attributes, where a rank has no samples and would fall behind in them."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Number
from typing import Any

from torch import nn

Numbers = dict[tuple[nn.Module, str, Any], Any]
"""Values by the module, its attribute, and the key where the attribute is a dict, else None."""


def numbers(model: nn.Module) -> Numbers:
    """The numbers among the attributes of `model` and its submodules, and in attributes that are dicts.

    Metrics of torchmetrics are skipped: their counts are reduced over ranks by themselves. Walks the whole tree.
    """
    return {(module, name, key): value for module in model.modules() for name, key, value in _numbers_of(module)}


def refuse_changed_numbers(model: nn.Module, before: Numbers) -> None:
    """Raise RuntimeError naming the numbers that differ from `before`, which is `numbers(model)` from before a step.

    For windows in which a rank has no samples. Its step has no effect or does not run, so it cannot count along, and no
    rank can know whether the others counted calls (alike on all ranks) or samples (each its own).
    """
    now = numbers(model)
    places = [place for place in {**before, **now} if _differ(before.get(place), now.get(place))]
    if not places:
        return
    names = {module: name for name, module in model.named_modules()}
    shown = sorted(
        ".".join(filter(None, (names[module], attribute))) + ("" if key is None else f"[{key!r}]")
        for module, attribute, key in places
    )
    raise RuntimeError(
        f"training_step changed the number{'s' if len(shown) > 1 else ''} {', '.join(shown[:5])}"
        + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
        + " of the model in a step in which a rank has no samples, and would fall behind the others; "
        "use trainer.global_step, self.log(..., reduce_fx='sum') or a registered buffer instead, "
        "or leave such steps out with drop_last=True in the DataLoader"
    )


def _numbers_of(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    if any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(module).__mro__):
        return
    for name, value in vars(module).items():
        if name.startswith(OF_ZERO):
            continue
        if isinstance(value, Number):
            yield name, None, value
        elif type(value) is dict and name not in _OF_TORCH:
            yield from ((name, key, item) for key, item in value.items() if isinstance(item, Number))


def _differ(one: Any, other: Any) -> bool:
    return bool(one is not other and one != other and (one == one or other == other))


OF_ZERO = ("ds_", "applied_pre_backward")
"""How the names of counters begin by which ZeRO-3 runs its backward."""
_OF_TORCH = frozenset(vars(nn.Module()))
