"""One process on one device."""

from __future__ import annotations

from torch import nn

from lockstep.strategies.base import Capabilities
from lockstep.strategies.spmd import SPMDStrategy


class SingleDevice(SPMDStrategy):
    """The model on one device of this process; nothing is exchanged."""

    single_process = True
    max_devices = 1
    sees_whole_gradients = True
    capabilities = Capabilities(bitwise=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model.to(self.topology.device)
