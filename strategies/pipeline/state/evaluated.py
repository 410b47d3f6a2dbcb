"""What layers and their hooks keep in an evaluation, of which one rank runs each alone: the others take it from it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.strategies.launch.program.reads import read_first
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.modules.blocks import is_metric, is_of_torch, measures
from lockstep.strategies.modules.parameter_hooks import OF_MODULE
from lockstep.strategies.pipeline.shapes.fake_tensors import is_fake
from lockstep.strategies.pipeline.state.hook_slots import HookSlots, refusing, sentence
from lockstep.strategies.pipeline.state.marks import SIMPLE, content_of, mark_of, put_content
from lockstep.strategies.pipeline.state.reached import MOST, Holder, Key, Place, Reached
from lockstep.strategies.pipeline.state.step_code import keeps

_FIRST, _FEW_BYTES, _NO_LIMIT = 4, 2**20, 2**62
"""Steps that are all compared; bytes of what is sent again and again, and of what is sent once or read by its layer."""
_CONTAINERS = (deque, set, frozenset, tuple)


class _Opaque(NamedTuple):
    """In the place of an object, of which only its parts are sent."""

    kind: str


_UNSENT = _Opaque("")
"""In the place of a tensor or array that is not sent."""


class _Sent(NamedTuple):
    """What a rank has changed."""

    values: dict[Key, Any]
    """The place of a container is before those of its items."""
    new: set[Key]
    """Where there was nothing, or None."""
    gone: list[Key]
    lists: set[Key]
    """Those that have another length."""
    large: dict[Key, tuple[int, list[tuple[Any, Any]]]]
    """Of dicts and lists whose items are not read, and which have another length: the keys and items from a number
    on."""
    devices: dict[Key, str]
    """The types of those that tensors are on."""


class Evaluated:
    """Compares evaluation steps from where they call the pipelined module: the first four, those whose number is a
    power of two, the first after training, and all once hooks were found or something is kept, or if the code of
    `layers` shows that they may keep something."""

    def __init__(self, hooks: HookSlots, layers: Iterable[nn.Module]) -> None:
        self._hooks, self._keeps = hooks, any(map(keeps, {type(layer) for layer in layers}))
        self._number, self._is_first, self._compares = 0, False, False
        self._before: dict[Key, Any] | None = None
        self._lengths: dict[Key, tuple[Any, int]] = {}

    def begin(self) -> None:
        """Training continues, so that what the next evaluation keeps may be new. All ranks call it."""
        self._is_first = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one, on all ranks. Raises RuntimeError naming a list of which hooks on several ranks change the
        length."""
        number, self._number = self._number, self._number + 1
        is_due = self._is_first or number < _FIRST or number & (number - 1) == 0
        self._is_first, self._compares, self._before = False, is_due or self._keeps, None
        yield
        if self._compares:
            self._agree()
        self._compares, self._before, self._lengths = False, None, {}

    def calling(self) -> None:
        """The step calls the pipelined module; what it has changed before is alike on all ranks."""
        if self._compares:
            self._hooks.find()
            holders: dict[Key, Holder] = {}
            self._before = {key: _mark(place.now()) for key, place in self._places(holders).items()}
            self._lengths = {key: (each.held, len(each.held)) for key, each in holders.items() if not each.is_object}

    # ---- helpers ---------------------------------------------------------------------------------------

    def _places(self, holders: dict[Key, Holder]) -> dict[Key, Place]:
        """Of modules by path and attribute, and of hooks."""
        named = dict(self._hooks.named_modules())
        metrics = {part for module in named.values() if is_metric(module) for part in module.modules()}
        paths, seen = {module: path for path, module in named.items()}, set[int]()
        found: dict[Key, Place] = {}
        for path, module in named.items():
            if module not in metrics and not measures(module):
                reached = Reached((path,), seen, paths)
                reached.module(module, path)
                found |= reached.places
                holders.update(reached.holders)
        return found | dict(self._hooks.places(holders, seen))

    def _agree(self) -> None:
        own = self._changed()
        found, has_hooks = zip(*self._hooks.gather((own, self._hooks.are_some)), strict=True)
        is_changed = any(each.values or each.gone or each.large for each in found)
        self._keeps |= is_changed or any(has_hooks)
        if not is_changed:
            return
        holders: dict[Key, Holder] = {}
        places = self._places(holders)
        by_list = [key for each in found for key in each.lists]
        if (twice := next((key for key in by_list if by_list.count(key) > 1), None)) is not None:
            raise RuntimeError(sentence(holders[twice].name if twice in holders else _shown(twice)))
        pairs = combinations(found, 2)
        apart = {key for a, b in pairs for key in a.values.keys() & b.values.keys() if not _is_alike(a, b, key)}
        for theirs in (each for each in found if each is not own):
            for key in sorted(theirs.gone, key=_last_first):
                if key in places:
                    places[key].delete()
            for key, value in theirs.values.items():
                if key in apart:
                    value = refusing(places[key].name if key in places else _shown(key))
                if key in apart or key not in own.values:
                    self._put(key, _moved(value, theirs.devices.get(key)), places, holders)
            for key, (start, items) in theirs.large.items():
                if key in holders:
                    _put_large(holders[key], start, _moved(items, theirs.devices.get(key)))

    def _changed(self) -> _Sent:
        sent, before = _Sent({}, set(), [], set(), {}, {}), self._before
        if before is None:  # the step has not called the module
            return sent
        holders: dict[Key, Holder] = {}
        now = self._places(holders)
        large = {key for key, each in holders.items() if each.is_large}
        gone = (key for key in before if key not in now)
        sent.gone.extend(key for key in gone if not large or large.isdisjoint(key[:i] for i in range(len(key))))
        self._add_large(sent, holders)
        sent.lists.update(
            key[:-1] for key in sent.gone if isinstance(getattr(holders.get(key[:-1]), "held", None), list)
        )
        for key, place in now.items():
            value = place.now()
            if key in before and not _is_other(before[key], _mark(value)):
                continue
            if key not in before and isinstance(place.holder, list):
                sent.lists.add(key[:-1])
            if isinstance(value, Refusing) or is_fake(value):
                continue
            if key not in before or before[key][0] is None:
                sent.new.add(key)
            sent.values[key] = _sent(value, _NO_LIMIT if key in sent.new else _FEW_BYTES)
            if sent.values[key] is _UNSENT and self._is_read(key):
                sent.values[key] = _sent(value, _NO_LIMIT)
            if isinstance(value, Tensor | tuple) and (kind := _device_of(sent.values[key])) is not None:
                sent.devices[key] = kind
        return sent

    def _add_large(self, sent: _Sent, holders: dict[Key, Holder]) -> None:
        for key, (held, _, is_object) in holders.items():
            before, length = self._lengths.get(key, (None, 0))
            if is_object or max(len(held), length) <= MOST or (held is before and len(held) == length):
                continue
            items = [*(held.items() if isinstance(held, dict) else enumerate(held))]
            grows = held is before and len(held) > length
            start = length if grows and (length > MOST or not self._any_is_other(key, items[:length])) else 0
            found = [(step, _sent(item, _NO_LIMIT)) for step, item in items[start:] if isinstance(step, SIMPLE)]
            sent.large[key] = start, found
            sent.lists.add(key)
            if (kind := _device_of(tuple(item for _, item in found))) is not None:
                sent.devices[key] = kind

    def _any_is_other(self, key: Key, items: list[tuple[Any, Any]]) -> bool:
        marks = [(self._before or {}).get((*key, step)) for step, _ in items]
        return any(mark is None or _is_other(mark, _mark(item)) for mark, (_, item) in zip(marks, items, strict=True))

    def _put(self, key: Key, value: Any, places: dict[Key, Place], holders: dict[Key, Holder]) -> None:
        """Let this rank have what another has set."""
        now = places[key].now() if key in places else None
        if isinstance(value, _Opaque):
            if value != _UNSENT and (type(now).__qualname__ == value.kind or self._may_read(key)):
                return
            value = refusing(places[key].name if key in places else _shown(key))
        elif type(now) is type(value) and isinstance(value, dict | list):
            return  # their items are sent by themselves
        elif type(now) is type(value) and isinstance(value, deque | set):
            put_content(now, content_of(value))
            return
        if key in places:
            places[key].put(value)
        elif (holder := holders.get(key[:-1])) is None:
            parent = places.get(key[:-1])
            if parent is None or not isinstance(parent.now(), Refusing):
                raise RuntimeError(sentence(_shown(key)))
        elif isinstance(holder.held, list) and key[-1] >= len(holder.held):
            holder.held.append(value)
        else:
            holder.held[self._hooks.item(key)] = value
        if isinstance(value, dict | list):
            holders[key] = Holder(value, _shown(key), is_object=False)

    def _may_read(self, key: Key) -> bool:
        """Whether a module may use its attribute as it runs on fake tensors."""
        if len(key) > 2 and key[1] in OF_MODULE:
            return False
        return not is_of_torch(dict(self._hooks.named_modules())[key[0]])

    def _is_read(self, key: Key) -> bool:
        """Whether `forward` of the module uses what the attribute was, as a running mean does."""
        kind: Any = type(dict(self._hooks.named_modules())[key[0]])
        return self._may_read(key) and key[1] in read_first(kind, ("forward",))


def _is_alike(own: _Sent, theirs: _Sent, key: Key) -> bool:
    """Whether two ranks have changed a place alike, but for what may be counts of their hooks."""
    mine, value = own.values[key], theirs.values[key]
    if type(mine) is not type(value):
        return False
    if isinstance(mine, dict | list):
        return True
    if isinstance(mine, Tensor):
        return mine.shape == value.shape and torch.equal(mine.cpu(), value.cpu())
    may_count = isinstance(mine, int | float) and not isinstance(mine, bool) and key[1] in OF_MODULE
    return mark_of(mine, True) == mark_of(value, True) and (not may_count or key in own.new & theirs.new)


def _mark(value: Any) -> tuple[Any, ...]:
    """The value, and what changes within it."""
    if isinstance(value, Tensor):
        return value, 0 if value.is_inference() or is_fake(value) else value._version
    if isinstance(value, _CONTAINERS):
        return value, [*map(id, value)], [*value]  # items that are gone would leave their ids to others
    return value, mark_of(value, True) if isinstance(value, (*SIMPLE, np.ndarray)) else None


def _is_other(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return before[1] != now[1] or (before[0] is not now[0] and not isinstance(now[0], SIMPLE))


def _sent(value: Any, most_bytes: int) -> Any:
    """What is sent of a value: itself, an empty container, or only what it is."""
    if type(value) in (dict, list):
        return type(value)()
    if type(value) is Tensor and not value.is_meta:
        is_plain = value.layout is torch.strided and not value.is_quantized
        return value.detach() if is_plain and value.nbytes <= most_bytes else _UNSENT
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value if value.nbytes <= most_bytes else _UNSENT
    if type(value) in _CONTAINERS:
        items = [_sent(item, most_bytes) for item in value]
        is_whole = not any(isinstance(item, _Opaque | dict | list) for item in items)
        if any(item is _UNSENT for item in items):
            return _UNSENT
        return type(value)(items) if is_whole else _Opaque(type(value).__qualname__)
    return value if isinstance(value, SIMPLE) else _Opaque(type(value).__qualname__)


def _put_large(holder: Holder, start: int, items: list[tuple[Any, Any]]) -> None:
    """Give a dict or list from `start` on the items of another rank."""
    found = {
        step: refusing(holder.shown(step)) if isinstance(item, _Opaque | dict | list) else item for step, item in items
    }
    if isinstance(holder.held, list):
        holder.held[start:] = found.values()
        return
    if not start:
        holder.held.clear()
    holder.held.update(found)


def _moved(value: Any, kind: str | None) -> Any:
    return value if kind is None else tree_map_only(Tensor, operator.methodcaller("to", kind), value)


def _device_of(value: Any) -> str | None:
    held = value if isinstance(value, tuple) else (value,)
    return next((t.device.type for t in held if isinstance(t, Tensor) and t.device.type != "cpu"), None)


def _last_first(key: Key) -> int:
    return -key[-1] if isinstance(key[-1], int) else 0


def _shown(key: Key) -> str:
    return ".".join(map(str, key[3:] if len(key) > 2 and key[1] in OF_MODULE else filter(None, key)))
