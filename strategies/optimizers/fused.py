"""torch's fused kernels for the optimizer step: few launches for all parameters, and a step can be skipped on the
device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

FUSED = (Adam, AdamW, SGD)
"""torch's optimizers that have such kernels on CUDA in every version that Lockstep supports."""
UNDECIDED = {"fused": (None,), "foreach": (None,), "differentiable": (None, False), "capturable": (None, False)}


def fuse(optimizer: Optimizer) -> None:
    """Let `optimizer` step by torch's fused kernels if it can and its maker has not said otherwise."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    undecided = all(group.get(name) in wanted for group in optimizer.param_groups for name, wanted in UNDECIDED.items())
    if type(optimizer) is SGD and (
        any(group["dampening"] for group in optimizer.param_groups)  # see `prepare`
        or any(hasattr(p, "device_mesh") for p in parameters)  # a DTensor, which these kernels of SGD do not take
    ):
        return
    if type(optimizer) in FUSED and undecided and all(p.is_floating_point() and not p.is_sparse for p in parameters):
        _choose(optimizer, True)
        for parameter, state in optimizer.state.items():  # of steps before this run: the kernels read it on the device
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device, torch.float32)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether `optimizer.found_inf` keeps its step from changing anything."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def prepare(optimizer: Optimizer) -> None:
    """Before a step on an accelerator: let SGD step by torch's fused kernels only what these step right.

    An optimizer that `fuse` has changed gets its own kernels back if a gradient is sparse, which the fused ones refuse;
    of `FUSED` only SGD steps by sparse gradients at all. Momentum begins as zeros: torch would leave it uninitialized
    where it skips a parameter's first step on the device, and fails where only some parameters have one. With dampening
    that would be another first step, so the host skips it.
    """
    if not isinstance(optimizer, SGD):
        return
    if type(optimizer) is SGD and getattr(optimizer, "_fused_here", False):
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            _choose(optimizer, False)
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        if group["dampening"]:
            optimizer._step_supports_amp_scaling = False
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _choose(optimizer: Optimizer, fused: bool) -> None:
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"] = fused or None
    optimizer._step_supports_amp_scaling = optimizer._fused_here = fused  # type: ignore[attr-defined]
