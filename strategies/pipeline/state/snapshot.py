"""What attributes, objects, containers, globals and classes hold, however deep, at one moment of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

from torch import nn

from lockstep.strategies.launch.program.generators import generator_content, generator_of, generators
from lockstep.strategies.launch.program.reach import base_of
from lockstep.strategies.modules.blocks import OF_TORCH
from lockstep.strategies.pipeline.state.marks import (
    CONTAINERS,
    FUNCTIONS,
    MOST,
    PLAIN,
    SIMPLE,
    Opaque,
    content_of,
    held_by,
    is_of_atoms,
    mark_of,
    put_content,
)
from lockstep.strategies.pipeline.state.step_code import globals_of, is_read

MANY = 100
"""Items of a dict that are followed though no code of a step stores items into it."""
_MOST_NODES, _MOST_DEPTH = 10_000, 100
"""Values that an attribute may hold, and how deep."""
_MISSING: Any = ("missing",)
_NOT_READ = OF_TORCH | {"_compiled_call_impl"}
"""Attributes of modules that are torch's; the last is set by `compile`, and by the strategy in every layer."""


def is_followed(name: str, value: Any, stored: Collection[str]) -> bool:
    """Whether the numbers in a dict are followed, which is an attribute of this name; steps store items into those that
    are `stored`. A larger one, such as a vocabulary, would take long to read in each run."""
    return type(value) is dict and (len(value) <= MANY or name in stored)


class Slot(NamedTuple):
    """A key of a dict, of what objects have as attributes or of one that the user has, or an index of a list."""

    holder: Any
    key: Any
    name: str
    value: Any

    @property
    def is_there(self) -> bool:
        return self.now() is not _MISSING

    def now(self) -> Any:
        """What it holds, by no code of the class of the holder."""
        if isinstance(self.holder, dict):
            return dict.get(self.holder, self.key, _MISSING)
        return self.holder[self.key] if self.key < len(self.holder) else _MISSING

    def put(self, value: Any) -> None:
        """Let it hold this, unless it is gone."""
        if self.is_there and value is not _MISSING:
            base_of(self.holder).__setitem__(self.holder, self.key, value)


class _Seen(NamedTuple):
    mark: Any
    slot: Slot | None
    """The nearest in which the value is."""
    is_global: bool = False
    owner: nn.Module | None = None


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
    """Whether an object has taken the place of another in a list."""
    is_cache: bool
    """Whether it is a new object of which nothing is read, such as a pool of threads, in the place of another."""
    is_missing: bool
    """Whether it was or is not there."""
    counts: bool
    """Whether a number has taken the place of another, or what holds it is still the same."""

    @property
    def grows_a_list(self) -> bool:
        return self.is_missing and self.slot is not None and isinstance(self.slot.holder, list)

    @property
    def counts_in_globals(self) -> bool:
        return self.is_global and self.slot is not None and isinstance(self.slot.value, PLAIN)


class Snapshot:
    """All that user code may change in a step, but for numbers and strings in attributes of `modules` and in dicts
    there that are followed, parameters and buffers; `functions` are those that a step calls, and classes those that it
    `reads`. Of each value it knows what tells whether it has changed."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        functions: Iterable[FunctionType],
        known: set[int],
        stored: Collection[str] = (),
        reads: Callable[[type], bool] = is_read,
    ) -> None:
        self._found: dict[str, _Seen] = {}
        self._copies: list[tuple[nn.Module, Any, Any]] = []
        """What a module has, by a dict, list, deque, set or object with slots, and what that holds."""
        self._known, self._stored = known, stored
        self._met: dict[int, Any] = {}
        self._is_global = False
        self.generators: list[tuple[str, Any, Any]] = []
        """Those of random numbers, with their names and states."""
        self._root, self._left, self._depth = "", 0, 0
        self.cut: set[str] = set()
        """Names of attributes and globals that hold too much to be read whole."""
        self.iterators: list[Slot] = []
        for path, module in modules.items():
            self._owner = module
            own = {name: value for name, value in vars(module).items() if name not in _NOT_READ}
            self._copy(vars(module), vars(module).copy())
            for name, value in own.items():
                self._attribute(f"{path}.{name}" if path else name, vars(module), name, value)
        self._is_global = True
        for module in modules.values():
            for cls in filter(reads, type(module).__mro__):
                self._class(cls)
        for function in functions:
            for name, value in globals_of(function):
                shown = f"the global {name}"
                self._begin(shown)
                self._note(shown, value, Slot(function.__globals__, name, shown, value))
                if isinstance(value, type) and reads(value):
                    self._class(value)

    def changed(self, before: Snapshot) -> Iterator[Change]:
        """What is another than it was."""
        cut = (*before.cut, *self.cut)
        for name in {**before._found, **self._found}:
            was, now = before._found.get(name), self._found.get(name)
            is_missing = was is None or now is None
            if is_missing and cut and name.startswith(cut):
                continue
            if is_missing or was.mark != now.mark:  # type: ignore[union-attr]
                seen: Any = now or was
                old, new = (
                    (_MISSING, _MISSING) if seen.slot is None else (before._bound(seen.slot), self._bound(seen.slot))
                )
                is_other = old is not new
                is_new = was is None or was.mark is None
                if not (is_new and seen.is_global):
                    is_item = not is_missing and is_other and not isinstance(seen.slot.holder, dict)
                    is_opaque = now is not None and isinstance(now.mark, Opaque)
                    counts = not is_other or (isinstance(old, PLAIN) and isinstance(new, PLAIN))
                    slot = seen.slot if is_other else None
                    yield Change(name, slot, is_new, seen.is_global, is_item, is_opaque, is_missing, counts)

    def owners_of(self, name: str) -> set[nn.Module]:
        """The module among whose attributes something was found."""
        found = self._found.get(name)
        return set() if found is None or found.owner is None else {found.owner}

    def held_nothing(self, name: str) -> bool:
        """Whether there was nothing, or None."""
        return (found := self._found.get(name)) is None or found.mark is None

    def _bound(self, slot: Slot) -> Any:
        found = self._found.get(slot.name)
        return _MISSING if found is None or found.slot is None else found.slot.value

    def holds(self, slot: Slot) -> bool:
        """Whether the dict or list of a slot was there."""
        return any(slot.holder is holder for _, holder, _ in self._copies)

    def put_back(self, draws: bool = False, of: Collection[nn.Module] | None = None) -> None:
        """Give containers and objects what they held, with `of` those of these modules, and with `draws` generators of
        random numbers their state; tensors that were changed in place are not put back."""
        for _, generator, content in self.generators if draws else ():
            generator_of(content, generator)
        for owner, holder, copied in self._copies:
            if of is None or owner in of:
                put_content(holder, copied)

    @contextmanager
    def refusing_iterators(self, instead: str) -> Iterator[None]:
        """While it lasts iterators in attributes give no items."""
        guards = [(slot, _Guard(slot, instead)) for slot in self.iterators]
        for slot, guard in guards:
            slot.put(guard)
        try:
            yield
        finally:
            for slot, guard in guards:
                if slot.now() is guard:
                    slot.put(slot.value)

    def _begin(self, root: str) -> None:
        self._root, self._left = root, _MOST_NODES

    def _attribute(self, name: str, holder: dict[Any, Any], key: str, value: Any) -> None:
        slot = Slot(holder, key, name, value)
        self._begin(name)
        if isinstance(value, PLAIN):  # it is followed
            self._found[name] = _Seen(None, slot, owner=self._owner)
            return
        follows = is_followed(key, value, self._stored)
        if follows and len(value) > MOST and is_of_atoms(value):
            self._copy(value, content_of(value))
            return
        self._note(name, value, slot)
        for inner, item in value.items() if follows else ():
            if isinstance(item, PLAIN) and (seen := self._found.get(f"{name}[{_shown(inner)}]")) is not None:
                self._found[f"{name}[{_shown(inner)}]"] = seen._replace(mark=None)

    def _class(self, cls: type) -> None:
        if id(cls) not in self._met:
            self._met[id(cls)] = cls
            for name, value in vars(cls).items():
                if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                    self._begin(f"{cls.__name__}.{name}")
                    self._note(f"{cls.__name__}.{name}", value, None)

    def _note(self, name: str, value: Any, slot: Slot | None) -> None:
        if id(value) in self._known:
            return
        if self._left <= 0 or self._depth > _MOST_DEPTH:
            self.cut.add(self._root)
            return
        self._left -= 1
        held = held_by(value)
        mark = type(value) if self._is_global and isinstance(value, list | deque) else mark_of(value, held is not None)
        self._found[name] = _Seen(mark, slot, self._is_global, self._owner)
        if isinstance(value, Iterator) and not is_read(type(value)):
            if slot is not None and slot.value is value:
                self.iterators.append(slot)
        elif isinstance(value, generators()):
            content = generator_content(value)
            self.generators += [] if content is None else [(name, value, content)]
        elif held is not None and id(value) not in self._met:
            self._met[id(value)] = value
            self._depth += 1
            if isinstance(value, CONTAINERS):
                self._container(name, value, slot)
            else:
                self._object(name, value, held)
            self._depth -= 1

    def _copy(self, holder: Any, copied: Any) -> None:
        if not self._is_global:
            self._copies.append((self._owner, holder, copied))

    def _container(self, name: str, value: Any, slot: Slot | None) -> None:
        if not isinstance(value, tuple | frozenset):
            self._copy(value, content_of(value))
        if len(value) > MOST and not (isinstance(value, set | frozenset) or is_of_atoms(value)):
            self.cut.add(self._root)
        if isinstance(value, dict):
            if len(value) <= MOST or not is_of_atoms(value):
                for key, item in islice(dict.items(value), MOST):
                    shown = f"{name}[{_shown(key)}]"
                    self._note(shown, item, Slot(value, key, shown, item))
        elif isinstance(value, set | frozenset):
            for item in value if len(value) <= MOST else ():
                self._found[f"{name}[{_shown(item)}]"] = _Seen(True, slot, self._is_global, self._owner)
        elif len(value) <= MOST or not is_of_atoms(value):
            for i, item in _ends([*enumerate(value)]):
                shown, is_fixed = f"{name}[{i}]", isinstance(value, tuple) or isinstance(item, PLAIN)
                self._note(shown, item, slot if is_fixed else Slot(value, i, shown, item))

    def _object(self, name: str, value: Any, held: dict[str, Any]) -> None:
        """`held`: its attributes, or what a function encloses."""
        if isinstance(value, FUNCTIONS):
            for key, item in held.items():
                self._note(f"{name}.{key}", item, None)
            return
        own, is_module = getattr(value, "__dict__", {}), isinstance(value, nn.Module)
        if own:
            self._copy(own, own.copy())
        if len(held) > len(own):
            self._copy(value, {key: item for key, item in held.items() if key not in own})
        for key, item in held.items():
            if not is_module or key not in _NOT_READ or key in ("_parameters", "_buffers", "_modules", "training"):
                shown = f"{name}.{key}"
                self._note(shown, item, Slot(own, key, shown, item) if key in own else None)


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


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, (*SIMPLE, tuple)) else f"{type(key).__name__} {id(key):x}"


def _ends(items: list[Any]) -> list[Any]:
    return items if len(items) <= MOST else [*items[: MOST // 2], *items[-MOST // 2 :]]
