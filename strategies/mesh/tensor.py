"""Layers sharded over the ranks, which all see the same samples: torch's parallelize_module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.strategies.mesh.options import Options
from lockstep.strategies.mesh.sharded import ShardedStrategy
from lockstep.strategies.modules.blocks import Rule


class TensorParallel(ShardedStrategy):
    """Tensor parallelism: each rank computes its slice of the layers, for the same samples as the others.

    Attention is sharded by heads, a perceptron by its inner width; two sums over the ranks a block and direction make
    them whole. What is in no plan is repeated on every rank.

    `plan`, `sequence_parallel`, `loss_parallel`, `broadcast_buffers`, `wrap`: as in `Options`.
    `activation_checkpointing`: recompute the blocks' activations in the backward; True for those of `wrap`, or
    which blocks.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    def __init__(
        self,
        *,
        plan: str | Mapping[str, Any] = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        broadcast_buffers: bool | None = None,
        wrap: Rule = "auto",
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        options = Options(
            plan=plan,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            broadcast_buffers=broadcast_buffers,
            wrap=wrap,
        )
        super().__init__(options, timeout_s, activation_checkpointing)

    @property
    def axes(self) -> Mapping[str, int | None]:
        return {"tensor": None}
