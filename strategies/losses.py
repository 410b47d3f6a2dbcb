"""What a training step returned: its weight in the mean, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.strategies.base import Loss

Weighted = tuple[Tensor, Sequence[nn.Parameter] | None, Tensor, Any]
"""What to run backward from: a loss times its weight, the parameters that it moves or None for all, the loss as the
step returned it, its weight."""


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


def backward_by(
    own: Callable[[Tensor], Any],
    loss: Tensor,
    weight: Any,
    inputs: Sequence[nn.Parameter] | None,
    scaler: Any,
    more: bool,
    once: bool,
) -> None:
    """Let `own`, the user's, run backward from the loss as the step returned it. What it runs backward from counts with
    the weight of the loss: a term that it adds is part of the mean too.

    `more`: another loss of the step needs the graph. Raises RuntimeError if `once`, and it runs backward any other
    number of times.
    """
    backward, is_running, times = torch.autograd.backward, False, 0

    def weighted(
        tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, *rest: Any, **options: Any
    ) -> None:
        nonlocal is_running, times
        if is_running:  # within a backward, as activation checkpointing runs one
            backward(tensors, grad_tensors, retain_graph, *rest, **options)
            return
        times += 1
        if once and times > 1:
            raise _not_once("twice")
        roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else [*grad_tensors]
        given += [None] * (len(roots) - len(given))
        seeds = [
            seed if seed is None and root.numel() != 1 else _scaled(root, seed, weight, scaler)
            for root, seed in zip(roots, given, strict=True)
        ]
        options["inputs"] = inputs if options.get("inputs") is None else options["inputs"]
        is_running = True
        try:
            backward(roots, seeds, retain_graph or more or None, *rest, **options)
        finally:
            is_running = False

    vars(torch.autograd)["backward"] = weighted  # which Tensor.backward calls
    try:
        own(loss)
    finally:
        vars(torch.autograd)["backward"] = backward
    if once and not times:
        raise _not_once("never")


def own_backward_refused(why: str) -> str:
    """The sentence of a strategy that cannot call the `backward` of the user's module."""
    return f"the module overrides backward, but {why}; add terms to the loss in training_step, or use strategy='ddp'"


def _scaled(root: Tensor, seed: Tensor | None, weight: Any, scaler: Any) -> Tensor:
    seed = torch.ones_like(root) if seed is None else seed
    seed = seed * (weight.to(seed.dtype) if isinstance(weight, Tensor) else weight)
    return seed if scaler is None else scaler.scale(seed)


def _not_once(times: str) -> RuntimeError:
    return RuntimeError(
        f"the module's backward has run backward {times}, but the strategy sums gradients over ranks in one of each "
        "loss; call loss.backward() once, on a sum of losses if there are several"
    )
