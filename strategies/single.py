"""One process on one device."""

from __future__ import annotations

from torch import nn

from lockstep.strategies.modules.meta import materialise
from lockstep.strategies.spmd import EagerStrategy


class SingleDevice(EagerStrategy):
    """The model on one device of this process; nothing is exchanged."""

    single_process = True
    max_devices = 1
    sees_whole_gradients = True

    def place(self, model: nn.Module) -> nn.Module:
        return super().place(materialise(model)).to(self.device)
