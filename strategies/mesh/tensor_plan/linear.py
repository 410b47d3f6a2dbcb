"""Layers that multiply by a matrix: torch's linear layers, and those of transformers that hold it transposed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def is_transposed(layer: Any) -> bool:
    """Whether a layer is transformers' `Conv1D`, as in GPT-2, whose weight has the shape [inputs, outputs]."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(layer).__mro__
    )


def is_linear(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def is_plain(layer: Any) -> bool:
    """Whether a layer is one of these and no subclass, which may compute something else."""
    return type(layer) is nn.Linear or (is_transposed(layer) and type(layer).__name__ == "Conv1D")


def in_features(layer: Any) -> int:
    return int(layer.nx if is_transposed(layer) else layer.in_features)


def out_features(layer: Any) -> int:
    return int(layer.nf if is_transposed(layer) else layer.out_features)


def shard_transposed(layer: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Shard the weight [inputs, outputs] along `dim`, and with outputs the bias. All ranks hold the same values."""
    placements = {"weight": Shard(dim), "bias": Shard(0) if dim else Replicate()}
    for name, parameter in [*layer.named_parameters(recurse=False)]:
        shards = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(shards, requires_grad=parameter.requires_grad))


def sharded_size(layer: Any, style: str) -> tuple[str, int]:
    """Name and size of what a style shards of a layer."""
    if style == "embedding":
        return "num_embeddings", layer.num_embeddings
    return ("in_features", in_features(layer)) if style in ("row", "scatter") else ("out_features", out_features(layer))
