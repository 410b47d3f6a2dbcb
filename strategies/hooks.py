"""What a strategy says of its own: the hooks of `SPMDStrategy`, in the order in which a run calls them.

`docs/strategies/writing-one.md` writes a strategy by them. Every rank calls each of them, in the same order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.strategies.base import NO_HOOKS, Loss, Strategy, split_loss
from lockstep.strategies.checkpoint_state import Reader, TensorShard
from lockstep.strategies.modules.side_effect_free import side_effect_free
from lockstep.strategies.modules.step_state import numbers, refuse_changed_numbers


class SPMDHooks(Strategy):
    """Strategies override `wrap`, and of the others those whose default does not hold for them."""

    _in_group = False
    """Whether this rank is in a process group."""
    _step_hooks = NO_HOOKS
    """Those of the running step."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Move, wrap or shard `model`, which has the precision's dtype, and return what the other hooks take as
        `wrapped`."""

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the module that `wrap` was given."""
        return wrapped

    def set_gradient_sync(self, wrapped: nn.Module, on: bool) -> None:
        """Called before each micro-batch: whether its backward ends the window, and must reduce the window's gradients.

        The gradients of the ranks are to be summed, not averaged.
        """

    def run_step(self, wrapped: nn.Module, step_fn: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Return what to call in place of `step_fn`, such as the wrapper's forward."""
        return step_fn

    def run_padding(self, wrapped: nn.Module, step_fn: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Return what to call for a micro-batch of padding, on a rank that has no samples left.

        By default that is the step, for the collectives that it calls, without effect on the module, and its loss
        weighs nothing.
        """
        if not self._in_group:
            return _no_output
        run, model = self.run_step(wrapped, step_fn), self.unwrap(wrapped)

        def without_weight(batch: Any, batch_idx: int) -> Any:
            with side_effect_free(model), self._step_hooks.log_scope(0):
                before = numbers(model)
                output = run(batch, batch_idx)
                refuse_changed_numbers(model, before)
            if (
                isinstance(output, Mapping) and "loss" not in output
            ):  # a loss for each optimizer, weighted by no samples
                return output
            value = split_loss(output, 0)[0]
            return None if value is None else Loss(value * 0, 0)

        return without_weight

    def local_gradients(self, wrapped: nn.Module) -> list[Tensor]:
        """Return the gradients that a window has left for the optimizer on this rank, to be scaled in place."""
        return [p.grad for p in wrapped.parameters() if p.grad is not None]

    def local_shard(self, tensor: Tensor) -> TensorShard | None:
        """Return what this rank writes of a tensor of the state, None if another rank writes it."""
        return TensorShard.whole(tensor) if self.topology.rank == 0 else None

    def read_shard(self, reader: Reader, name: str, like: Tensor | None) -> Tensor:
        """Read a saved tensor, laid out as `like` is here."""
        return reader.read(name)

    def extra_state(self, wrapped: nn.Module) -> dict[str, Any]:
        """Return what the strategy itself remembers between steps: JSON data, equal on all ranks."""
        return {}

    def load_extra_state(self, wrapped: nn.Module, saved: dict[str, Any]) -> None:
        """Take over what `extra_state` of the same strategy returned; another strategy's is {}."""


def _no_output(batch: Any, batch_idx: int) -> None:
    return None
