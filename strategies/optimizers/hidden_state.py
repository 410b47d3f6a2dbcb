"""The state of an optimizer whose parts are on several ranks, as user code finds it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer


class HiddenState(defaultdict[Tensor, Any]):
    """Stands for `optimizer.state` where user code runs. It may be cleared, as on every rank; all else raises
    RuntimeError.

    `why`: why this rank does not have all of it, as a clause with {} for the optimizer's class.
    """

    def __init__(self, optimizer: Optimizer, why: str) -> None:
        super().__init__(dict)
        self.held: Any = optimizer.state
        self.times_cleared = 0
        self._why = why.format(type(optimizer).__name__)

    def clear(self) -> None:
        self.times_cleared += 1
        self.held.clear()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._why}; read it from a checkpoint (trainer.save_checkpoint), which holds all of it, or use "
            "strategy='ddp'"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = __eq__ = __or__ = _refuse
    __missing__ = __repr__ = __reduce__ = __copy__ = __deepcopy__ = __reversed__ = __ior__ = _refuse
    get = keys = values = items = pop = popitem = setdefault = update = copy = _refuse
