"""Finds what user code remembers in Python, and what tells whether it was changed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, product, repeat
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.launch.program.functions import OTHERS, is_users_class, variables_of
from lockstep.strategies.modules.blocks import OF_TORCH
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES, OF_MODULE
from lockstep.strategies.modules.side_effect_free import PlainValues, differ
from lockstep.strategies.sync.contents import generator_state
from lockstep.trainer.kept.fields import fields
from lockstep.trainer.metrics.model_parts import ModelParts
from lockstep.trainer.shares.marks import NUMBERS, noted, of_array, of_tensor, place_of
from lockstep.trainer.shares.named_values import is_watched, places_of
from lockstep.trainer.shares.reads import Reads

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
"""Those of the Trainer, of optimizers as user code sees them and of schedulers."""


class Items(NamedTuple):
    """A list that may grow."""

    container: Any
    items: tuple[Any, ...]
    marks: list[Any]
    """Of the first ones."""


class Objects(NamedTuple):
    """What a large container holds, and marks of the first of it that can change in place."""

    items: tuple[Any, ...]
    marks: list[Any]


class Found(NamedTuple):
    marks: Marks
    lists: dict[str, Items]
    owners: dict[str, tuple[Any, str]]
    """Of numbers that are attributes of callbacks."""
    plain: PlainValues
    """Of layers of torch's classes."""
    model: ModelParts | None
    followed: Collection[int]
    reads: Reads

    def holds(self, model: ModelParts, followed: Collection[int]) -> bool:
        """Whether a search would find the same."""
        same = self.model is model and self.followed == followed and not self.plain.changed(model.plain.now())
        return same and self.reads.hold()


NOTHING = Found({}, {}, {}, PlainValues([], []), None, (), Reads())


def find(run: RunState, model: ModelParts, followed: Collection[int]) -> Found:
    """Marks of all that user code remembers outside of parameters, buffers and optimizer state; `followed` are lists of
    which each share sees its own, by `id`."""
    search = _Search([*model.known, *run.streams.values()], followed)
    search.all_hooks(((name or type(part).__name__, part) for name, part in model.parts), OF_MODULE)
    for prefix, part in model.users:
        search.attributes(part, prefix)
    for callback in search.reads.objects(iter, run.callbacks):
        if is_users_class(type(callback)) or callback.changes_model:
            search.attributes(callback, prefix := f"{type(callback).__name__}.")
            numbers = [key for key, value in vars(callback).items() if isinstance(value, (int, float, type(None)))]
            search.owners |= {prefix + key: (callback, key) for key in numbers}
    search.all_hooks(model.parameters, ATTRIBUTES)
    for owner in (run.trainer, *run.user_optimizers, *(config.scheduler for config in run.schedulers)):
        search.attributes(owner, f"{type(owner).__name__}.", _OF_HANDLES)
    if run.datamodule is not None:
        for key, value in search.reads.entries(run.datamodule, _NOT_THEIRS):
            if is_watched(value):
                search.common(value, f"{type(run.datamodule).__name__}.{key}")
        search.classes(type(run.datamodule))
    search.all_hooks(((type(each).__name__, each) for each in run.optimizers.values()), _OF_OPTIMIZER)
    return Found(search.marks, search.lists, search.owners, model.plain.now(), model, followed, search.reads)


class _Search:
    """Finds marks, and goes to each container and object once."""

    def __init__(self, known: Iterable[Any], followed: Collection[int]) -> None:
        self._followed = followed
        self.reads = Reads()
        self.marks: Marks = {}
        self.lists: dict[str, Items] = {}
        self.owners: dict[str, tuple[Any, str]] = {}
        self._seen = set(map(id, known))
        self._kinds: set[type] = set()
        self._is_common = False

    def attributes(self, owner: Any, prefix: str, but: Collection[str] = _NOT_THEIRS) -> None:
        for key, value in self.reads.entries(owner, but):
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
                    self.common(self.reads.value(read), name)
            self._data_of(kind)

    def _data_of(self, kind: type) -> None:
        for key, value in self.reads.contents(vars(kind)):
            if not key.startswith("__") and isinstance(value, _OF_CLASSES):
                name = f"{kind.__name__}.{key}"
                self.marks[name] = self.marks.get(name) or self._mark(value, name, _DEPTH)

    def common(self, value: Any, name: str) -> None:
        """A value that may be as large as the data: only what tells cheaply whether a step has changed it."""
        if isinstance(value, type):
            self._data_of(value)
        elif isinstance(value, Tensor):
            self.marks[name] = self.reads.result(noted, value)
        elif isinstance(value, np.ndarray):
            self.marks[name] = self.reads.result(_of_small_array, value)
        else:
            self._is_common = True
            self.marks[name] = self._mark(value, name, 2)
            self._is_common = False

    def all_hooks(self, named: Iterable[tuple[str, Any]], kinds: Sequence[str]) -> None:
        """Those in the attributes `kinds` of parts, parameters or optimizers, most of which have none."""
        named = [*named]
        owners, attributes = [owner for _, owner in named for _ in kinds], [*kinds] * len(named)
        if self.reads.objects(_NotEmpty(owners, attributes), None):
            for (name, owner), kind in product(named, kinds):
                if held := getattr(owner, kind, None):
                    self.hooks(held, name)

    def hooks(self, hooks: dict[int, Callable[..., Any]], owner: str) -> None:
        for i, hook in self.reads.contents(hooks):
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
        read = self.reads.result
        if isinstance(value, Tensor):
            return read(noted if self._is_common else of_tensor, value)
        if isinstance(value, np.ndarray):
            return read(_shape_of, value), read(_of_small_array if self._is_common else of_array, value)
        large = isinstance(value, (list, dict, set, deque)) and len(value) > _MOST
        if large and self._is_common and id(value) not in self._followed:
            return read(len, value)
        if isinstance(value, (bytearray, array)):
            return read(_of_small_bytes, value)
        if generator_state(value) is not None:
            return read(generator_state, value)
        if isinstance(value, nn.Module):
            read(_never_same, value)
            tensors = value.state_dict(keep_vars=True).items()
            found = {key: self._mark(tensor, name, 1) for key, tensor in tensors if isinstance(tensor, Tensor)}
            updates = {path: getattr(part, "_update_count", 0) for path, part in value.named_modules()}
            return {"": updates} | found  # of metrics, whose sums are in no state dict
        if hasattr(type(value), "__next__") and place_of(value) is not None:
            return read(place_of, value)
        return self._contents_of(value, name, depth)

    def _contents_of(self, value: Any, name: str, depth: int) -> Any:
        """The mark of a container or an object."""
        if isinstance(value, dict):
            self.reads.contents(value)
        held = self.reads.objects(_contents, value) if _may_change(value) else _contents(value)
        if isinstance(value, (list, dict, tuple, deque, set, frozenset)) and len(value) > _MANY:
            self.reads.result(_all_noted, value)
        if isinstance(value, list) or (isinstance(value, deque) and value.maxlen is None):
            first = [
                item if isinstance(item, NUMBERS) else self._mark(item, f"{name}[{i}]", depth - 1)
                for i, item in enumerate(held[:_MANY])
            ]
            first += map(self._noted, held[_MANY:_MOST])
            self.lists[name] = Items(value, tuple(held), first)
            return self.lists[name]
        if isinstance(value, (dict, tuple, deque, set, frozenset)) and len(value) > _MANY:
            values = [*islice(value.values() if isinstance(value, dict) else value, _MOST)]
            inner = [(i, item) for i, item in enumerate(values) if isinstance(item, (dict, list, deque, set))][:_MANY]
            marks = [self._mark(item, f"{name}[{i}]", depth - 1) for i, item in inner]
            return Objects(tuple(held), [*marks, *map(self._noted, values)])
        if isinstance(value, (tuple, deque)):
            return {i: self._mark(item, f"{name}[{i}]", depth - 1) for i, item in enumerate(value)}
        if isinstance(value, (set, frozenset)):
            return {item if isinstance(item, NUMBERS) else id(item): None for item in value}
        parts = value.items() if isinstance(value, dict) else _parts(value)
        return {key: self._mark(item, f"{name}[{key!r}]", depth - 1) for key, item in parts}

    def _noted(self, value: Any) -> Any:
        """What torch notes of a tensor that is not known."""
        return None if id(value) in self._seen else noted(value)


class _NotEmpty:
    """Dicts of hooks that are not empty. Without any they are read again once torch has registered a hook."""

    def __init__(self, owners: list[Any], attributes: list[str]) -> None:
        self._owners, self._attributes, self._number = owners, attributes, -1

    def __call__(self, _: Any) -> list[Any]:
        if self._number == RemovableHandle.next_id:
            return []
        found = [*filter(None, map(getattr, self._owners, self._attributes, repeat(None)))]
        self._number = -1 if found else RemovableHandle.next_id
        return found


def _of_small_array(array: np.ndarray) -> Any:
    return of_array(array, _SMALL)


def _of_small_bytes(value: bytearray | array[Any]) -> Any:
    return bytes(value) if len(value) <= _SMALL else len(value)


def _shape_of(array: np.ndarray) -> Any:
    return array.shape


def _never_same(_: Any) -> Any:
    """Another object each time: what was read with it never holds."""
    return object()


def _may_change(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return value.__closure__ is not None or is_theirs(value)
    is_users = is_users_class(type(value)) and not isinstance(value, (type, partial, MethodType))
    return not isinstance(value, dict) and (is_users or isinstance(value, (list, deque, set)))


def _contents(value: Any) -> list[Any]:
    """The objects that a container or an object holds, and their names."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return [*value]
    return [*chain.from_iterable(_parts(value))]


def _all_noted(value: Any) -> list[Any]:
    """What torch notes of tensors in a large container."""
    return [*map(noted, islice(value.values() if isinstance(value, dict) else value, _MOST))]


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


def differs(one: Any, other: Any) -> bool:
    if isinstance(one, Items) and isinstance(other, Items):
        grown = one.container is other.container and starts_with(other.items[_MANY:], one.items[_MANY:])
        return not grown or len(other.items) < len(one.items) or any(map(differs, one.marks, other.marks))
    if isinstance(one, Objects) and isinstance(other, Objects):
        same = len(one.items) == len(other.items) and starts_with(one.items, other.items)
        return not same or any(map(differs, one.marks, other.marks))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differs(one[key], other[key]) for key in one)
    return differ(one, other)


def starts_with(items: Sequence[Any], first: Sequence[Any]) -> bool:
    return list(map(id, items[: len(first)])) == list(map(id, first))
