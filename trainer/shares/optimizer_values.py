"""What optimizers hold while shares run: each begins with the same, and leaves the same."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.optimizers.numbers import numbers_of, put_back, same
from lockstep.trainer.shares.marks import bits_of


class OptimizerValues:
    """The numbers of parameter groups, and what tells whether the state or an attribute of optimizers was changed, in
    one window.

    Without `watches_state` that is not noted, as on a rank with one share, which may change it. `reads`: also its bits,
    which tell what was changed by `.data`.
    """

    def __init__(self, optimizers: Collection[Optimizer], watches_state: bool, reads: bool = False) -> None:
        self._optimizers, self._watches_state, self._reads = optimizers, watches_state, reads
        self._begun, self._held = self._numbers(), self._state()
        self._tensors = [getattr(value, "_local_tensor", value) for value in self._held if isinstance(value, Tensor)]
        self._versions = [*map(_VERSION, self._tensors)]
        self._bits = self._read() if reads else []
        self._left: list[dict[str, Any]] | None = None
        """As the share before has left them."""

    def are_changed(self, reads: bool) -> bool:
        return self._is_other(reads) or not all(map(same, self._numbers(), self._begun))

    def end_share(self) -> None:
        """Let the next share begin with what this one began with.

        Raises RuntimeError for numbers that the share before has left otherwise.
        """
        numbers = self._numbers()
        if self._left is not None and not all(map(same, numbers, self._left)):
            raise RuntimeError(
                "the shares of this rank leave different numbers in param_groups, such as learning rates, which they "
                "share; set them alike, such as by trainer.global_step"
            )
        self._left = numbers
        self._put(self._begun)

    def refuse_changed_state(self) -> None:
        """Called before the last share begins: what the others have changed is not the same again by then."""
        if self._is_other(self._reads):
            raise RuntimeError(
                "training_step or a hook of a batch changed the state of an optimizer, which the shares of this rank "
                "have in common; change it in a hook such as on_before_zero_grad"
            )

    def leave(self) -> None:
        """The window ends: groups hold what its shares have left."""
        self._put(self._left or [])

    def _put(self, numbers: list[dict[str, Any]]) -> None:
        for group, held in zip(self._groups(), numbers, strict=False):
            put_back(group, held)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _numbers(self) -> list[dict[str, Any]]:
        return [numbers_of(group) for group in self._groups()]

    def _is_other(self, reads: bool) -> bool:
        """Whether the state or an attribute was replaced, or a tensor of the state written to."""
        now = self._state()
        return (
            len(now) != len(self._held)
            or not (all(map(is_, now, self._held)) or all(map(_same, now, self._held)))
            or [*map(_VERSION, self._tensors)] != self._versions
            or (reads and self._read() != self._bits)
        )

    def _state(self) -> list[Any]:
        """What the state holds, and names and values of attributes."""
        if not self._watches_state:
            return []
        states = [getattr(optimizer.state, "held", optimizer.state) for optimizer in self._optimizers]
        entries = [entry for state in states for entry in state.values() if isinstance(entry, dict)]
        own = [vars(optimizer).items() for optimizer in self._optimizers]
        held = [part for items in own for item in items if isinstance(item[1], _PLAIN) for part in item]
        return held + [value for entry in entries for value in entry.values()]

    def _read(self) -> list[Any]:
        return [*map(bits_of, self._tensors)]


_PLAIN = (int, float, str)
_VERSION = attrgetter("_version")


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and isinstance(other, _PLAIN) and one == other)
