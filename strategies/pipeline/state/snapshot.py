"""What attributes, objects, containers, globals and classes hold, however deep, at one moment of a step."""

from __future__ import annotations

import functools
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.strategies.launch.program.changes import is_own_class
from lockstep.strategies.launch.program.values import slots
from lockstep.strategies.modules.absent import Refusing, is_here
from lockstep.strategies.modules.blocks import OF_TORCH, measures
from lockstep.strategies.pipeline.state.step_code import enclosed_by, globals_of, is_own_function
from lockstep.strategies.sync.contents import checksum, generator_content, generator_of, generators, sum_of_bits

PLAIN = (type(None), int, float, complex, str, np.number)
"""Values that are followed from one run of a step to the next, where attributes or dicts in attributes hold them."""
_SIMPLE = (*PLAIN, bytes, Enum, PurePath, np.generic, torch.dtype, torch.device, range, slice)
_BARE = (SimpleNamespace, Namespace)
_NOT_READ = (Optimizer, LRScheduler)
_MOST, _MOST_NODES, _FEW_BYTES, _MOST_BYTES = 2000, 10_000, 2**20, 2**26
_MISSING: Any = ("missing",)


class Slot(NamedTuple):
    """A key of a dict: of what objects have as attributes, or of a dict that the user has."""

    holder: dict[Any, Any]
    key: Any
    name: str
    value: Any


class _Seen(NamedTuple):
    mark: Any
    slot: Slot | None
    """The nearest in which the value is."""
    is_global: bool = False
    tensor: Tensor | None = None


class Change(NamedTuple):
    """Of what is another than it was."""

    name: str
    slot: Slot | None
    """That holds it, if another object has taken its place there."""
    is_new: bool
    """Whether there was nothing, as in a cache that is filled."""
    is_global: bool
    """Whether globals or classes hold it, where lists may grow: what they held is not put back."""
    is_item: bool
    """Whether a tensor has taken the place of another in a list."""

    @property
    def counts_in_globals(self) -> bool:
        return self.is_global and self.slot is not None and isinstance(self.slot.value, PLAIN)


class Snapshot:
    """All that user code may change in a step, but for numbers and strings in attributes of `modules` and in dicts
    there, parameters and buffers; `functions` are those that a step calls. Of each value it knows what tells whether
    it has changed."""

    def __init__(self, modules: Mapping[str, nn.Module], functions: Iterable[FunctionType], known: set[int]) -> None:
        self._found: dict[str, _Seen] = {}
        self._copies: list[tuple[Any, Any]] = []
        self._known = known
        self._met: dict[int, Any] = {}
        self._is_global = False
        self._generators: list[tuple[Any, Any]] = []
        self.iterators: list[Slot] = []
        for path, module in modules.items():
            own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
            self._copies.append((vars(module), vars(module).copy()))
            for name, value in own.items():
                self._attribute(f"{path}.{name}" if path else name, vars(module), name, value)
        self._is_global = True
        for module in modules.values():
            for cls in filter(is_own_class, type(module).__mro__):
                self._class(cls)
        for function in functions:
            for name, value in globals_of(function):
                self._note(f"the global {name}", value, Slot(function.__globals__, name, f"the global {name}", value))
                if isinstance(value, type) and is_own_class(value):
                    self._class(value)

    def changed(self, before: Snapshot) -> Iterator[Change]:
        """What is another than it was."""
        for name in {**before._found, **self._found}:
            was, now = before._found.get(name), self._found.get(name)
            is_missing = was is None or now is None
            old, new = was and was.tensor, now and now.tensor
            if is_missing and max(len(before._found), len(self._found)) > _MOST_NODES:
                continue
            if is_missing or was.mark != now.mark:  # type: ignore[union-attr]
                seen: Any = now or was
                is_other = seen.slot is not None and before._bound(seen.slot) is not self._bound(seen.slot)
                is_new = was is None or was.mark is None
                if not (is_new and seen.is_global):
                    is_item = not is_missing and not is_other and old is not new
                    yield Change(name, seen.slot if is_other else None, is_new, seen.is_global, is_item)

    def _bound(self, slot: Slot) -> Any:
        found = self._found.get(slot.name)
        return _MISSING if found is None or found.slot is None else found.slot.value

    def holds(self, slot: Slot) -> bool:
        """Whether the dict of a slot was there."""
        return any(slot.holder is holder for holder, _ in self._copies)

    def put_back(self, draws: bool = False) -> None:
        """Give containers and objects what they held, and with `draws` generators of random numbers their state;
        tensors that were changed in place are not put back."""
        for generator, content in self._generators if draws else ():
            generator_of(content, generator)
        for holder, copied in self._copies:
            kind: Any = next(kind for kind in (dict, list, deque, set) if isinstance(holder, kind))
            if kind is dict and holder.keys() == copied.keys() and all(holder[key] is copied[key] for key in copied):
                continue
            kind.clear(holder)
            fill: Any = kind.extend if issubclass(kind, list | deque) else kind.update
            fill(holder, copied)

    @contextmanager
    def refusing_iterators(self, instead: str) -> Iterator[None]:
        """While it lasts iterators in attributes give no items."""
        guards = [(slot, _Guard(slot, instead)) for slot in self.iterators]
        for slot, guard in guards:
            slot.holder[slot.key] = guard
        try:
            yield
        finally:
            for slot, guard in guards:
                if slot.holder.get(slot.key) is guard:
                    slot.holder[slot.key] = slot.value

    def _attribute(self, name: str, holder: dict[Any, Any], key: str, value: Any) -> None:
        slot = Slot(holder, key, name, value)
        if isinstance(value, PLAIN):  # it is followed
            self._found[name] = _Seen(None, slot)
            return
        self._note(name, value, slot)
        for inner, item in value.items() if type(value) is dict else ():
            if isinstance(item, PLAIN) and (seen := self._found.get(f"{name}[{_shown(inner)}]")) is not None:
                self._found[f"{name}[{_shown(inner)}]"] = seen._replace(mark=None)

    def _class(self, cls: type) -> None:
        if id(cls) not in self._met:
            self._met[id(cls)] = cls
            for name, value in vars(cls).items():
                if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                    self._note(f"{cls.__name__}.{name}", value, None)

    def _note(self, name: str, value: Any, slot: Slot | None) -> None:
        if isinstance(value, type | ModuleType) or id(value) in self._known or len(self._found) > _MOST_NODES:
            return
        mark = type(value) if self._is_global and isinstance(value, list | deque) else _mark_of(value)
        self._found[name] = _Seen(mark, slot, self._is_global, value if isinstance(value, Tensor) else None)
        if isinstance(value, Iterator) and not is_own_class(type(value)):
            if slot is not None and slot.value is value:
                self.iterators.append(slot)
        elif isinstance(value, generators()):
            content = generator_content(value)
            self._generators += [] if content is None else [(value, content)]
        elif not isinstance(value, (*_SIMPLE, Tensor, np.ndarray)) and id(value) not in self._met:
            self._met[id(value)] = value
            if isinstance(value, dict | list | tuple | deque | set | frozenset):
                self._container(name, value, slot)
            else:
                self._object(name, value, slot)

    def _copy(self, holder: Any, copied: Any) -> None:
        if not self._is_global:
            self._copies.append((holder, copied))

    def _container(self, name: str, value: Any, slot: Slot | None) -> None:
        if isinstance(value, dict):
            self._copy(value, dict(dict.items(value)))
            for key, item in islice(dict.items(value), _MOST):
                shown = f"{name}[{_shown(key)}]"
                self._note(shown, item, Slot(value, key, shown, item))
        elif isinstance(value, set | frozenset):
            if isinstance(value, set):
                self._copy(value, {*value})
            for item in value if len(value) <= _MOST else ():
                self._found[f"{name}[{_shown(item)}]"] = _Seen(True, slot, self._is_global)
        else:
            if not isinstance(value, tuple):
                self._copy(value, [*value])
            for i, item in _ends([*enumerate(value)]):
                self._note(f"{name}[{i}]", item, slot)

    def _object(self, name: str, value: Any, slot: Slot | None) -> None:
        """Of the user's classes, and modules beside those of the model."""
        if isinstance(value, FunctionType | MethodType | functools.partial):
            if isinstance(value, functools.partial) or is_own_function(getattr(value, "__func__", value)):
                for key, item in enclosed_by(value):
                    self._note(f"{name}.{key}", item, None)
            return
        kind: Any = type(value)
        is_module = isinstance(value, nn.Module)
        if isinstance(value, _NOT_READ) or (is_module and measures(value)):
            return
        if not is_module and not isinstance(value, _BARE) and not is_own_class(kind):
            return
        own = getattr(value, "__dict__", {})
        if own:
            self._copy(own, own.copy())
        for key, item in own.items():
            if not is_module or key not in OF_TORCH or key in ("_parameters", "_buffers", "_modules", "training"):
                shown = f"{name}.{key}"
                self._note(shown, item, Slot(own, key, shown, item))
        for key in slots(kind):
            if hasattr(value, key):
                self._note(f"{name}.{key}", getattr(value, key), None)


class _Guard:
    """In the place of an iterator while a step runs."""

    def __init__(self, slot: Slot, instead: str) -> None:
        self._slot, self._instead = slot, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot.value, name)

    def __iter__(self) -> NoReturn:
        self.__next__()

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            f"training_step takes an item of the iterator {self._slot.name}, but a pipeline runs it for each part of a "
            f"micro-batch and on each stage; take it {self._instead}"
        )


def _mark_of(value: Any) -> Any:
    """What tells whether it has changed, but for what it holds; None of nothing."""
    if isinstance(value, _SIMPLE):
        return None if value is None else (type(value), repr(value))
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        few = not value.dtype.hasobject and value.nbytes <= _MOST_BYTES
        return value.dtype, value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes()) if few else id(value)
    if isinstance(value, list | tuple | deque) or (isinstance(value, set | frozenset) and len(value) > _MOST):
        return type(value), len(value)
    return None if isinstance(value, Refusing) else type(value)


def _of_tensor(tensor: Tensor) -> Any:
    if not is_here(tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return type(tensor)
    if tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return tensor.dtype, tensor.shape
    if tensor.nbytes > _MOST_BYTES:
        return id(tensor), 0 if tensor.is_inference() else tensor._version
    few = tensor.nbytes <= _FEW_BYTES
    return tensor.dtype, tensor.shape, checksum(tensor) if few else int(sum_of_bits(tensor))


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, (*_SIMPLE, tuple)) else f"{type(key).__name__} {id(key):x}"


def _ends(items: list[Any]) -> list[Any]:
    return items if len(items) <= _MOST else [*items[: _MOST // 2], *items[-_MOST // 2 :]]
