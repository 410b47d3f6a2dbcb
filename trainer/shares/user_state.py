"""What user code remembers in Python: attributes of the module, its layers and callbacks, and what hooks close over.

Shares, learners and clients that one rank runs one after the other have it in common, where on ranks of their own each
would have its own. So nothing of it may change in a step, but for lists that only grow, of which each share sees what
it has appended itself and code between steps what all of them have, and for numbers of callbacks that become the same
in each share, such as counters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lockstep.strategies.launch.program.functions import OTHERS, is_users_class, variables_of
from lockstep.strategies.modules.blocks import OF_TORCH
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES, OF_MODULE
from lockstep.strategies.modules.side_effect_free import PlainValues, differ
from lockstep.strategies.sync.contents import generator_state
from lockstep.trainer.kept.fields import fields
from lockstep.trainer.metrics.model_parts import ModelParts, Parts
from lockstep.trainer.shares.marks import NUMBERS, noted, of_array, of_tensor, place_of
from lockstep.trainer.shares.named_values import is_watched, places_of

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

Marks = dict[str, Any]
"""By name what tells whether something was changed or replaced."""

_DEPTH = 5
"""How deep containers and objects within attributes are searched."""
_MANY = 64
"""Items of a list, and containers in larger ones, that are searched; of others it is seen whether they are the same
objects, and whether the first `_MOST` tensors were written to."""
_MOST = 4096
_SMALL = 2**16
"""Bytes of arrays outside of objects that are read."""
_OF_CLASSES = (int, float, Tensor, np.ndarray, list, dict, set, deque)
"""What is read of a class, which all its objects have in common."""
_OF_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_THEIRS = (OF_TORCH - {"training"}) | {"trainer", "_trainer", "_module", "_toggled"}
"""Attributes that every module or callback has: parameters and buffers are compared by themselves."""
_OF_HANDLES = frozenset({"_run", "optimizer", "hooks"})
"""Those of the Trainer and of optimizers as user code sees them."""


class UserState:
    """Keeps apart what user code remembers while shares of this rank run."""

    def __init__(self, run: RunState, parts: Parts) -> None:
        self._run, self._parts = run, parts
        self._share: int | None = None
        self._before = _NOTHING
        self._grown: dict[str, _Grown] = {}
        self._counted: dict[str, _Counted] = {}
        self.is_open = False

    def begin(self, share: int | None, at_once: bool = False) -> None:
        """Called before the code of a share, or with None before that of one which never comes again; `at_once` if no
        code of the user has run since `end`."""
        self.is_open, self._share = True, share
        if at_once and not self._grown and not self._counted:
            return
        now = self._found()
        for name, kept in list(self._grown.items()):
            if name in now.lists:
                kept.follow(now.lists[name], name)
                kept.show(share)
            else:
                del self._grown[name]
        for kept_number in self._counted.values():
            kept_number.show(share)
        self._before = self._found() if self._grown or self._counted else now

    def end(self, more: bool = False) -> list[str]:
        """Called after it, and before `more` code of the same share. Returns the names of what it has changed and may
        not."""
        self.is_open = False
        now, before = self._found(), self._before
        names = [n for n in before.marks.keys() | now.marks.keys() if _differ(before.marks.get(n), now.marks.get(n))]
        if plain := before.plain.changed(now.plain):
            paths = self._parts.now().names
            names += [f"{paths[layer]}.{name}" for layer, name in plain if layer in paths]
        for name in [
            name for name in names if self._share is not None and name in before.owners and name in now.owners
        ]:
            names.remove(name)
            self._counted.setdefault(name, _Counted(*now.owners[name], before.marks[name]))
        for name, (container, items, _) in now.lists.items():
            if self._run.evaluating and name in before.lists and len(items) > len(before.lists[name].items):
                names.append(name)  # what sums an evaluation up reads what all shares of a rank have appended
            if name in self._grown:
                self._grown[name].take(self._share)
            elif not names and name in before.lists and len(items) > len(before.lists[name].items):
                self._grown[name] = _Grown(container, [*before.lists[name].items])
                self._grown[name].take(self._share)
        shares = () if self._share is None or more else self._run.strategy.shares  # type: ignore[attr-defined]
        names += [name for name, kept in self._counted.items() if not kept.take(self._share, shares)]
        self._before = now
        return sorted(names)

    def counted(self) -> dict[str, list[str]]:
        """By name what numbers of callbacks are in the shares of this rank."""
        shares = self._run.strategy.shares  # type: ignore[attr-defined]
        return {name: sorted({repr(kept.of(share)) for share in shares}) for name, kept in self._counted.items()}

    def rest(self) -> None:
        """Called where code of the user follows that is not of a share: holds on to nothing of it."""
        self._before = _NOTHING

    def _found(self) -> _Found:
        return _found(self._run, self._parts.now(), {id(kept.container) for kept in self._grown.values()})


class _Items(NamedTuple):
    """A list that may grow."""

    container: Any
    items: tuple[Any, ...]
    marks: list[Any]
    """Of the first ones."""


class _Objects(NamedTuple):
    """What a large container holds, and marks of the first of it that can change in place."""

    items: tuple[Any, ...]
    marks: list[Any]


class _Found(NamedTuple):
    marks: Marks
    lists: dict[str, _Items]
    owners: dict[str, tuple[Any, str]]
    """Of numbers that are attributes of callbacks."""
    plain: PlainValues
    """Of layers of torch's classes."""


_NOTHING = _Found({}, {}, {}, PlainValues([], []))


class _Grown:
    """A list to which shares append."""

    def __init__(self, container: Any, common: list[Any]) -> None:
        self.container = container
        self._common, self._all = common, [*common]
        self._own: dict[int, list[Any]] = {}

    def follow(self, now: _Items, name: str) -> None:
        """Let code between steps have appended to the list, or emptied or replaced it by an empty one."""
        number = len(self._all)
        if not now.items:
            self._common, self._own = [], {}
        elif now.container is self.container and _starts_with(now.items, self._all):
            for items in (self._common, *self._own.values()):
                items.extend(now.items[number:])
        else:
            raise RuntimeError(
                f"{name} was changed between steps, but holds what several shares or learners of this rank have "
                "appended, each for itself; clear it or append to it, or use self.log"
            )
        self.container, self._all = now.container, [*now.items]

    def show(self, share: int | None) -> None:
        """Let the list hold what it would hold if there were only this share."""
        _put(self.container, self._of(share))

    def take(self, share: int | None) -> None:
        """Take what a share has appended; the list holds what all have."""
        items, before = [*self.container], self._of(share)
        self._all.extend(items[len(before) :])
        if share is not None:
            self._own[share] = items
        _put(self.container, self._all)

    def _of(self, share: int | None) -> list[Any]:
        return self._common if share is None else self._own.get(share, self._common)


class _Counted:
    """A number of a callback that shares change alike."""

    def __init__(self, owner: Any, key: str, common: Any) -> None:
        self._owner, self._key = owner, key
        self._common = self._left = common
        self._own: dict[int, Any] = {}

    def show(self, share: int | None) -> None:
        """Let the callback hold the number of this share; that which code between steps has set is that of all."""
        now = vars(self._owner).get(self._key)
        if _differ(now, self._left):
            self._common, self._own = now, {}
        vars(self._owner)[self._key] = self.of(share)

    def take(self, share: int | None, shares: Sequence[int]) -> bool:
        """Take what a share has left; whether all have the same after the last one."""
        self._left = vars(self._owner).get(self._key)
        if share is not None:
            self._own[share] = self._left
        return not shares or share != shares[-1] or not any(_differ(self.of(s), self._left) for s in shares)

    def of(self, share: int | None) -> Any:
        """The number of a share, or with None of code between steps."""
        return self._common if share is None else self._own.get(share, self._common)


def _put(container: Any, items: list[Any]) -> None:
    container.clear()
    container.extend(items)


def _starts_with(items: Sequence[Any], first: Sequence[Any]) -> bool:
    return list(map(id, items[: len(first)])) == list(map(id, first))


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, _Items) and isinstance(other, _Items):
        grown = one.container is other.container and _starts_with(other.items[_MANY:], one.items[_MANY:])
        return not grown or len(other.items) < len(one.items) or any(map(_differ, one.marks, other.marks))
    if isinstance(one, _Objects) and isinstance(other, _Objects):
        same = len(one.items) == len(other.items) and _starts_with(one.items, other.items)
        return not same or any(map(_differ, one.marks, other.marks))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differ(one[key], other[key]) for key in one)
    return differ(one, other)


def _found(run: RunState, model: ModelParts, followed: Collection[int]) -> _Found:
    """Marks of all that user code remembers outside of parameters, buffers and optimizer state."""
    search = _Search([*model.known, *run.streams.values()], followed)
    for name, part in model.parts:
        for hooks in OF_MODULE:
            if held := getattr(part, hooks, None):
                search.hooks(held, name or type(part).__name__)
    for prefix, part in model.users:
        search.attributes(part, prefix)
    for callback in run.callbacks:
        if is_users_class(type(callback)) or callback.changes_model:
            search.attributes(callback, prefix := f"{type(callback).__name__}.")
            numbers = [key for key, value in vars(callback).items() if isinstance(value, (int, float, type(None)))]
            search.owners |= {prefix + key: (callback, key) for key in numbers}
    for name, parameter in model.parameters:
        for hooks in ATTRIBUTES:
            if held := getattr(parameter, hooks, None):
                search.hooks(held, name)
    for owner in (run.trainer, *run.user_optimizers):
        search.attributes(owner, f"{type(owner).__name__}.", _OF_HANDLES)
    if run.datamodule is not None:
        for key, value in vars(run.datamodule).items():
            if key not in _NOT_THEIRS and is_watched(value):
                search.common(value, f"{type(run.datamodule).__name__}.{key}")
        search.classes(type(run.datamodule))
    for optimizer in run.optimizers.values():
        for hooks in _OF_OPTIMIZER:
            search.hooks(getattr(optimizer, hooks, None), type(optimizer).__name__)
    return _Found(search.marks, search.lists, search.owners, model.plain.now())


class _Search:
    """Finds marks, and goes to each container and object once."""

    def __init__(self, known: Iterable[Any], followed: Collection[int]) -> None:
        self._followed = followed
        """Lists of which each share sees its own, by `id`."""
        self.marks: Marks = {}
        self.lists: dict[str, _Items] = {}
        self.owners: dict[str, tuple[Any, str]] = {}
        self._seen = set(map(id, known))
        self._kinds: set[type] = set()
        self._is_common = False

    def attributes(self, owner: Any, prefix: str, but: Collection[str] = _NOT_THEIRS) -> None:
        for key, value in vars(owner).items():
            if key not in but:
                self.marks[prefix + key] = self._mark(value, prefix + key, _DEPTH)
        self.classes(type(owner))

    def classes(self, of: type) -> None:
        """What all objects of a user's class have in common, and what its methods name."""
        if of in self._kinds:
            return
        self._kinds.add(of)
        for kind in filter(is_users_class, of.__mro__):
            for name, read in places_of(kind):
                if name not in self.marks:
                    self.common(read(), name)
            self._data_of(kind)

    def _data_of(self, kind: type) -> None:
        for key, value in vars(kind).items():
            if not key.startswith("__") and isinstance(value, _OF_CLASSES):
                name = f"{kind.__name__}.{key}"
                self.marks[name] = self.marks.get(name) or self._mark(value, name, _DEPTH)

    def common(self, value: Any, name: str) -> None:
        """A value that may be as large as the data: only what tells cheaply whether a step has changed it."""
        if isinstance(value, type):
            self._data_of(value)
        elif isinstance(value, Tensor):
            self.marks[name] = noted(value)
        elif isinstance(value, np.ndarray):
            self.marks[name] = of_array(value, _SMALL)
        else:
            self._is_common = True
            self.marks[name] = self._mark(value, name, 2)
            self._is_common = False

    def hooks(self, hooks: dict[int, Callable[..., Any]] | None, owner: str) -> None:
        for i, hook in (hooks or {}).items():
            own = getattr(hook, "hook", hook)  # in the place of which another one stands
            name = f"what {getattr(own, '__name__', type(own).__name__)} remembers, a hook of {owner}"
            name = f"{name} ({i})" if name in self.marks else name
            mark = self._mark(own, name, _DEPTH)
            if mark or is_theirs(getattr(own, "__func__", own)):  # engines add hooks of their own to a step
                self.marks[name] = mark

    def _mark(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, NUMBERS):
            return value
        if id(value) in self._seen or not depth:
            return None
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            return noted(value) if self._is_common else of_tensor(value)
        if isinstance(value, np.ndarray):
            return value.shape, of_array(value, *((_SMALL,) if self._is_common else ()))
        large = isinstance(value, (list, dict, set, deque)) and len(value) > _MOST
        if large and self._is_common and id(value) not in self._followed:
            return len(value)
        if (state := generator_state(value)) is not None:
            return state
        if isinstance(value, nn.Module):
            tensors = value.state_dict(keep_vars=True).items()
            found = {key: self._mark(tensor, name, 1) for key, tensor in tensors if isinstance(tensor, Tensor)}
            return {"": getattr(value, "_update_count", None)} | found  # of a metric: its sums are in no state dict
        if hasattr(type(value), "__next__") and (place := place_of(value)) is not None:
            return place
        if isinstance(value, list) or (isinstance(value, deque) and value.maxlen is None):
            first = [
                item if isinstance(item, NUMBERS) else self._mark(item, f"{name}[{i}]", depth - 1)
                for i, item in enumerate(islice(value, _MANY))
            ]
            first += map(self._noted, islice(value, _MANY, _MOST))
            self.lists[name] = _Items(value, tuple(value), first)
            return self.lists[name]
        if isinstance(value, (dict, tuple, deque, set, frozenset)) and len(value) > _MANY:
            items = (*value, *value.values()) if isinstance(value, dict) else (*value,)
            held = [*islice(value.values() if isinstance(value, dict) else value, _MOST)]
            inner = [(i, item) for i, item in enumerate(held) if isinstance(item, (dict, list, deque, set))][:_MANY]
            marks = [self._mark(item, f"{name}[{i}]", depth - 1) for i, item in inner]
            return _Objects(items, [*marks, *map(self._noted, held)])
        if isinstance(value, (tuple, deque)):
            return {i: self._mark(item, f"{name}[{i}]", depth - 1) for i, item in enumerate(value)}
        if isinstance(value, (set, frozenset)):
            return {item if isinstance(item, NUMBERS) else id(item): None for item in value}
        parts = value.items() if isinstance(value, dict) else _parts(value)
        return {key: self._mark(item, f"{name}[{key!r}]", depth - 1) for key, item in parts}

    def _noted(self, value: Any) -> Any:
        """What torch notes of a tensor that is not known."""
        return None if id(value) in self._seen else noted(value)


def is_theirs(hook: Any) -> bool:
    """Whether a function, or the class of an object that is called, belongs to another package than those used here."""
    module = hook.__module__ if isinstance(hook, FunctionType) else type(hook).__module__
    return (module or "").partition(".")[0] not in OTHERS


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a function or an object of a user's class holds, by name."""
    if isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        if not str(value.__func__.__module__).startswith("lockstep.strategies."):  # such as a wrapped model's
            yield "self", value.__self__
    elif isinstance(value, FunctionType):
        theirs = is_theirs(value)
        yield from vars(value).items() if theirs else ()
        for key, _, held in variables_of(value):
            functions = isinstance(held, (FunctionType, MethodType, partial))
            if theirs or functions or (callable(held) and is_users_class(type(held))):  # around one of the user's
                yield key, held
    elif not isinstance(value, type) and is_users_class(type(value)):
        yield from fields(value).items()
