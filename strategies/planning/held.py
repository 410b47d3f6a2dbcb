"""What a rank keeps for the parameters that it trains, wherever its engine has it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lockstep.strategies.base import Strategy
from lockstep.strategies.hooks import SPMDHooks
from lockstep.strategies.modules.absent import is_here


def parameters_of(model: nn.Module) -> Iterator[Tensor]:
    """This rank's shards, and what else of the parameters is on this rank between two steps."""
    for parameter in filter(is_here, model.parameters()):
        yield parameter
        if hasattr(parameter, "ds_tensor"):  # DeepSpeed's shard
            yield parameter.ds_tensor


def gradients_of(strategy: Strategy, wrapped: nn.Module) -> list[Tensor]:
    """Those that the optimizer gets on this rank."""
    if isinstance(strategy, SPMDHooks):
        return strategy.local_gradients(wrapped)
    return [p.grad for p in wrapped.parameters() if p.grad is not None]
