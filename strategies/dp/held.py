"""What a model holds beside the values of its tensors, at one moment: attributes, containers and objects in them."""

from __future__ import annotations

import functools
import operator
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.strategies.launch.program.functions import OTHERS
from lockstep.strategies.launch.program.reach import base_of, content_of, refill
from lockstep.strategies.launch.program.values import attributes_of, put_attributes

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_OF_DATA = frozenset({"abc", "argparse", "collections", "contextlib", "types", "typing"})
"""Modules of the standard library in which bases are that hold data alone."""
_OF_PYTHON = sys.stdlib_module_names - _OF_DATA
_NOT_READ = (Optimizer, LRScheduler)
_OF_TORCH = (frozenset(vars(nn.Module())) - {"training"}) | {"_trainer"}
_REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass
class Part:
    """The attributes of an object, or the content of a container.

    `place`: the attribute it was found in. `keys`: names of attributes, or keys of a dict. `base`: of which class a
    container is made. `kind`: what is in a dict of a module, such as "buffer".
    """

    owner: Any
    place: str
    keys: list[Any]
    items: list[Any]
    base: Any = None
    kind: str = ""

    def name(self, index: int) -> str:
        """Of one of the items."""
        is_named = self.base is None or self.kind
        return f"{self.place}.{self.keys[index]}".lstrip(".") if is_named else self.place


class Held:
    """All that can be reached from a model by attributes, containers, bound methods and partials.

    Read are modules, objects of classes, and containers. Not read: objects of torch, numpy, the standard library and of
    what reports progress (tqdm, rich, wandb), those that end something as they are deleted, metrics, and what functions
    and classes hold.
    """

    def __init__(self, model: nn.Module) -> None:
        self.attributes: dict[int, Part] = {}
        self.containers: dict[int, Part] = {}
        self.values: dict[int, tuple[str, Any]] = {}
        """By id tensors, arrays and metrics, each with the attribute it was found in."""
        self.buffers: set[int] = set()
        """The ids of those that are registered."""
        self._seen: dict[int, Any] = {}  # which keeps them, so that nothing else gets their ids
        self._waiting: deque[tuple[str, Any]] = deque([("", model)])
        while self._waiting:
            place, value = self._waiting.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._read(place, value)

    def put(self, of: Callable[[Any], Any] | None = None) -> None:
        """Let all hold what they held here, or what `of` has in the place of it."""
        for part in self.attributes.values():
            items = part.items if of is None or is_plain(part.items) else map(of, part.items)
            put_attributes(part.owner, dict(zip(part.keys, items, strict=True)), _attributes)
        for part in self.containers.values():  # afterwards, as keys may be hashed by their attributes
            keys, items = (
                each if of is None or is_plain(each) else [*map(of, each)] for each in (part.keys, part.items)
            )
            if not all(map(identical, _content_of(part.owner, part.base), (keys, items))):
                pairs = [each for pair in zip(keys, items, strict=True) for each in pair] if keys else items
                refill(part.owner, part.base, pairs)

    def __contains__(self, value: Any) -> bool:
        return id(value) in self.attributes or id(value) in self.containers

    def _read(self, place: str, value: Any) -> None:
        kind: Any = type(value)
        base = base_of(value)
        if isinstance(value, Tensor | np.ndarray) or is_metric(value):
            self.values[id(value)] = place, value
            self._wait(place, [value._base] if isinstance(value, Tensor) else [])
        elif (parts := inside(value)) is not None:
            self._wait(place, parts)
        elif base is not None or _is_read(kind):
            if base is not None:
                self._container(value, base, place)
            held = {} if base is kind else _attributes(value)
            if base is not kind:
                self.attributes[id(value)] = Part(value, place, [*held], [*held.values()])
            named = ((name, item) for name, item in held.items() if type(item) not in _PLAIN)
            self._waiting.extend((f"{place}.{name}".lstrip("."), item) for name, item in named)
            if isinstance(value, nn.Module):
                self._module(value, place)

    def _module(self, module: nn.Module, place: str) -> None:
        """What is registered, which is read first."""
        found: list[tuple[str, Any]] = []
        for key, kind in _REGISTERED.items():
            content = vars(module)[key]
            is_statistic = kind == "buffer" and isinstance(module, nn.modules.batchnorm._NormBase)
            self.containers[id(content)] = Part(
                content, place, [*content], [*content.values()], dict, "statistic" if is_statistic else kind
            )
            self.buffers |= {id(item) for item in content.values()} if kind == "buffer" else set()
            found += [(f"{place}.{name}".lstrip("."), item) for name, item in content.items()]
        self._waiting.extendleft(reversed(found))

    def _container(self, value: Any, base: Any, place: str) -> None:
        keys, items = _content_of(value, base)
        self.containers[id(value)] = Part(value, place, keys, items, base)
        self._wait(place, keys)
        self._wait(place, items)

    def _wait(self, place: str, items: Collection[Any]) -> None:
        if items and not is_plain(items):
            self._waiting.extend((place, item) for item in items if type(item) not in _PLAIN)


def _content_of(value: Any, base: Any) -> tuple[list[Any], list[Any]]:
    """Keys and items of a dict, or the items of another container, by no code of its class."""
    if issubclass(base, dict):
        return [*base.keys(value)], [*base.values(value)]
    return [], content_of(value, base)


def identical(own: list[Any], theirs: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(own) == len(theirs) and all(map(operator.is_, own, theirs))


def inside(value: Any) -> tuple[Any, ...] | None:
    """What is in a value that is itself made again if a part is replaced; None of any other."""
    kind: Any = type(value)
    if kind is MethodType:
        return value.__func__, value.__self__
    if kind is functools.partial:
        return value.func, value.args, value.keywords
    return tuple(value) if issubclass(kind, tuple) or kind is frozenset else None


def is_metric(value: Any) -> bool:
    """Whether it is an object of torchmetrics, which counts by itself."""
    return isinstance(value, nn.Module) and hasattr(value, "merge_state")


def is_plain(items: Iterable[Any]) -> bool:
    """Whether there are numbers and strings alone."""
    return set(map(type, items)) <= _PLAIN


def _attributes(value: Any) -> dict[str, Any]:
    held = attributes_of(value)
    return {k: v for k, v in held.items() if k not in _OF_TORCH} if isinstance(value, nn.Module) else held


@functools.lru_cache(1000)
def _is_read(kind: Any) -> bool:
    if issubclass(kind, nn.Module) or kind in (SimpleNamespace, Namespace):
        return True
    packages = [cls.__module__.partition(".")[0] for cls in kind.__mro__ if cls is not object]
    is_users = packages and packages[0] not in OTHERS and not _OF_PYTHON.intersection(packages)
    return bool(is_users) and not issubclass(kind, _NOT_READ) and not hasattr(kind, "__del__")


def check_hooks(model: nn.Module) -> None:
    """Raise ValueError for a hook that may keep what it sees outside of what `Held` reads."""
    known = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for kind in _HOOKS:
            for hook in (getattr(module, kind, None) or {}).values():
                owner = getattr(hook, "__self__", None)
                if id(owner) in known or not _remembers(hook):
                    continue
                raise ValueError(
                    f"{name or type(model).__name__} has a hook, {getattr(hook, '__qualname__', type(hook).__name__)}, "
                    "that strategy 'dp' would call for each slice of a batch, and that may keep what it sees; make it "
                    "a method of the module, or use strategy='ddp'"
                )


def _remembers(hook: Any) -> bool:
    """Whether a callable holds objects of its own in which it could keep something."""
    if str(getattr(hook, "__module__", "")).startswith(("torch.", "lockstep.strategies.")):
        return False
    return (
        not hasattr(hook, "__code__") or bool(hook.__closure__) or bool(hook.__defaults__) or hasattr(hook, "__self__")
    )
