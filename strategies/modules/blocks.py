"""What a model is made of: blocks, which are gathered, freed and recomputed as one, and layers, of which each may be on
a device or a stage of its own."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Rule: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool] | Iterable[str | type[nn.Module]] | None"

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LISTS_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that torch gives every module."""
_NOT_OF_USERS = ("torch", "lockstep", "torchmetrics", "builtins", "abc", "typing")


def find_blocks(model: nn.Module, rule: Rule) -> dict[str, nn.Module]:
    """The blocks by name, inner ones before those that hold them.

    "auto" takes the innermost items of lists and sequences that are more than one layer. A class, a name
    (`"gpt.blocks.*"`), or a list of both takes what matches; a function is asked with (name, module); None
    takes none. A submodule whose parameters others share is skipped, as its block could not move alone.
    Raises ValueError for a class or name that matches nothing.
    """
    ties = [[_way(model, name) for name in many] for many in several_names(model)]
    return {
        name: block
        for name, block in match(model, rule, "wrap").items()
        if not any(_crosses(block, ways) for ways in ties)
    }


def match(model: nn.Module, rule: Rule, option: str) -> dict[str, nn.Module]:
    """As `find_blocks`, with those that share parameters; `option` is what the user gave the rule by."""
    named = dict(model.named_modules())
    candidates = [name for name in _inner_first(named) if name and next(named[name].parameters(), None) is not None]
    candidates = [
        name for name in candidates if not isinstance(named[name], (nn.ModuleList, nn.ModuleDict))
    ]  # never called
    if rule is None:
        found: list[str] = []
    elif rule == "auto":
        found = _items(named, candidates)
    elif callable(rule) and not isinstance(rule, type):
        found = [name for name in candidates if rule(name, named[name])]
    else:
        wanted = [rule] if isinstance(rule, (str, type)) else list(rule)
        matches = {_shown(item): [name for name in candidates if _matches(item, name, named[name])] for item in wanted}
        nothing = [item for item, names in matches.items() if not names]
        if nothing:
            raise ValueError(
                f"{option} must name classes or submodules that have parameters, but {nothing[0]} is not one of "
                f"{type(model).__name__}; "
                f"there are {', '.join(candidates[:6])}"
            )
        found = [name for name in candidates if any(name in names for names in matches.values())]
    return {name: named[name] for name in found}


def shared(model: nn.Module) -> dict[tuple[str, ...], list[tuple[nn.Module, str]]]:
    """The names of each parameter that has several, with the modules that hold it and what it is called there."""
    places = {}
    for many in several_names(model):
        where = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in many]
        if len({id(module) for module, _ in where}) > 1:
            places[many] = where
    return places


def several_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter that has several: it is an attribute of two modules, or its module is."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(many) for many in names.values() if len(many) > 1]


def _items(named: dict[str, nn.Module], candidates: list[str]) -> list[str]:
    found: list[str] = []
    for name in candidates:
        parent = name.rpartition(".")[0]
        single = next(named[name].children(), None) is None
        if (
            isinstance(named.get(parent), CONTAINERS)
            and not single
            and not any(inner.startswith(name + ".") for inner in found)
        ):
            found.append(name)
    return found


def _matches(item: Any, name: str, module: nn.Module) -> bool:
    return isinstance(module, item) if isinstance(item, type) else fnmatch.fnmatchcase(name, item)


def _shown(item: Any) -> str:
    return item.__name__ if isinstance(item, type) else repr(item)


def _inner_first(named: dict[str, nn.Module]) -> Iterator[str]:
    return iter(sorted(named, key=lambda name: -name.count(".") - bool(name)))


def _way(model: nn.Module, name: str) -> set[nn.Module]:
    """The modules between `model` and the parameter `name`."""
    way = set()
    for part in name.split(".")[:-1]:
        model = getattr(model, part)
        way.add(model)
    return way


def _crosses(block: nn.Module, ways: list[set[nn.Module]]) -> bool:
    """Whether a parameter is reached through `block` and past it."""
    inside = [block in way for way in ways]
    return any(inside) and not all(inside)


# ---- layers --------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A module that is in one place as a whole and is run by calling it."""

    name: str
    """Its name in the model."""
    module: nn.Module


def find_layers(name: str, net: nn.Module) -> tuple[list[Layer], list[tuple[str, nn.Module]]]:
    """Take apart `net`, which is `name` in its model: its layers in the order of their definition, and the modules
    around them by name, which may have parameters of their own.

    A layer has parameters, or buffers that a forward may change. Containers are taken apart, and modules with most of
    the parameters in a list.
    """
    layers: list[Layer] = []
    shells: list[tuple[str, nn.Module]] = []
    _take_apart(name, net, _size(net), True, layers, shells)
    return layers, shells


def closed_layers(net: nn.Module, at_least: int) -> list[Layer]:
    """As `find_layers`, but a module with parameters of its own is one layer; `net` itself must have none. Further
    modules are taken apart, the largest first, while there are fewer than `at_least` layers."""
    layers: list[Layer] = []
    _take_apart("", net, _size(net), False, layers, [])
    while len(layers) < at_least:
        divisible = [
            (_size(layer.module), i)
            for i, layer in enumerate(layers)
            if not _has_own(layer.module) and any(map(_size, layer.module.children()))
        ]
        if not divisible:
            break
        _, i = max(divisible)
        inner: list[Layer] = []
        _take_apart(*layers[i], _size(net), False, inner, [])
        layers[i : i + 1] = inner
    return layers


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Where each of `num_parts` contiguous, non-empty parts of `costs` begins, so that the largest sum is least."""
    total = [0.0, *accumulate(costs)]
    best = [(cost, [0]) for cost in total]  # of the first i layers in one part
    for part in range(1, num_parts):
        grown = [(float("inf"), [0])] * len(best)
        for i in range(part + 1, len(total)):
            grown[i] = min(
                ((max(best[k][0], total[i] - total[k]), [*best[k][1], k]) for k in range(part, i)),
                key=lambda found: found[0],
            )
        best = grown
    return best[-1][1]


def measures(module: nn.Module) -> bool:
    """Whether its tensors may change in a forward.

    BatchNorm's are statistics of batches, which each rank and part measures by itself; `max_norm` of embeddings leaves
    the rows that the parts look up as it leaves those of the whole.
    """
    return isinstance(module, nn.modules.batchnorm._NormBase | nn.Embedding | nn.EmbeddingBag) or is_metric(module)


def is_metric(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(module).__mro__)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _take_apart(
    name: str, module: nn.Module, total: int, opens: bool, layers: list[Layer], shells: list[tuple[str, nn.Module]]
) -> None:
    """`opens`: also modules with parameters of their own."""
    shells.append((name, module))
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not any(True for _ in child.parameters()) and not any(measures(m) and m._buffers for m in child.modules()):
            continue  # it runs wherever it is called
        if not opens and _has_own(child):
            layers.append(Layer(path, child))
        elif isinstance(child, LISTS_OF_PARAMETERS):
            shells.append((path, child))
        elif isinstance(child, CONTAINERS) or (2 * _size(child) > total and _has_list(child)):
            _take_apart(path, child, total, opens, layers, shells)
        else:
            layers.append(Layer(path, child))


def _has_list(module: nn.Module) -> bool:
    return any(
        isinstance(child, CONTAINERS) and sum(any(True for _ in item.parameters()) for item in child.children()) > 1
        for child in module.modules()
    )


def is_of_user(module: nn.Module) -> bool:
    """Whether its class has code of the user's; FSDP makes another class of it."""
    kind: Any = type(module)
    return _is_of_user(kind)


def is_of_torch(layer: nn.Module) -> bool:
    """Whether its class is torch's, with no code of the user's or of an engine that might change its attributes."""
    return not is_of_user(layer) and not any(cls.__module__.startswith("lockstep.") for cls in type(layer).__mro__)


def users_classes(value: object) -> list[type]:
    """Its class and bases, but for those of torch and Lockstep."""
    return _users_classes(type(value))


def _users_classes(kind: type) -> list[type]:
    return [cls for cls in kind.__mro__ if cls.__module__.partition(".")[0] not in _NOT_OF_USERS]


@functools.lru_cache(1000)
def _is_of_user(kind: Any) -> bool:
    return bool(_users_classes(kind))


def holds_states(metric: nn.Module) -> bool:
    """Whether a torchmetrics object has states of its own; those of a ClasswiseWrapper are of the metric in it."""
    return not any(getattr(child, "_defaults", None) is metric._defaults for child in metric.children())


def join_states(metric: Any, other: Any, instead: str) -> None:
    """Add to the states of a torchmetrics object those of another one, or a dict of them, that has seen other samples.

    Its own `merge_state` refuses most metrics, and joins means, and tensors without a reduction, to something else than
    what they would be over all samples. Raises ValueError for these, unless a mean is the same in both.
    """
    if not type(metric).merge_state.__module__.startswith("torchmetrics."):
        metric.merge_state(other)
        return
    state = other if isinstance(other, dict) else other.metric_state
    for key, reduction in metric._reductions.items():
        mine, theirs = getattr(metric, key), state[key]
        joined = _JOINS.get(getattr(reduction, "__name__", ""))
        if isinstance(mine, list) or isinstance(theirs, list):
            mine, theirs = ([*s] if isinstance(s, list) else [s] for s in (mine, theirs))
            setattr(metric, key, mine + theirs)
        elif joined is not None:
            setattr(metric, key, joined(mine, theirs))
        elif getattr(reduction, "__name__", "") != "dim_zero_mean" or not torch.equal(mine, theirs):
            how = getattr(reduction, "__name__", reduction)
            raise ValueError(
                f"{type(metric).__name__} keeps {key} with dist_reduce_fx={how}, which cannot be joined with that of "
                f"other samples before more are counted; {instead}"
            )


_JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda one, other: torch.cat([one, other]),
}
