"""Strategies: where the work runs, never what it computes."""

from lockstep.strategies.base import Loss, Strategy
from lockstep.strategies.ddp import DDP
from lockstep.strategies.deepspeed.strategy import DeepSpeed
from lockstep.strategies.dp import DataParallel
from lockstep.strategies.mesh.fsdp import FSDP
from lockstep.strategies.mesh.mesh_parallel import MeshParallel
from lockstep.strategies.mesh.tensor import TensorParallel
from lockstep.strategies.model_parallel import ModelParallel
from lockstep.strategies.pipeline.strategy import Pipeline
from lockstep.strategies.registry import build
from lockstep.strategies.single import SingleDevice
from lockstep.strategies.spmd import SPMDStrategy

__all__ = [
    "DDP",
    "FSDP",
    "DataParallel",
    "DeepSpeed",
    "Loss",
    "MeshParallel",
    "ModelParallel",
    "Pipeline",
    "SPMDStrategy",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "build",
]
