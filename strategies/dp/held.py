"""What a model holds beside the values of its tensors, at one moment: attributes, containers and objects in them."""

from __future__ import annotations

import copy
import functools
import sys
from argparse import Namespace
from collections import ChainMap, deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from dataclasses import replace
from itertools import chain
from types import GenericAlias, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.strategies.dp.parts import PLAIN, Part, Replaced, Snapshot, Watched, attributes, content, inside, is_plain
from lockstep.strategies.launch.program.functions import OTHERS
from lockstep.strategies.launch.program.reach import base_of
from lockstep.strategies.modules.absent import Refusing

_OF_DATA = frozenset({"abc", "argparse", "collections", "contextlib", "types", "typing"})
"""Modules of the standard library in which bases are that hold data alone."""
_OF_PYTHON = sys.stdlib_module_names - _OF_DATA
_NOT_READ = (Optimizer, LRScheduler, type, GenericAlias)
_REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_OF_COPIES = ("parameter", "statistic")
"""Kinds of what each slice has copies of that nobody compares here."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Moment = tuple[Snapshot, Snapshot]


class Held:
    """All that can be reached from a model by attributes, containers, bound methods and partials.

    Read are modules, objects of classes, and containers. Not read: objects of torch, numpy, the standard library and of
    what reports progress (tqdm, rich, wandb), those that end something as they are deleted, metrics, and what functions
    and classes hold.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attributes: MutableMapping[int, Part] = {}
        self.containers: MutableMapping[int, Part] = {}
        self.values: MutableMapping[int, tuple[str, Any]] = {}
        """By id tensors, arrays and metrics, each with the attribute it was found in."""
        self.buffers: set[int] = set()
        """The ids of those that are registered."""
        self._seen: MutableMapping[int, Any] = {}  # which keeps them, so that nothing else gets their ids
        self._walk([("", model)])
        self._seen = dict.fromkeys(chain(self.attributes, self.containers, self.values))  # others may end from here on
        self.modules = [*model.named_modules()]
        self.parameters = [*model.parameters()]
        self.buffered = [(name, module) for name, module in self.modules if module._buffers]
        self.hooks = [hooks for _, module in self.modules for hooks in hooks_of(module)]
        """The dicts of hooks of the modules."""
        replaced = [part for part in self.parts() if _may_be_replaced(part)]
        self._tables = [part for part in replaced if part.kind in _OF_COPIES]
        self.loose = [part for part in replaced if part.kind not in _OF_COPIES]
        """The parts in which slices find something else each, but for parameters and statistics of BatchNorm."""
        self._watch()

    def _watch(self) -> None:
        replaced = {*self._tables, *self.loose}
        self._fixed = Watched([part for part in self.parts() if part not in replaced])
        self._replaced = Watched([*self._tables, *self.loose])
        self.moment: Moment = self._fixed.now(), self._replaced.now()
        """What the parts hold."""

    def is_of(self, model: nn.Module) -> bool:
        """Whether it tells what `model` holds now, after it has taken over which numbers and strings have changed."""
        if self.model is not model:
            return False
        changed, now, num_loose = *self.changed(self.moment), len(self.loose)
        for part in changed:
            keys, items = part.now()
            if _led_to(chain(keys, items)) != _led_to(chain(part.keys, part.items)):
                return False
            part.keys, part.items = keys, items
            if part not in self.loose and part.kind not in _OF_COPIES and _may_be_replaced(part):
                self.loose.append(part)
        self.moment = now
        if len(self.loose) != num_loose:
            self._watch()
        return True

    def changed(self, before: Moment) -> tuple[list[Part], Moment]:
        """The parts that hold something else now than before, and what they hold."""
        now = self._fixed.now(), self._replaced.now()
        return self._fixed.changed(before[0], now[0]) + self._replaced.changed(before[1], now[1]), now

    def after(self, changed: Iterable[Part]) -> Held:
        """What is held now, if these of its parts alone may hold something else."""
        other = copy.copy(self)
        other.attributes, other.containers = ChainMap({}, self.attributes), ChainMap({}, self.containers)
        other.values, other._seen = ChainMap({}, self.values), ChainMap({}, self._seen)
        other._walk([*{id(part.holder): (part.place, part.holder) for part in changed}.values()])
        return other

    def own(self, parts: Iterable[Part]) -> list[Part]:
        """Those that this one, which came `after` another, has in the place of parts of that, and the ones that it has
        found besides: all may be changed."""
        for part in parts:
            held = self.attributes if part.base is None else self.containers
            if held[id(part.owner)] is part:
                held[id(part.owner)] = replace(part, items=[*part.items])
        mine: Any = self.attributes, self.containers
        return [part for held in mine for part in held.maps[0].values()]

    def parts(self) -> Iterator[Part]:
        """Attributes before containers, as keys may be hashed by them."""
        return chain(self.attributes.values(), self.containers.values())

    def put(self, replaced: Replaced, changed: Collection[Part]) -> Moment:
        """Let all hold what they held here, with replacements, where only `changed` parts and replaced values differ
        from it. Returns what they hold then."""
        for part in self._tables:
            part.swap(replaced.of_each(part.items))
        for part in sorted({*self.loose, *changed}, key=_is_container):
            part.put(replaced.of)
        return self.moment[0], self._replaced.now()

    def put_back(self) -> None:
        """Let all hold what they held here, whatever they hold now."""
        for part in self.parts():
            part.put()

    def __contains__(self, value: Any) -> bool:
        return id(value) in self.attributes or id(value) in self.containers

    def _walk(self, begin: list[tuple[str, Any]]) -> None:
        self._waiting = deque[tuple[str, Any]]()
        for place, value in begin:
            self._seen[id(value)] = value
            self._read(place, value)
        while self._waiting:
            place, value = self._waiting.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._read(place, value)

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
                keys, items = content(value, base)
                self.containers[id(value)] = Part(value, place, keys, items, value, base)
                self._wait(place, keys)
                self._wait(place, items)
            held = {} if base is kind else attributes(value)
            if base is not kind:
                self.attributes[id(value)] = Part(value, place, [*held], [*held.values()], value)
            named = ((name, item) for name, item in held.items() if type(item) not in PLAIN)
            self._waiting.extend((f"{place}.{name}".lstrip("."), item) for name, item in named)
            if isinstance(value, nn.Module):
                self._module(value, place)

    def _module(self, module: nn.Module, place: str) -> None:
        """What is registered, which is read first."""
        found: list[tuple[str, Any]] = []
        for key, kind in _REGISTERED.items():
            held = vars(module)[key]
            is_statistic = kind == "buffer" and isinstance(module, nn.modules.batchnorm._NormBase)
            self.containers[id(held)] = Part(
                held, place, [*held], [*held.values()], module, dict, "statistic" if is_statistic else kind
            )
            self.buffers |= {id(item) for item in held.values()} if kind == "buffer" else set()
            found += [(f"{place}.{name}".lstrip("."), item) for name, item in held.items()]
        self._waiting.extendleft(reversed(found))

    def _wait(self, place: str, items: Collection[Any]) -> None:
        if items and not is_plain(items):
            self._waiting.extend((place, item) for item in items if type(item) not in PLAIN)


def _may_be_replaced(part: Part) -> bool:
    """Whether slices may have something else each in the place of one of its items."""
    return any(map(_is_of_a_slice, part.items)) or any(map(_is_of_a_slice, part.keys))


def _is_of_a_slice(value: Any) -> bool:
    if type(value) in PLAIN:
        return False
    if isinstance(value, Tensor | np.ndarray | Refusing) or is_metric(value):
        return True
    parts = inside(value)
    return parts is not None and not is_plain(parts)


def _led_to(items: Iterable[Any]) -> set[int]:
    """The ids of those through which something is found."""
    return {id(item) for item in items if type(item) not in PLAIN and _leads(item)}


def _leads(value: Any) -> bool:
    kind: Any = type(value)
    parts = inside(value)
    if parts is not None:
        return not is_plain(parts)
    return isinstance(value, Tensor | np.ndarray) or base_of(value) is not None or _is_read(kind)


def _is_container(part: Part) -> bool:
    return part.base is not None


def is_metric(value: Any) -> bool:
    """Whether it is an object of torchmetrics, which counts by itself."""
    return isinstance(value, nn.Module) and hasattr(value, "merge_state")


@functools.lru_cache(1000)
def _is_read(kind: Any) -> bool:
    if issubclass(kind, nn.Module) or kind in (SimpleNamespace, Namespace):
        return True
    packages = [cls.__module__.partition(".")[0] for cls in kind.__mro__ if cls is not object]
    is_users = packages and packages[0] not in OTHERS and not _OF_PYTHON.intersection(packages)
    return bool(is_users) and not issubclass(kind, _NOT_READ) and not hasattr(kind, "__del__")


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Its dicts of hooks for forward and backward."""
    return [hooks for kind in _HOOKS if (hooks := getattr(module, kind, None)) is not None]


def check_hooks(held: Held) -> None:
    """Raise ValueError for a hook that may keep what it sees outside of what is read."""
    if not any(held.hooks):
        return
    known = {id(module) for _, module in held.modules}
    for name, module in held.modules:
        for hook in chain.from_iterable(map(dict.values, hooks_of(module))):
            if id(getattr(hook, "__self__", None)) in known or not _remembers(hook):
                continue
            raise ValueError(
                f"{name or type(module).__name__} has a hook, {getattr(hook, '__qualname__', type(hook).__name__)}, "
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
