"""Attributes that user code has changed in a run, kept for one that continues it."""

from __future__ import annotations

import copy
import functools
import os
import sys
from abc import ABC
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import IOBase
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.callbacks.base import Callback, Logger
from lockstep.strategies.launch.failure import libraries
from lockstep.strategies.modules.blocks import is_of_user
from lockstep.trainer.kept_values import (
    MOST_ITEMS,
    NOTHING,
    STATEFUL,
    Mark,
    as_it_is,
    copied,
    encoded,
    fields,
    is_equal,
    is_free,
    is_same,
    is_savable,
    is_small,
    mark_of,
    moved,
    not_of_users,
    on_host,
    storages,
    take,
    tensors_in,
)

if TYPE_CHECKING:
    from lockstep.trainer.datamodule import DataModule

_HPARAMS = "_hparams"
"""Made, with nothing in it, when `hparams` is first read, as the first save does."""
_DEPTH, _MANY, _MOST = 3, 64, 1000
"""How deep objects within objects are searched, the most items of a list or dict that are, and the most objects."""
_BARE = (Callback, Generic, Protocol, ABC)
"""Bases that have no attributes of their own."""
_OTHERS = (nn.Module, Callback, Dataset, DataLoader, Sampler, type, *STATEFUL)
"""Objects that are saved otherwise, or make what a run reads."""


class Changes:
    """What user code has changed since a fit was set up in the attributes of the module, of layers of its own classes,
    of callbacks and a DataModule of such classes that save no state by themselves, and of other objects of such classes
    that these hold: numbers, strings, tensors, arrays, generators, small containers of them, and optimizers and
    schedulers that are not the run's, which are saved, and other objects, which are not."""

    def __init__(
        self, module: nn.Module, callbacks: Iterable[Callback] = (), datamodule: DataModule | None = None
    ) -> None:
        self._module = module
        callbacks = [*filter(_has_no_state, callbacks)]
        keys = [each.state_key for each in callbacks]
        self._beside: dict[str, Any] = {
            f"callbacks.{key}{keys[:i].count(key) or ''}": each
            for i, (key, each) in enumerate(zip(keys, callbacks, strict=True))
        }
        """Callbacks and the DataModule."""
        if datamodule is not None and _saves_nothing(datamodule):
            self._beside["datamodule"] = datamodule
        self._of_run: list[Any] = []
        """The run's optimizers and schedulers, which are saved by themselves."""
        self._at_start = self._marks()
        self._had: dict[str, set[str]] = {}
        """By owner the attributes that every run has as its first step begins."""
        self._by_hook: set[tuple[str, str]] = set()
        """What `on_load_checkpoint` has taken up, and loader methods have made."""
        self._begun: dict[str, dict[str, Any]] = {}
        """By owner and name the values that hooks of the start have left; before they are called, those that they had
        left in the run that is resumed, and that it has changed since."""
        self._begun_marks: dict[str, _Marks] = {}
        self._resumed: dict[str, dict[str, Any]] = {}
        """Of those, and of owners that these hooks make, what the run that is resumed has."""

    def note_loaded(self) -> None:
        """Called once `on_load_checkpoint` has been."""
        self._by_hook = {(path, name) for path, _, name, *_ in self._changed(self._marks())}

    def begin(self, of_run: Iterable[Any]) -> None:
        """Called once `configure_optimizers` has been, whose optimizers and schedulers are `of_run`: what is as it left
        it each run makes again."""
        self._of_run = [*of_run]
        self._at_start = self._marks()
        for path, name in self._by_hook:
            if path in self._at_start:
                self._at_start[path].marks.pop(name, None)

    def note_begun(self, of_run: Iterable[Any], has_hooks: bool) -> list[str]:
        """Called once `on_train_start` has been, which every run calls. What hooks of the start have left, if there are
        any, as when the run was new is again what the run that is resumed had made of it. Returns the names of what
        they have changed to something else."""
        self._of_run += of_run
        marks, owners = self._marks(), dict(self._owners())
        self._had = {
            path: {n for n, value in fields(owner).items() if value is not None} for path, owner in owners.items()
        }
        giving_way, resumed, self._resumed = [*self._giving_way(marks)], self._resumed, {}
        made = {path: found for path, found in marks.items() if not self._is_known(path, found.owner)}
        for parent in self._at_start.values():
            for name, value in fields(parent.owner).items():
                if any(found.owner is part for found in made.values() for part in _parts(value)):
                    parent.marks[name] = mark_of(value, MOST_ITEMS)
        self._at_start |= made
        before, self._begun, self._begun_marks = self._begun, self._left(marks) if has_hooks else {}, marks
        given = {(path, name) for path, name, _ in giving_way}
        otherwise = [
            _shown(path, name)
            for path, values in before.items()
            for name in values.keys() & resumed.get(path, {}).keys() & self._begun.get(path, {}).keys()
            if (path, name) not in given and not is_equal(self._begun[path][name], on_host(resumed[path][name]))
        ]
        for path, name, value in giving_way:
            if path in owners:
                take(owners[path], name, value)
        return sorted(otherwise)

    def _giving_way(self, marks: Mapping[str, _Marks]) -> Iterator[tuple[str, str, Any]]:
        """What hooks of the start have left as when the run was new, or have yet to make, with the value that the run
        that is resumed has of it."""
        for path, values in self._resumed.items():
            for name, value in values.items():
                if path in self._at_start:
                    if path not in marks or name not in self._begun.get(path, ()):
                        continue
                    owner, own = marks[path]
                    if not is_savable(own.get(name, (None, None))):
                        continue
                    if not is_equal(copied(fields(owner)[name]), self._begun[path][name]):
                        continue
                yield path, name, value

    def _is_known(self, path: str, owner: Any) -> bool:
        return path in self._at_start and self._at_start[path].owner is owner

    def _left(self, marks: Mapping[str, _Marks]) -> dict[str, dict[str, Any]]:
        """Copies of what may be found changed later; of what is large only if hooks may have made it."""
        weights = storages((*self._module.parameters(), *self._module.buffers()))
        left: dict[str, dict[str, Any]] = {}
        for path, (owner, own) in marks.items():
            for name, mark in own.items():
                value = fields(owner)[name]
                is_new = not is_same(self._at_start[path].marks.get(name, NOTHING), mark)
                if is_savable(mark) and (is_new or is_small(value)) and weights.isdisjoint(storages(tensors_in(value))):
                    left.setdefault(path, {})[name] = copied(value)
        return left

    def state_dict(self) -> dict[str, Any]:
        """What is saved by owner and name; the names of what is not; and which tensors are on the model's device.

        Of a layer in which steps have made an object that cannot be saved nothing is, as a flag may say that it is
        there.
        """
        values: dict[str, dict[str, Any]] = {}
        lost, apart, on_device = [], set(), []
        all_marks = self._marks()
        for path, _, name, value, mark in self._changed(all_marks):
            if not is_savable(mark):
                lost.append(_shown(path, name))
                apart |= {path} if name not in self._had.get(path, (name,)) else set()
                continue
            if any(tensor.device.type != "cpu" for tensor in tensors_in(value)):
                on_device.append(_shown(path, name))
            values.setdefault(path, {})[name] = encoded(value)
        lost += [_shown(path, name) for path in apart for name in values.pop(path, ())]
        for path, name, value in self._giving_way(all_marks):  # where hooks of the start are still called
            values.setdefault(path, {})[name] = value
            if any(tensor.device.type != "cpu" for tensor in tensors_in(value)):
                on_device.append(_shown(path, name))
        owners = {path: found.owner for path, found in all_marks.items()}
        known = set(map(id, (*owners.values(), *self._of_run)))
        lost += [_shown(path, name) for path, owner in owners.items() for name in _iterators(owner, known)]
        begun = {
            path: found for path in self._begun if path not in apart and (found := self._since_begun(path, all_marks))
        }
        if not (values or lost or begun):
            return {}
        return {"values": values, "lost": [*dict.fromkeys(lost)], "on_device": on_device, "begun": begun}

    def _since_begun(self, path: str, marks: Mapping[str, _Marks]) -> dict[str, Any]:
        """The values that hooks of the start left in an owner and that have changed since."""
        if path not in self._begun_marks:  # hooks of the start are still called
            return self._begun[path]
        if path not in marks:
            return {}
        (owner, own), before = marks[path], self._begun_marks[path].marks
        return {
            name: value
            for name, value in self._begun[path].items()
            if is_savable(mark := own.get(name, (None, None))) and not is_same(before[name], mark)
            if not is_equal(copied(fields(owner)[name]), value)
        }

    def load_state_dict(self, state: Mapping[str, Any], device: Any) -> None:
        """Take up the values of a run that is continued, but for what a hook has taken up already."""
        owners = dict(self._owners())
        self._begun, self._resumed = state.get("begun", {}), {}
        for path, values in state.get("values", {}).items():
            for name, value in values.items():
                value = moved(value, device) if _shown(path, name) in state["on_device"] else value
                owner = owners.get(path)
                if owner is None or name in self._begun.get(path, ()):
                    self._resumed.setdefault(path, {})[name] = copy.deepcopy(value)
                if owner is None or (path, name) in self._by_hook or not is_free(owner, name):
                    continue
                take(owner, name, value)
                if path in self._at_start:  # it is saved again, whatever the module began with
                    self._at_start[path].marks.pop(name, None)
        for path, values in self._begun.items():
            for name in values:
                if path in owners and name in fields(owners[path]):
                    is_taken = (path, name) in self._by_hook or name not in self._resumed.get(path, ())
                    if is_taken and is_savable(mark_of(now := fields(owners[path])[name], MOST_ITEMS)):
                        self._resumed.setdefault(path, {})[name] = copy.deepcopy(encoded(now))

    @contextmanager
    def as_saved(self, state: Mapping[str, Any], device: Any) -> Iterator[None]:
        """While it lasts attributes have the values that `state_dict` returned, and then those of before. What is made
        meanwhile of objects that are not saved, a run that is continued has."""
        owners, before, put_back = dict(self._owners()), self._marks(), []
        for path, values in state.get("values", {}).items():
            for name, value in values.items():
                if path in owners and is_free(owners[path], name):
                    put_back.append(as_it_is(owners[path], name))
                    value = moved(value, device) if _shown(path, name) in state["on_device"] else value
                    take(owners[path], name, copy.deepcopy(value))
        yield
        for path, (_, marks) in self._marks().items():
            was = before[path].marks if path in before else {}
            made = {name for name, mark in marks.items() if not is_savable(mark) and was.get(name) != mark}
            self._by_hook |= {(path, name) for name in made}
        for each in reversed(put_back):
            each()

    def lost(self, state: Mapping[str, Any]) -> list[str]:
        """The names of what `state` does not hold and no hook has taken up."""
        parts = [(shown, *shown.rpartition(".")[::2]) for shown in state.get("lost", [])]
        return [shown for shown, path, name in parts if (path, name) not in self._by_hook]

    def _changed(self, all_marks: Mapping[str, _Marks]) -> Iterator[tuple[str, Any, str, Any, Mark]]:
        weights = storages((*self._module.parameters(), *self._module.buffers()))
        for path, (owner, marks) in all_marks.items():
            if path not in self._at_start or self._at_start[path].owner is not owner:  # built by a hook
                continue
            before = self._at_start[path].marks
            for name, mark in marks.items():
                value = fields(owner)[name]
                if is_same(before.get(name, NOTHING), mark):
                    continue
                if not is_savable(mark) or weights.isdisjoint(storages(tensors_in(value))):
                    yield path, owner, name, value, mark
                elif name not in before or before[name] == (type(None), None):  # a copy would not follow the weights
                    yield path, owner, name, value, (None, id(value))

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """By name all whose attributes are saved."""
        seen, paths = set[int](), set[str]()
        for path, owner in (*_layers(self._module), *self._beside.items()):
            for shown, found in ((path, owner), *_objects(owner, path, _DEPTH, seen)):
                while shown in paths:  # as of the keys 1 and "1" of a dict
                    shown += "'"
                paths.add(shown)
                yield shown, found

    def _marks(self) -> dict[str, _Marks]:
        parts = (vars(each).get(name) for each in self._of_run for name in ("state", "param_groups"))  # for wrappers
        known = {id(each) for each in (*self._of_run, *parts)} - {id(None)}
        return {
            path: _Marks(
                owner,
                {
                    name: mark_of(value, MOST_ITEMS)
                    for name, value in fields(owner).items()
                    if name not in not_of_users(owner) and name.isidentifier() and not isinstance(value, nn.Module)
                    if (name != _HPARAMS or value) and not known.issuperset(map(id, _parts(value)))
                },
            )
            for path, owner in self._owners()
        }


class _Marks(NamedTuple):
    owner: Any
    marks: dict[str, Mark]


def _parts(value: Any) -> list[Any]:
    """What a small container holds; of anything else itself."""
    if type(value) in (list, tuple, dict) and 0 < len(value) <= _MANY:
        return [*value.values()] if type(value) is dict else [*value]
    return [value]


def alike(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the states of several ranks what those that have it agree on; what they do not is lost."""
    lost = {name for state in states for name in state.get("lost", [])}
    values = _agreed([state.get("values", {}) for state in states], lost)
    begun = _agreed([state.get("begun", {}) for state in states], {*lost})
    on_device = [name for state in states for name in state.get("on_device", [])]
    return {"values": values, "lost": sorted(lost), "on_device": on_device, "begun": begun}


def _agreed(found: list[dict[str, dict[str, Any]]], lost: set[str]) -> dict[str, dict[str, Any]]:
    """What is not `lost`, to which those are added that differ."""
    values: dict[str, dict[str, Any]] = {}
    for path, name, value in ((path, *item) for each in found for path, own in each.items() for item in own.items()):
        if not is_equal(values.setdefault(path, {}).setdefault(name, value), value):
            lost.add(_shown(path, name))
    return {
        path: {name: v for name, v in own.items() if _shown(path, name) not in lost} for path, own in values.items()
    }


def _shown(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _iterators(owner: Any, known: set[int]) -> Iterator[str]:
    """The names of those of which nobody can tell where they are, and that are not `known`."""
    for name, value in fields(owner).items():
        if hasattr(type(value), "__next__") and not isinstance(value, IOBase) and id(value) not in known:
            yield name


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in module.named_modules():
        if is_of_user(layer) and not hasattr(layer, "metric_state"):  # metrics are saved by themselves
            yield path, layer


def _has_no_state(callback: Callback) -> bool:
    """Whether it says nothing of what is saved; a logger's buffers are of the run that has them."""
    kind: Any = type(callback)
    return not issubclass(kind, Logger) and kind.state_dict is Callback.state_dict and _is_of_users_code(kind)


def _saves_nothing(datamodule: DataModule) -> bool:
    """Whether it is of a class of the user's that says nothing of what is saved."""
    of_users = [cls for cls in type(datamodule).__mro__[:-1] if not cls.__module__.startswith("lockstep.")]
    own = ("state_dict", "load_state_dict")
    return all(cls in _BARE or (_is_of_program(cls) and not any(n in vars(cls) for n in own)) for cls in of_users)


def _objects(owner: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, value in fields(owner).items():
        if name in not_of_users(owner) or not name.isidentifier():
            continue
        parts: Iterable[tuple[Any, Any]] = ((name, value),)
        if type(value) is dict and len(value) <= _MANY:
            parts = ((f"{name}.{key}", item) for key, item in value.items() if isinstance(key, str | int))
        elif type(value) in (list, tuple) and len(value) <= _MANY:
            parts = ((f"{name}.{i}", item) for i, item in enumerate(value))
        for shown, item in parts:
            kind: Any = type(item)
            if id(item) in seen or len(seen) == _MOST or issubclass(kind, _OTHERS) or not _is_of_users_code(kind):
                continue
            if any("train_dataloader" in vars(cls) for cls in kind.__mro__):  # a DataModule, which is saved by itself
                continue
            seen.add(id(item))
            yield (here := _shown(path, shown)), item
            if depth > 1:
                yield from _objects(item, here, depth - 1, seen)


@functools.cache
def _is_of_users_code(kind: type) -> bool:
    """Whether a class and all its bases are written in the user's program, and not in a package that is installed, or
    are bare holders of attributes."""
    return all(cls in _BARE or _is_of_program(cls) for cls in kind.__mro__[:-1])


def _is_of_program(kind: type) -> bool:
    if kind.__module__ == "__main__" or kind in (SimpleNamespace, Namespace):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not os.path.realpath(file).startswith(libraries())
