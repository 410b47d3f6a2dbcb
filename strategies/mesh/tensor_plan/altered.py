"""Layers that are more than their weights: with hooks, which would see shards, with a weight that is computed, or with
a forward of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from lockstep.strategies.mesh.tensor_plan.linear import is_linear
from lockstep.strategies.mesh.tensor_plan.plan import Plan
from lockstep.strategies.modules.parameter_hooks import OF_MODULE


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in OF_MODULE)


def inside(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)


def is_altered(layer: nn.Module) -> bool:
    """Whether a linear layer has hooks or a forward set on it, or computes its weight: by a parametrization, or the
    hook of weight_norm or prune."""
    if not is_linear(layer):
        return False
    return has_hooks(layer) or is_computed(layer) or has_own_forward(layer)


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a forward was set on the layer itself, which may compute something else than its class does."""
    return "forward" in vars(layer)


def is_computed(layer: nn.Module) -> bool:
    """Whether the weight of a linear layer is computed."""
    return "weight" not in layer._parameters or "parametrizations" in layer._modules


def refused_hooks(style: Any) -> tuple[str, ...]:
    """The kinds of hooks that would see shards at a layer of this style."""
    return OF_MODULE[1:] if style in ("row", "gather", "scatter", "embedding") else OF_MODULE


def refuse_altered(model: nn.Module, plan: Plan, blocks: Iterable[str]) -> None:
    """Raise ValueError for layers of the plan that hooks would see in shards, or whose weight is computed."""
    for name, style in plan.styles.items():
        layer = model.get_submodule(name)
        hooked = any(getattr(layer, kind) for kind in (OF_MODULE if blocks else refused_hooks(style)))
        if hooked or (is_linear(layer) and is_computed(layer)):
            what = "a weight that something computes" if is_computed(layer) else "hooks"
            raise ValueError(f"the plan of strategy tensor shards {name}, but it has {what}; leave it out of the plan")
    for name in blocks:
        for inner, module in model.get_submodule(name).named_modules():
            if inner and has_hooks(module):
                raise ValueError(
                    f"{name}.{inner} has hooks, which would see a share of the sequence under sequence_parallel=True; "
                    "leave the option out, or take the hooks off"
                )


def watch_hooks(model: nn.Module, plan: Plan) -> list[tuple[nn.Module, str, Any]]:
    """From now on refuse hooks on modules that work on shards. Returns what to put back: modules, attributes and
    values."""
    names = {*plan.styles, *plan.between}
    for holder in plan.checked:
        names |= {f"{holder}.{inner}".strip(".") for inner, _ in model.get_submodule(holder).named_modules() if inner}
    if plan.sequence is not None:
        names |= {name for name, module in model.named_modules() if plan.sequence.holds(module)}
    before = []
    for name in names:
        module = model.get_submodule(name)
        if module in plan.traced:
            continue
        for kind in OF_MODULE if plan.sequence is not None else refused_hooks(plan.styles.get(name)):
            held = getattr(module, kind)
            before.append((module, kind, held))
            setattr(module, kind, _RefusesMore(held, name))
    return before


class _RefusesMore(OrderedDict[int, Any]):
    """Hooks of a module that takes no further ones."""

    def __init__(self, hooks: Mapping[int, Any], name: str) -> None:
        super().__init__(hooks)
        self._name = name

    def __setitem__(self, key: int, hook: Any) -> None:
        if "_name" in vars(self):
            raise RuntimeError(
                f"a hook was registered on {self._name}, which works on shards under strategy tensor, so that the hook "
                "would "
                "see a part of its inputs or outputs; register it in __init__, so that the automatic plan leaves the "
                "layer "
                "whole, or give strategy=TensorParallel(plan={...}) without the layer"
            )
        super().__setitem__(key, hook)

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)

    def copy(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return OrderedDict(self)
