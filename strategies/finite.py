"""Whether gradients are finite, of every kind, and how a host learns it that does not wait for its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def found(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-dim float32 on `device`: 1 where an element of the gradients (DTensors: of this rank's part) is NaN or infinite, else 0."""
    result = torch.zeros((), dtype=torch.float32, device=device)
    mine = [
        getattr(gradient, "_local_tensor", gradient) for gradient in gradients
    ]  # a DTensor would ask the other ranks
    try:  # GradScaler's pass with a scale of one: changes no bit of what is finite
        torch._amp_foreach_non_finite_check_and_unscale_(mine, result, torch.ones_like(result))
        return result
    except RuntimeError:  # none, sparse, complex, or on several devices
        result.zero_()
    for local in mine:
        values = local.coalesce().values() if local.is_sparse else local
        result.copy_(torch.maximum(result, (~torch.isfinite(values).all()).to(result)))
    return result


def later(found: Tensor) -> Callable[[], str | None]:
    """What `found` holds, on its way to the host while the device works on."""
    host = torch.empty((), dtype=torch.float32, pin_memory=found.is_cuda)
    host.copy_(found, non_blocking=True)
    event = torch.cuda.Event() if found.is_cuda else None
    if event is not None:
        event.record()

    def read() -> str | None:
        if event is not None:
            event.synchronize()
        return "a gradient" if host.item() else None

    return read


def name(model: nn.Module) -> str:
    """Which gradient is not finite, in words, for what `found` has found."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and found([parameter.grad], parameter.grad.device):
            return f"the gradient of {name}"
    return "a gradient"
