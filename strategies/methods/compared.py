"""Ranks that train apart and evaluate common weights: that these are common is checked where an evaluation begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, StepHooks, W
from lockstep.strategies.data.sharded_loader import MicroBatch
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.sync.buffers import kept_buffers
from lockstep.strategies.sync.collectives import differing


class ComparedWeights(SPMDStrategy[W]):
    """Base of the strategies that compare what hooks of the start of an evaluation have written to weights."""

    _compares = False
    """Whether the next batch that is evaluated needs common weights."""

    _refuse_weights: Callable[[], None] | None = None
    """Refuses different weights in place of `_refuse_different`."""

    def _refuse_different(self, wrapped: W) -> None:
        """Raise RuntimeError if ranks hold other parameters, or buffers of the state dict. Every rank calls it, between
        steps."""
        if self._refuse_weights is not None:
            self._refuse_weights()
            return
        model = self.unwrap(wrapped)
        named = [*model.named_parameters(), *kept_buffers(model).items()]
        if found := differing([tensor for _, tensor in named], self.topology.world_size):
            raise RuntimeError(
                f"a hook has written other values of {shortened([named[place][0] for place in found])} on some ranks, "
                f"of which {self.name} would take those of one; write the same on all ranks, such as what "
                "trainer.strategy.broadcast returns, and no average that on_train_batch_end keeps, which each rank "
                "calls for its own batches"
            )

    @contextmanager
    def evaluation_weights(self, wrapped: W, optimizers: Iterable[Optimizer], restore: bool = True) -> Iterator[None]:
        with super().evaluation_weights(wrapped, optimizers, restore):
            self._compares = True
            try:
                yield
            finally:
                self._compares = False

    def evaluate(
        self, wrapped: W, step_fn: Callable[..., Any], micro_batch: MicroBatch, *args: Any, hooks: StepHooks = NO_HOOKS
    ) -> Any:
        if self._compares:
            self._compares = False
            self._refuse_different(wrapped)
        return super().evaluate(wrapped, step_fn, micro_batch, *args, hooks=hooks)
