"""LRScaling: adapt the learning rate to the global batch size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.callbacks._support.lr_factor import LRFactor

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class LRScaling(LRFactor):
    """Multiply the learning rate of every optimizer by a factor that follows from the global batch size.

    With "linear" the factor is global batch / reference (Goyal et al. 2017, arXiv:1706.02677, for SGD),
    with "sqrt" its square root (Malladi et al. 2022, arXiv:2205.10287, for Adam and its kin). Rank 0
    prints the arithmetic when fit starts.

    The factor multiplies whatever the schedulers ask for, inside `optimizer.step` only: rates in the
    code, in schedulers (also `min_lr`, `max_lr`) and in checkpoints stay those of the reference batch.
    So a run that is resumed with another global batch gets the factor of that one.

    Args:
        reference_batch_size: Samples a step for which the learning rate was chosen.
        rule: "linear" or "sqrt".
        global_batch_size: Samples of a full optimizer step over all ranks and accumulated
            micro-batches. None takes the loader's; needed where that is unknown. It may be counted in
            something else, such as tokens, if the reference is too.
    """

    factor: float
    """What the rates are multiplied by; known from `on_fit_start` on."""

    def __init__(
        self, reference_batch_size: float, *, rule: str = "linear", global_batch_size: float | None = None
    ) -> None:
        super().__init__()
        if rule not in ("linear", "sqrt"):
            raise ValueError(f"rule of LRScaling must be 'linear' or 'sqrt', got {rule!r}")
        if not 0 < reference_batch_size < math.inf:
            raise ValueError(f"reference_batch_size of LRScaling must be above 0, got {reference_batch_size}")
        if global_batch_size is not None and not 0 < global_batch_size < math.inf:
            raise ValueError(f"global_batch_size of LRScaling must be above 0, got {global_batch_size}")
        self.reference_batch_size = reference_batch_size
        self.rule = rule
        self.global_batch_size = global_batch_size

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        size = self.global_batch_size or trainer._run.batch_size_at_start
        if size is None:
            raise ValueError(
                "LRScaling needs the number of samples of an optimizer step, which this loader does not report: set "
                "global_batch_size=..."
            )
        ratio = size / self.reference_batch_size
        factor = self.factor = ratio if self.rule == "linear" else math.sqrt(ratio)
        trainer.print(self._arithmetic(trainer, size))
        self._multiply(trainer, lambda: factor)

    def _arithmetic(self, trainer: Trainer, size: float) -> str:
        if self.global_batch_size is None:
            ranks, accumulation = trainer.strategy.topology.data_size, trainer._run.accumulation_at_start
            origin = (
                f"samples per rank {size / (ranks * accumulation):.10g} × ranks {ranks} "
                f"× accumulation {accumulation} "
                f"= global batch {size:.10g}"
            )
        else:
            origin = f"global batch {size:.10g}, as given"
        # Float of a tensor rate waits for its device: once a run.
        rates = dict.fromkeys(
            float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups
        )
        scaled = ", ".join(f"{lr:g} → {lr * self.factor:g}" for lr in rates)
        return (
            f"LRScaling: {origin}; {self.rule} rule against {self.reference_batch_size:.10g}: factor {self.factor:g}; "
            f"lr {scaled}"
        )
