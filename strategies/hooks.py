"""What a strategy says of its own: the hooks of `SPMDStrategy`, in the order in which a run calls them.

`docs/strategies/writing-one.md` writes a strategy by them. Every rank calls each of them, in the same order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, StepFn, Strategy, W
from lockstep.strategies.checkpoint_state import Reader, TensorShard
from lockstep.strategies.losses import counting_nothing, reached_by
from lockstep.strategies.modules.side_effect_free import numbers, refuse_changed_numbers, side_effect_free
from lockstep.strategies.sync.collectives import sum_gradients

_ELSEWHERE = {
    "accelerator": "read topology.device.type",
    "checkpoint_io": "call trainer.save_checkpoint",
    "cluster_environment": "read topology",
    "global_rank": "read topology.rank",
    "is_global_zero": "read trainer.is_global_zero",
    "launcher": "read starts_ranks",
    "lightning_module": "read trainer.lightning_module",
    "model": "read trainer.model",
    "node_rank": "read topology.node_rank",
    "local_rank": "read topology.local_rank",
    "num_processes": "read num_devices",
    "precision_plugin": "read trainer.precision",
    "reduce": "call all_reduce",
    "strategy_name": "read name",
    "world_size": "read topology.world_size",
}
"""Attributes of other trainers' strategies, and what to write instead."""


def _of_run(name: str) -> property:
    """What `trainer.NAME` is, to read and to set."""

    def trainer(strategy: Strategy) -> Any:
        if strategy.of_run is None:
            raise AttributeError(f"a strategy has {name} only while fit runs; read trainer.{name}")
        return strategy.of_run

    return property(
        lambda strategy: getattr(trainer(strategy), name),
        lambda strategy, value: setattr(trainer(strategy), name, value),
    )


class SPMDHooks(Strategy[W]):
    """Strategies override `wrap`, and of the others those whose default does not hold for them.

    Where the model is in a run is said by `wrap` and `unwrap`; how a window runs by `run_step`, `run_padding`,
    `set_gradient_sync`, `end_backward` and `finish_gradients`; where gradients are by `local_gradients`,
    `read_gradient`, `write_gradient` and `sum_gradients`; what is saved by the rest.
    """

    _in_group = False
    """Whether this rank is in a process group."""
    _step_hooks = NO_HOOKS
    """Those of the running step."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the error of a property again
            instead = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    _accelerator: str
    """Kind of the devices. Valid after `configure`."""

    @property
    def root_device(self) -> torch.device:
        """`topology.device`; before the first run the first device of the node."""
        if "topology" in vars(self):
            return self.topology.device
        return torch.device(self._accelerator, 0) if self._accelerator == "cuda" else torch.device(self._accelerator)

    optimizers = _of_run("optimizers")
    lr_scheduler_configs = _of_run("lr_scheduler_configs")

    def data_size_of(self, num_ranks: int) -> int:
        """Return how many of so many ranks see different samples. Called once `configure` has run."""
        return num_ranks

    @abstractmethod
    def wrap(self, model: nn.Module) -> W:
        """Move, wrap or shard `model`, which has the precision's dtype, and return what the other hooks take as
        `wrapped`."""

    def unwrap(self, wrapped: W) -> nn.Module:
        """Return the module that `wrap` was given."""
        return wrapped

    def set_gradient_sync(self, wrapped: W, on: bool) -> None:
        """Called before each micro-batch: whether its backward ends the window, and must reduce the window's gradients.

        The gradients of the ranks are to be summed, not averaged.
        """

    def run_step(self, wrapped: W, step_fn: StepFn) -> StepFn:
        """Return what to call in place of `step_fn`, such as the wrapper's forward."""
        return step_fn

    def run_padding(self, wrapped: W, step_fn: StepFn) -> StepFn:
        """Return what to call for a micro-batch of padding, on a rank that has no samples left.

        By default that is the step, for the collectives that it calls, without effect on the module, and its loss
        weighs nothing.
        """
        if not self._in_group:
            return no_output
        run, model = self.run_step(wrapped, step_fn), self.unwrap(wrapped)

        def without_weight(batch: Any, batch_idx: int) -> Any:
            if batch is None:  # no rank has one
                return None
            with side_effect_free(model), self._step_hooks.log_scope(0):
                before = numbers(model)
                output = run(batch, batch_idx)
                value = reached_by(self._step_hooks.backward, output, model)
                refuse_changed_numbers(model, before)
            if isinstance(value, Mapping):  # a loss for each optimizer, weighted by no samples
                return value
            return None if value is None else counting_nothing(output, value * 0)

        return without_weight

    def end_backward(self, wrapped: W) -> None:
        """Called after the last backward of a window, before this rank waits for the others."""

    def finish_gradients(self, wrapped: W) -> None:
        """Called once the backwards of a window have run on all ranks: complete the gradients that the optimizer gets.

        May call collectives. Gradient hooks on parameters and the check that all is finite come after it. Not called
        if no rank has a loss, or without a process group.
        """

    def local_gradients(self, wrapped: W) -> list[Tensor]:
        """Return the gradients that a window has left for the optimizer on this rank, to be scaled in place."""
        return [p.grad for p in wrapped.parameters() if p.grad is not None]

    def read_gradient(self, wrapped: W, parameter: nn.Parameter) -> Tensor | None:
        """Return the whole gradient of a parameter, a plain tensor; None if it has none.

        Ranks that share the parameter call it in the same order.
        """
        return parameter.grad

    def write_gradient(self, wrapped: W, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Let `gradient`, whole and equal on the ranks that share the parameter, be what the optimizer gets.

        None for all parameters, without a collective, leaves the optimizer nothing of the window.
        """
        parameter.grad = gradient

    def sum_gradients(self, wrapped: W, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Manual optimization: sum over data ranks what `backward` has left in `.grad` of these parameters.

        Return those that were summed, without those that `backward` itself reduces. A gradient that no rank has stays
        None.
        """
        sum_gradients(parameters)
        return parameters

    def trainability_changed(self, wrapped: W, names: list[str]) -> None:
        """Called if user code has changed `requires_grad` of these parameters, or has cast them, since they were
        wrapped or since the last call."""

    def open_optimizer(self, wrapped: W, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return the context in which `optimizer` holds what this rank steps.

        It yields the optimizer, or a stand-in on a rank that has nothing to step.
        """
        return nullcontext(optimizer)

    def local_shard(self, tensor: Tensor) -> TensorShard | None:
        """Return what this rank writes of a tensor of the state, None if another rank writes it."""
        return TensorShard.whole(tensor) if self.topology.rank == 0 else None

    def read_shard(self, reader: Reader, name: str, like: Tensor | None) -> Tensor:
        """Read a saved tensor, laid out as `like` is here."""
        return reader.read(name)

    def extra_state(self, wrapped: W) -> dict[str, Any]:
        """Return what the strategy itself remembers between steps: JSON data, equal on all ranks."""
        return {}

    def load_extra_state(self, wrapped: W, saved: dict[str, Any]) -> None:
        """Take over what `extra_state` of the same strategy returned; another strategy's is {}."""


def no_output(batch: Any, batch_idx: int) -> None:
    """A step without a loss."""
