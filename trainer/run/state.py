"""RunState: the record of what a run owns, which the functions of `trainer.run` and `trainer.setup` take."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback, Logger
from lockstep.callbacks.guard import Guard
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.callbacks.training.gradient_accumulation import GradientAccumulationScheduler
from lockstep.strategies.base import Strategy
from lockstep.strategies.launch.phase import TRAINING_STEP, current_phase
from lockstep.trainer.arguments import TrainerArguments
from lockstep.trainer.checkpoint import store
from lockstep.trainer.kept import numbers
from lockstep.trainer.metrics.entry import nowhere
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.progress import Progress
from lockstep.trainer.run import publish, saving
from lockstep.trainer.run.hooks import Hooks
from lockstep.trainer.run.signals import Signals
from lockstep.trainer.seeding import rng_state

if TYPE_CHECKING:
    from lockstep.callbacks._support.parameter_state import ParameterState
    from lockstep.strategies.optimizers.attributes import Attributes
    from lockstep.trainer.checkpoint.store import Checkpoint, Saving
    from lockstep.trainer.datamodule import DataModule
    from lockstep.trainer.kept.changes import Changes
    from lockstep.trainer.kept.numbers import Numbers
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.folder import RunFolder
    from lockstep.trainer.setup.compilation import Compiled
    from lockstep.trainer.setup.reload import Reload
    from lockstep.trainer.setup.start_hooks import StartHooks
    from lockstep.trainer.shares.shares import Shares
    from lockstep.trainer.trainer import Trainer

RESULTS: tuple[str, ...] = ("callback_metrics", "logged_metrics", "progress_bar_metrics", "log_dir", "should_stop")
RESULTS += ("num_training_batches", "windows_per_epoch", "evaluation_batches", "seed", "begins_from", "batch_idx")
RESULTS += numbers.NAMES
"""What rank 0 brings back to the process that called `fit`."""


class Paused(NamedTuple):
    """What training has while a validation has its own."""

    streams: dict[str, Any]
    metrics: MetricStore
    order: dict[str, Any]
    """The state of its loader: a validation may read from the same sampler, dataset or generator."""


@dataclass(eq=False)
class RunState:
    """What a Trainer's runs own. It lives as long as the Trainer: progress and results count on from run to run."""

    trainer: Trainer
    """What hooks get."""
    arguments: TrainerArguments
    given: dict[str, Any]
    """The arguments as they are written into the run's folder."""
    strategy: Strategy
    strategy_reason: str | None
    """A line that says why "auto" chose this strategy; None once it was printed."""
    callbacks: list[Callback]
    compile_options: dict[str, Any] | None
    """Arguments of torch.compile; None if nothing is compiled."""
    max_epochs: int | None
    max_steps: int | None
    accumulate_grad_batches: int
    accumulation_at_start: int = field(default=1, init=False)
    """`accumulate_grad_batches` when loaders were made first; hooks may change it."""

    # ---- results, which the Trainer shows ------------------------------------------------------------
    progress: Progress = field(default_factory=Progress)
    should_stop: bool = False
    callback_metrics: dict[str, Tensor] = field(default_factory=dict)
    logged_metrics: dict[str, Tensor] = field(default_factory=dict)
    progress_bar_metrics: dict[str, Tensor] = field(default_factory=dict)
    measured_at: dict[str, int] = field(default_factory=dict)
    """By name in `callback_metrics`: `global_step` when its value was measured."""
    last_loss: float | None = None
    """The loss of the last optimizer step over all ranks; None if knowing it would cost a host synchronization."""
    apart: bool = False
    """Whether a fit runs in processes of its own, and leaves module, DataModule and random streams as they are."""
    final: bool = False
    """Whether the module holds what a fit has ended with."""
    at_setup: dict[str, Any] = field(default_factory=dict)
    """The callbacks, hooks in attributes and, in a fit, `training_step`, as the run was set up."""
    at_end: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint of the end of the last fit holds and later runs change, where the fit ran in this process."""
    log_dir: str | None = None
    config: str | None = None
    """The resolved configuration as YAML, if the run has one; loggers write it."""
    saving_seconds: float = 0.0
    """How long training has waited for checkpoints on this rank."""
    executed: Any = field(default_factory=lambda: [0])
    """Its first item counts optimizer steps computed, lost ones included."""

    # ---- the run that is active ----------------------------------------------------------------------
    begun: bool = False
    """Whether a run has got past the checks that need no ranks."""
    active: bool = False
    stage: str = "fit"
    """"fit", "validate", "test" or "predict"."""
    status: str = "initializing"
    """"initializing", "running", "finished" or "interrupted"."""
    evaluating: str | None = None
    """"validate", "test" or "predict" while that runs, within a fit too."""
    module: Module | None = None
    wrapped: Any = None
    """The module as the strategy has wrapped it."""
    datamodule: DataModule | None = None
    hooks: Hooks = field(default_factory=Hooks)
    """What is overridden; nothing before it is known."""
    signals: Signals = field(default_factory=Signals)
    metrics: MetricStore = field(default_factory=lambda: _nothing_measured())
    paused: Paused | None = None
    """Set while a validation runs."""
    seed: int = 0
    """The run's seed, on all ranks; its random streams are derived from it."""
    streams: dict[str, torch.Generator] = field(default_factory=dict)
    rng_at_setup: dict[str, Any] = field(default_factory=dict)
    """The random streams as `setup` began; a run that continues this one sets up with them."""
    folder: RunFolder | None = None
    begins_from: str | None = None
    """Path of the checkpoint that the run begins with, or the last one has."""
    searched: bool = False
    """On a started rank, whether that checkpoint was searched for, with ckpt_path='auto'."""
    resumed: Checkpoint | None = None
    saving: Saving | None = None
    """An asynchronous checkpoint save that has not been waited for."""
    failed_loggers: list[Logger] = field(default_factory=list)
    noticed_names: set[str] = field(default_factory=set)
    """Metric names of which was reported that ranks logged values of their own."""
    watched: set[str] = field(default_factory=set)
    """The loops whose first batches were watched for counts of a part."""
    compiled: Compiled | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Gives back torch's settings that this run has changed."""

    shares: Shares | None = None
    """What this rank switches from share to share, with `virtual_ranks`."""

    reporting_ranks: list[int] | None = None
    """By data rank the rank that reports, once somebody has asked."""

    # ---- data and optimizers -------------------------------------------------------------------------
    train_dataloader: Any = None
    given_loaders: dict[str, Any] = field(default_factory=dict)
    """By kind ("val", "test", "predict") the loaders as the user gave them."""
    num_training_batches: int | float = 0
    windows_per_epoch: int | None = None
    evaluation_limits: dict[str, list[int | None]] = field(
        default_factory=lambda: {"val": [], "test": [], "predict": []}
    )
    evaluation_batches: dict[str, list[int | float]] = field(
        default_factory=lambda: {"val": [], "test": [], "predict": []}
    )
    keeps_predictions: bool = True
    """Whether `predict` returns what `predict_step` returned."""
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    user_optimizers: list[Any] = field(default_factory=list)
    """What `Module.optimizers()` and `Module.optimizer_step` get."""
    schedulers: list[Any] = field(default_factory=list)
    replaceable: tuple[dict[str, Optimizer], list[Any]] | None = None
    """Optimizers and schedulers that are set up, while hooks of the start may set others in their place."""
    optimizer_attributes: Attributes | None = None
    parameter_states: dict[str, ParameterState] = field(default_factory=dict)
    """What callbacks keep beside the parameters, by the name under which a checkpoint holds it."""
    had_parameter_states: bool = False
    """Whether the last fit had any: they end with it."""
    attributes: Changes | None = None
    """What user code has changed of the module's attributes."""
    numbers: Numbers | None = None
    """What user code has set of the Trainer's numbers."""
    start_hooks: StartHooks | None = None
    """What the user's hooks of the start set, if there are any."""
    reload: Reload | None = None
    """`reload_dataloaders_every_n_epochs`, where it is given."""
    configured: dict[str, Any] = field(default_factory=dict)
    """Classes and initial values that `configure_optimizers` returned, or hooks of the start have set."""
    trainable_at_start: dict[str, bool] = field(default_factory=dict)
    frozen_at_start: dict[str, int] | None = None
    """A number of each frozen parameter as the code has built it, if checkpoints leave these out."""

    # ---- flags of the step ---------------------------------------------------------------------------
    batch_idx: int = -1
    """Index in the epoch of the running micro-batch of training."""
    manually_stepped: bool = False
    called_backward: bool = False
    """Whether `manual_backward` was ever called."""
    window_is_open: bool = False
    """Whether an accumulation window is being computed, so that gradients are not whole."""
    is_accumulating: bool = False
    """Whether a window of several micro-batches is before its last backward: gradients are of a part of the step."""
    batch_share: float = 1.0
    """Samples of the running micro-batch over those of its accumulation window on all ranks."""
    sanity_checking: bool = False
    stop_was_voted: bool = False
    """In hooks at the end of a step: whether the ranks knew in it that one asks to stop."""
    asked_to_stop: bool = False
    """Whether the checkpoint that is resumed holds `should_stop` of a run that was still to come to it; from its first
    step on this run asks so too."""
    validation_follows: bool = False
    """In `on_train_batch_end`: whether the current weights are validated before another step."""

    @property
    def rank(self) -> int:
        return self.strategy.topology.rank

    @property
    def world_size(self) -> int:
        return self.strategy.topology.world_size

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0

    @property
    def loggers(self) -> list[Logger]:
        return [item for item in self.callbacks if isinstance(item, Logger)]

    @property
    def stop_is_pending(self) -> bool:
        """Whether this rank asks to stop and a step is still to follow, for `min_epochs` and `min_steps` or since the
        ranks do not know yet. Where training ends at once, a resumed run continues it."""
        progress, arguments = self.progress, self.arguments
        epochs = progress.current_epoch + progress.epoch_validated  # in whose end hooks are asked before it counts
        due = epochs >= (arguments.min_epochs or 0) and progress.global_step >= (arguments.min_steps or 0)
        in_step = (self.metrics.in_batch and self.evaluating is None) or self.signals.number > 0
        return self.should_stop and (not due or (in_step and not self.stop_was_voted))

    def windows_in(self, epoch: int) -> int:
        """Accumulation windows of an epoch, if the loader's length is known."""
        assert self.windows_per_epoch is not None
        schedule = next((item for item in self.callbacks if isinstance(item, GradientAccumulationScheduler)), None)
        if schedule is None or self.arguments.split_batches:
            return self.windows_per_epoch
        return -(-int(self.num_training_batches) // schedule.accumulation_at(epoch, self.accumulation_at_start))

    @property
    def windows_at_start(self) -> int | None:
        """Accumulation windows of an epoch as the run began, whatever hooks have made of accumulation since."""
        loader = self.train_dataloader
        if self.windows_per_epoch is None or loader.splits or loader.plan["accumulate"] == self.accumulation_at_start:
            return self.windows_per_epoch
        return -(-int(self.num_training_batches) // self.accumulation_at_start)

    @property
    def batch_size_at_start(self) -> float | None:
        """Samples of an optimizer step as the run began, if the loader reports them."""
        loader = self.train_dataloader
        if loader is None or loader.batch_size is None or loader.splits:
            return None if loader is None else loader.batch_size
        return loader.batch_size * self.accumulation_at_start / loader.plan["accumulate"]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint."""
        return next((item for item in self.callbacks if isinstance(item, ModelCheckpoint)), None)

    @property
    def guard(self) -> Guard:
        """The run's Guard, or one with the defaults."""
        return next((item for item in self.callbacks if isinstance(item, Guard)), Guard())

    def refuse_within_window(self, what: str, but_in: str | None = None) -> None:
        """Raise RuntimeError for a call between micro-batches, unless in phase `but_in`: gradients are this rank's."""
        if not self.is_accumulating or self.world_size == 1 or current_phase()[1] == but_in:
            return
        if self.strategy.capabilities.synchronous:
            raise RuntimeError(
                f"{what} was called within an accumulation window, whose gradients are not added up yet; call it in "
                "on_before_optimizer_step or on_before_zero_grad, which come once a step, or after the last micro-batch"
            )

    def refuse_within_evaluated_batch(self, what: str) -> None:
        """Raise RuntimeError for a call that waits for all ranks, of which some may have no sample of the batch."""
        if self.metrics.in_batch and not self.metrics.training and self.strategy.topology.data_size > 1:
            raise RuntimeError(
                f"{what} was called in the step or a hook of a batch of an evaluation, which ranks without samples in "
                "it do not run; call it in a hook of the epoch, such as on_validation_epoch_start"
            )

    @property
    def is_stepping(self) -> bool:
        """Whether a strategy runs a step, on this rank perhaps without a batch, before optimizers step."""
        return current_phase()[1] == TRAINING_STEP

    def pause(self) -> Paused:
        """Called as a validation within a fit begins."""
        order = self.train_dataloader.state_dict()
        with suppress(Exception):  # what cannot be copied cannot be saved, which a save says
            order = copy.deepcopy(order)
        self.paused = Paused(rng_state(self.streams), self.metrics, order)
        return self.paused

    @property
    def has_replaced(self) -> bool:
        """Whether a hook of the start has set optimizers or schedulers that are not set up yet."""
        held = self.replaceable
        return held is not None and (self.optimizers is not held[0] or self.schedulers is not held[1])

    def assign(self, name: str, value: Any) -> None:
        """Set `optimizers` or `lr_scheduler_configs` of the Trainer. Every rank calls it."""
        from lockstep.trainer.setup import assigned

        assigned.assign(self, name, value)

    # ---- for the callbacks of this package, which import nothing of the trainer ------------------------
    def log_metrics(self, values: dict[str, float]) -> None:
        publish.log_metrics(self, values)

    def show_measured(self, values: dict[str, float]) -> None:
        """Show what a callback has measured of this step, alike on all ranks, to callbacks and loggers."""
        for name, value in values.items():
            self.callback_metrics[name] = torch.tensor(value, dtype=torch.float64)
            self.measured_at[name] = self.progress.global_step
        publish.log_metrics(self, values)

    def publish_due(self) -> None:
        publish.publish_due(self)

    def finish_saving(self) -> None:
        saving.finish(self)

    def has_saved(self, callback: ModelCheckpoint) -> None:
        for logger in self.loggers if self.is_global_zero else ():
            publish.guarded(self, logger, logger.after_save_checkpoint, callback)

    def is_checkpoint(self, path: str) -> bool:
        """Whether `path` is a committed checkpoint."""
        return store.is_checkpoint(os.path.expanduser(path))

    def __getstate__(self) -> dict[str, Any]:
        """What travels to the ranks: arguments and results, not what belongs to an active run."""
        gone: dict[str, Any] = dict.fromkeys(
            (
                "wrapped",
                "optimizer_attributes",
                "attributes",
                "resumed",
                "saving",
                "module",
                "datamodule",
                "train_dataloader",
                "folder",
                "shares",
                "numbers",
                "start_hooks",
                "reload",
            )
        )
        gone |= {"streams": {}, "given_loaders": {}, "schedulers": [], "user_optimizers": [], "optimizers": {}}
        gone |= {"parameter_states": {}, "at_end": {}, "at_setup": {}}
        return {**vars(self), **gone, "metrics": None, "hooks": Hooks()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.metrics = _nothing_measured()


def _nothing_measured() -> MetricStore:
    store = MetricStore()
    store.log = nowhere  # type: ignore[method-assign,assignment]
    return store
