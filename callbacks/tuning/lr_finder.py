"""LRFinder: a learning rate from a short run in which the rate rises."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.callbacks._support.monitored_metric import check_state, is_number
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lockstep import Module, Trainer

_SMOOTHING = 0.98
_FIRST, _LAST = 10, 1  # points that the suggestion skips at both ends


@dataclass
class LRSweep:
    """Losses of a run whose learning rate rose from step to step."""

    lrs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of each step, over all ranks, before the step."""

    @property
    def smoothed(self) -> list[float]:
        """The losses as a bias-corrected moving average."""
        average, smooth = 0.0, []
        for i, loss in enumerate(self.losses):
            average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
            smooth.append(average / (1 - _SMOOTHING ** (i + 1)))
        return smooth

    def suggestion(self, skip_begin: int = _FIRST, skip_end: int = _LAST) -> float | None:
        """The rate at which the smoothed loss falls fastest, without so many points at both ends; None if there are too
        few points to tell."""
        losses = self.smoothed
        points = range(skip_begin + 1, len(losses) - skip_end - 1)
        slopes = {i: losses[i + 1] - losses[i - 1] for i in points}
        return self.lrs[min(slopes, key=slopes.__getitem__)] if slopes else None

    def plot(self, path: str | Path | None = None) -> Any:
        """Return a figure of the loss by rate with the suggestion; write it to `path` (PNG, PDF, SVG) too.

        Raises ModuleNotFoundError without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "plot needs matplotlib: pip install 'lockstep-trainer[plot]', or read lrs and losses"
            ) from None
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.lrs, self.losses, alpha=0.4, label="loss")
        axes.plot(self.lrs, self.smoothed, label="smoothed")
        suggestion = self.suggestion()
        if suggestion is not None:
            axes.axvline(suggestion, linestyle="--", color="black", label=f"suggestion {suggestion:.3g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        if path is not None:
            figure.savefig(Path(path).expanduser())
        return figure


class LRFinder(Callback):
    """Before `fit`, train the module for some steps with a rising learning rate elsewhere, and set the rate found.

    The search is a run of its own in other processes, under the same strategy and on the same data, so nothing of the
    run that follows is moved: weights, random streams, counters, globals and folders are those of a run without this
    callback. On ranks that a launcher such as torchrun has started, it trains copies in these processes, of which
    functions over the module, globals and map-style datasets are shared. Losses are those over all ranks, so the
    answer is the same on any number of ranks for the same global batch. A run that is resumed (`ckpt_path`) is not
    searched, but has the rate that was found for it.

    The rate replaces `module.lr` or `module.learning_rate`, or the hyperparameter of that name, which
    `configure_optimizers` must use. Smith 2015, arXiv:1506.01186.

    Args:
        min_lr, max_lr: Rates of the first and last step.
        num_training_steps: Optimizer steps of the search.
        mode: "exponential" or "linear" rise.
        early_stop_threshold: Stop once the smoothed loss is so many times the lowest; None for never.
        update_attr: Set the rate on the module; False only finds it.
        attr_name: Name of the attribute or hyperparameter; None takes "lr" or "learning_rate".
        plot: A file to draw the curve to, such as "lr.png"; needs matplotlib.
    """

    result: LRSweep | None = None
    """What the last search measured."""
    fewest_steps = _FIRST + _LAST + 3
    """Steps from which on a rate can be suggested."""

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        *,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str | None = None,
        plot: str | Path | None = None,
    ) -> None:
        if not 0 < min_lr < max_lr < math.inf:
            raise ValueError(f"min_lr must be above 0 and below max_lr, got min_lr={min_lr} and max_lr={max_lr}")
        if num_training_steps < self.fewest_steps:
            raise ValueError(f"num_training_steps must be at least {self.fewest_steps}, got {num_training_steps}")
        if mode not in ("exponential", "linear"):
            raise ValueError(f"mode must be 'exponential' or 'linear', got {mode!r}")
        self.min_lr, self.max_lr, self.num_training_steps, self.mode = min_lr, max_lr, num_training_steps, mode
        self.early_stop_threshold = early_stop_threshold
        self.update_attr, self.attr_name, self.plot = update_attr, attr_name, plot

    @property
    def state_key(self) -> str:
        return super().state_key + ("" if self.attr_name is None else f"[{self.attr_name}]")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.result is None else asdict(self.result)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            check_state("LRFinder", state_dict, dict.fromkeys(("lrs", "losses"), _are_numbers))
        self.result = LRSweep(state_dict["lrs"], state_dict["losses"]) if state_dict else None

    def rate_at(self, step: int) -> float:
        """The learning rate of step `step`, from 0."""
        share = step / max(1, self.num_training_steps - 1)
        if self.mode == "linear":
            return self.min_lr + (self.max_lr - self.min_lr) * share
        return self.min_lr * (self.max_lr / self.min_lr) ** share


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


class RisingRate(Callback):
    """The callback of the search: sets the rate of each step and records its loss."""

    def __init__(self, finder: LRFinder) -> None:
        self.finder = finder
        self.sweep = LRSweep()
        self._shares: dict[int, list[float]] = {}  # rates of groups over that of the first, by optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"lrs": self.sweep.lrs, "losses": self.sweep.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sweep = LRSweep(state_dict["lrs"], state_dict["losses"])

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        self.log("lr_find/loss", loss.detach(), on_step=True, on_epoch=False)

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        rate = self.finder.rate_at(trainer.global_step)
        index = next(i for i, item in enumerate(trainer.optimizers) if item is optimizer)
        if index not in self._shares:
            rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
            self._shares[index] = [rate / (rates[0] or 1.0) for rate in rates]  # whatever a warm-up begins with
        for group, share in zip(optimizer.param_groups, self._shares[index], strict=True):
            group["lr"] = group["lr"].fill_(rate * share) if isinstance(group["lr"], torch.Tensor) else rate * share

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps = len(self.sweep.lrs)
        if trainer.global_step == steps:  # within an accumulation window, or the loss was not finite
            trainer.should_stop = trainer.should_stop or trainer._run.guard.in_a_row > 0
            return
        loss = trainer._run.last_loss
        self.sweep.losses.append(float(trainer.callback_metrics["lr_find/loss"]) if loss is None else loss)
        self.sweep.lrs.append(self.finder.rate_at(steps))
        threshold, smooth = self.finder.early_stop_threshold, self.sweep.smoothed
        if threshold is not None and steps > _FIRST and smooth[-1] > threshold * min(smooth):
            trainer.should_stop = True
