"""Parameters without a gradient in a step: what a strategy that waits for every gradient says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from torch import Tensor, nn

from lockstep.strategies.modules.model_changes import shortened


def refuse_unused(names: Sequence[str]) -> NoReturn:
    """Raise for parameters that got no gradient on this rank, for which the other ranks may wait."""
    raise RuntimeError(
        f"these parameters got no gradient in a step: {shortened(names) or 'some parameters'}; use them in "
        "training_step, freeze them (requires_grad=False), or give strategy=DDP(find_unused_parameters=True)"
    )


def refuse_unstepped(names: Sequence[str]) -> NoReturn:
    """Raise for parameters that a gradient has reached, though no optimizer steps them."""
    raise ValueError(
        f"no optimizer steps {shortened(names, 5)}, so training would leave them as they are, though they get "
        "gradients; give them to one, or freeze them (requires_grad_(False))"
    )


def refuse_unequal(names: Sequence[str], masks: Tensor) -> NoReturn:
    """Raise for parameters that got a gradient on some ranks only.

    `masks`, of shape `[ranks, parameters]`, is 1 where a rank has a gradient of a parameter.
    """
    unequal = [name for i, name in enumerate(names) if len({int(mask[i]) for mask in masks}) > 1]
    ranks = [rank for rank, mask in enumerate(masks) if not mask.equal(masks.amax(0))]
    raise RuntimeError(
        f"on rank {', '.join(map(str, ranks))} these parameters got no gradient, but on others they did: "
        f"{shortened(unequal)}; use them on every rank, or give find_unused_parameters=True"
    )


def drop_unused(parameters: Iterable[nn.Parameter], used: Iterable[int]) -> None:
    """Leave without a gradient what no rank has used, as on one process: torch has reduced zeros."""
    for parameter, is_used in zip(parameters, used, strict=True):
        if not is_used:
            parameter.grad = None
