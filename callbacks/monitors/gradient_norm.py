"""GradientNorm: the norm of the gradient that the optimizers apply, as a curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lockstep import Module, Trainer


class GradientNorm(Callback):
    """Log the 2-norm of the gradient before it is clipped, in the steps that are logged (`log_every_n_steps`).

    The norm is that of all parameters over all ranks, whatever part of it a rank holds, so it is the same under every
    strategy whose ranks step together; the others refuse it. With several optimizers there is one value for each, under
    `<name>/<optimizer>`. In other steps it costs nothing.

    Args:
        name: Name of the logged value.
    """

    def __init__(self, name: str = "grad_norm") -> None:
        self.name = name
        self._norms: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        refused = trainer.strategy.capabilities.refuses.get("gradient_norm")
        if refused is not None:
            raise ValueError(refused)
        self._norms = {}  # of a run that failed

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        if (trainer.global_step + 1) % trainer.arguments.log_every_n_steps:
            return
        run = trainer._run
        names = {id(item): name for name, item in run.optimizers.items()}
        norm = run.strategy.clip_gradients(run.wrapped, optimizer, float("inf"))
        if norm is not None:
            suffix = "" if len(names) == 1 else f"/{names[id(optimizer)]}"
            self._norms[self.name + suffix] = norm

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._norms:
            return
        values = {name: float(norm) for name, norm in self._norms.items()}
        self._norms = {}
        trainer._run.show_measured(values)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_norms": {}}
