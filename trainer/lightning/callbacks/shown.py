"""Callbacks with Lightning's arguments that show a run: the summary of its model and its progress."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep import callbacks
from lockstep.trainer.lightning.callbacks.uncalled import Uncalled
from lockstep.trainer.lightning.utilities import ModelSummary as Summary

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.trainer import Trainer


class ModelSummary(callbacks.ModelSummary):
    """`lockstep.callbacks.ModelSummary`, which shows nothing with `max_depth=0`; a subclass may override `summarize`,
    which is given `options`.
    """

    def __init__(self, max_depth: int = 1, **options: Any) -> None:
        super().__init__(max_depth)
        self._options = options

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if not self.max_depth:
            return
        if type(self).summarize is ModelSummary.summarize:
            super().on_fit_start(trainer, module)
        elif trainer.is_global_zero:
            table = _summary(module, self.max_depth)
            modes = ["train" if layer.training else "eval" for _, layer in table.named_modules]
            all_modes = [layer.training for layer in module.modules()][1:]
            self.summarize(
                [
                    (" ", list(map(str, range(len(modes))))),
                    ("Name", table.layer_names),
                    ("Type", table.layer_types),
                    ("Params", [f"{number:,}" for number in table.param_nums]),
                    ("Mode", modes),
                ],
                table.total_parameters,
                table.trainable_parameters,
                table.model_size,
                {"train": all_modes.count(True), "eval": all_modes.count(False)},
                total_flops=table.total_flops,
                **self._options,
            )

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Override to show the columns of the table and its sums, on rank 0."""


def _summary(module: Module, max_depth: int) -> Summary:
    """The table of a module, with what its forward on the example shows if that succeeds."""
    try:
        return Summary(module, max_depth)
    except Exception as error:
        warnings.warn(
            f"the summary of {type(module).__name__} has no sizes and no FLOPs, as its forward on example_input_array "
            f"fails ({type(error).__name__}: {error})",
            stacklevel=2,
        )
    example, module.example_input_array = module.example_input_array, None
    try:
        return Summary(module, max_depth)
    finally:
        module.example_input_array = example


class RichModelSummary(ModelSummary):
    """`lockstep.callbacks.ModelSummary`; the table is a text."""


class ProgressBar(Uncalled, callbacks.ProgressBar):
    """`lockstep.callbacks.ProgressBar`; what draws Lightning's bars changes nothing, but `refresh_rate=0` shows none.

    Raises TypeError for a subclass that overrides what Lightning's bars call.
    """

    def __init__(self, refresh_rate: int = 1, *args: Any, **options: Any) -> None:
        super().__init__()
        self.refresh_rate = refresh_rate
        self._disabled = False
        self._trainer: Trainer | None = None

    @property
    def is_enabled(self) -> bool:
        return not self._disabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        return not self.is_enabled

    def enable(self) -> None:
        """Show the bar from the next `fit`, `validate`, `test` or `predict` on."""
        self._disabled = False

    def disable(self) -> None:
        """Show nothing."""
        self._disabled = True
        self.hide()

    def get_metrics(self, trainer: Trainer, module: Module) -> dict[str, Any]:
        """What the bar shows after its counts: the version of the logger, and values of `prog_bar=True`."""
        version = getattr(trainer.logger, "version", None)
        named = {} if version is None else {"v_num": version[-4:] if isinstance(version, str) else version}
        return named | super().get_metrics(trainer, module)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._trainer = trainer
        if self.is_disabled:
            self.hide()

    @property
    def trainer(self) -> Trainer:
        """That which runs, or ran last, with this bar."""
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__} has no trainer before a run")
        return self._trainer

    @property
    def total_train_batches(self) -> int | float:
        """Batches of the epoch, or as many as `max_steps` leaves."""
        trainer = self.trainer
        steps = trainer.max_steps or -1
        left = steps - trainer.global_step if trainer.max_epochs == -1 and steps > 0 else math.inf
        return min(trainer.num_training_batches, left)

    @property
    def total_val_batches(self) -> int | float:
        """Batches of a validation over all loaders; 0 in an epoch without one."""
        every = self.trainer.check_val_every_n_epoch
        validates = every is None or (self.trainer.current_epoch + 1) % every == 0
        return sum(self.trainer.num_val_batches) if validates else 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trainer": None}


class TQDMProgressBar(ProgressBar):
    """`lockstep.callbacks.ProgressBar`; `TQDM_MINITERS` of the environment is the least `refresh_rate`."""

    def __init__(self, refresh_rate: int = 1, *args: Any, **options: Any) -> None:
        super().__init__(max(refresh_rate, int(os.environ.get("TQDM_MINITERS") or 0)), *args, **options)


class RichProgressBar(ProgressBar):
    """`lockstep.callbacks.ProgressBar`."""


@dataclass
class RichProgressBarTheme:
    """Styles of Lightning's `RichProgressBar`; they change nothing."""

    description: Any = ""
    progress_bar: Any = "#6206E0"
    progress_bar_finished: Any = "#6206E0"
    progress_bar_pulse: Any = "#6206E0"
    batch_progress: Any = ""
    time: Any = "dim"
    processing_speed: Any = "dim underline"
    metrics: Any = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"
