"""What layers keep in attributes on a rank that runs them alone, given to the other ranks as a run ends."""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.launch import environment, payload
from lockstep.trainer.kept.agreed import is_equal
from lockstep.trainer.kept.identity import in_state_dict
from lockstep.trainer.kept.owners import layers
from lockstep.trainer.kept.values import (
    MOST_ITEMS,
    NOTHING,
    Mark,
    caches_of,
    drop,
    fields,
    is_same,
    mark_of,
    on_host,
    own_data,
    storages,
    take,
    take_data,
)

if TYPE_CHECKING:
    from lockstep.strategies import Strategy


@contextmanager
def layers_alike(strategy: Strategy, module: nn.Module) -> Iterator[None]:
    """Around a run: if ranks run different layers, each layer has at the end what it has on the rank that runs it. Of
    modules that no rank runs alone, what others have changed is added where this rank has not. Every rank enters it,
    before the model is wrapped."""
    if strategy.rank_of_layer is None:
        yield
        return
    before = {path: _marks(layer) for path, layer in layers(module)}
    yield
    if not (rank_of := strategy.rank_of_layer):
        return
    rank, weights, own = strategy.topology.rank, storages(in_state_dict(module)), dict(layers(module))
    runs_on = {path: _owner(path, rank_of) for path in own}
    sent = {
        path: _held(layer, weights, before.get(path, {}), runs_on[path] == rank)
        for path, layer in own.items()
        if runs_on[path] in (rank, None)
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _dumps(sent))
    others = {source: pickle.loads(found[source]) for source in sorted({*rank_of.values()} - {rank})}
    for path, layer in own.items():
        if (source := runs_on[path]) is not None:
            if path in others.get(source, {}):
                _take_all(layer, others[source][path])
            continue
        known = {*sent[path].attributes}
        for held in (theirs[path] for theirs in others.values() if path in theirs):
            take_layer(layer, {n: value for n, value in held.attributes.items() if n not in known}, held.caches)
            known.update(held.attributes)


def take_layer(layer: nn.Module, attributes: dict[str, Any], caches: list[str]) -> None:
    """Give a layer its attributes, of which `caches` are buffers that are not in the state dict."""
    take_data(layer, {name: value for name, value in attributes.items() if name not in caches})
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


def _held(layer: nn.Module, weights: set[int | None], before: Mapping[str, Mark], is_own: bool) -> _Held:
    """Only what has changed since `before`: the rest is alike on all ranks. Views of weights are not sent."""
    attributes = {
        name: on_host(value)
        for name, value in own_data(layer).items()
        if not is_same(before.get(name, NOTHING), _mark(value))
        if not isinstance(value, Tensor) or (value.grad_fn is None and weights.isdisjoint(storages([value])))
    }
    parameters = {name: own_data(p) for name, p in layer._parameters.items() if p is not None and is_own}
    return _Held(attributes, [*caches_of(layer)], [*fields(layer)], parameters)


def _take_all(layer: nn.Module, held: _Held) -> None:
    for name in own_data(layer).keys() - {*held.names}:
        drop(layer, name)
    own = fields(layer)
    take_layer(layer, {n: v for n, v in held.attributes.items() if not _is_same(own.get(n), v)}, held.caches)
    for name in layer._parameters.keys() & held.parameters:
        take_data(layer._parameters[name], held.parameters[name])


def _is_same(now: Any, value: Any) -> bool:
    """Whether it is a tensor with these values, which stays the one that it is for whoever else holds it."""
    return isinstance(now, Tensor) and isinstance(value, Tensor) and is_equal(now, value.to(now.device))


def _marks(layer: nn.Module) -> dict[str, Mark]:
    return {name: _mark(value) for name, value in own_data(layer).items()}


def _mark(value: Any) -> Mark:
    return mark_of(tuple(fields(value).values()) if dataclasses.is_dataclass(value) else value, MOST_ITEMS)


class _Pickler(payload.Pickler):
    """Names classes of the program where each rank is the program."""

    def reducer_override(self, obj: Any) -> Any:
        by_name = isinstance(obj, type) and getattr(sys.modules.get(obj.__module__), obj.__qualname__, None) is obj
        return NotImplemented if by_name and not environment.started_by_lockstep() else super().reducer_override(obj)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, None).dump(value)
    return file.getvalue()


def _owner(path: str, rank_of: Mapping[str, int]) -> int | None:
    return next((rank for name, rank in rank_of.items() if f"{path}.".startswith(f"{name}.")), None)
