"""The plan that a model brings along: `_tp_plan` of its modules, or `base_model_tp_plan` of its config, as transformers
writes them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping

from torch import nn

from lockstep.strategies.modules.blocks import shared

STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "rowwise_rep": "scatter",
    "rowwise_split_input": "scatter",
    "embedding_rowwise": "embedding",
}
"""Names of transformers' styles, and ours."""
_HEAD_WIDTH = "head_dim"


def declared_styles(model: nn.Module, size: int) -> dict[str, str] | None:
    """The style of each layer by name, as the model declares it; None if it declares nothing.

    A layer whose weight another one shares that is in no plan stays whole. Raises ValueError for a style that has no
    counterpart here, and for heads that `size` ranks cannot share.
    """
    named = dict(model.named_modules())
    styles: dict[str, str] = {}
    for prefix, plan, owner in _plans(model):
        for pattern, style in plan.items():
            for name in [name for name in named if fnmatch.fnmatchcase(name, prefix + pattern)]:
                if style not in STYLES:
                    raise ValueError(
                        f"the tensor-parallel plan of {owner} says {style!r} of {name}, which strategy tensor does not "
                        f"know ({', '.join(STYLES)}); give strategy=TensorParallel(plan={{...}})"
                    )
                if isinstance(named[name], (nn.Linear, nn.Embedding)):
                    styles[name] = STYLES[style]
    for places in shared(model).values():
        names = [name for name, module in named.items() if any(module is holder for holder, _ in places)]
        if not all(name in styles for name in names):
            styles = {name: style for name, style in styles.items() if name not in names}
    for name, style in styles.items():
        width = getattr(named[name.rpartition(".")[0]], _HEAD_WIDTH, None)
        layer = named[name]
        if style == "column" and type(width) is int and getattr(layer, "out_features", 0) % (size * width):
            raise ValueError(
                f"strategy tensor shards attention by heads, but {name} has out_features={layer.out_features}, which "
                f"is not a whole number of heads of {width} on each of the {size} ranks of a tensor group; change it, "
                "or the mesh"
            )
    return styles or None


def _plans(model: nn.Module) -> Iterator[tuple[str, Mapping[str, str], str]]:
    """The prefix of its names, each plan, and the class that declares it; of the outermost modules that do."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in found):
            continue
        prefix = name + "." if name else ""
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            found.append(prefix)
            yield prefix, plan, type(module).__name__
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(base, Mapping) and base:
            inner = getattr(module, "base_model_prefix", "")
            inside = f"{prefix}{inner}." if inner and hasattr(module, inner) else prefix
            found.append(prefix)
            yield inside, base, type(module).__name__
