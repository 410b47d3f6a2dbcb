"""The state of an optimizer in a pipeline, where each rank has that of its own parameters: hidden from what would take
it for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.modules.absent import is_here


class HiddenState(defaultdict[Tensor, Any]):
    """Stands for `optimizer.state` where user code runs. It may be cleared, as on every rank; all else raises
    RuntimeError."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(dict)
        self.held: Any = optimizer.state
        self._name = type(optimizer).__name__

    def clear(self) -> None:
        self.held.clear()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"in a pipeline the state of {self._name} is spread over the ranks, and each has only that of its own "
            "stages; read it "
            "from a checkpoint (trainer.save_checkpoint), which holds all of it, or use strategy='ddp' or 'fsdp'"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = __eq__ = __or__ = _refuse
    __missing__ = __repr__ = __reduce__ = __copy__ = __deepcopy__ = __reversed__ = __ior__ = _refuse
    get = keys = values = items = pop = popitem = setdefault = update = copy = _refuse


def hide(optimizer: Optimizer) -> None:
    """Put a `HiddenState` in the place of the optimizer's state."""
    optimizer.state = HiddenState(optimizer)


def show(optimizer: Optimizer) -> None:
    """Undo `hide`, and drop what user code has put there meanwhile for parameters of other ranks."""
    if isinstance(optimizer.state, HiddenState):
        optimizer.state = optimizer.state.held
        return
    for parameter in [p for p in optimizer.state if not is_here(p)]:
        del optimizer.state[parameter]


@contextmanager
def shown(*optimizers: Optimizer) -> Iterator[None]:
    """While it lasts the optimizers have the state of this rank's parameters."""
    for optimizer in optimizers:
        show(optimizer)
    try:
        yield
    finally:
        for optimizer in optimizers:
            hide(optimizer)
