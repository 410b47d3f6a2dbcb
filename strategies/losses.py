"""What a training step returned: its losses, their weights in the global mean, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.strategies.base import Loss, split_loss
from lockstep.strategies.launch import fault_injection


def weighted_losses(
    output: Any,
    num_samples: int,
    scale: float | None,
    parameters: Mapping[str, Sequence[nn.Parameter]] | None,
    reads_counts: bool = True,
) -> tuple[list[tuple[Tensor, Sequence[nn.Parameter] | None, Tensor]], Any]:
    """What to run backward from, as (loss times its weight, parameters that it moves or None for all, the loss that the
    step returned), and what it counts.

    `scale` turns a sum into this rank's part of the global mean; None means that the micro-batch is the
    whole of it. Without `reads_counts` a count that is a tensor stays one, on its device, in float64.
    """
    losses: list[tuple[Tensor, Sequence[nn.Parameter] | None, Tensor]]
    count: Any
    weight: Any
    if parameters and isinstance(output, Mapping) and "loss" not in output:
        wrong = sorted(set(map(str, output)) ^ set(parameters)) + [
            name for name, value in output.items() if not isinstance(value, Tensor)
        ]
        if wrong:
            raise ValueError(
                f"training_step must return one mean loss (a tensor) for each optimizer ({', '.join(parameters)}), or "
                f"None, but {', '.join(wrong)} is not; "
                "name the losses after the optimizers"
            )
        losses = [(output[name], parameters[name], output[name]) for name in parameters]
        numerator, count = float(num_samples), num_samples
    else:
        value, numerator, count = (
            (output, num_samples, num_samples) if isinstance(output, Tensor) else split_loss(output, num_samples)
        )
        losses = [] if value is None else [(value, None, value)]
    if reads_counts or not isinstance(count, Tensor):
        count = float(count)
        weight = numerator * scale if scale is not None else numerator / count if count else 0.0
    else:
        count = count.detach().double().reshape(())
        weight = numerator * scale if scale is not None else torch.where(count != 0, numerator / count, 0.0)
    for i, (value, inputs, returned) in enumerate(losses):
        if fault_injection.plan is not None:
            value = fault_injection.plan.poison(value)
            losses[i] = value, inputs, returned
        if value.numel() != 1:
            raise ValueError(
                f"training_step must return a scalar loss, but its loss has shape {list(value.shape)}; return its mean "
                "or Loss(total, count)"
            )
        if not value.requires_grad:
            raise ValueError(
                "training_step returned a loss without gradient: it does not depend on a trainable parameter, or was "
                "detached or computed under no_grad"
            )
        if isinstance(weight, Tensor):
            losses[i] = value * weight.to(value.dtype), inputs, returned
        elif weight != 1.0:
            losses[i] = value * weight, inputs, returned
    return losses, count


def detach(output: Any) -> Any:
    """`output` without the graph of its tensors, so that keeping it keeps no memory alive."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Loss):
        return Loss(output.total.detach(), output.count)
    if isinstance(output, Mapping):
        return {key: detach(value) for key, value in output.items()}
    return output
