"""What user code meets that computes with sharded weights and gradients: global numbers, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

INSTEAD = (
    "in a hook look at whole ones, as in `with trainer.whole(module): ...`, or take module.grad_norm(); "
    "for a step or an optimizer that needs them use strategy='ddp'"
)


def install() -> None:
    """Let torch's DTensors give global numbers. Changes torch once a process."""
    dispatcher: Any = DTensor._op_dispatcher
    if getattr(dispatcher, "_lockstep", False):
        return
    dispatcher._lockstep = True
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
    DTensor.numpy = _refuse_numpy  # type: ignore[method-assign, assignment]


def _number(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`.item()`, `float()` and the like: of the whole, where torch would give this rank's part. Every rank of the mesh calls it."""
    with torch.no_grad():
        return op(args[0].full_tensor())


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Within it errors of torch about DTensors of several meshes, or beside plain tensors, say what to do instead."""
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        text = str(error)
        if not any(words in text for words in ("mixed torch.Tensor and DTensor", "same mesh", "cross mesh")):
            raise
        raise RuntimeError(
            f"{what} computes ({text.split()[0][:40]}) with weights or gradients that are sharded over ranks together with tensors "
            f"that are whole or sharded over other ranks; {INSTEAD}"
        ) from error


def _refuse_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"numpy() was called on a tensor of shape {list(self.shape)} of which this rank holds a shard; {INSTEAD}"
    )
