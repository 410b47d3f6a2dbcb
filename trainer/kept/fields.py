"""The attributes of an object, as Python holds them, and the entries of hyperparameters, which are theirs: read, set
and deleted by no code of its class. Those that user code deletes in a run are gone afterwards too, and in a run that
continues it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from lockstep.strategies.launch.program.values import put_attribute, slots
from lockstep.strategies.modules.absent import is_here
from lockstep.trainer.hparams import Namespace

_CACHES = "_non_persistent_buffers_set"
_COMPUTING = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")


def fields(owner: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots of its class too, and of a module buffers that are not in the state
    dict; not by `__getattr__`, in which anything may happen."""
    kind: Any = type(owner)
    own, found = dict_of(owner), dict[str, Any]()
    for name, slot in slots(kind).items():
        with suppress(AttributeError):  # nothing is there
            found[name] = slot.__get__(owner, kind)
    if own.get(_CACHES):
        found |= caches_of(owner)
    return found | own if found else own


def caches_of(owner: Any) -> dict[str, Tensor | None]:
    """The buffers of a module that are not in the state dict."""
    own = dict_of(owner)
    caches = own.get(_CACHES, ())
    return {name: buffer for name, buffer in own["_buffers"].items() if name in caches} if caches else {}


def derived(layer: nn.Module) -> dict[str, Tensor]:
    """The attributes that hooks of torch (`weight_norm`, `spectral_norm`) compute of weights before each forward."""
    hooks = dict_of(layer).get("_forward_pre_hooks", {}).values()
    names = [hook.name for hook in hooks if type(hook).__module__ in _COMPUTING]
    found = {name: dict_of(layer).get(name) for name in names}
    return {name: each.detach() for name, each in found.items() if type(each) is Tensor and not each.is_meta}


def absent_caches(owner: Any) -> list[str]:
    """The names of those that other ranks hold."""
    return [name for name, buffer in caches_of(owner).items() if buffer is not None and not is_here(buffer)]


def dict_of(owner: Any) -> dict[str, Any]:
    """Its `__dict__`; an empty one of an object without, such as a proxy of another."""
    if isinstance(owner, Namespace):
        return owner
    try:
        own = object.__getattribute__(owner, "__dict__")
    except Exception:
        return {}
    return own if isinstance(own, dict) else {}


def put(owner: Any, name: str, value: Any) -> None:
    """`put_attribute`, also for a buffer that is not in the state dict."""
    if isinstance(owner, Weights):
        owner.put(name, value)
    elif name in caches_of(owner):
        owner._buffers[name] = value
    elif isinstance(owner, Namespace):
        owner[name] = value
    else:
        put_attribute(owner, name, value)


def drop(owner: Any, name: str) -> None:
    """Delete an attribute that is there, as `put` sets one."""
    kind: Any = type(owner)
    if name in caches_of(owner):
        del owner._buffers[name]
        vars(owner)[_CACHES].discard(name)
    elif name in slots(kind):
        slots(kind)[name].__delete__(owner)
    else:
        del dict_of(owner)[name]


class Weights(SimpleNamespace):
    """Has as attributes the parameters and buffers of a layer, in the same memory."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(_module=weakref.ref(layer))

    def put(self, name: str, value: Any) -> None:
        """Set one, of a tensor in what the layer has."""
        layer = self._module()
        now = None if layer is None else {**layer._parameters, **layer._buffers}.get(name)
        if now is not None and isinstance(value, Tensor):
            put_tensor(now, value)
            value = now.detach()
        vars(self)[name] = value


def put_tensor(now: Tensor, trained: Tensor) -> None:
    """Give a tensor that is here the content that it has on a rank: in the run's precision; a buffer may have grown."""
    if (now.dtype, now.shape) != (trained.dtype, trained.shape):
        now.data = trained.to(now.device)
    else:
        now.detach().copy_(trained)


class Gone:
    """The attributes that owners had as a run began, to find those that they have no longer."""

    def __init__(self) -> None:
        self._had: dict[str, tuple[Any, set[str]]] = {}
        """The owners, with the names of their attributes."""

    def note(self, owners: Mapping[str, tuple[Any, Iterable[str]]]) -> None:
        """Add the attributes that owners have now."""
        for path, (owner, names) in owners.items():
            known, before = self._had.get(path, (None, set[str]()))
            self._had[path] = owner, {*names} | (before if known is owner else set())

    def names(self, owners: Mapping[str, Any]) -> list[list[str]]:
        """Owner and name of each attribute that is gone, of owners that are still there."""
        still = [(path, owner, had) for path, (owner, had) in self._had.items() if owners.get(path) is owner]
        return [[path, name] for path, owner, had in still for name in sorted(had - _names(owner))]


def _names(owner: Any) -> set[str]:
    """The attributes of an owner, and of a module what has taken the place of one as a layer or tensor of it."""
    own = dict_of(owner)
    return {*fields(owner), *(name for held in ("_modules", "_parameters", "_buffers") for name in own.get(held, ()))}


def take_away(owners: Mapping[str, Any], gone: Iterable[Collection[str]]) -> None:
    """Delete from owners what `Gone.names` has found."""
    for path, name in gone:
        if path in owners and name in fields(owners[path]):
            drop(owners[path], name)
