"""The automatic plan: attention, perceptrons and pairs of linear layers, found by the names they usually have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from torch import nn

from lockstep.strategies.mesh.tensor_plan.altered import has_hooks, has_own_forward, inside, is_altered
from lockstep.strategies.mesh.tensor_plan.linear import in_features, is_plain, is_transposed, out_features
from lockstep.strategies.mesh.tensor_plan.plan import Plan
from lockstep.strategies.modules.blocks import shared
from lockstep.strategies.modules.forwards import is_called

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


def find(model: nn.Module, size: int, plan: Plan) -> None:
    """The automatic plan."""
    tied = {id(module) for places in shared(model).values() for module, _ in places}
    named = {name: module for name, module in model.named_modules() if id(module) not in tied}
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    alone = {key for key, count in places.items() if count == 1} - tied
    """What is called as one layer of one module, and shares no parameter."""
    for name, module in named.items():
        dot = name + "." if name else ""
        linear = {
            child: layer
            for child, layer in module.named_children()
            if is_plain(layer) and id(layer) in alone and not is_altered(layer)
        }
        plan.left += [dot + child for child, layer in module.named_children() if is_altered(layer)]
        if isinstance(module, nn.Sequential):
            _find_pairs(dot, module, alone, plan)
        elif is_called(module) and not any(map(has_hooks, inside(module))):  # they may read what its layers pass on
            taken = _find_attention(dot, module, linear, size, plan)
            _find_perceptron(dot, module, linear, taken, plan)
    _find_others(named, size, plan)


def _find_attention(
    dot: str, module: nn.Module, linear: Mapping[str, nn.Module], size: int, plan: Plan
) -> Collection[str]:
    """The four projections of an attention layer, sharded over heads; returns their names."""
    found = [[child for child in linear if child in names] for names in ATTENTION]
    if any(len(names) != 1 for names in found):
        return ()
    q, k, v, o = names = [names[0] for names in found]
    heads = _heads(dot, module, linear, names, size)
    if heads is None:
        return ()
    _cut(dot, (q, k, v), o, plan)
    plan.heads[dot.removesuffix(".")] = heads
    return names


def _find_perceptron(
    dot: str, module: nn.Module, linear: Mapping[str, nn.Module], taken: Collection[str], plan: Plan
) -> None:
    """The layers before and the one after an activation."""
    up, down = ([child for child in linear if child in names and child not in taken] for names in (UP, DOWN))
    others = [  # such as an adapter in the place of a layer
        child
        for child, layer in module.named_children()
        if child in UP | DOWN and child not in linear and next(layer.parameters(), None) is not None
    ]
    if not up or len(down) != 1 or others:
        return
    if all(out_features(linear[child]) == in_features(linear[down[0]]) for child in up):
        _cut(dot, up, down[0], plan)


def _cut(dot: str, columns: Collection[str], row: str, plan: Plan) -> None:
    """Cut layers by what they give, and the one that takes it by what it takes."""
    plan.styles |= {dot + child: "column" for child in columns} | {dot + row: "row"}
    plan.checked.setdefault(dot.removesuffix("."), []).extend(dot + child for child in (*columns, row))


def _find_others(named: Mapping[str, nn.Module], size: int, plan: Plan) -> None:
    """Layers that are cut each by itself: where no others were found, all that are plain."""
    by_itself = is_transposed if plan.styles else is_plain  # what GPT-2's attention is made of
    for name, module in named.items():
        if by_itself(module) and is_plain(module) and name not in plan.styles and not is_altered(module):
            sizes = {"scatter": in_features(module), "gather": out_features(module)}
            order = ("scatter", "gather") if sizes["scatter"] >= sizes["gather"] else ("gather", "scatter")
            plan.styles[name] = next((style for style in order if sizes[style] % size == 0), order[0])


def _find_pairs(dot: str, sequence: nn.Sequential, alone: set[int], plan: Plan) -> None:
    """Linear layers of a sequence with nothing but elementwise layers between them."""
    first: tuple[str, nn.Linear] | None = None
    between: dict[str, nn.Module] = {}
    for child, layer in sequence._modules.items():
        if type(layer) is nn.Linear and id(layer) in alone and not is_altered(layer):
            if first is not None and first[1].out_features == layer.in_features:
                plan.styles |= {dot + first[0]: "column", dot + child: "row"}
                plan.between += between
                dropouts = {name: inner for name, inner in between.items() if type(inner) is nn.Dropout}
                plan.dropouts |= dict.fromkeys(dropouts, layer.in_features)
                plan.within |= dict.fromkeys((first[1], *dropouts.values()), sequence)
                first = None
            else:
                first = (child, layer)
            between = {}
        elif layer is not None and _is_elementwise(layer) and (id(layer) in alone or type(layer) is not nn.Dropout):
            between[dot + child] = layer
        else:
            first = None


def _is_elementwise(layer: nn.Module) -> bool:
    """A subclass, or a forward set on the layer, may compute something else, and hooks would see shards."""
    return type(layer) in ELEMENTWISE and not has_own_forward(layer) and not has_hooks(layer)


def _heads(
    dot: str, module: nn.Module, linear: Mapping[str, nn.Module], names: list[str], size: int
) -> dict[str, int] | None:
    """The attributes that count heads, as one rank has them; None where the module does not say how it makes heads.

    Without them a reshape could make narrower heads out of a slice, which computes something else.
    """
    q, k, v, o = (linear[name] for name in names)
    if out_features(q) != in_features(o) or out_features(k) != out_features(v):
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
        if out_features(linear[name]) % (size * width):
            raise ValueError(
                f"strategy tensor cuts attention by heads, but {dot}{name} has "
                f"out_features={out_features(linear[name])}, which is not a whole number "
                f"of heads of {width} on each of the {size} ranks of a tensor group; change it, or the mesh"
            )
    return {}
