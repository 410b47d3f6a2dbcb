"""Objects of any class, of which only pickle knows what they hold: what tells whether one was changed, and how a
process takes over what another has made of it."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.hooks import RemovableHandle

from lockstep.callbacks.base import Callback
from lockstep.strategies.launch import payload
from lockstep.strategies.launch.program.values import put_attribute, put_attributes, slots
from lockstep.strategies.sync.contents import Sample, sample_of
from lockstep.trainer.hparams import Namespace
from lockstep.trainer.kept.fields import fields
from lockstep.trainer.kept.identity import names_of
from lockstep.trainer.kept.owners import is_users_object, parts, with_networks
from lockstep.trainer.kept.values import MOST_ITEMS, SAVED, STATEFUL, Mark, Marks, filled, is_data, is_savable, mark_of

_MOST_BYTES, _MOST_PARTS = 2**26, 2**16
"""Of larger objects, and of those that hold more others, only some parts are read."""
_SAMPLE = b"a sample: "
_ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes})
_OF_PROCESS = ("_thread", "threading", "multiprocessing", "concurrent", "lockstep", "socket", "subprocess", "logging")
"""Packages whose objects belong to the process that has made them."""
_OTHERWISE = (*SAVED, Tensor, *STATEFUL, Dataset, DataLoader, Sampler, Callback, RemovableHandle)
"""Objects that are known in other ways."""
_HPARAMS = "_hparams"
"""Made, with nothing in it, when `hparams` is first read, as the first save does."""
_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)


class Pickler(payload.Pickler):
    """Names what the program knows."""

    known: Mapping[int, str]

    def persistent_id(self, obj: Any) -> Any:
        return self.known.get(id(obj))


class _TooLarge(pickle.PicklingError):
    """Pickling it would copy more than is read of one object."""


class _Strict(Pickler):
    """Refuses what another process would not have, or not as it is here, and what is too much to be read."""

    is_limited = True
    _parts = 0

    def persistent_id(self, obj: Any) -> Any:
        self._parts += 1
        kind: Any = type(obj)
        if self.is_limited and (self._parts > _MOST_PARTS or _is_large(obj, kind)):
            raise _TooLarge
        if kind in _ATOMS:  # most of what is in large lists
            return None
        name = super().persistent_id(obj)
        if name is None and self.is_limited and kind in _KINDS and len(obj) > _MOST_PARTS:
            raise _TooLarge  # at once, as it would be after so many of its items
        if name is None and _is_of_process(kind):
            raise pickle.PicklingError(f"a {kind.__qualname__} belongs to its process")
        return name

    def reducer_override(self, obj: Any) -> Any:
        made = super().reducer_override(obj)
        if issubclass(type(obj), (type, FunctionType)) and isinstance(made, tuple) and len(made) > 2:  # not by its name
            raise pickle.PicklingError(f"{obj.__qualname__} is another one in each process")
        return made


def is_opaque(value: Any) -> bool:
    """Whether it may be an object whose content only pickle knows: not data, nor what is known in other ways."""
    is_empty = isinstance(value, Namespace) and not value  # as reading `hparams` makes it
    return not isinstance(value, _OTHERWISE) and not is_data(value) and not is_empty


def _is_large(value: Any, kind: type) -> bool:
    """Whether pickling it would copy more than is known of one object, such as a file that is mapped or what a GPU
    holds."""
    if kind is torch.UntypedStorage:
        return value.nbytes() > _MOST_BYTES
    return issubclass(kind, np.ndarray) and value.nbytes > _MOST_BYTES


@functools.cache
def _is_of_process(kind: Any) -> bool:
    if issubclass(kind, (type, FunctionType)):
        return False
    if issubclass(kind, STATEFUL) or (issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter)):
        return True
    module = str(kind.__module__)
    return module.startswith(("torch.distributed", "torch._C._distributed")) or module.partition(".")[0] in _OF_PROCESS


class _Digest(io.RawIOBase):
    """A file that keeps nothing but a checksum of what is written to it."""

    def __init__(self, most: int | None) -> None:
        self._hash, self._size, self._most = hashlib.blake2b(digest_size=16), 0, most

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._size += size
        if self._most is not None and self._size > self._most:
            raise _TooLarge
        self._hash.update(data)
        return size

    def digest(self) -> bytes:
        return self._hash.digest()


def fingerprint(value: Any, known: Mapping[int, str], samples: bool = False) -> bytes | None:
    """What tells whether an object was changed in this process; None of one that is large and no network, or that
    another process could not have. `known`: by id the names of what both have. `samples`: of what is large it tells
    what some of its parts are."""
    file = _Digest(None if isinstance(value, nn.Module) else _MOST_BYTES)
    pickler = _Strict(file, lambda buffer: file.write(buffer.raw()) < 0)  # type: ignore[arg-type]
    pickler.known, pickler.is_limited = known, not isinstance(value, nn.Module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # also of iterators, which Python stops pickling with 3.14
        try:
            pickler.dump(value)
        except _TooLarge:
            return _SAMPLE + bytes(str(sample_of(value, MOST_ITEMS, known).number), "ascii") if samples else None
        except Exception:  # whatever the code of its class raises
            return None
    return file.digest()


def is_sample(print: bytes) -> bool:
    """Whether a `fingerprint` is of a large object."""
    return print.startswith(_SAMPLE)


def marks_of(
    owners: Sequence[tuple[str, Any]], module: nn.Module, of_run: Sequence[Any], metrics: Mapping[str, Iterable[Any]]
) -> dict[str, Marks]:
    """What tells later which attributes of owners, by name, were changed. `of_run`: the optimizers and schedulers of
    the run; `metrics`: what else is saved by itself."""
    own = (vars(each).get(name) for each in of_run for name in ("state", "param_groups"))  # for wrappers
    known = {id(each) for each in (*of_run, *own)} - {id(None)}
    names = functools.cache(lambda: names_of(owners, module, metrics, of_run))
    return {
        path: Marks(
            owner,
            {
                name: mark_by_content(value, names)
                for name, value in with_networks(owner, module).items()
                if (isinstance(owner, Namespace) or name.isidentifier())
                and (name != _HPARAMS or value)
                and not known.issuperset(map(id, parts(value)))
            },
        )
        for path, owner in owners
    }


def mark_by_content(value: Any, known: Callable[[], Mapping[int, str]]) -> Mark:
    """`mark_of`; of an object that a checkpoint does not hold also with its `fingerprint`, after what it is."""
    mark = mark_of(value, MOST_ITEMS)
    if is_savable(mark) or isinstance(value, (*_OTHERWISE, nn.Module)) or is_users_object(value):
        return mark
    made = fingerprint(value, known(), samples=True)
    if made is None or (is_sample(made) and isinstance(mark[1], Sample)):
        return mark
    return None, [id(value), made]


def is_in_place(before: Mark, now: Mark) -> bool:
    """Whether marks of `mark_by_content` that differ are of one object."""
    return (of := _marked(before[1])) is not None and of == _marked(now[1])


def _marked(content: Any) -> int | None:
    """The id of the object, if a mark has it."""
    return content.of if isinstance(content, Sample) else content[0] if isinstance(content, list) else None


def arrives(value: Any, known: Mapping[int, str], named: Mapping[str, Any]) -> bool:
    """Whether it can be made again of its pickle, as of a hook's handle that was removed it cannot. `named`: what is
    `known`."""
    buffers: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Unpickler((dumped(value, known, buffers), buffers), named).load()
        except Exception:  # whatever the code of its class raises
            return False
    return True


def dumped(found: Any, known: Mapping[int, str], buffers: list[Any]) -> bytes:
    file = io.BytesIO()
    pickler = Pickler(file, buffers.append)
    pickler.known = known
    pickler.dump(found)
    return file.getvalue()


class Unpickler(pickle.Unpickler):
    def __init__(self, packed: tuple[bytes, list[Any]], known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(packed[0]), buffers=packed[1])
        self._known = known

    def persistent_load(self, name: Any) -> Any:
        return self._known[name]


class Adopted:
    """Gives objects of this process the content of those that another one has sent, and keeps who is who."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        """`own`: what was sent by its name."""
        self._is: dict[int, tuple[Any, Any]] = {id(each): (each, each) for each in own.values()}
        """By id what was sent, and what it is here."""
        self._taken = {*self._is}

    def __call__(self, now: Any, value: Any) -> Any:
        """`value`, in the object that is there `now` if it is of the same type."""
        if now is value or id(value) in self._is:
            return self._is.get(id(value), (value, value))[1]
        kind: Any = type(value)
        if type(now) is not kind or id(now) in self._taken:
            self._is[id(value)] = value, value
            return value
        base: Any = next((each for each in _KINDS if isinstance(now, each)), None)
        if isinstance(now, np.memmap) and now.shape == value.shape and now.flags.writeable:
            now[...] = value
            return now
        if base is None and not _is_plain(kind):
            return filled(now, value)
        self._is[id(value)] = value, now
        self._taken.add(id(now))
        if base is not None:
            self._fill(base, now, value)
        held = fields(value)
        if isinstance(now, defaultdict):
            now.default_factory = value.default_factory
        if held or fields(now):
            before = fields(now)
            made = {name: self(before.get(name), item) for name, item in [*held.items()]}
            if getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None):  # Python 3.10 has none
                put_attributes(now, made, fields)
            else:  # which may have sent less than it holds
                for name, item in made.items():
                    put_attribute(now, name, item)
        return now

    def _fill(self, base: Any, now: Any, value: Any) -> None:
        """By no code of the class of the user's."""
        if issubclass(base, dict):
            items = {key: self(base.get(now, key), item) for key, item in base.items(value)}
            base.clear(now)
            dict.update(now, items) if base is dict else base.update(now, items)
            return
        before, content = [*base.__iter__(now)], [*base.__iter__(value)]
        if base is not set:
            content = [self(before[i] if i < len(before) else None, item) for i, item in enumerate(content)]
        base.clear(now)
        base.update(now, content) if base is set else base.extend(now, content)


def _is_plain(kind: Any) -> bool:
    """Whether all that its objects hold is in attributes."""
    if issubclass(kind, (nn.Module, Tensor, type, torch.Generator)) or not (kind.__dictoffset__ or slots(kind)):
        return False
    if (kind.__reduce_ex__, kind.__reduce__) != (object.__reduce_ex__, object.__reduce__):
        return False
    for name in ("__getstate__", "__setstate__"):  # one written in C keeps what has no name
        found = getattr(kind, name, None)
        if not isinstance(found, (FunctionType, NoneType)) and found is not getattr(object, name, None):
            return False
    return not any(hasattr(kind, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
