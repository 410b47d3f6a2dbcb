"""Parameters, gradients and optimizer state sharded over the ranks: torch's fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lockstep.strategies.mesh.options import Options
from lockstep.strategies.mesh.sharded import ShardedStrategy
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.sync.compression.compressor import Compressor


class FSDP(ShardedStrategy):
    """Fully sharded data parallelism: each rank sees its share of the global batch and keeps its share of every tensor.

    A block's parameters are gathered before it runs and freed after it, in the forward and again in the backward;
    gradients are summed and cut in one collective. Values come from rank 0, whatever the others hold.

    `replicas`: 1 cuts over all ranks; n cuts over groups of ranks / n, which hold the same (hybrid sharding).
    `wrap`, `reshard_after_forward`, `cpu_offload`, `find_unused_parameters`, `sync_every_micro_batch`,
    `low_precision_gather`, `broadcast_buffers`: as in `Options`.
    `activation_checkpointing`: recompute the blocks' activations in the backward; True for those of `wrap`, or
    which blocks.
    `compress`: send gradients between replicas, which are the slow links as a rule, in fewer bytes; see
        docs/methods/compression.md.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    def __init__(
        self,
        *,
        replicas: int = 1,
        wrap: Rule = "auto",
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: bool | Rule = False,
        find_unused_parameters: bool = False,
        sync_every_micro_batch: bool = False,
        low_precision_gather: bool | Literal["all"] = True,
        broadcast_buffers: bool | None = None,
        compress: str | Compressor | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise ValueError(f"replicas must be a whole number of at least 1, but replicas={replicas!r}")
        options = Options(
            wrap=wrap,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            find_unused_parameters=find_unused_parameters,
            sync_every_micro_batch=sync_every_micro_batch,
            low_precision_gather=low_precision_gather,
            broadcast_buffers=broadcast_buffers,
        )
        super().__init__(options, timeout_s, activation_checkpointing, compress)
        self.replicas = replicas

    @property
    def axes(self) -> Mapping[str, int | None]:
        return {"fsdp": None} if self.replicas == 1 else {"ddp": self.replicas, "fsdp": None}
