"""How a mesh is applied to a model: what FSDP, TensorParallel and MeshParallel take beside their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lockstep.strategies.modules.blocks import Rule, find_blocks

if TYPE_CHECKING:
    from lockstep.strategies.mesh.tensor_plan.plan import Plan


UNRULED = {
    "detect_anomaly": "detect_anomaly=True looks for NaN in gradients that are sharded, for which torch has no rule; "
    "look for it with strategy='single' or 'fsdp'"
}
"""What torch cannot do with the activations and gradients of tensor parallelism."""


@dataclass(frozen=True)
class Options:
    """Each field concerns the axes named in its first word; the others leave it alone."""

    wrap: Rule = "auto"
    """fsdp, ddp: the blocks that are gathered and freed as one. "auto": the items of lists and sequences that are more
    than a layer; a class or a name such as `"gpt.blocks.*"`, or a list of them; a function of (name, module); None: the
    model is one."""
    reshard_after_forward: bool | int | None = None
    """fsdp: free a block's parameters between its forward and backward (None and True), keep them (False: more memory,
    a third less traffic), or keep a share on groups of that many ranks (int, a divisor of the axis)."""
    cpu_offload: bool = False
    """fsdp: keep parameters, gradients and optimizer state in host memory, and step there."""
    find_unused_parameters: bool = False
    """fsdp, ddp: allow steps in which some ranks use parameters of a block that others do not; what no rank uses gets a
    gradient of zeros too, where one process would leave it without."""
    sync_every_micro_batch: bool = False
    """fsdp, ddp: exchange gradients after each micro-batch: the memory of whole gradients is saved, traffic
    multiplied."""
    low_precision_gather: bool | Literal["all"] = True
    """fsdp: in mixed precision gather blocks in the format that the forward computes in where this changes no number:
    those of linear and convolutional layers, and norms (True), or none (False). "all": every parameter but norms', and
    convert what enters a block: less memory and traffic, and other numbers than ddp's. Gradients are reduced in
    float32."""
    broadcast_buffers: bool | None = None
    """fsdp, ddp, tensor: True: rank 0's buffers overwrite the others' after each step; None: the same, but buffers that
    differ between ranks are refused, apart from statistics of BatchNorm and InstanceNorm; False: each rank keeps its
    own."""
    plan: str | Mapping[str, Any] = "auto"
    """tensor: how each layer is cut, by name: "column", "row" or one of torch's ParallelStyle. "auto" asks the modules'
    `tensor_plan()`, else finds attention and pairs of linear layers."""
    sequence_parallel: bool = False
    """tensor: between the blocks each rank holds its share of the sequence (dimension 1)."""
    loss_parallel: bool = False
    """tensor: cut the last linear layer by classes and compute cross entropy on the cut logits."""

    def __post_init__(self) -> None:
        if self.low_precision_gather not in (True, False, "all"):
            raise ValueError(
                f"low_precision_gather must be True, False or 'all', but "
                f"low_precision_gather={self.low_precision_gather!r}"
            )

    def applied_to(self, model: nn.Module, tensor: int | None) -> tuple[dict[str, nn.Module], Plan | None]:
        """The blocks of `model` by name, and the plan of `tensor` ranks, if there is that axis. Raises ValueError
        naming the layer or option that does not fit."""
        if self.find_unused_parameters and torch.__version__ < "2.13":  # as versions, not as texts
            raise ValueError(
                f"find_unused_parameters=True of sharded parameters needs torch 2.13 or later, but this is torch "
                f"{torch.__version__}; use every parameter on every rank, or strategy=DDP(find_unused_parameters=True)"
            )
        blocks = find_blocks(model, self.wrap)
        if tensor is None:
            return blocks, None
        from lockstep.strategies.mesh.tensor_plan.make import make_plan

        sequence, loss = self.sequence_parallel, self.loss_parallel
        return blocks, make_plan(model, blocks, tensor, self.plan, sequence_parallel=sequence, loss_parallel=loss)
