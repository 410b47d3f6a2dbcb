"""What learners keep in a checkpoint: their optimizer state, learner 0's under the names that all strategies use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import Reader, State
from lockstep.strategies.methods.learner import Learner, Numbers, of_groups

_OPTIMIZER = "optimizer/"


def save(
    state: State,
    learners: Sequence[Learner],
    put: Callable[[int], None],
    gather: Callable[[], State],
    broadcast: Callable[[Any, int], Any],
    ranks: int,
) -> None:
    """Add the optimizer state of all learners but 0 to `state`. Every rank calls it; `put(i)` loads its learner i, of
    which `gather()` is what it writes."""
    mine: dict[str, Any] = {}
    for i, learner in enumerate(learners):
        if learner.number == 0:
            continue
        put(i)
        gathered = gather()
        mine[str(learner.number)] = gathered.meta["optimizers"]
        for name, mine_of_it in gathered.tensors.items():
            if name.startswith(_OPTIMIZER):
                state.tensors[_name(learner.number, name)] = mine_of_it
    state.meta["learners"] = {}
    for rank in range(ranks):
        state.meta["learners"] |= broadcast(mine, rank)


def load(
    reader: Reader, optimizers: Mapping[str, Optimizer], learners: Sequence[Learner], restore: Callable[[Reader], None]
) -> list[Numbers]:
    """Give each learner the state that it had, or that of learner 0 where it had none; the optimizers have that now.

    `restore` gives the optimizers a state. Returns the numbers of each one's `param_groups`. Leaves the optimizers with
    those of the last learner.
    """
    saved, numbers, of_first = reader.meta.get("learners", {}), [], of_groups(optimizers)
    for learner in learners:
        if str(learner.number) in saved:
            restore(_OfLearner(reader, learner.number))
            if len(learners) > 1:
                learner.state = {key: dict(optimizer.state) for key, optimizer in optimizers.items()}
            numbers.append(of_groups(optimizers))
        else:
            numbers.append(of_first)
    return numbers


class _OfLearner:
    """A checkpoint as one learner's: the weights are common, the optimizer state is its own."""

    def __init__(self, reader: Reader, number: int) -> None:
        self._reader, self._number = reader, number
        self.meta = {**reader.meta, "optimizers": reader.meta["learners"][str(number)]}

    def names(self, prefix: str = "") -> list[str]:
        return self._reader.names(prefix)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(self._own(name))

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._own(name))

    def read(self, name: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        return self._reader.read(self._own(name), offsets, shape)

    def _own(self, name: str) -> str:
        return _name(self._number, name) if name.startswith(_OPTIMIZER) else name


def _name(number: int, name: str) -> str:
    return f"strategy/learners/{number}/{name}"
