"""A learner: its own weights, buffers and optimizer state, which a rank puts into the model in its turn."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.optimizers.attributes import marks
from lockstep.strategies.optimizers.numbers import numbers_of, put_back
from lockstep.strategies.sync.contents import checksum

Numbers = dict[tuple[str, int, str], Any]
"""By optimizer, group and key what an optimizer's own steps leave in `param_groups`."""

Buffers = dict[tuple[nn.Module, str], Tensor | None]
"""By module and name, also what is None yet."""

_NONE = object()
"""Stands for a number that a group does not have yet."""


class Learner:
    """What is one learner's while another one of the same rank has its turn."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights: list[Tensor] = []
        """Of all parameters of the model, in order."""
        self.buffers: Buffers = {}
        self.gradients: list[Tensor | None] = []
        """Those of its last step, until they are cleared."""
        self.state: dict[str, dict[Any, Any]] = {}
        """By optimizer its `state`."""
        self.marks: Marks | None = None
        """Of `state`, as the learner's last turn has left it."""
        self.numbers: Numbers = {}
        self.counted = 0.0
        """What its losses have counted since learners were last together."""
        self.counted_at: dict[int, float] = {}
        """By fragment `counted` when that was last sent."""

    def start_from(self, weights: Mapping[int, Tensor], buffers: Buffers) -> None:
        """Copy these weights, by their place, and these buffers if there are any, but for caches."""
        for place, common in weights.items():
            self.weights[place].copy_(common)
        for (module, name), buffer in buffers.items():
            if name not in module._non_persistent_buffers_set:
                self.buffers[module, name] = None if buffer is None else buffer.clone()

    def copy_state(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Take over, as copies, the state that the optimizers have now."""
        self.state = {
            key: {p: copy.deepcopy(entry) for p, entry in optimizer.state.items()}
            for key, optimizer in optimizers.items()
        }

    def keep_state(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Take over the state that the optimizers have after this learner's turn."""
        self.state = {key: dict(optimizer.state) for key, optimizer in optimizers.items()}
        self.marks = Marks.of(self.state)


class Marks(NamedTuple):
    """What tells whether the state of optimizers was changed."""

    entries: dict[tuple[str, Any], dict[str, Any]]
    """By optimizer and parameter."""
    bits: bool
    """Whether what tensors hold was read: writes through numpy leave no other trace."""

    @classmethod
    def of(cls, states: Mapping[str, Mapping[Any, Any]], bits: bool = False) -> Marks:
        return cls(
            {
                (key, p): {name: _mark(value, bits) for name, value in entry.items()}
                for key, state in states.items()
                for p, entry in state.items()
            },
            bits,
        )

    def changed(self, optimizers: Mapping[str, Optimizer]) -> list[str]:
        """The optimizers whose state has other marks now."""
        now = Marks.of({key: optimizer.state for key, optimizer in optimizers.items()}, self.bits).entries
        differing = {
            place[0] for place in self.entries.keys() | now.keys() if self.entries.get(place) != now.get(place)
        }
        return sorted(f"state of optimizer {key!r}" for key in differing)


def _mark(value: Any, bits: bool) -> Any:
    if not isinstance(value, Tensor):
        return value if isinstance(value, (int, float, str, type(None))) else id(value)
    return id(value), value._version, checksum(value) if bits and value.is_cpu and type(value) is Tensor else 0


class OwnNumbers:
    """Numbers in `param_groups` that steps change: each learner has its own, where all share what schedulers set."""

    def __init__(self) -> None:
        self._left: Numbers = {}
        """As the last learner has left them."""
        self._at_start: Numbers = {}
        """Of all groups, as they were before the first learner's turn."""
        self._at_end: Numbers | None = None
        """Those that other code than steps has left there after a turn."""

    def begin(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Called before the first turn of a window."""
        self._at_start, self._at_end = of_groups(optimizers), None

    def end_turn(self, optimizers: Mapping[str, Optimizer], own: Learner, more: bool) -> None:
        """Let the next turn begin with the numbers that this one began with.

        Raises RuntimeError if user code has left other ones, such as learning rates, than in the turn before.
        """
        left = {place: value for place, value in of_groups(optimizers).items() if place not in own.numbers}
        before = left if self._at_end is None else self._at_end
        if wrong := sorted(
            {name for key, i, name in left if not _same(left[key, i, name], before.get((key, i, name)))}
        ):
            raise RuntimeError(
                f"the learners of this rank leave different values of {', '.join(wrong)} in param_groups, which they "
                "share; set them alike, such as by trainer.global_step, or use as many ranks as learners"
            )
        self._at_end = left
        for key, i, name in left if more else ():
            if (key, i, name) in self._at_start:
                put_back(optimizers[key].param_groups[i], {name: self._at_start[key, i, name]})

    def before(self, key: str, optimizer: Optimizer) -> Any:
        return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups], marks(optimizer)

    def after(self, key: str, optimizer: Optimizer, before: Any, own: Learner, others: Iterable[Learner]) -> None:
        """Note what the step of `own` has changed since `before`. Raises RuntimeError for what cannot be kept apart."""
        groups, attributes = before
        for i, (was, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            for name, now in group.items():
                place, value = (key, i, name), was.get(name, _NONE)
                if name == "params":
                    continue
                if place in own.numbers or not _same(value, now):
                    if isinstance(now, Tensor):
                        raise RuntimeError(
                            f"{type(optimizer).__name__} changes the tensor {name!r} of its param_groups in a step, "
                            "which the learners of a rank share; use as many ranks as learners"
                        )
                    for other in others:
                        other.numbers.setdefault(place, value)
                    own.numbers[place] = self._left[place] = now
        left = marks(optimizer)
        changed = sorted(name for name in left.keys() | attributes if left.get(name) != attributes.get(name))
        if changed:
            raise RuntimeError(
                f"{type(optimizer).__name__} changes its attribute {changed[0]!r} in a step, which the learners of a "
                "rank share; keep it in state or param_groups, or use as many ranks as learners"
            )

    def restore(self, optimizers: Mapping[str, Optimizer], learners: list[Learner], numbers: list[Numbers]) -> None:
        """Take what the groups of each learner held in a checkpoint: what differs is a learner's own."""
        if len(learners) == 1:
            return
        for place in dict.fromkeys(place for of_learner in numbers for place in of_learner):
            values = [of_learner.get(place, _NONE) for of_learner in numbers]
            if any(not _same(value, values[0]) for value in values):
                for learner, value in zip(learners, values, strict=True):
                    learner.numbers[place] = value
                key, i, name = place
                self._left[place] = optimizers[key].param_groups[i].get(name, _NONE)

    def put(self, optimizers: Mapping[str, Optimizer], learner: Learner) -> None:
        """Give the optimizers the learner's numbers. Raises RuntimeError if other code has set one since."""
        for (key, i, name), value in learner.numbers.items():
            group = optimizers[key].param_groups[i]
            left = self._left.get((key, i, name), value)
            if not _same(group.get(name, _NONE), left):
                raise RuntimeError(
                    f"{name!r} of param_groups is changed by the steps of {type(optimizers[key]).__name__} and by "
                    "other code, such as a scheduler, but each learner here has its own; use as many ranks as learners"
                )
            self._left[key, i, name] = value
            if value is _NONE:
                group.pop(name, None)
            else:
                group[name] = value


def of_groups(optimizers: Mapping[str, Optimizer]) -> Numbers:
    """Copies of what parameter groups hold now."""
    return {
        (key, i, name): value
        for key, optimizer in optimizers.items()
        for i, group in enumerate(optimizer.param_groups)
        for name, value in numbers_of(group).items()
    }


def buffers_of(model: nn.Module) -> Buffers:
    """What the model holds now."""
    return {
        (module, name): None if buffer is None else buffer.data
        for module in model.modules()
        for name, buffer in module._buffers.items()
    }


def put_buffers(model: nn.Module, buffers: Buffers) -> None:
    """Let the model hold these, and no others."""
    for module in model.modules():
        for name in [name for name in module._buffers if (module, name) not in buffers]:
            del module._buffers[name]
    for (module, name), value in buffers.items():
        if value is None or (held := module._buffers.get(name)) is None:
            module._buffers[name] = value
        else:
            held.data = value


def make_learners(numbers: Iterable[int], model: nn.Module, optimizers: Mapping[str, Optimizer]) -> list[Learner]:
    """Learners with what model and optimizers hold now; the first one's weights and buffers are the model's own."""
    learners = [Learner(number) for number in numbers]
    for i, learner in enumerate(learners):
        learner.weights = [p.data.clone() if i else p.data for p in model.parameters()]
        learner.buffers = buffers_of(model)
        if i:
            learner.buffers = {at: None if b is None else b.clone() for at, b in learner.buffers.items()}
        if len(learners) > 1:
            learner.copy_state(optimizers)
    return learners


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or (isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other))
    return bool(one is other or one == other)
