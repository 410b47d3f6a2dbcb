"""DeepSpeed's engine, and the environment variables that it reads."""

from __future__ import annotations

import io
import os
import warnings
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.strategies.launch import environment


def initialize(
    module: nn.Module, optimizer: Optimizer, config: dict[str, Any], device: torch.device, index: int
) -> Any:
    """DeepSpeed's engine around `module`. Every rank calls it, with the index of its device."""
    accelerator = {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")} if device.type == "cpu" else {}
    with environment.variables(place_of(index) | accelerator), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        # An operator for inference, which would be compiled here (45 s, and not without g++). Asking which
        # operators could be compiled tries the compiler, so the answer is put in its place.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        with redirect_stdout(io.StringIO()):
            engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=config, dist_init_required=False
            )
    return engine


def place_of(device_index: int) -> dict[str, str | None]:
    """LOCAL_RANK as DeepSpeed reads it, also in each forward of ZeRO-3: the index of the rank's device. Not every
    launcher sets it, and a rank that sees one device only has its place on the node there."""
    names = ["LOCAL_RANK", *({"OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys())]  # which DeepSpeed wants to be equal
    return dict.fromkeys(names, str(device_index))
