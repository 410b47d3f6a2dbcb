"""What DeepSpeed's engine cannot do, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer

from lockstep.strategies.losses import own_backward_refused
from lockstep.strategies.precision import PRECISIONS

_COMPUTES_IN = ("32-true", "tf32-true", "bf16-mixed", "bf16-true")
REFUSES = {
    "manual_optimization": "DeepSpeed's engine decides when gradients are reduced, so it cannot optimize manually; set "
    "automatic_optimization = True, or use strategy='ddp'",
    "backward": own_backward_refused("DeepSpeed's engine reduces gradients in the one that it expects"),
    "accumulation_schedule": "DeepSpeed's engine is built for one number; use strategy='ddp' or 'fsdp'",
    "parameter_state": "DeepSpeed partitions the weights that it steps; use strategy='ddp' or 'fsdp'",
    "several_optimizers": "DeepSpeed's engine steps one optimizer; return one from configure_optimizers, with "
    "parameter groups if rates differ, or use strategy='ddp'",
    "assigned_optimizers": "DeepSpeed's engine holds the one that configure_optimizers returned",
    "closures": "DeepSpeed's engine steps without a closure; use another optimizer, or strategy='ddp'",
} | {
    name: "DeepSpeed keeps float32 weights, or bfloat16 ones with float32 masters, so precision must be one of "
    f"{', '.join(_COMPUTES_IN)}, but precision={name!r}"
    for name in PRECISIONS
    if name not in _COMPUTES_IN
}


def refuse_group(*_: Any) -> NoReturn:
    raise RuntimeError(
        "a parameter group was added during the run, but ZeRO shards what is trained when it starts; add it in "
        "configure_optimizers, or use strategy='ddp' or 'fsdp'"
    )


def refuse_params(*_: Any) -> NoReturn:
    raise RuntimeError(
        "the parameters of an optimizer's group were changed during the run, but ZeRO shards what is trained when it "
        "starts; change them in configure_optimizers, or use strategy='ddp' or 'fsdp'"
    )


def refuse_state_dict(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"the state_dict of {type(optimizer).__name__} was read or loaded during the run, but DeepSpeed's engine keeps "
        "its state in flat parts, of which each rank has its own; save and resume by checkpoints "
        "(trainer.save_checkpoint), or use strategy='ddp' or 'fsdp'"
    )
