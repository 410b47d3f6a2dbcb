"""What a training step returned: its weight in the mean, what is kept of it, and the backward from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.strategies.base import Loss
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.user_edits import version

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


def has_loss(output: Any) -> bool:
    """Whether a step returned something to run backward from: neither None nor a dict whose loss is None."""
    while isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    return output is not None


def trained(parameters: Sequence[nn.Parameter] | None) -> list[nn.Parameter] | None:
    """Those that a backward can reach now; None for all of the model."""
    return None if parameters is None else [parameter for parameter in parameters if parameter.requires_grad]


# ---- backward -------------------------------------------------------------------------------------


class OwnBackward(NamedTuple):
    """What runs backward from the loss as the step returned it, and what the strategy asks of it."""

    call: Callable[[Tensor], Any]
    once: bool
    """Whether it must run backward once, in which gradients are summed over ranks."""
    watched: Callable[[], Iterable[tuple[str, Tensor]]] | None
    """Gives parameters by name whose gradients it must not change itself; None where gradients are those of the whole
    step."""


@contextmanager
def replaced_backward(call: Callable[..., None]) -> Iterator[None]:
    """While it lasts, `call` is in the place of torch.autograd.backward, which Tensor.backward calls."""
    backward = torch.autograd.backward
    vars(torch.autograd)["backward"] = call
    try:
        yield
    finally:
        vars(torch.autograd)["backward"] = backward


def run_own(own: OwnBackward, loss: Weighted, more: bool, scaler: Any = None) -> None:
    """Let it run backward. What it does so from counts with the weight of the loss: a term that it adds is part of the
    mean too. `more`: another loss of the step needs the graph.

    Raises RuntimeError if it runs no backward, another number than it may, or changes gradients besides.
    """
    _, own_inputs, returned, weight = loss
    if own_inputs == []:
        return
    backward, is_running, times, before = torch.autograd.backward, False, 0, _marks(own)

    def weighted(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        nonlocal is_running, times, before
        if is_running:  # within a backward, as activation checkpointing runs one
            backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        times += 1
        if own.once and times > 1:
            raise RuntimeError(f"the module's backward has run backward twice, but {_ONCE}")
        _refuse_changed(own, before)
        seeds = grad_tensors if grad_variables is None else grad_variables
        roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        given = [seeds] if seeds is None or isinstance(seeds, Tensor) else [*seeds]
        given += [None] * (len(roots) - len(given))
        seeds = [
            seed if seed is None and root.numel() != 1 else _scaled(root, seed, weight, scaler)
            for root, seed in zip(roots, given, strict=True)
        ]
        is_running = True
        try:
            backward(
                roots,
                seeds,
                retain_graph or more or None,
                create_graph,
                inputs=own_inputs if inputs is None else inputs,
            )
        finally:
            is_running = False
        before = _marks(own)

    with replaced_backward(weighted):
        own.call(returned)
    if not times:
        raise RuntimeError(
            "the module's backward has never run backward, by which the strategy weighs what it adds to gradients; "
            "call loss.backward(), or return None from training_step for a batch that is not to count"
        )
    _refuse_changed(own, before)


_ONCE = (
    "the strategy sums gradients over ranks in one of each loss; call loss.backward() once, on a sum of losses if "
    "there are several"
)


def _scaled(root: Tensor, seed: Tensor | None, weight: Any, scaler: Any) -> Tensor:
    seed = torch.ones_like(root) if seed is None else seed
    seed = seed * (weight.to(seed.dtype) if isinstance(weight, Tensor) else weight)
    return seed if scaler is None else scaler.scale(seed)


def _marks(own: OwnBackward) -> dict[int, tuple[Tensor, str, Tensor | None, int]]:
    """The gradients that it must leave alone, and how often each was written to."""
    watched = () if own.watched is None else own.watched()
    return {id(p): (p, name, p.grad, 0 if p.grad is None else version(p.grad)) for name, p in watched}


def _refuse_changed(own: OwnBackward, before: dict[int, tuple[Tensor, str, Tensor | None, int]]) -> None:
    now = _marks(own)
    pairs = [(was, now[key]) for key, was in before.items() if key in now]
    changed = [name for (_, name, one, times), (*_, other, more) in pairs if one is not other or times != more]
    if changed:
        raise RuntimeError(
            f"the module's backward changed gradients by itself ({shortened(changed)}), which are those of a part of "
            "the step (one rank, micro-batch or share) or scaled by precision='16-mixed'; change them in "
            "on_after_backward"
        )


class _Reached(BaseException):
    """A backward was to begin; nothing of a user's that catches errors takes it for one."""


def reached_by(call: Callable[[Tensor], Any] | None, output: Any, model: nn.Module) -> Any:
    """What a user's backward begins from, given `output`, which a step returned for a batch of padding. The user's
    code runs up to there, as ranks may meet before it.

    Raises RuntimeError if that code changes gradients.
    """
    if isinstance(output, Mapping) and "loss" not in output:
        return output if call is None else {name: reached_by(call, value, model) for name, value in output.items()}
    value = split_loss(output, 0)[0]
    if call is None or value is None:
        return value
    own = OwnBackward(call, True, model.named_parameters)
    before, roots = _marks(own), [value]

    def begin(tensors: Any, *_: Any, **__: Any) -> None:
        roots[:] = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        raise _Reached

    with replaced_backward(begin), suppress(_Reached):
        own.call(value)
    _refuse_changed(own, before)
    return torch.stack([root.sum() for root in roots]).sum()


def own_backward_refused(why: str) -> str:
    """The sentence of a strategy that cannot call the `backward` of the user's module."""
    return f"the module overrides backward, but {why}; add terms to the loss in training_step, or use strategy='ddp'"
