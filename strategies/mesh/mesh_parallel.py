"""Several kinds of parallelism at once, on a mesh of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lockstep.strategies.mesh.mesh import parse
from lockstep.strategies.mesh.options import Options
from lockstep.strategies.mesh.sharded import ShardedStrategy
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.sync.compression.compressor import Compressor


class MeshParallel(ShardedStrategy):
    """Several kinds of parallelism at once, such as `"fsdp=2,tensor=2"` on four ranks.

    `axes`: names and sizes of the axes ddp, fsdp and tensor, in any order; ranks are numbered with tensor
        innermost and ddp outermost. One axis may have no size and takes the ranks that are left: `"fsdp,tensor=2"`.

    The other options are those of FSDP and TensorParallel, see `Options`; of FSDP's, the axis ddp takes `wrap`,
    `find_unused_parameters` and `sync_every_micro_batch` as well.
    `compress`: along ddp, of a mesh of ddp and fsdp, send gradients in fewer bytes; see docs/methods/compression.md.
    """

    def __init__(
        self,
        axes: str,
        *,
        wrap: Rule = "auto",
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: bool | Rule = False,
        find_unused_parameters: bool = False,
        sync_every_micro_batch: bool = False,
        low_precision_gather: bool | Literal["all"] = True,
        broadcast_buffers: bool | None = None,
        plan: str | Mapping[str, Any] = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        compress: str | Compressor | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._parsed = parse(axes)
        if "pipeline" in self._parsed:
            raise ValueError(
                f"MeshParallel has the axes ddp, fsdp and tensor, but axes={axes!r} has pipeline; use "
                "strategy='pipeline', or leave the axis out"
            )
        options = Options(
            wrap=wrap,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            find_unused_parameters=find_unused_parameters,
            sync_every_micro_batch=sync_every_micro_batch,
            low_precision_gather=low_precision_gather,
            broadcast_buffers=broadcast_buffers,
            plan=plan,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
        )
        super().__init__(options, timeout_s, activation_checkpointing, compress)

    @property
    def axes(self) -> Mapping[str, int | None]:
        return self._parsed
