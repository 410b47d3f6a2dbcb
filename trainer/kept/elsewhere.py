"""What layers keep in attributes on a rank that runs them alone, given to the other ranks as a run ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.sync.collectives import gather_objects
from lockstep.trainer.kept.agreed import is_equal
from lockstep.trainer.kept.fields import caches_of, derived, drop, fields
from lockstep.trainer.kept.identity import in_state_dict
from lockstep.trainer.kept.owners import layers
from lockstep.trainer.kept.values import (
    MOST_ITEMS,
    NOTHING,
    Mark,
    is_record,
    is_same,
    is_savable,
    mark_of,
    on_host,
    own_data,
    put,
    storages,
    take,
    take_data,
)

if TYPE_CHECKING:
    from lockstep.strategies import Strategy


@contextmanager
def layers_alike(strategy: Strategy, module: nn.Module, beside: Sequence[Any] = ()) -> Iterator[None]:
    """Around a run: if ranks run different layers, each layer has at the end what it has on the rank that runs it. Of
    modules that no rank runs alone, what others have changed is added where this rank has not; attributes of callbacks,
    `beside`, that refuse any use on a rank do so on all. Every rank enters it, before the model is wrapped."""
    if strategy.rank_of_layer is None:
        yield
        return
    before = {path: _marks_of_layer(layer) for path, layer in layers(module)}
    yield
    if not (rank_of := strategy.rank_of_layer):
        return
    rank, weights, own = strategy.topology.rank, storages(in_state_dict(module)), dict(layers(module))
    runs_on = {path: _owner(path, rank_of) for path in own}
    sent = {
        path: _held(layer, weights, before.get(path, ({}, {})), runs_on[path] == rank)
        for path, layer in own.items()
        if runs_on[path] in (rank, None)
    }
    found = gather_objects((sent, [_refusing(owner) for owner in beside]))
    for theirs in (each for _, refused in found for each in zip(beside, refused, strict=True)):
        _refuse_alike(*theirs)
    others = {source: found[source][0] for source in sorted({*rank_of.values()} - {rank})}
    for path, layer in own.items():
        if (source := runs_on[path]) is not None:
            if path in others.get(source, {}):
                _take_all(layer, others[source][path])
            continue
        known = {*sent[path].attributes}
        for held in (theirs[path] for theirs in others.values() if path in theirs):
            take_layer(layer, {n: value for n, value in held.attributes.items() if n not in known}, held.caches)
            known.update(held.attributes)


def take_layer(layer: nn.Module, attributes: dict[str, Any], caches: list[str], replaced: Collection[str] = ()) -> None:
    """Give a layer its attributes, of which `caches` are buffers that are not in the state dict."""
    take_data(layer, {name: value for name, value in attributes.items() if name not in caches}, replaced)
    for name in attributes.keys() & set(caches):
        value, now = attributes[name], caches_of(layer).get(name)
        if isinstance(value, Tensor) and now is not None and not now.is_meta:
            value = value.to(now.device)
        take(layer, name, value, is_cache=True)


class _Held(NamedTuple):
    """What a rank sends of a layer."""

    attributes: dict[str, Any]
    caches: list[str]
    names: list[str]
    """Of all its attributes, also of those that cannot be sent."""
    parameters: dict[str, dict[str, Any]]
    """The attributes of each."""


Marks = Mapping[str, Mark]


def _held(layer: nn.Module, weights: set[int | None], found: tuple[Marks, Mapping[str, Marks]], is_own: bool) -> _Held:
    """Only what has changed since `before`: the rest is alike on all ranks. Views of weights are not sent."""
    before, of_parameters = found
    attributes = {
        name: value
        for name, value in _changed(layer, before).items()
        if not isinstance(value, Tensor) or (value.grad_fn is None and weights.isdisjoint(storages([value])))
    }
    attributes |= {name: on_host(value) for name, value in derived(layer).items() if is_own}
    held = {name: p for name, p in layer._parameters.items() if p is not None and is_own}
    parameters = {n: _changed(p, of_parameters.get(n, {})) for n, p in held.items()}
    return _Held(attributes, [*caches_of(layer)], [*fields(layer)], parameters)


def _changed(owner: Any, before: Marks) -> dict[str, Any]:
    own = own_data(owner).items()
    return {name: on_host(value) for name, value in own if not is_same(before.get(name, NOTHING), _mark(value))}


def _refusing(owner: Any) -> dict[str, Any]:
    """The attributes that refuse any use; of dicts and lists the items that do."""
    return _refused(own_data(owner)) or {}


def _refused(value: Any) -> Any:
    if not isinstance(value, dict | list):
        return value if isinstance(value, Refusing) else None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: found for key, item in items if (found := _refused(item)) is not None} or None


def _refuse_alike(owner: Any, refused: dict[str, Any]) -> None:
    """Let on this rank refuse any use what does on another; what else is beside it stays."""
    for name, items in refused.items():
        if isinstance(items, Refusing):
            put(owner, name, items)
        else:
            _put_items(fields(owner).get(name), items)


def _put_items(held: Any, refused: dict[Any, Any]) -> None:
    for key, items in refused.items() if isinstance(held, dict | list) else ():
        if isinstance(held, list) and key >= len(held):
            continue
        if isinstance(items, Refusing):
            held[key] = items
        else:
            _put_items(held.get(key) if isinstance(held, dict) else held[key], items)


def _take_all(layer: nn.Module, held: _Held) -> None:
    for name in own_data(layer).keys() - {*held.names}:
        drop(layer, name)
    take_layer(layer, others_of(fields(layer), held.attributes), held.caches)
    for name in layer._parameters.keys() & held.parameters:
        own: Any = layer._parameters[name]
        take_data(own, others_of(vars(own), held.parameters[name]))


def others_of(own: Mapping[str, Any], attributes: dict[str, Any]) -> dict[str, Any]:
    """Those that are not there, as what is equal stays the object that it is for whoever else holds it."""
    return {name: value for name, value in attributes.items() if name not in own or not is_equal(own[name], value)}


def _marks_of_layer(layer: nn.Module) -> tuple[Marks, dict[str, Marks]]:
    return _marks(layer), {name: _marks(p) for name, p in layer._parameters.items() if p is not None}


def _marks(owner: Any) -> dict[str, Mark]:
    return {name: _mark(value) for name, value in own_data(owner).items()}


def _mark(value: Any) -> Mark:
    found = mark_of(tuple(fields(value).values()) if is_record(value) else value, MOST_ITEMS)
    return found if is_savable(found) or isinstance(value, Tensor) else (None, object())  # it is not read whole


def _owner(path: str, rank_of: Mapping[str, int]) -> int | None:
    return next((rank for name, rank in rank_of.items() if f"{path}.".startswith(f"{name}.")), None)
