"""What optimizers hold while shares run: each begins with the same, and leaves the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.optimizers.numbers import numbers_of, put_back, same


class OptimizerValues:
    """The numbers of parameter groups, and what tells whether the state or an attribute of optimizers was changed, in
    one window.

    Without `watches_state` that is not noted, as on a rank with one share, which may change it.
    """

    def __init__(self, optimizers: Collection[Optimizer], watches_state: bool) -> None:
        self._optimizers, self._watches_state = optimizers, watches_state
        self._begun, self._state = self._numbers(), self._marks()
        self._left: list[dict[str, Any]] | None = None
        """As the share before has left them."""

    @property
    def are_changed(self) -> bool:
        return self._state != self._marks() or not all(map(same, self._numbers(), self._begun))

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
        """Called before another share of the window begins."""
        if self._state != self._marks():
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

    def _marks(self) -> list[Any]:
        if not self._watches_state:
            return []
        states = [getattr(optimizer.state, "held", optimizer.state) for optimizer in self._optimizers]
        entries = [entry for state in states for entry in state.values() if isinstance(entry, dict)]
        own = [
            item for optimizer in self._optimizers for item in vars(optimizer).items() if isinstance(item[1], _PLAIN)
        ]
        return [*own, *(_mark(value) for entry in entries for value in entry.values())]


_PLAIN = (int, float, str)


def _mark(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if isinstance(value, _PLAIN) else id(value)
    return id(value), getattr(value, "_local_tensor", value)._version
