"""Whether gradients are finite, of every kind, and how a host learns it that does not wait for its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.strategies.modules.absent import is_here


@torch.no_grad()
def found(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-dim float32 on `device`: 1 where an element of the gradients (DTensors: of this rank's part) is NaN or
    infinite, else 0."""
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


def later(found: Tensor, then: Callable[[], object] | None = None) -> Callable[[], str | None]:
    """What `found` holds, on its way to the host while the device works on; `then` is called where it is bad."""
    read = to_host(found)

    def bad() -> str | None:
        if not read():
            return None
        if then is not None:
            then()
        return "a gradient"

    return bad


def to_host(number: Tensor) -> Callable[[], float]:
    """What a 0-dim tensor holds, on its way to the host while the device works on: calling it waits for what came
    before."""
    host = torch.empty((), dtype=number.dtype, pin_memory=number.is_cuda)
    host.copy_(number.detach(), non_blocking=True)
    event = torch.cuda.current_stream(number.device).record_event() if number.is_cuda else None

    def read() -> float:
        if event is not None:
            event.synchronize()
        return host.item()

    return read


def name(model: nn.Module) -> str:
    """Which gradient is not finite, in words, for what `found` has found."""
    for name, parameter in model.named_parameters():
        # `Tensor.grad` itself, as a strategy may refuse users a gradient that its engine holds.
        gradient = Tensor.grad.__get__(parameter) if is_here(parameter) else None  # type: ignore[union-attr]
        if gradient is not None and found([gradient], gradient.device):
            return f"the gradient of {name}"
    return "a gradient"
