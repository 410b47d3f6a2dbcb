"""Whose attributes are kept: the module, layers of the user's classes, callbacks, a DataModule, and what these hold."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from abc import ABC
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import IOBase
from types import MethodType, SimpleNamespace
from typing import Any, Generic, Protocol

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.callbacks.base import Callback, Logger
from lockstep.strategies.data.combined import CombinedLoader
from lockstep.strategies.launch.failure import libraries
from lockstep.strategies.modules.blocks import is_of_torch, is_of_user
from lockstep.trainer.hparams import Namespace as HParams
from lockstep.trainer.kept.fields import Weights, fields
from lockstep.trainer.kept.values import SAVED, STATEFUL, attributes, not_of_users

_DEPTH, MANY, _MOST = 3, 64, 1000
"""How deep objects within objects are searched, the most items of a list or dict that are, and the most objects."""
_BARE = (Callback, Generic, Protocol, ABC)
"""Bases that have no attributes of their own."""
_OTHERS = (nn.Module, Callback, Dataset, DataLoader, Sampler, type, *STATEFUL)
"""Objects that are saved otherwise, or make what a run reads."""
_WEIGHTS = weakref.WeakKeyDictionary[nn.Module, Weights]()
_LOADERS = (DataLoader, CombinedLoader)
_READ = (*_LOADERS, Dataset, Sampler)


def shown(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parts(value: Any) -> list[Any]:
    """What a small container holds; of anything else itself."""
    if type(value) in (list, tuple, dict) and 0 < len(value) <= MANY:
        return [*value.values()] if type(value) is dict else [*value]
    return [value]


def modules_of(callbacks: Iterable[Any], module: nn.Module) -> dict[str, nn.Module]:
    """What callbacks hold beside `module` in attributes, and in lists and dicts there, by name: such as metrics."""
    held = (
        (f"{type(each).__name__}.{name}" + (f"[{i}]" if part is not value else ""), part)
        for each in callbacks
        for name, value in getattr(each, "__dict__", {}).items()
        for i, part in enumerate(parts(value))
    )
    return {name: part for name, part in held if isinstance(part, nn.Module) and part is not module}


def iterators(owner: Any, known: set[int]) -> Iterator[str]:
    """The names of those of which nobody can tell where they are, and that are not `known`."""
    for name, value in attributes(owner).items():
        if hasattr(type(value), "__next__") and not isinstance(value, IOBase) and id(value) not in known:
            yield name


def layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those whose attributes user code may set, by name: metrics are saved by themselves."""
    of_metrics = {id(part) for metric in filter(_is_metric, module.modules()) for part in metric.modules()}
    for path, layer in module.named_modules():
        if not _is_metric(layer) and (is_of_user(layer) or (is_of_torch(layer) and id(layer) not in of_metrics)):
            yield path, layer


def _is_metric(layer: nn.Module) -> bool:
    return hasattr(layer, "metric_state")


@contextmanager
def in_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """While it lasts layers have these modes."""
    before = [(layer, layer.training) for layer, _ in modes]
    for layer, mode in modes:
        layer.training = mode
    try:
        yield
    finally:
        for layer, mode in before:
            layer.training = mode


def metrics_of(owners: Iterable[tuple[str, Any]], model: nn.Module) -> dict[str, tuple[Any, nn.Module]]:
    """The torchmetrics objects that owners hold beside the layers of the model, in attributes and in lists and dicts,
    by name, each with what is held there."""
    seen, found = {*map(id, model.modules())}, dict[str, tuple[Any, nn.Module]]()
    for path, owner in owners:
        leads_back = not_of_users(owner)
        for name, value in fields(owner).items():
            is_small = type(value) in (list, tuple, dict) and len(value) <= MANY
            places = [(shown(name, key), item) for key, item in items(value)] if is_small else [(name, value)]
            for place, part in places if name not in leads_back else ():
                if isinstance(part, nn.Module) and id(part) not in seen:
                    seen.update(map(id, part.modules()))
                    for inner, metric in part.named_modules():
                        if _is_metric(metric) and hasattr(metric, "_update_count"):
                            found[shown(shown(path, place), inner) if inner else shown(path, place)] = metric, part
    return found


def is_of_program(owner: Any) -> bool:
    """Whether a callback or DataModule is all of the user's code; a logger's buffers are of the run that has them."""
    of_data = not isinstance(owner, Callback)
    own = [cls for cls in type(owner).__mro__[:-1] if not (of_data and cls.__module__.startswith("lockstep."))]
    return not isinstance(owner, Logger) and all(cls in _BARE or _is_of_program(cls) for cls in own)


def beside(callbacks: Iterable[Callback], datamodule: Any, trainer: Any) -> dict[str, Any]:
    """By name what of the user's code is kept beside the module."""
    callbacks = [*filter(is_of_program, callbacks)]
    keys = [each.state_key for each in callbacks]
    found: dict[str, Any] = {
        f"callbacks.{key}{keys[:i].count(key) or ''}": each
        for i, (key, each) in enumerate(zip(keys, callbacks, strict=True))
    }
    if datamodule is not None and is_of_program(datamodule):
        found["datamodule"] = datamodule
    return found if trainer is None else found | {"trainer": trainer}


def has_no_state(owner: Any) -> bool:
    """Whether a callback or DataModule has no `state_dict` of its own."""
    saying = next((cls for cls in type(owner).__mro__ if "state_dict" in vars(cls)), None)
    return saying is None or saying.__module__.startswith("lockstep.")


def refuse_other_modes(saved: Sequence[tuple[nn.Module, bool]]) -> None:
    """Raise RuntimeError if layers have other modes than a checkpoint has that was saved in a validation."""
    if any(layer.training != mode for layer, mode in saved):
        raise RuntimeError(
            "on_validation_model_train leaves layers in modes that a checkpoint of this validation does not have, so "
            "that a resumed run would train in others; set them in on_train_epoch_start"
        )


def objects(owner: Any, path: str, seen: set[int], depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Objects of the user's classes that an owner holds, and its hyperparameters, by name; `seen` are the ids of those
    that were found."""
    if isinstance(owner, nn.Module) and not is_of_user(owner):  # of which numbers and strings are kept
        return
    for name, value in attributes(owner).items():
        if not name.isidentifier():
            continue
        held: Iterable[tuple[Any, Any]] = ((name, value),)
        if type(value) is dict and len(value) <= MANY:
            held = ((f"{name}.{key}", item) for key, item in value.items() if isinstance(key, str | int))
        elif type(value) in (list, tuple) and len(value) <= MANY:
            held = ((f"{name}.{i}", item) for i, item in enumerate(value))
        for place, item in held:
            if id(item) in seen or len(seen) == _MOST or not is_users_object(item):
                continue
            seen.add(id(item))
            yield (here := shown(path, place)), item
            if depth > 1:
                yield from objects(item, here, seen, depth - 1)


def read_by_loaders(value: Any, path: str, seen: set[int], depth: int = 2 * _DEPTH) -> Iterator[tuple[str, Any]]:
    """Datasets, samplers and loaders' own objects (a collate function, a transform) that `value` is or leads to, by
    name; of loaders those of the user's classes. `seen` are the ids of what was found."""
    if isinstance(value, MethodType):
        value = value.__self__
    if type(value) in (list, tuple, dict) and len(value) <= MANY:
        held = items(value)
    elif id(value) in seen or len(seen) >= _MOST or not (isinstance(value, _READ) or is_users_object(value)):
        return
    else:
        seen.add(id(value))
        if not isinstance(value, _LOADERS) or _is_of_program(type(value)):
            yield path, value
        held = [*fields(value).items()]
    for name, item in held if depth else ():
        if not isinstance(item, SAVED):
            yield from read_by_loaders(item, shown(path, name), seen, depth - 1)


def items(value: Any) -> list[tuple[str, Any]]:
    """What a list, tuple or dict holds: under a key other than a string or a number, which may have no text, by its
    place."""
    if type(value) is not dict:
        return [(str(at), item) for at, item in enumerate(value)]
    return [(str(k) if isinstance(k, str | int) else f"({at})", v) for at, (k, v) in enumerate(value.items())]


def networks_of(owner: Any, path: str, known: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Networks that an owner holds beside the model, such as a teacher in a list, by name; `known` are the ids of the
    layers of the model, and of the networks that were found. Metrics are not meant."""
    leads_back = not_of_users(owner)
    for name, value in fields(owner).items():
        if name not in leads_back:
            yield from _networks(value, shown(path, name), known)


def with_networks(owner: Any, model: nn.Module) -> dict[str, Any]:
    """The attributes of an owner, and networks that an object holds in one, which are not layers of the model."""
    if isinstance(owner, nn.Module | nn.Parameter):
        return attributes(owner)
    own, leads_back = fields(owner), not_of_users(owner)
    held = {name: value for name, value in own.items() if isinstance(value, nn.Module) and name not in leads_back}
    return attributes(owner) | (
        {n: v for n, v in held.items() if all(v is not m for m in model.modules())} if held else {}
    )


def _networks(value: Any, path: str, known: set[int], depth: int = _DEPTH) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        if not known.isdisjoint(map(id, value.modules())):  # wrapped around what is known
            return
        known.update(map(id, value.modules()))
        if not any(map(_is_metric, value.modules())):
            yield path, value
    elif type(value) in (list, tuple, dict) and len(value) <= MANY and depth:
        for key, item in items(value):
            yield from _networks(item, shown(path, key), known, depth - 1)


def of_networks(owner: Any, path: str, known: set[int]) -> Iterator[tuple[str, Any]]:
    """The weights and layers of the networks that an owner holds beside the model, by name."""
    for where, net in networks_of(owner, path, known):
        for name, layer in net.named_modules():
            yield from ((shown(where, name), each) for each in (_weights_of(layer), layer))


def _weights_of(layer: nn.Module) -> Any:
    """An object whose attributes are the parameters and buffers of a layer, in the same memory; always the same one."""
    held = _WEIGHTS.setdefault(layer, Weights(layer))
    for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
        if tensor is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            vars(held).pop(name, None)
        elif (own := vars(held).get(name)) is None or own.data_ptr() != tensor.data_ptr() or own.dtype != tensor.dtype:
            vars(held)[name] = tensor.detach()
    return held


def is_users_object(value: Any) -> bool:
    kind: Any = type(value)
    if issubclass(kind, _OTHERS) or not _is_of_users_code(kind):
        return False
    return not any("train_dataloader" in vars(cls) for cls in kind.__mro__)  # a DataModule is saved by itself


@functools.cache
def _is_of_users_code(kind: type) -> bool:
    """Whether a class and all its bases are written in the user's program, and not in a package that is installed, or
    are bare holders of attributes, as hyperparameters are."""
    return issubclass(kind, HParams) or all(cls in _BARE or _is_of_program(cls) for cls in kind.__mro__[:-1])


def _is_of_program(kind: type) -> bool:
    if kind.__module__ == "__main__" or kind in (SimpleNamespace, Namespace):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not os.path.realpath(file).startswith(libraries())
