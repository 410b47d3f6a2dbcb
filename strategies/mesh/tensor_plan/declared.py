"""The plan that a model brings along: `_tp_plan` of its modules, or `base_model_tp_plan` of its config, as transformers
writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lockstep.strategies.mesh.tensor_plan.linear import is_linear, sharded_size
from lockstep.strategies.modules.blocks import shared

STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "rowwise_rep": "scatter",
    "rowwise_split_input": "scatter",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "replicated",
    "replicate": "whole",
}
"""Names of transformers' styles, and ours."""
_HEAD_WIDTH = "head_dim"
_OPTIONAL = ("gather", "scatter", "embedding")
"""Styles of layers that take and return whole activations: a layer of a size that does not divide may stay whole."""


def declared_styles(model: nn.Module, size: int) -> dict[str, str] | None:
    """The style of each layer by name, as the model declares it; None if it declares nothing.

    A layer whose weight another one shares that is in no plan stays whole, as does one whose size `size` ranks do not
    divide, if its inputs and outputs are whole. Raises ValueError for a style that has no counterpart here, for a layer
    of another kind than its style is for, and for heads that `size` ranks cannot share.
    """
    named = dict(model.named_modules())
    styles: dict[str, str] = {}
    for found, owner in _plans(model):
        for name, style in found.items():
            if STYLES.get(style) == "whole":
                styles.pop(name, None)
            else:
                styles |= _of_layer(name, named.get(name), style, owner)
    for name, style in [*styles.items()]:
        if style in _OPTIONAL and sharded_size(named[name], style)[1] % size:
            del styles[name]
    for places in shared(model).values():
        names = [name for name, module in named.items() if any(module is holder for holder, _ in places)]
        if not all(name in styles for name in names):
            styles = {name: style for name, style in styles.items() if name not in names}
    for name, style in styles.items():
        width = getattr(named[name.removesuffix(".base_layer").rpartition(".")[0]], _HEAD_WIDTH, None)
        layer = named[name]
        if style == "column" and type(width) is int and getattr(layer, "out_features", 0) % (size * width):
            raise ValueError(
                f"strategy tensor shards attention by heads, but {name} has out_features={layer.out_features}, which "
                f"is not a whole number of heads of {width} on each of the {size} ranks of a tensor group; change it, "
                "or the mesh"
            )
    return styles or None


def _of_layer(name: str, layer: Any, style: str, owner: str) -> dict[str, str]:
    """Our styles of the layer that transformers' `style` is of, and of the adapters around it."""
    if style not in STYLES:
        raise ValueError(
            f"the tensor-parallel plan of {owner} says {style!r} of {name}, which strategy tensor does not "
            f"know ({', '.join(STYLES)}); give strategy=TensorParallel(plan={{...}})"
        )
    ours = STYLES[style]
    if ours == "replicated" and layer is not None:
        return {name: ours}
    if isinstance(layer, nn.Embedding) if ours == "embedding" else is_linear(layer):
        return {name: ours}
    if is_linear(getattr(layer, "base_layer", None)):
        return _of_adapted(name, layer, ours)
    kind = "a parameter" if layer is None else f"{type(layer).__module__}.{type(layer).__name__}"
    raise ValueError(
        f"the tensor-parallel plan of {owner} says {style!r} of {name}, which is {kind}, and strategy tensor follows "
        "it for torch's linear layers and embeddings; give strategy=TensorParallel(plan={...})"
    )


def _of_adapted(name: str, layer: Any, style: str) -> dict[str, str]:
    """A linear layer within PEFT's LoRA: what adds to shards of its output, or takes shards of its input, is sharded
    alike."""
    lora = [getattr(layer, part, None) for part in ("lora_A", "lora_B")]
    known = {
        id(p) for module in (layer.base_layer, *lora) if isinstance(module, nn.Module) for p in module.parameters()
    }
    unknown = [part for part, parameter in layer.named_parameters() if id(parameter) not in known]
    if unknown or not all(isinstance(part, nn.ModuleDict) for part in lora):
        raise ValueError(
            f"strategy tensor shards {name}.base_layer and its LoRA adapters, but not "
            f"{', '.join(unknown) or 'adapters of ' + type(layer).__name__}; use another strategy"
        )
    styles = {f"{name}.base_layer": style}
    sharded = {"column": "lora_B", "row": "lora_A"}.get(style)
    return styles | {f"{name}.{sharded}.{adapter}": style for adapter in (getattr(layer, sharded) if sharded else ())}


def _plans(model: nn.Module) -> Iterator[tuple[dict[str, str], str]]:
    """Names in the model with transformers' styles, and the class that declares them, of the outermost modules that
    do."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in found):
            continue
        prefix = name + "." if name else ""
        sources = [(prefix, _own(module, "_tp_plan"))]
        inner = getattr(module, "base_model_prefix", "")
        inside = f"{prefix}{inner}." if inner and hasattr(module, inner) else prefix
        sources.append((inside, getattr(_own(module, "config"), "base_model_tp_plan", None)))
        for start, plan in sources:
            if isinstance(plan, Mapping) and (matched := _matched(model, start, plan)):
                found.append(prefix)
                yield matched, type(module).__name__


def _own(module: nn.Module, name: str) -> Any:
    """An attribute of a module that is not another one's, as those of the model that PEFT wraps are."""
    return vars(module).get(name, getattr(type(module), name, None))


def _matched(model: nn.Module, prefix: str, plan: Mapping[str, str]) -> dict[str, str]:
    """The names of modules and parameters below `prefix` that a plan is about. In its names a * is a number."""
    matched = {}
    for name in [name for name, _ in (*model.named_modules(), *model.named_parameters())]:
        if name.startswith(prefix):
            relative = name[len(prefix) :]
            style = plan.get(relative) or plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", relative))
            if style is not None:
                matched[name] = style
    return matched
