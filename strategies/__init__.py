"""Strategies: where the work runs, never what it computes."""

from typing import TYPE_CHECKING

from lockstep._lazy import exports

if TYPE_CHECKING:
    from lockstep.strategies.base import Loss, Strategy
    from lockstep.strategies.ddp import DDP
    from lockstep.strategies.deepspeed.strategy import DeepSpeed
    from lockstep.strategies.dp.strategy import DataParallel
    from lockstep.strategies.mesh.fsdp import FSDP
    from lockstep.strategies.mesh.mesh_parallel import MeshParallel
    from lockstep.strategies.mesh.tensor import TensorParallel
    from lockstep.strategies.methods.diloco import DiLoCo
    from lockstep.strategies.methods.federated.clients import dirichlet
    from lockstep.strategies.methods.federated.strategy import Federated
    from lockstep.strategies.methods.local_sgd import LocalSGD
    from lockstep.strategies.methods.parameter_server.strategy import ParameterServer
    from lockstep.strategies.model_parallel import ModelParallel
    from lockstep.strategies.pipeline.strategy import Pipeline
    from lockstep.strategies.registry import build
    from lockstep.strategies.single import SingleDevice
    from lockstep.strategies.spmd import SPMDStrategy
    from lockstep.strategies.sync.compression.compressor import Compressor, Encoding
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "base": ["Loss", "Strategy"],
            "ddp": ["DDP"],
            "deepspeed.strategy": ["DeepSpeed"],
            "dp.strategy": ["DataParallel"],
            "mesh.fsdp": ["FSDP"],
            "mesh.mesh_parallel": ["MeshParallel"],
            "mesh.tensor": ["TensorParallel"],
            "methods.federated.strategy": ["Federated"],
            "methods.federated.clients": ["dirichlet"],
            "methods.parameter_server.strategy": ["ParameterServer"],
            "methods.diloco": ["DiLoCo"],
            "methods.local_sgd": ["LocalSGD"],
            "model_parallel": ["ModelParallel"],
            "pipeline.strategy": ["Pipeline"],
            "registry": ["build"],
            "single": ["SingleDevice"],
            "spmd": ["SPMDStrategy"],
            "sync.compression.compressor": ["Compressor", "Encoding"],
        },
    )

__all__ = [
    "DDP",
    "FSDP",
    "Compressor",
    "DataParallel",
    "DeepSpeed",
    "DiLoCo",
    "Encoding",
    "Federated",
    "LocalSGD",
    "Loss",
    "MeshParallel",
    "ModelParallel",
    "ParameterServer",
    "Pipeline",
    "SPMDStrategy",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "build",
    "dirichlet",
]
