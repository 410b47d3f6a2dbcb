"""Which layers tensor parallelism cuts, and how.

A plan names layers and says of each: "column" (split along outputs, which stay cut), "row" (split along inputs, which
are cut already; outputs are summed), "gather" (split along outputs, which are gathered), "scatter" (split along inputs,
of which each rank takes its part; outputs are summed), "embedding" (split along entries), or one of torch's
ParallelStyle.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from lockstep.strategies.mesh.tensor_plan.altered import refuse_altered
from lockstep.strategies.mesh.tensor_plan.declared import declared_styles
from lockstep.strategies.mesh.tensor_plan.linear import is_linear, sharded_size
from lockstep.strategies.mesh.tensor_plan.plan import Plan
from lockstep.strategies.mesh.tensor_plan.search import find
from lockstep.strategies.mesh.tensor_plan.styles import STYLES, SequenceSharding
from lockstep.strategies.modules.blocks import shared
from lockstep.strategies.modules.forwards import within_compiled
from lockstep.strategies.modules.model_changes import shortened


def make_plan(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    size: int,
    given: str | Mapping[str, Any] = "auto",
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> Plan:
    """Decide what is sharded over `size` ranks, by the user's plan or "auto".

    Raises ValueError if a layer's size does not divide, or nothing can be sharded.
    """
    plan = Plan(traced=within_compiled(model))
    styles: dict[str, Any] | None = _given(model, given) or (declared_styles(model, size) if given == "auto" else None)
    if styles is not None:
        plan.styles, plan.is_given = styles, True
    else:
        find(model, size, plan)
    if not plan.styles:
        raise ValueError(
            f"strategy tensor finds nothing to cut in {type(model).__name__}: no attention, pair of linear layers or "
            "linear layer; "
            "give strategy=TensorParallel(plan={...}) or define tensor_plan() in a module, or use another strategy"
            + (
                f" (hooks, computed weights or forwards of their own leave these whole: {shortened(plan.left)})"
                if plan.left
                else ""
            )
        )
    if loss_parallel:
        _cut_classes(model, plan)
    elif "classes" in plan.styles.values():
        raise ValueError(
            "a plan that cuts a layer by 'classes' needs loss_parallel=True, which computes the loss on cut logits; "
            "give it, or cut the layer by 'gather'"
        )
    _check_sizes(model, size, plan)
    refuse_altered(model, plan, blocks if sequence_parallel else ())
    if sequence_parallel:
        plan.sequence = SequenceSharding.of(model, blocks, plan.styles, size)
    return plan


def _given(model: nn.Module, given: str | Mapping[str, Any]) -> dict[str, Any] | None:
    """The plan of the option, else those of the modules' `tensor_plan()`, with patterns resolved; None without any."""
    named = dict(model.named_modules())
    sources: list[tuple[str, Mapping[str, Any], str]] = []
    if isinstance(given, Mapping):
        sources = [("", given, "plan")]
    elif given != "auto":
        raise ValueError(f"plan must be 'auto' or a dict of layer names and how they are cut, but plan={given!r}")
    else:
        sources = [
            (name + "." if name else "", module.tensor_plan(), f"{type(module).__name__}.tensor_plan()")
            for name, module in named.items()
            if callable(getattr(module, "tensor_plan", None))
        ]
    styles: dict[str, Any] = {}
    for prefix, plan, where in sources:
        for pattern, style in plan.items():
            if not isinstance(style, ParallelStyle) and style not in STYLES:
                raise ValueError(
                    f"{where} must say one of {', '.join(STYLES)} or a ParallelStyle of torch, but {pattern!r} has "
                    f"{style!r}"
                )
            found = [name for name in named if fnmatch.fnmatchcase(name, prefix + pattern)]
            if not found:
                raise ValueError(
                    f"{where} names {pattern!r}, which is not a submodule; there are "
                    f"{', '.join(name for name in named if name)[:200]}"
                )
            styles |= dict.fromkeys(found, style)
    return styles if sources else None


def _cut_classes(model: nn.Module, plan: Plan) -> None:
    """Loss parallelism: the last linear layer is sharded by its outputs, the classes."""
    linear = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    heads = [name for name, style in plan.styles.items() if style == "classes"]
    heads = heads or [name for name, _ in linear[-1:] if plan.styles.get(name, "gather") in ("gather", "scatter")]
    if not heads:
        raise ValueError(
            "loss_parallel=True cuts the last linear layer by classes, but the plan uses it otherwise; name the layer "
            "in the plan with 'classes'"
        )
    for name in heads:
        plan.styles[name] = "classes"
        for places in shared(model).values():  # the embedding that shares its weight
            holders = [module for module, _ in places]
            if model.get_submodule(name) in holders:
                plan.styles |= {
                    other: "embedding"
                    for other, module in model.named_modules()
                    if isinstance(module, nn.Embedding) and module in holders
                }


def _check_sizes(model: nn.Module, size: int, plan: Plan) -> None:
    for name, style in plan.styles.items():
        if not isinstance(style, str):
            continue
        layer = model.get_submodule(name)
        if style in ("position", "replicated"):
            continue
        if not (isinstance(layer, nn.Embedding) if style == "embedding" else is_linear(layer)):
            wanted = "Embedding" if style == "embedding" else "Linear"
            raise ValueError(
                f"the plan cuts {name} by {style!r}, which is for {wanted}, but it is {type(layer).__name__}"
            )
        attribute, width = sharded_size(layer, style)
        if width % size:
            raise ValueError(
                f"strategy tensor cuts {name} by {attribute}={width}, which is not divisible by "
                f"the {size} ranks of a tensor group; "
                "change the layer or the mesh, or leave it out with a plan"
            )
