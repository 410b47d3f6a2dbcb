"""The numbers with which user code changes weights and gradients of which ranks hold shards, for ranks to compare.

Replicas that get other numbers drift apart, which is found. A shard has no replica: a factor that each rank draws, or
takes from its own samples, would scale each part of one tensor by another number, and leave no trace.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.strategies.mesh.user_code.operators import (
    Handler,
    by_torch,
    check_write,
    handlers,
    operators,
    put_handlers,
)

_FIRST, _EVERY = 16, 32
"""Steps that are all followed, and which ones later: to follow an operation takes longer than a small one."""


class UserNumbers:
    """Follows what is computed with shards between `begin` and `end`, which may be nested.

    What an operation writes to or returns gets a digest of the operation, the numbers that it was given and the digests
    of its tensors; ranks that have computed alike have the same for each parameter and gradient.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._digests: dict[int, tuple[StorageWeakRef, int, str, list[str]]] = {}
        """By the key of a tensor: a reference, the digest, and the last operation that changed it, with its numbers."""
        self._reported: dict[str, int] = {}
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        """Of parameters and gradients, once an operation asks for them, as they were then."""
        self._depth = self._period = self._steps = 0
        self._is_new = self._follows = False
        self._before: dict[Any, Handler] = {}
        self._handlers: dict[Any, Handler] = {}
        self._followed: dict[Any, Handler] = {}

    def begin(self) -> None:
        self._depth += 1
        if self._depth == 1 and (self._steps < _FIRST or self._steps % _EVERY == 0):
            self._follows, self._names, self._is_new = True, {}, bool(self._digests)
            self._followed = self._followed or {op: self._follow(op) for op in operators()}
            self._handlers = {**handlers(), **self._followed}
            self._before = put_handlers(self._handlers)

    def end(self) -> list[str]:
        """What has changed by other numbers than at the last call: names of parameters and gradients, with digests."""
        self._depth -= 1
        if self._depth == 0 and self._follows:
            self._follows = False
            put_handlers(self._before)
        return self.take()

    def stop(self) -> list[str]:
        """End all that has begun."""
        self._depth = min(self._depth, 1)
        return self.end() if self._depth else []

    def take(self) -> list[str]:
        """As `end`, while it lasts."""
        if not self._is_new:
            return []
        found, self._is_new = [], False
        for name, tensor in self._tensors():
            known = self._digests.get(_key(tensor))
            if known is not None and self._reported.get(name) != known[1]:
                _, self._reported[name], shown, numbers = known
                found.append(f"{name} by {shown}({', '.join(numbers)}) [{known[1]:08x}]")
        self._digests = {key: entry for key, entry in self._digests.items() if not entry[0].expired()}
        return found

    def step(self) -> None:
        """Another window of batches was computed."""
        self._steps += 1

    def renew(self) -> None:
        """Gradients are others now, by a backward of all ranks."""
        self._period += 1
        for name, tensor in self._tensors() if self._digests else ():
            if name not in self._parameters:
                self._digests.pop(_key(tensor), None)

    # ---- helpers -----------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._parameters.items():
            for of, tensor in ((name, parameter), (f"the gradient of {name}", parameter.grad)):
                if hasattr(tensor, "_local_tensor"):
                    yield of, tensor

    def _follow(self, op: Any) -> Handler:
        shown = op._schema.name.removeprefix("aten::")
        is_list, kind = shown.startswith("_foreach_"), zlib.crc32(shown.encode())
        names = [argument.name for argument in op._schema.arguments]
        writes = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]

        def note(values: Mapping[str, Any], result: Any) -> None:
            numbers: list[str] = []
            read: set[int] = set()
            digest = hash((kind, *[self._digest_of(value, read, numbers) for value in values.values()]))
            entry = digest & 0xFFFFFFFF, shown, numbers
            written = [values.get(name) for name in writes]
            for tensor in _sharded(written):
                self._put(tensor, *entry)
            for tensor in _sharded([result]):
                if _key(tensor) not in read:
                    self._put(tensor, *entry)

        def follow(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
            before = self._before.get(op)
            if before is None:
                check_write(op, args, kwargs)
                result = by_torch(op, args, kwargs, follow)
            else:
                result = before(op, args, kwargs)
                self._handlers[op] = follow
            values = dict(zip(names, args, strict=False)) | kwargs
            lists = [value for value in values.values() if isinstance(value, list | tuple)]
            for i in range(len(lists[0])) if is_list else ():
                row = {key: value[i] if isinstance(value, list | tuple) else value for key, value in values.items()}
                note(row, None if result is None else result[i])
            if not is_list:
                note(values, result)
            return result

        return follow

    def _put(self, tensor: Any, digest: int, shown: str, numbers: list[str]) -> None:
        held = _held(tensor)
        self._digests[held._cdata], self._is_new = (StorageWeakRef(held), digest, shown, numbers), True

    def _digest_of(self, value: Any, read: set[int], numbers: list[str]) -> int:
        """Of a tensor of shards its digest, whose key is added to `read`, or of a value, which is to `numbers`."""
        if hasattr(value, "_local_tensor"):
            key = _key(value)
            read.add(key)
            if key in self._digests:
                return self._digests[key][1]
            if not self._names:
                # The references keep their keys from what may be made in the place of one that is gone.
                held = [(_held(tensor), name) for name, tensor in self._tensors()]
                self._names = {each._cdata: (StorageWeakRef(each), name) for each, name in held}
            _, name = self._names.get(key, (None, None))
            return zlib.crc32(repr((name, self._period, [*value.shape])).encode())
        if isinstance(value, list | tuple):
            return hash(tuple([self._digest_of(each, read, numbers) for each in value]))
        if type(value) in (Tensor, nn.Parameter) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float | complex):
            return 0
        numbers.append(repr(value))
        return zlib.crc32(numbers[-1].encode())


def _sharded(values: list[Any]) -> list[Any]:
    flat = [each for value in values for each in (value if isinstance(value, list | tuple) else (value,))]
    return [each for each in flat if hasattr(each, "_local_tensor")]


def _key(tensor: Any) -> int:
    """What views of a tensor share; another tensor may have it once this one is gone."""
    return _held(tensor)._cdata


def _held(tensor: Any) -> Any:
    held = tensor._local_tensor
    return (held if type(held) is Tensor else getattr(held, "elem", held)).untyped_storage()
