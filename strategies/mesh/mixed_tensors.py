"""What torch's DTensors give to user code: numbers of the whole tensor, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.modules.sharded_errors import INSTEAD


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


def _refuse_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"numpy() was called on a tensor of shape {list(self.shape)} of which this rank holds a shard; {INSTEAD}"
    )
