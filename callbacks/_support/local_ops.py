"""Records the operations that a process runs, for the few steps that are measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LocalOps(TorchDispatchMode):
    """Calls `see(op, args, result)` for every operation on plain tensors, before autograd is applied to it.

    A DTensor is skipped, so that the operations on its local part are seen, and its collectives. Collectives that
    engines issue in C++ (DDP's reducer) go through the same dispatcher. It sees the thread in which it is entered and
    the backwards that this thread starts, and makes each operation some microseconds slower.
    """

    def __init__(self, see: Callable[[Any, tuple[Any, ...], Any], None] | None = None) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") and hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._see is not None:
            self._see(func, args, result)
        return result


def watching(*modes: AbstractContextManager[Any]) -> ExitStack:
    """Enter `modes`, until `close` of what is returned. Close in the reverse order of entering: modes are a stack.

    What torch.compile has made runs as it is written meanwhile: under a mode it would be skipped, and a function
    that is first called under one is never compiled.
    """
    stack = ExitStack()
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the import takes a second
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    for mode in modes:
        stack.enter_context(mode)
    return stack
