"""Which layers tensor parallelism cuts, and how.

A plan names layers and says of each: "column" (cut by outputs, which stay cut), "row" (cut by inputs, which are
cut already; outputs are summed), "gather" (cut by outputs, which are gathered), "scatter" (cut by inputs, of
which each rank takes its part; outputs are summed), "embedding" (cut by entries), or one of torch's ParallelStyle.
"""

from __future__ import annotations

import fnmatch
import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils._pytree import tree_leaves

from lockstep.strategies.mesh.options import Options
from lockstep.strategies.mesh.styles import STYLES, Column, SequenceSharding, differentiable_twice, writable
from lockstep.strategies.modules.blocks import shared
from lockstep.strategies.modules.forwards import within_compiled
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.side_effect_free import side_effect_free

ATTENTION = (
    {"q", "wq", "q_proj", "query", "to_q", "q_lin"},
    {"k", "wk", "k_proj", "key", "to_k", "k_lin"},
    {"v", "wv", "v_proj", "value", "to_v", "v_lin"},
    {"o", "wo", "o_proj", "out_proj", "out", "proj", "to_out", "out_lin", "dense"},
)
"""Names that the four projections of an attention layer go by."""
UP = {
    "up",
    "up_proj",
    "gate",
    "gate_proj",
    "fc1",
    "w1",
    "w3",
    "c_fc",
    "linear1",
    "lin1",
    "wi",
    "wi_0",
    "wi_1",
    "dense_h_to_4h",
}
DOWN = {"down", "down_proj", "fc2", "w2", "c_proj", "linear2", "lin2", "dense_4h_to_h", "wo"}
"""Names of the linear layers before and after the activation of a perceptron."""
HEAD_COUNTS = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
)
HEAD_WIDTHS = ("head_width", "head_dim", "head_size", "d_head", "attention_head_size")
ELEMENTWISE = tuple(
    getattr(nn, name)
    for name in (
        "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Tanh Sigmoid LogSigmoid Softplus Softsign Hardtanh "
        "Hardswish Hardsigmoid Identity Dropout"
    ).split()
)
"""What may stand between two cut linear layers of a sequence."""


@dataclass
class Plan:
    """What is cut: styles by the name of the layer, and what the automatic plan promises of the modules around them."""

    styles: dict[str, str | ParallelStyle] = field(default_factory=dict)
    is_given: bool = False
    """Whether the user has given the styles."""
    sequence: SequenceSharding | None = None
    checked: dict[str, list[str]] = field(default_factory=dict)
    """Modules that must compute the same with these layers cut as whole: the automatic plan knows names, not code."""
    heads: dict[str, dict[str, int]] = field(default_factory=dict)
    """Attributes of modules that count heads, to be set to what one rank has."""
    dropouts: dict[str, int] = field(default_factory=dict)
    """Dropout layers on cut activations, and the width that is cut."""
    between: list[str] = field(default_factory=list)
    """What runs on sharded activations besides these layers and what the checked modules hold."""
    left: list[str] = field(default_factory=list)
    """Linear layers that stay whole, as they have hooks or a weight that something computes."""
    traced: set[nn.Module] = field(default_factory=set)
    """What lies within a compiled block: torch would take a graph for each of its hooks that is called after a failure
    as well."""


def make_plan(model: nn.Module, blocks: Mapping[str, nn.Module], size: int, options: Options) -> Plan:
    """Decide what is sharded over `size` ranks. Raises ValueError where a layer's size does not divide, or nothing can be
    cut."""
    plan = Plan(traced=within_compiled(model))
    given = _given(model, options)
    if given is not None:
        plan.styles, plan.is_given = given, True
    else:
        _find(model, size, plan)
    if not plan.styles:
        raise ValueError(
            f"strategy tensor finds nothing to cut in {type(model).__name__}: no attention, pair of linear layers or "
            "linear layer; "
            "give strategy=TensorParallel(plan={...}) or define tensor_plan() in a module, or use another strategy"
            + (f" (hooks or computed weights leave these whole: {shortened(plan.left)})" if plan.left else "")
        )
    if options.loss_parallel:
        _cut_classes(model, plan)
    elif "classes" in plan.styles.values():
        raise ValueError(
            "a plan that cuts a layer by 'classes' needs loss_parallel=True, which computes the loss on cut logits; "
            "give it, or cut the layer by 'gather'"
        )
    _check_sizes(model, size, plan)
    _refuse_altered(model, plan, blocks if options.sequence_parallel else ())
    if options.sequence_parallel:
        plan.sequence = SequenceSharding.of(model, blocks, plan.styles, size)
    return plan


def apply_plan(unit: nn.Module, prefix: str, mesh: DeviceMesh, plan: Plan) -> None:
    """Cut the layers of `unit` (named `prefix` in the model) that are still whole. All ranks of `mesh` hold the same
    values."""

    def inside(names: Any) -> Iterator[tuple[str, str, nn.Module]]:
        for name in names:
            if name == prefix or name.startswith(prefix + ".") or not prefix:
                relative = name[len(prefix) + 1 :] if prefix else name
                yield name, relative, unit.get_submodule(relative)

    todo = {relative: plan.styles[name] for name, relative, module in inside(plan.styles) if not _is_cut(module)}
    modules = [
        module
        for name, _, module in inside(plan.checked)
        if any(not _is_cut(layer) for _, _, layer in inside(plan.checked[name]))
    ]
    names = [name for name, _, module in inside(plan.checked) if module in modules]
    expected = [_computed(module) for module in modules]
    ties = [[(module, leaf) for module, leaf in places] for places in shared(unit).values()]
    # values are the same on all ranks, so that nothing needs to be sent
    torch_plan: dict[str, ParallelStyle] = {}
    columns: dict[str, Column] = {}
    for name, style in todo.items():
        if style == "column":  # one for the layers of a module
            parent = name.rpartition(".")[0]
            if parent not in columns:
                holder = unit.get_submodule(parent)
                hands_on = holder if isinstance(holder, nn.Sequential) and not plan.is_given else None
                columns[parent] = Column(plan.sequence, hands_on)
                holder.register_forward_hook(columns[parent].forget, always_call=holder not in plan.traced)
            torch_plan[name] = columns[parent]
        else:
            torch_plan[name] = STYLES[style](plan.sequence) if isinstance(style, str) else style
    if torch_plan:
        parallelize_module(unit, mesh, torch_plan, src_data_rank=None)
        for name in torch_plan:
            unit.get_submodule(name).register_forward_pre_hook(differentiable_twice)
            unit.get_submodule(name).register_forward_hook(writable)
    for name, _, module in inside(plan.heads):
        for attribute, count in plan.heads[name].items():
            setattr(module, attribute, count)
    for name, _, module in inside(plan.dropouts):
        module.forward = SlicedDropout(module, plan.dropouts[name], mesh)
    for places in ties:
        _tie(places, prefix, unit)
    for name, module in zip(names, modules, strict=True):
        guard = Guard(name or type(module).__name__)
        module.register_forward_pre_hook(guard.enter)
        module.register_forward_hook(guard.leave, always_call=module not in plan.traced)
        for layer_name, _, layer in inside(plan.checked[name]):
            if plan.styles[layer_name] == "column":
                layer.register_forward_pre_hook(functools.partial(guard.check, layer_name))
    for name, module, wanted in zip(names, modules, expected, strict=True):
        if wanted is not None and not _agree(_computed(module), wanted):
            raise ValueError(
                f"the automatic plan cuts {', '.join(plan.checked[name])}, but {name or type(unit).__name__} then "
                "computes something else; "
                "give strategy=TensorParallel(plan={...}) or define tensor_plan() in a module"
            )


class Guard:
    """Refuses the call of a layer whose outputs are cut from anywhere but the module for which the automatic plan cut
    it."""

    def __init__(self, name: str) -> None:
        self._name, self._running = name, 0

    def enter(self, module: nn.Module, args: Any) -> None:
        self._running += not torch.compiler.is_compiling()  # what is compiled makes the module's own calls

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running -= not torch.compiler.is_compiling()

    def check(self, layer: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:  # or recomputed by a backward
            return
        if not self._running:
            raise RuntimeError(
                f"{layer} was called without {self._name}, but strategy tensor has cut its outputs over ranks for "
                f"{self._name} to use; "
                "give strategy=TensorParallel(plan={...}) that leaves it whole"
            )


class SlicedDropout:
    """Dropout of a cut activation: this rank's part of the noise that the whole activation would get, so that ranks do
    not repeat it."""

    def __init__(self, layer: nn.Module, width: int, mesh: DeviceMesh) -> None:
        self._layer, self._width, self._rank = layer, width, mesh.get_local_rank()

    def __call__(self, x: Tensor) -> Tensor:
        if not self._layer.training or not self._layer.p:
            return x
        whole = nn.functional.dropout(x.new_ones(*x.shape[:-1], self._width), self._layer.p)  # type: ignore[arg-type]
        if x.shape[-1] == self._width:  # called by itself
            return x * whole
        return x * whole.narrow(-1, self._rank * x.shape[-1], x.shape[-1])


# ---- where a plan comes from -----------------------------------------------------------------------


def _given(model: nn.Module, options: Options) -> dict[str, Any] | None:
    """The plan of the option, else those of the modules' `tensor_plan()`, with patterns resolved; None without any."""
    named = dict(model.named_modules())
    sources: list[tuple[str, Mapping[str, Any], str]] = []
    if isinstance(options.plan, Mapping):
        sources = [("", options.plan, "plan")]
    elif options.plan != "auto":
        raise ValueError(
            f"plan must be 'auto' or a dict of layer names and how they are cut, but plan={options.plan!r}"
        )
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
                    f"{where} names {pattern!r}, which is no submodule; there are "
                    f"{', '.join(name for name in named if name)[:200]}"
                )
            styles |= dict.fromkeys(found, style)
    return styles if sources else None


def _find(model: nn.Module, size: int, plan: Plan) -> None:
    """The automatic plan."""
    tied = {id(module) for places in shared(model).values() for module, _ in places}
    named = {name: module for name, module in model.named_modules() if id(module) not in tied}
    for name, module in named.items():
        dot = name + "." if name else ""
        linear = {
            child: layer
            for child, layer in module.named_children()
            if type(layer) is nn.Linear and id(layer) not in tied and not is_altered(layer)
        }
        plan.left += [dot + child for child, layer in module.named_children() if is_altered(layer)]
        if isinstance(module, nn.Sequential):
            _find_pairs(dot, module, tied, plan)
            continue
        if any(map(_has_hooks, _inside(module))):
            continue  # they may look at what the layers of a group hand to each other
        attention = [[child for child in linear if child in names] for names in ATTENTION]
        heads = (
            _heads(dot, module, linear, [names[0] for names in attention], size)
            if all(len(names) == 1 for names in attention)
            else None
        )
        if heads is not None:
            q, k, v, o = (names[0] for names in attention)
            plan.styles |= {dot + q: "column", dot + k: "column", dot + v: "column", dot + o: "row"}
            plan.heads[name] = heads
            plan.checked.setdefault(name, []).extend(dot + child for child in (q, k, v, o))
        taken = {names[0] for names in attention} if heads is not None else set()
        up, down = ([child for child in linear if child in names and child not in taken] for names in (UP, DOWN))
        others = [  # such as an adapter in the place of a layer
            child
            for child, layer in module.named_children()
            if child in UP | DOWN and child not in linear and next(layer.parameters(), None) is not None
        ]
        if (
            up
            and len(down) == 1
            and not others
            and all(linear[child].out_features == linear[down[0]].in_features for child in up)
        ):
            plan.styles |= {dot + child: "column" for child in up} | {dot + down[0]: "row"}
            plan.checked.setdefault(name, []).extend(dot + child for child in (*up, *down))
    if not plan.styles:
        for name, module in named.items():
            if type(module) is nn.Linear and not is_altered(module):
                wide = module.in_features >= module.out_features
                sizes = {"scatter": module.in_features, "gather": module.out_features}
                order = ("scatter", "gather") if wide else ("gather", "scatter")
                plan.styles[name] = next((style for style in order if sizes[style] % size == 0), order[0])


def _find_pairs(dot: str, sequence: nn.Sequential, tied: set[int], plan: Plan) -> None:
    """Linear layers of a sequence with nothing but elementwise layers between them."""
    first: tuple[str, nn.Linear] | None = None
    between: dict[str, nn.Module] = {}
    layers = [*sequence._modules.items()]  # a layer that stands there twice is called twice
    repeated = {id(layer) for i, (_, layer) in enumerate(layers) if any(layer is other for _, other in layers[:i])}
    for child, layer in layers:
        if layer is None or (id(layer) in repeated and not isinstance(layer, ELEMENTWISE)):
            first = None
        elif type(layer) is nn.Linear and id(layer) not in tied and not is_altered(layer):
            if first is not None and first[1].out_features == layer.in_features:
                plan.styles |= {dot + first[0]: "column", dot + child: "row"}
                plan.between += between
                dropouts = [name for name, inner in between.items() if isinstance(inner, nn.Dropout)]
                plan.dropouts |= dict.fromkeys(dropouts, layer.in_features)
                first = None
            else:
                first = (child, layer)
            between = {}
        elif not isinstance(layer, ELEMENTWISE) or _has_hooks(layer):
            first = None
        else:
            between[dot + child] = layer


def _heads(
    dot: str, module: nn.Module, linear: Mapping[str, nn.Linear], names: list[str], size: int
) -> dict[str, int] | None:
    """The attributes that count heads, as one rank has them; None where the module does not say how it makes heads.

    Without them a reshape could make narrower heads out of a slice, which computes something else.
    """
    q, k, v, o = (linear[name] for name in names)
    if q.out_features != o.in_features or k.out_features != v.out_features:
        return None
    counts = {name: value for name in HEAD_COUNTS if type(value := vars(module).get(name)) is int}
    for name, value in counts.items():
        if value % size:
            raise ValueError(
                f"strategy tensor cuts attention by heads, but {dot}{name}={value} is not divisible by the {size} "
                "ranks of a tensor group; "
                "change it, or the mesh"
            )
    if counts:
        return {name: value // size for name, value in counts.items()}
    width = next((value for name in HEAD_WIDTHS if type(value := vars(module).get(name)) is int), None)
    if width is None:
        return None
    for name in names[:3]:
        if linear[name].out_features % (size * width):
            raise ValueError(
                f"strategy tensor cuts attention by heads, but {dot}{name} has "
                f"out_features={linear[name].out_features}, which is not a whole number "
                f"of heads of {width} on each of the {size} ranks of a tensor group; change it, or the mesh"
            )
    return {}


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
        if style == "position":
            continue
        wanted = nn.Embedding if style == "embedding" else nn.Linear
        if not isinstance(layer, wanted):
            raise ValueError(
                f"the plan cuts {name} by {style!r}, which is for {wanted.__name__}, but it is {type(layer).__name__}"
            )
        attribute = {"row": "in_features", "scatter": "in_features", "embedding": "num_embeddings"}.get(
            style, "out_features"
        )
        if getattr(layer, attribute) % size:
            raise ValueError(
                f"strategy tensor cuts {name} by {attribute}={getattr(layer, attribute)}, which is not divisible by "
                f"the {size} ranks of a tensor group; "
                "change the layer or the mesh, or leave it out with a plan"
            )


# ---- layers that are more than their weights ---------------------------------------------------------

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in HOOKS)


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)


def is_altered(layer: nn.Module) -> bool:
    """Whether a linear layer has hooks, or computes its weight: by a parametrization, or the hook of weight_norm or
    prune."""
    if not isinstance(layer, nn.Linear):
        return False
    return _has_hooks(layer) or "weight" not in layer._parameters or "parametrizations" in layer._modules


def _refuse_altered(model: nn.Module, plan: Plan, blocks: Iterable[str]) -> None:
    """Raise ValueError for layers of the plan that hooks would see in shards, or whose weight is computed."""
    for name in plan.styles:
        layer = model.get_submodule(name)
        if is_altered(layer) or _has_hooks(layer):
            what = (
                "hooks" if _has_hooks(layer) and "weight" in layer._parameters else "a weight that something computes"
            )
            raise ValueError(f"the plan of strategy tensor shards {name}, but it has {what}; leave it out of the plan")
    for name in blocks:
        for inner, module in model.get_submodule(name).named_modules():
            if inner and _has_hooks(module):
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
        whole_output = plan.styles.get(name) in ("row", "gather", "scatter", "embedding") and plan.sequence is None
        for kind in HOOKS[1:] if whole_output else HOOKS:
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


# ---- applying it -----------------------------------------------------------------------------------


def _is_cut(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


@torch.no_grad()
def _computed(module: nn.Module) -> Tensor | None:
    """What a module makes of fixed random numbers, or None where it takes something else than one tensor."""
    first = next((layer for layer in module.modules() if isinstance(layer, nn.Linear)), None)
    if first is None:
        return None
    x = torch.randn(2, 8, first.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(
        first.weight
    )
    modes = [(child, child.training) for child in module.modules()]
    with side_effect_free(module), torch.compiler.set_stance("force_eager"):
        try:
            module.eval()
            output = module(x)
        except Exception:  # whatever a forward raises that wants other arguments
            return None
        finally:
            for child, mode in modes:
                child.training = mode
    return next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)


def _agree(found: Tensor | None, wanted: Tensor) -> bool:
    if found is None or found.shape != wanted.shape:
        return False
    tolerance = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-3))


def _tie(places: list[tuple[nn.Module, str]], prefix: str, unit: nn.Module) -> None:
    """Make what was one parameter one again, once its layers are cut."""
    parameters = [module._parameters[leaf] for module, leaf in places]
    kinds = {(p.placements if isinstance(p, DTensor) else None) for p in parameters}
    if len(kinds) > 1:
        names = {id(module): name for name, module in unit.named_modules()}
        shown = " and ".join(".".join(filter(None, (prefix, names[id(module)], leaf))) for module, leaf in places)
        raise ValueError(
            f"{shown} are one parameter, but the plan cuts them in different ways; name both layers in the plan, cut "
            "alike, or neither"
        )
    for module, leaf in places:
        module._parameters[leaf] = parameters[0]
