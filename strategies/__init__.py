"""Strategies: where the work runs, never what it computes."""

from strategies.imports import uncollected

with uncollected():
    from strategies.base import Loss, Strategy
    from strategies.ddp import DDP
    from strategies.deepspeed import DeepSpeed
    from strategies.dp import DataParallel
    from strategies.fsdp import FSDP
    from strategies.mesh_parallel import MeshParallel
    from strategies.model_parallel import ModelParallel
    from strategies.pipeline import Pipeline
    from strategies.registry import build
    from strategies.single import SingleDevice
    from strategies.tensor import TensorParallel

__all__ = [
    "DDP",
    "FSDP",
    "DataParallel",
    "DeepSpeed",
    "Loss",
    "MeshParallel",
    "ModelParallel",
    "Pipeline",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "build",
]
