"""Optimizers that train other weights than those to evaluate, between which their `train()` and `eval()` switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import Reader, State, Take, TensorShard, parameter_names
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.sync.collectives import local

Open = Callable[[Optimizer], AbstractContextManager[Any]]
"""The context in which an optimizer holds what this rank steps; it yields the optimizer, or a stand-in."""


def has_modes(optimizer: Any) -> bool:
    """Whether it is an optimizer such as a schedule-free one."""
    both = callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
    return both and isinstance(optimizer, Optimizer)


def train(optimizers: Iterable[Optimizer], open_one: Open) -> None:
    """Let the model hold the weights to train. Every rank calls it."""
    for optimizer in filter(has_modes, optimizers):
        _switch(optimizer, open_one, "train")


class Evaluation:
    """The time in which the model holds the weights to evaluate. Every rank calls `begin` and `end`, together."""

    def __init__(self, optimizers: Iterable[Optimizer], open_one: Open, returns: bool) -> None:
        self._optimizers, self._open_one = [*filter(has_modes, optimizers)], open_one
        self.returns = returns
        """Whether training continues; costs the memory of the parameters that each rank holds."""
        self._kept: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        for optimizer in self._optimizers:
            if self.returns:
                held = [p for group in optimizer.param_groups for p in group["params"] if is_here(p)]
                self._kept += [(p, local(p).detach().clone()) for p in held]
            _switch(optimizer, self._open_one, "eval")

    def end(self) -> None:
        """The model holds the weights to train again, bit for bit: to switch there and back would round."""
        for optimizer in self._optimizers:
            _switch(optimizer, self._open_one, "train")
        with torch.no_grad():
            for parameter, value in self._kept:
                local(parameter).copy_(value)
        self._kept = []


def _switch(optimizer: Optimizer, open_one: Open, mode: str) -> None:
    with open_one(optimizer) as held, torch.no_grad():
        if held is optimizer:
            getattr(held, mode)()


def save_both(
    model: nn.Module, optimizers: Mapping[str, Optimizer], state: State, evaluated: AbstractContextManager[None],
    shard: Callable[[Tensor], TensorShard | None],
) -> None:  # fmt: skip
    """Let `state`, which has the weights that optimizers train, have those to evaluate too, as the model's; those to
    train are among the optimizers'. `evaluated` is the context in which the model holds them."""
    names = parameter_names(model)
    modal = {key: optimizer for key, optimizer in optimizers.items() if has_modes(optimizer)}
    if not modal:
        return
    switched: set[str] = set()
    for key, optimizer in modal.items():
        held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        switched.update(held)
        saved = {name: {"$tensor": f"optimizer/{key}/{name}/train_weights"} for name in held}
        state.meta["optimizers"][key]["train_weights"] = saved
        for name in held:
            if f"model/{name}" in state.tensors:
                state.tensors[f"optimizer/{key}/{name}/train_weights"] = state.tensors[f"model/{name}"]
    with evaluated:
        for name, parameter in model.named_parameters():
            if name in switched and f"model/{name}" in state.tensors:
                mine = shard(parameter)
                assert mine is not None
                state.tensors[f"model/{name}"] = TensorShard(mine.tensor.clone(), mine.global_shape, mine.offsets)


def load_training(model: nn.Module, optimizers: Mapping[str, Optimizer], reader: Reader, take: Take) -> None:
    """Load the weights to train, where `save_both` saved them."""
    parameters = dict(model.named_parameters())
    for key in optimizers:
        for name in reader.meta["optimizers"].get(key, {}).get("train_weights", ()):
            if is_here(parameters[name]):
                with torch.no_grad():
                    value = take(reader, f"optimizer/{key}/{name}/train_weights", parameters[name])
                    parameters[name].copy_(value)
