"""Torch's operators on DTensors, in whose place something else can be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.strategies.modules.sharded_errors import INSTEAD

Handler = Callable[[Any, tuple[Any, ...], Any], Any]


def handlers() -> dict[Any, Handler]:
    """What is called in the place of operators."""
    from torch.distributed.tensor import DTensor  # takes a second

    dispatcher: Any = DTensor._op_dispatcher
    found: dict[Any, Handler] = dispatcher._custom_op_handlers
    return found


_before: dict[Any, Handler] = {}


def put_handlers(others: dict[Any, Handler]) -> dict[Any, Handler]:
    """Call these from now on; return those before."""
    from torch.distributed.tensor import DTensor

    global _before
    dispatcher: Any = DTensor._op_dispatcher
    _before = handlers()
    dispatcher._custom_op_handlers = others
    return _before


def by_torch(op: Any, args: Sequence[Any], kwargs: Any, handler: Handler) -> Any:
    """What torch does with a DTensor where `handler` is to be called for it."""
    held = handlers()
    held.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        held[op] = handler


def operators(names: Iterable[str] = ()) -> Iterator[Any]:
    """Those of these names, by default all that torch's functions and methods are made of."""
    packets: list[Any] = [getattr(torch.ops.aten, name, None) for name in names or _all_names()]
    for packet in packets:
        yield from (
            (getattr(packet, overload) for overload in packet.overloads()) if hasattr(packet, "overloads") else ()
        )


def _all_names() -> set[str]:
    names = {*dir(Tensor), *dir(torch), *dir(nn.functional), *(f"{name}_" for name in dir(nn.functional))}
    for prefix, module in (("linalg", torch.linalg), ("special", torch.special), ("fft", torch.fft)):
        names |= {f"{prefix}_{name}" for name in dir(module)}
    return names


_watches_writes = False


def watch_writes() -> None:
    """From now on check each operation that writes."""
    global _watches_writes
    if not _watches_writes:
        _watches_writes, writes = True, [op for op in operators() if op._schema.is_mutable]
        for held in (handlers(), _before):  # which come back
            held.update({op: _write for op in writes if op not in held})


def _write(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    check_write(op, args, kwargs)
    return by_torch(op, args, kwargs, _write)


def check_write(op: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """Raise RuntimeError if `op` is to write to a part of a sharded tensor that is a copy of what other ranks hold."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[i] if i < len(args) else kwargs.get(argument.name)
        for part in written if isinstance(written, list | tuple) else (written,):
            whole = None if part is None else part._base
            if whole is not None and hasattr(whole, "_local_tensor") and not _shares(part, whole):
                name = op._schema.name.removeprefix("aten::")
                raise RuntimeError(
                    f"{'an assignment or ' if name in ('copy_', 'fill_') else ''}{name}() was to change a part, of "
                    f"shape {list(part.shape)}, of a tensor of shape {list(whole.shape)} that is sharded over ranks, "
                    f"and would change a copy of it; {INSTEAD}"
                )


def _shares(part: Any, whole: Any) -> bool:
    """Whether writing to a part of a DTensor writes to this rank's shard of it."""
    return memory(part._local_tensor).cdata == memory(whole._local_tensor).cdata


def memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
