"""torch's fused kernels for the optimizer step: one pass over the parameters, and a step can be left out on the device."""

from __future__ import annotations

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

FUSED = (Adam, AdamW, SGD, Adagrad)
UNDECIDED = {"fused": (None,), "foreach": (None,), "differentiable": (None, False), "capturable": (None, False)}


def fuse(optimizer: Optimizer) -> None:
    """Let `optimizer` step by torch's fused kernels where it can and its maker has not said otherwise."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    undecided = all(group.get(name) in wanted for group in optimizer.param_groups for name, wanted in UNDECIDED.items())
    if type(optimizer) in FUSED and undecided and all(p.is_floating_point() and not p.is_sparse for p in parameters):
        for group in optimizer.param_groups:
            group["fused"] = True
        optimizer.defaults["fused"] = True
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def leaves_out(optimizer: Optimizer) -> bool:
    """Whether `optimizer.found_inf` keeps its step from changing anything."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )
