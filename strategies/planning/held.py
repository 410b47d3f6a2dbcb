"""What a rank keeps for the parameters that it trains, wherever its engine has it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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


_HOST_BUFFERS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload",
    "accumulated_grads_in_cpu",
    "grad_partitions_flat_buffer",
)


def host_buffers_of(wrapped: nn.Module) -> list[Tensor]:
    """What DeepSpeed's optimizer, if it offloads, keeps in the host's memory beside its masters and their state."""
    optimizer = getattr(getattr(wrapped, "engine", None), "optimizer", None)
    found = [getattr(optimizer, name, None) for name in _HOST_BUFFERS]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
