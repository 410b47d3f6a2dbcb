"""Which submodules are the blocks of a model: what is gathered, freed and recomputed as one."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torch import nn

Rule: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool] | Iterable[str | type[nn.Module]] | None"

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, rule: Rule) -> dict[str, nn.Module]:
    """The blocks by name, inner ones before those that hold them.

    "auto" takes the innermost items of lists and sequences that are more than one layer. A class, a name
    (`"gpt.blocks.*"`), or a list of both takes what matches; a function is asked with (name, module); None
    takes none. A submodule whose parameters others share is skipped, as its block could not move alone.
    Raises ValueError for a class or name that matches nothing.
    """
    ties = [[_way(model, name) for name in many] for many in _several_names(model)]
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
    for many in _several_names(model):
        where = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in many]
        if len({id(module) for module, _ in where}) > 1:
            places[many] = where
    return places


def _several_names(model: nn.Module) -> list[tuple[str, ...]]:
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
