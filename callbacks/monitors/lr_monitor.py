"""Learning rates, and if wanted momentum and weight decay, beside the other curves of a run."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from lockstep.callbacks._support.lr_factor import lr_factor
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lockstep import Module, Trainer


class LearningRateMonitor(Callback):
    """Logs the learning rate of every optimizer and parameter group under the step that it was used for.

    The name is the scheduler's `name` where its config has one, else `lr-<optimizer class>`; a second
    optimizer of that name gets `-1`, then `-2`. Several parameter groups append `/pg1`, `/pg2`, or `/<name>`
    where the group has a "name". Momentum and weight decay append `-momentum` and `-weight_decay`.
    The values are in `trainer.callback_metrics` too, on every rank.

    Args:
        logging_interval: "step" logs every `log_every_n_steps` optimizer steps, "epoch" at the start of every
            training epoch; None logs each optimizer as often as its scheduler is stepped (without one: both).
        log_momentum: also log `momentum`, or the first of `betas`.
        log_weight_decay: also log `weight_decay`.
    """

    keeps_a_record = True
    lrs: dict[str, list[float]]
    """All rates of this fit by name, as they were logged; a group that gets company takes its rates along."""
    last_momentum_values: dict[str, float]
    """The momentum that was logged last, by name."""
    last_weight_decay_values: dict[str, float]
    """The weight decay that was logged last, by name."""

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ValueError(f"logging_interval must be 'step', 'epoch' or None, but it is {logging_interval!r}")
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self._used: dict[str, float] = {}  # by the step that is being taken, where that step is logged
        self._forget()

    def _forget(self) -> None:
        self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self._forget()
        self._check_names(trainer)
        without = [
            type(optimizer).__name__
            for optimizer in trainer.optimizers
            if not any({"momentum", "betas"} & group.keys() for group in optimizer.param_groups)
        ]
        if self.log_momentum and without and trainer.is_global_zero:
            warnings.warn(
                f"log_momentum=True of LearningRateMonitor logs 0 for {', '.join(without)}, without momentum",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._check_names(trainer)  # hooks of the start may have set other optimizers
        stats = self._stats(trainer, "epoch")
        if stats:
            self._log(trainer, stats)

    @staticmethod
    def _check_names(trainer: Trainer) -> None:
        for optimizer in trainer.optimizers:
            for name, count in Counter(group["name"] for group in optimizer.param_groups if "name" in group).items():
                if count > 1:
                    raise ValueError(
                        f"LearningRateMonitor found {count} parameter groups of {type(optimizer).__name__} with the "
                        f"name {name!r}, whose values would be one curve; give each group another name"
                    )

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        # Read now, since schedulers move before the step is counted and logged.
        if (trainer.global_step + 1) % trainer.arguments.log_every_n_steps == 0:
            self._used = self._stats(trainer, "step")

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._used and not trainer._run.window_is_open:  # else another learner of this rank has stepped before
            self._log(trainer, self._used)
            self._used = {}

    def _log(self, trainer: Trainer, stats: dict[str, float]) -> None:
        for name, value in stats.items():
            owner, _, kind = name.rpartition("-")
            if owner in stats and kind in ("momentum", "weight_decay"):
                last = self.last_momentum_values if kind == "momentum" else self.last_weight_decay_values
                last[name] = value
                continue
            if name not in self.lrs:
                self.lrs[name] = self.lrs.pop(name.removesuffix("/pg1"), [])
            self.lrs[name].append(value)
        trainer._run.show_measured(stats)

    def _stats(self, trainer: Trainer, interval: str) -> dict[str, float]:
        stats: dict[str, float] = {}
        seen: Counter[str] = Counter()
        for optimizer in trainer.optimizers:
            config = next(
                (
                    config
                    for config in trainer._run.schedulers
                    if getattr(config.scheduler, "optimizer", None) is optimizer
                ),
                None,
            )
            name = (config.name if config else None) or f"lr-{type(optimizer).__name__}"
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name}-{seen[name] - 1}"
            if interval != (self.logging_interval or (config.interval if config else interval)):
                continue
            for index, group in enumerate(optimizer.param_groups):
                suffix = (
                    f"/{group['name']}"
                    if "name" in group
                    else f"/pg{index + 1}"
                    if len(optimizer.param_groups) > 1
                    else ""
                )
                # float() of a rate that is a tensor on a device waits for the device; done only when logged.
                stats[name + suffix] = float(group["lr"]) * lr_factor(optimizer)
                if self.log_momentum:
                    stats[f"{name}{suffix}-momentum"] = float(
                        group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                    )
                if self.log_weight_decay:
                    stats[f"{name}{suffix}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return stats
