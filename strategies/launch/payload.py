"""Objects in one anonymous file: how work reaches the ranks and how a result is returned.

Functions and classes of `__main__` travel by value (cloudpickle), everything importable by name. The bytes of
tensors on the CPU and of numpy arrays are beside the pickle, and large ones are mapped, not read: any number of
processes that unpack one file share its pages until they write to them. The file has no name, so nothing is left
when the last process that holds it ends, however it ends.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import pickle
import re
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import CellType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.launch.program.functions import codes_of, variables_of

_ALIGN = 64  # what torch's own allocator gives; vector instructions are slower below it
_LARGE = 1 << 20  # bytes from which on a tensor is mapped, not read
_LONG = re.compile(rb"\x8a([\x05-\x07])")  # how pickle writes the size of an int that is an address


class CannotSend(TypeError):
    """Something that cannot be pickled was to be sent to ranks, or returned from them."""


def pack(value: Any, *, refuse_ids: bool = False) -> int:
    """Write `value` into an anonymous file and return its descriptor, which the caller closes.

    Tensors that share memory share it again after `unpack`, tied parameters stay tied. Costs one copy of the tensors'
    bytes. Raises TypeError for what cannot be pickled (a lock, an open file, a generator), and with `refuse_ids` for
    the `id()` of a parameter or layer that is sent too: it arrives with another one.
    """
    buffers: list[pickle.PickleBuffer] = []
    data, ids = _pickled(value, buffers)
    if refuse_ids:
        _refuse_ids(value, data, ids)
    parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
    numbers = RemovableHandle.next_id, len(parts), *(part.nbytes for part in parts)
    header = struct.pack(f"{len(numbers)}q", *numbers)
    fd = _anonymous_file()
    try:
        offset = _write(fd, memoryview(header), 0)
        for part in parts:
            offset = _write(fd, part, _aligned(offset, part.nbytes))
    except BaseException:
        os.close(fd)
        raise
    return fd


def unpack(fd: int) -> Any:
    """Return what `pack` wrote to `fd`. Its tensors and arrays are private and writable; tensors that were in shared
    memory are again, in memory that this process shares with those it starts.

    Large ones are views of the file, copied page by page on write, each with a map of its own: one that stays keeps no
    other. Their storages cannot be resized. Raises whatever importing or building the objects raises.
    """
    next_hook_id, num_parts = struct.unpack("2q", os.pread(fd, 16, 0))
    offset = 16 + 8 * num_parts
    parts = []
    for size in struct.unpack(f"{num_parts}q", os.pread(fd, 8 * num_parts, 16)):
        offset = _aligned(offset, size)
        if size >= _LARGE:
            part = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY, offset=offset))
        else:
            part = torch.empty(size, dtype=torch.uint8).numpy().data
            os.preadv(fd, [part], offset)
        parts.append(part)
        offset += size
    # A hook's key is the count of hooks in the process that registered it: one registered here must not take its place.
    RemovableHandle.next_id = max(RemovableHandle.next_id, next_hook_id)
    return pickle.loads(parts[0], buffers=parts[1:])


def _aligned(offset: int, size: int) -> int:
    """Where a part of this size begins that follows `offset`."""
    alignment = mmap.ALLOCATIONGRANULARITY if size >= _LARGE else _ALIGN
    return -(-offset // alignment) * alignment


def dumps(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Pickle as `pack` does; with `buffers` the bytes of tensors and arrays are appended there, not copied into the
    result."""
    return _pickled(value, buffers)[0]


def _pickled(value: Any, buffers: list[pickle.PickleBuffer] | None) -> tuple[bytes, set[int]]:
    """The pickle, and the `id()` of each parameter and layer in it."""
    file = io.BytesIO()
    pickler = Pickler(file, None if buffers is None else buffers.append)
    try:
        pickler.dump(value)
    except (pickle.PickleError, TypeError, AttributeError, NotImplementedError) as error:
        where, found = _culprit(value, "", set()) or ("", value)
        of_torch = isinstance(error, NotImplementedError) and len(error.args) == 2  # the iterator of a DataLoader
        why = error.args[0].format(error.args[1]) if of_torch else error
        raise CannotSend(
            f"Everything that is sent to or returned from ranks must be picklable, but {why}"
            + (f" ({where} is a {type(found).__qualname__})" if where else "")
            + ": create it on the rank, or remove it"
        ) from error
    return file.getvalue(), pickler.ids


def _refuse_ids(value: Any, data: bytes, ids: set[int]) -> None:
    longs = ((match.end(), match.end() + match[1][0]) for match in _LONG.finditer(data))
    ids = ids.intersection(int.from_bytes(data[start:end], "little") for start, end in longs)
    if ids:
        raise TypeError(
            f"{_holder(value, ids) or 'what is sent to ranks'} holds the id() of a parameter or layer, which is "
            "another one on each rank; keep names instead, or call id() in configure_optimizers, for a local variable"
        )


def _holder(value: Any, ids: set[int]) -> str:
    """The attribute that holds one of these, such as `Net.slow`; empty where none is found."""
    places, seen = [("", value)], set[int]()
    for name, item in places:  # grows
        is_container = isinstance(item, (list, tuple, set, frozenset, Mapping))
        if any(type(number) is int and number in ids for number in (item if is_container else (item,))):
            return name
        if id(item) not in seen and not isinstance(item, ModuleType):
            seen.add(id(item))
            with suppress(Exception):  # pickled in another way: what it holds has no name here
                places += _children(item, name)
    return ""


def _culprit(value: Any, name: str, seen: set[int]) -> tuple[str, Any] | None:
    """The innermost attribute or item that cannot be pickled, such as `loaders['train'].dataset.lock`; None if `value`
    cannot be pickled only because of what refers to it."""
    seen.add(id(value))
    refers_back = False
    for child_name, child in _children(value, name):
        if id(child) in seen:
            refers_back = True
            continue
        try:
            Pickler(io.BytesIO(), lambda buffer: None).dump(child)
        except Exception:
            if found := _culprit(child, child_name, seen):
                return found
            refers_back = True
    return None if refers_back else (name, value)


def _children(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            ours = isinstance(item, (list, tuple)) or type(item).__module__.startswith("lockstep.")
            yield f"{name}[{i}]" if name else "" if ours else type(item).__qualname__, item
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r:.40}]", item) for key, item in value.items())
    elif isinstance(value, FunctionType):
        names = {name for code in codes_of(value) for name in code.co_names}
        yield from ((key, item) for key, item in value.__globals__.items() if key in names)
        yield from ((key, item) for key, _, item in variables_of(value))
    elif isinstance(value, type):
        if value.__module__ == "__main__":  # else it is sent by its name
            yield from ((f"{value.__qualname__}.{key}", item) for key, item in vars(value).items())
    else:
        yield type(value).__qualname__, type(value)
        state = None
        with suppress(Exception):  # which is then why it cannot be pickled
            state = value.__getstate__() if hasattr(type(value), "__getstate__") else getattr(value, "__dict__", None)
        if isinstance(state, dict):
            yield from ((f"{name}.{key}" if name else key, item) for key, item in state.items())


class Pickler(cloudpickle.Pickler):
    """Takes storages out of torch's own pickling of tensors, so that every kind of tensor keeps its way of being
    rebuilt."""

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], object] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.ids = set[int]()
        """`id()` of the parameters and layers."""
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        """By `id()` the variables that functions close over, each with an empty one that is sent in its place first."""

    def _function_getnewargs(self, func: FunctionType) -> tuple[Any, ...]:
        """By itself cloudpickle gives each function variables of its own, where `nonlocal` changes those of several."""
        *given, empty = super()._function_getnewargs(func)
        cells = zip(func.__closure__ or (), empty or (), strict=True)
        shared = tuple(self._cells.setdefault(id(cell), (cell, other))[1] for cell, other in cells)
        return *given, empty and shared

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.nn.Module, torch.nn.Parameter)):
            self.ids.add(id(obj))
        # By identity of the storage, which pickle's memo keeps: that is what preserves sharing between tensors.
        # What is on a GPU arrives on the CPU: which device it is to be on is known to the rank alone.
        if type(obj) is torch.storage.TypedStorage and obj._untyped_storage.device.type in ("cpu", "cuda"):
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if type(obj) is torch.UntypedStorage and obj.device.type in ("cpu", "cuda"):
            is_shared = obj.device.type == "cpu" and obj.is_shared()
            return _untyped_storage, (pickle.PickleBuffer(_bytes_of(obj.cpu())) if obj.nbytes() else None, is_shared)
        # torch cannot pickle the dtypes that it added last (uint16, float8): hand them over as integers of their width.
        if (
            type(obj) is torch.Tensor
            and not obj.is_quantized
            and obj.dtype not in _PICKLED
            and obj.device.type == "cpu"
        ):
            return _viewed, (obj.detach().view(_INTEGERS[obj.itemsize]), obj.dtype, obj.requires_grad)
        # The hooks by which transformers records outputs refer to a variable of their module.
        recording = sys.modules.get("transformers.utils.output_capturing")
        if recording is not None and obj is getattr(recording, "_active_collector", recording):
            return getattr, (recording, "_active_collector")
        if isinstance(obj, functools._lru_cache_wrapper) and not _is_found_by_name(obj):
            return _cached, (obj.cache_parameters(),), (obj.__wrapped__, vars(obj)), None, None, _set_cached
        if isinstance(obj, FunctionType) and _is_compiled(obj) and not _is_found_by_name(obj):
            raise pickle.PicklingError(f"{obj.__qualname__} is compiled, move it to a file that the program imports")
        if type(obj) is functools.cached_property:  # which has a lock of its own before Python 3.12
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj) in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
            return type(obj), (), None, None, iter([*obj.items()])
        # By itself torch leaves the hooks of a tensor behind, and refuses modules with parametrizations.
        if isinstance(obj, torch.Tensor) and obj.is_leaf and _hooks_of(obj):
            made = obj.__reduce_ex__(5)
            if len(made) == 2:
                return *made, _hooks_of(obj), None, None, _set_hooks
        if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
            plain = type(obj).__mro__[1]
            own = any("__getstate__" in vars(base) for base in plain.__mro__ if base is not object)
            state = plain.__getstate__(obj) if own else dict(vars(obj))  # type: ignore[attr-defined]
            return _new, (plain,), state, None, None, _set_parametrized
        made = super().reducer_override(obj)
        by_name = isinstance(obj, type) or type(obj) in self.dispatch_table
        if made is NotImplemented and not by_name and _forwards(type(obj)):
            return *obj.__reduce_ex__(5), _set_state
        # cloudpickle leaves behind where a class was defined, by which callbacks find their state.
        if isinstance(obj, type) and isinstance(made, tuple) and len(made) > 2:
            made[2][0]["__qualname__"] = obj.__qualname__
        return made


_COMPILED = "_torchdynamo_orig_callable"
"""What torch.compile sets on functions that it returns."""
_PICKLED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _hooks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The users' hooks of a tensor, by the attribute in which torch keeps them."""
    found = {name: getattr(tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    return {name: hooks for name, hooks in found.items() if hooks}


def _set_hooks(tensor: torch.Tensor, hooks: dict[str, Any]) -> None:
    for name, found in hooks.items():
        setattr(tensor, name, found)


class _Later:
    """A function that is there once what refers to it is."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _is_compiled(function: FunctionType) -> bool:
    """By torch.compile, which marks what `torch.compiler.disable` returns in the same way."""
    return hasattr(function, _COMPILED) and not getattr(function, "_torchdynamo_disable", False)


def _is_found_by_name(function: Any) -> bool:
    """Whether an import gives this function: not in `__main__`, nor within another function."""
    found: Any = None if function.__module__ == "__main__" else sys.modules.get(function.__module__)
    for name in getattr(function, "__qualname__", "").split("."):  # a partial has none
        found = getattr(found, name, None)
    return found is function


def _cached(parameters: dict[str, Any]) -> Any:
    """An empty cache, as a process has it that imports the function."""
    return functools.lru_cache(**parameters)(_Later())


def _set_cached(cached: Any, state: tuple[Callable[..., Any], dict[str, Any]]) -> None:
    cached.__wrapped__.function, attributes = state
    vars(cached).update(attributes)


def _forwards(cls: Any) -> bool:
    """Whether to give objects of a class their state without asking them for `__setstate__`: a `__getattr__` that hands
    on to an attribute, which is not there yet, would call itself without end."""
    plain = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
    return plain and hasattr(cls, "__getattr__") and not hasattr(cls, "__setstate__")


def _set_state(value: Any, state: Any) -> None:
    """As pickle does it."""
    held, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if held:
        object.__getattribute__(value, "__dict__").update(held)
    for name, item in (slots or {}).items():
        setattr(value, name, item)


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _set_parametrized(module: torch.nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


def _bytes_of(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_ubyte]:
    """A view of the memory of a storage on the CPU, which lives as long as the view."""
    view = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    view.storage = storage  # type: ignore[attr-defined]
    return view


def _viewed(tensor: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return tensor.view(dtype).requires_grad_(requires_grad)


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped_storage(buffer: Any, is_shared: bool) -> torch.UntypedStorage:
    if buffer is None:
        return torch.UntypedStorage(0)
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    if is_shared:
        return storage.share_memory_()
    return storage.clone() if storage.nbytes() < _LARGE else storage  # torch resizes only what it has allocated


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux: memory that needs no /dev/shm, which is tiny in many containers
        return os.memfd_create("lockstep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(fd: int, data: memoryview, offset: int) -> int:
    """Write all of `data` at `offset` (one call writes at most 2 GiB); return the offset behind it."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
    return offset
