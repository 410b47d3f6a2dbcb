"""What torch's DTensors give to user code: numbers of the whole tensor, or an error that says what to do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.strategies.launch.phase import AFTER_BACKWARD, CALLBACKS, END_OF_STEP, OPTIMIZER_STEP, current_phase
from lockstep.strategies.modules.sharded_errors import INSTEAD


def install() -> None:
    """Let torch's DTensors give global numbers. Changes torch once a process."""
    from torch.distributed.tensor import DTensor  # takes a second

    dispatcher: Any = DTensor._op_dispatcher
    if getattr(dispatcher, "_lockstep", False):
        return
    dispatcher._lockstep = True
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
    for op in _DRAWS:
        dispatcher._custom_op_handlers[op] = _draw
    DTensor.numpy = _refuse_numpy  # type: ignore[method-assign, assignment]
    for name in _writes():
        setattr(DTensor, name, _checked(getattr(Tensor, name)))

    @torch.no_grad()
    def assign(self: DTensor, value: Tensor) -> None:
        if not isinstance(value, DTensor):  # torch would keep the shard and lose the value
            raise RuntimeError(
                f"a tensor was assigned to `data` of a parameter of shape {list(self.shape)} of which this rank holds "
                "a shard; "
                f"{INSTEAD}"
            )
        if value.shape != self.shape or value.dtype != self.dtype or value.device_mesh != self.device_mesh:
            raise RuntimeError(
                f"a tensor of shape {list(value.shape)} and {value.dtype} was assigned to `data` of a sharded "
                f"parameter of shape {list(self.shape)} and {self.dtype}, or it is sharded over other ranks; assign "
                "one like it, or change the parameter before fit"
            )
        self._local_tensor.copy_(value.redistribute(placements=self.placements)._local_tensor)  # torch would lose it

    data: Any = Tensor.data
    DTensor.data = property(data.__get__, assign)  # type: ignore[assignment]


_in_steps = 0


@contextmanager
def step() -> Iterator[None]:
    """While it lasts user code has values of this rank's own samples at hand."""
    global _in_steps
    _in_steps += 1
    try:
        yield
    finally:
        _in_steps -= 1


def _number(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`.item()`, `float()` and the like: of the whole, where torch would give this rank's part. Every rank of the mesh
    calls it.

    Raises RuntimeError in a step for a sum over ranks with samples of their own: torch takes a plain number that was
    added to it, such as the loss, for the same on all of them.
    """
    tensor = args[0]
    if _in_steps:
        names = tensor.device_mesh.mesh_dim_names or ()
        sums = {name for name, place in zip(names, tensor.placements, strict=False) if place.is_partial("sum")}
        if sums & {"ddp", "fsdp"}:
            raise RuntimeError(
                "a number was taken in a step of a sum over weights that are sharded over ranks, to which values of "
                f"this rank's own samples may be added; {INSTEAD}"
            )
    with torch.no_grad():
        return op(tensor.full_tensor())


_OF_HOOKS = {AFTER_BACKWARD, OPTIMIZER_STEP, END_OF_STEP, CALLBACKS}
_aten = torch.ops.aten
_DRAWS = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.bernoulli.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
}


def _draw(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Random numbers for a DTensor: those of a model's own layers in a step, but none for weights and gradients, of
    which each rank would draw its part by itself."""
    tensor = args[0]
    names = tensor.device_mesh.mesh_dim_names or ()
    if isinstance(tensor, nn.Parameter) or {"fsdp", "ddp"} & {*names} or current_phase()[1] in _OF_HOOKS:
        raise RuntimeError(
            f"random numbers were drawn ({str(op).removesuffix('.default')}) for a tensor of shape "
            f"{list(tensor.shape)} of which this rank holds a shard, and would not be those of one process; {INSTEAD}"
        )
    handlers = type(tensor)._op_dispatcher._custom_op_handlers
    del handlers[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = _draw


def _writes() -> list[str]:
    """The methods of a tensor that write to it."""
    operators = [f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()]
    others = ("requires_grad_", "detach_", "rename_", "share_memory_")
    in_place = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in others]
    return ["__setitem__", *operators, *in_place]


def _checked(write: Any) -> Any:
    """`write`, a method of a tensor, but for a part of a sharded one that torch has copied, as other ranks hold it."""

    @functools.wraps(write)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = self
        if write is Tensor.__setitem__:
            keys = args[0] if isinstance(args[0], tuple) else args[:1]
            if all(key is None or key is ... or isinstance(key, (int, slice)) for key in keys):
                part = self[args[0]]
        whole = part._base
        if whole is not None and hasattr(whole, "_local_tensor") and not _shares(part, whole):
            what = "an assignment" if write is Tensor.__setitem__ else f"{write.__name__}()"
            raise RuntimeError(
                f"{what} was to change a part, of shape {list(part.shape)}, of a tensor of shape {list(whole.shape)} "
                f"that is sharded over ranks, and would change a copy of it; {INSTEAD}"
            )
        return write(self, *args, **kwargs)

    return checked


def _shares(part: Any, whole: Any) -> bool:
    """Whether writing to a part of a DTensor writes to this rank's shard of it."""
    mine, all_mine = (StorageWeakRef(tensor._local_tensor.untyped_storage()) for tensor in (part, whole))
    return mine.cdata == all_mine.cdata


def _refuse_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"numpy() was called on a tensor of shape {list(self.shape)} of which this rank holds a shard; {INSTEAD}"
    )
