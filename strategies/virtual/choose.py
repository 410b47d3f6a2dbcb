"""From a strategy to what runs in its place with virtual ranks."""

from __future__ import annotations

from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import DDP
from lockstep.strategies.mesh.sharded import ShardedStrategy
from lockstep.strategies.pipeline.strategy import Pipeline
from lockstep.strategies.single import SingleDevice
from lockstep.strategies.virtual.pipeline import VirtualPipeline
from lockstep.strategies.virtual.replicas import VirtualReplicas
from lockstep.strategies.virtual.sharded import VirtualSharded
from lockstep.strategies.virtual.step import VirtualStep

_REPLACED = (SingleDevice, DDP, ShardedStrategy, Pipeline)
"""Strategies that others stand for."""


def virtual(strategy: Strategy, number: int) -> Strategy:
    """The strategy, to be configured, whose numbers are bit for bit those of `number` ranks on any number of them.

    Raises ValueError for a strategy that cannot give them, and for options that let numbers depend on the ranks.
    """
    if isinstance(strategy, ShardedStrategy) and strategy.compressor is not None:
        raise ValueError(
            f"virtual_ranks={number} cannot be used with compress where parameters are sharded, as what a rank "
            "compresses is its shard; use DDP(compress=…)"
        )
    if not strategy.capabilities.bitwise:
        raise ValueError(
            f"virtual_ranks={number} needs a strategy that can add gradients in one order on any number of ranks, "
            f"which {strategy.name} cannot; use single, ddp, fsdp or pipeline, or a mesh of ddp and one of "
            "the others"
        )
    if isinstance(strategy, VirtualStep):
        strategy.virtual_ranks = number
        return strategy
    kind = type(strategy)
    ours = next(cls for cls in kind.__mro__ if cls.__module__.startswith("lockstep."))
    if isinstance(strategy, _REPLACED) and kind is not ours:
        raise ValueError(
            f"virtual_ranks={number} takes a strategy of its own in the place of {ours.__name__}, without what "
            f"{kind.__name__} adds to it; give strategy={ours.__name__}(…), remove virtual_ranks, or derive the class "
            "from VirtualStep"
        )
    if isinstance(strategy, SingleDevice):
        return VirtualReplicas(number, activation_checkpointing=strategy.activation_checkpointing, on_one_device=True)
    if isinstance(strategy, DDP):
        _refuse("sync_batchnorm", strategy.sync_batchnorm)
        _refuse("broadcast_buffers", strategy.broadcast_buffers, refused=False)
        if strategy.all_reduce_by != "auto":
            raise ValueError(
                f"virtual_ranks cannot be used with all_reduce={strategy.all_reduce_by!r}, as it adds gradients in an "
                "order of its own; remove all_reduce"
            )
    elif isinstance(strategy, ShardedStrategy):
        if "tensor" in strategy.axes:
            raise ValueError(
                f"virtual_ranks={number} cannot be used with the axis tensor, which cuts the sums within a layer by "
                "its size; use single, ddp, fsdp or pipeline, or a mesh of ddp and one of the others"
            )
        options = strategy.options
        _refuse("find_unused_parameters", options.find_unused_parameters)
        _refuse("sync_every_micro_batch", options.sync_every_micro_batch)
        _refuse("broadcast_buffers", options.broadcast_buffers, refused=False)
        if "fsdp" in strategy.axes:
            return VirtualSharded(strategy, number)
    elif isinstance(strategy, Pipeline):
        return VirtualPipeline(strategy, number)
    else:
        raise TypeError(f"{strategy.name} says that it takes virtual_ranks; derive it from VirtualStep")
    return VirtualReplicas(
        number,
        activation_checkpointing=strategy.activation_checkpointing,
        timeout_s=strategy.timeout_s,
        compressor=strategy.compressor,
    )


def _refuse(name: str, value: bool | None, refused: bool = True) -> None:
    if value is refused:
        raise ValueError(
            f"virtual_ranks cannot be used with {name}={value}, by which numbers depend on the ranks; remove it"
        )
