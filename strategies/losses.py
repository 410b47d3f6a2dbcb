"""What a training step returned: its weight in the mean, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lockstep.strategies.base import Loss


class StandIn(Loss):
    """A loss that counts nothing, in place of what a step returned: for a backward that other ranks wait for."""

    returned: Any = None
    """What hooks of the batch see: None as the step returned it, or its output for a batch that counts nothing."""


def counting_nothing(output: Any, loss: Tensor | None) -> StandIn:
    """The `loss` of a rank without samples, whose step returned `output` for a batch of padding; None if no rank waits
    for a backward."""
    standing = StandIn(loss, 0)  # type: ignore[arg-type]
    standing.returned = _without_loss(detach(output))
    return standing


def _without_loss(output: Any) -> Any:
    if isinstance(output, Loss):
        return Loss(output.total * 0, 0)
    if isinstance(output, Mapping):
        losses = ["loss"] if "loss" in output else output  # one for each optimizer
        return {**output, **{key: _without_loss(output[key]) for key in losses}}
    return output if output is None else output * 0


def detach(output: Any) -> Any:
    """`output` without the graph of its tensors, so that keeping it keeps no memory alive."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, StandIn):
        return output.returned
    if isinstance(output, Loss):
        return Loss(output.total.detach(), output.count)
    if isinstance(output, Mapping):
        return {key: detach(value) for key, value in output.items()}
    return output


def split_loss(output: Any, num_samples: int) -> tuple[Tensor | None, float, int | float | Tensor]:
    """Normalize what a training step returned to (value, numerator, count).

    The micro-batch contributes `value * numerator` to the sum and `count` to the denominator. A count that is a tensor
    stays one: to read it, the host would wait for its device.
    """
    if isinstance(output, Tensor):
        return output, num_samples, num_samples
    if output is None:
        return None, 0.0, 0.0
    if isinstance(output, Loss):
        return output.total, 1.0, output.count
    if isinstance(output, Mapping) and "loss" in output:
        return split_loss(output["loss"], num_samples)
    raise TypeError(
        "training_step must return a scalar tensor, a dict with 'loss', Loss(total, count) or None, but it returned "
        f"{type(output).__name__}" + (f" with keys {sorted(map(str, output))}" if isinstance(output, Mapping) else "")
    )


def trained(parameters: Sequence[nn.Parameter] | None) -> list[nn.Parameter] | None:
    """Those that a backward can reach now; None for all of the model."""
    return None if parameters is None else [parameter for parameter in parameters if parameter.requires_grad]
