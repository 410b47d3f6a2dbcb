"""What user code meets that computes with sharded weights and gradients: global numbers, and errors that say what to
do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

INSTEAD = (
    "in a hook use whole ones, as in `with trainer.whole(module): ...`, module.grad_norm(), or gradient_clip_val to "
    "clip; "
    "for a step or an optimizer that needs them use strategy='ddp'"
)


def install() -> None:
    """Let torch's DTensors give global numbers. Changes torch once a process."""
    from torch.distributed.tensor import DTensor  # takes a second

    dispatcher: Any = DTensor._op_dispatcher
    if getattr(dispatcher, "_lockstep", False):
        return
    dispatcher._lockstep = True
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
    DTensor.numpy = _refuse_numpy  # type: ignore[method-assign, assignment]

    def assign(self: DTensor, value: Tensor) -> None:
        if not isinstance(value, DTensor):  # torch would keep the shard and lose the value
            raise RuntimeError(
                f"a tensor was assigned to `data` of a parameter of shape {list(self.shape)} of which this rank holds "
                "a shard; "
                f"{INSTEAD}"
            )
        data.__set__(self, value)

    data: Any = Tensor.data
    DTensor.data = property(data.__get__, assign)  # type: ignore[assignment]


def _number(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`.item()`, `float()` and the like: of the whole, where torch would give this rank's part. Every rank of the mesh
    calls it."""
    with torch.no_grad():
        return op(args[0].full_tensor())


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Within it errors of torch about DTensors of several meshes, or beside plain tensors, say what to do instead."""
    try:
        yield
    except Exception as error:
        better = explanation(error, what)
        if better is None:
            raise
        raise better from error


_WORDS = (
    "mixed torch.Tensor and DTensor",
    "same mesh",
    "cross mesh",
    "does not have a sharding strategy registered",
    "in-place operations that require placement changes",
)


def explanation(error: BaseException, what: str) -> RuntimeError | None:
    """What to raise in place of an error of torch about sharded tensors in `what`; None for any other error."""
    text = str(error)
    if not isinstance(error, (RuntimeError, ValueError)) or not any(words in text for words in _WORDS):
        return None
    found = re.search(r"aten\.\w+", text)
    return RuntimeError(
        f"{what} computes ({found[0] if found else text.split()[0][:40]}) with weights or gradients that are sharded "
        "over ranks "
        f"together with tensors that are whole or sharded over other ranks; {INSTEAD}"
    )


def _refuse_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"numpy() was called on a tensor of shape {list(self.shape)} of which this rank holds a shard; {INSTEAD}"
    )
