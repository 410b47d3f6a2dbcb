"""ChannelsLast: the memory layout that convolutions are fastest in on many devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class ChannelsLast(Callback):
    """Lays out 4-dimensional parameters as NHWC in memory; convolutions then compute and hand on in that layout.

    Shapes, names and checkpoints stay as they are, and numbers up to rounding. Set before the strategy places the
    module. Raises ValueError where it would do nothing: for a module without such a parameter, and under fsdp, tensor
    parallelism and DeepSpeed, which lay out parameters themselves.
    Source: https://pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if not any(parameter.dim() == 4 for parameter in module.parameters()):
            raise ValueError(
                "ChannelsLast changes the memory format of 4-dimensional parameters, such as those of convolutions, "
                f"but {type(module).__name__} has none; remove it"
            )
        if not trainer.strategy.capabilities.preserves_memory_format:
            name = trainer.strategy.name
            raise ValueError(
                f"ChannelsLast has no effect under strategy {name}, which sets the memory format itself; remove it, or "
                "use strategy='ddp'"
            )
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
