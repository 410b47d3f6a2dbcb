"""One process on one device."""

from __future__ import annotations

from torch import nn

from lockstep.strategies.modules.meta import materialize
from lockstep.strategies.spmd import SPMDStrategy


class SingleDevice(SPMDStrategy):
    """The model on one device of this process; nothing is exchanged."""

    single_process = True
    max_devices = 1
    sees_whole_gradients = True

    def setup_module(self, model: nn.Module) -> nn.Module:
        return super().setup_module(materialize(model)).to(self.topology.device)
