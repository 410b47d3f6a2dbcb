"""What users read on a Trainer, and on a Module of it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback, Logger
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.strategies.base import Strategy
from lockstep.strategies.precision import ALIASES
from lockstep.trainer.arguments import TrainerArguments
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.lightning_names import SET, TRAINER, missing

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.optimizers import SchedulerConfig
    from lockstep.trainer.trainer import Trainer

_ARGUMENTS = frozenset(field.name for field in fields(TrainerArguments))


class TrainerState(NamedTuple):
    """What a Trainer does."""

    status: str
    """"initializing", "running", "finished" or "interrupted"."""
    fn: str | None
    """"fit", "validate", "test" or "predict": what was called last."""
    stage: str | None
    """"train", "sanity_check", "validate", "test" or "predict" while it runs, else None."""

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        return self.status in ("finished", "interrupted")


class Facts:
    """The attributes of a Trainer."""

    _run: RunState
    """What its runs own; for this package alone."""
    _not_kept = _ARGUMENTS | {"_run", "_predictions"}
    """Attributes that are not the user's."""

    @property
    def arguments(self) -> TrainerArguments:
        """What this Trainer was given, with what `fast_dev_run` implies."""
        return self._run.arguments

    @property
    def strategy(self) -> Strategy:
        return self._run.strategy

    @property
    def callbacks(self) -> list[Callback]:
        """The run's callbacks in the order in which they are called: loggers first, ModelCheckpoint last."""
        return self._run.callbacks

    @callbacks.setter
    def callbacks(self, value: list[Callback]) -> None:
        self._run.callbacks = value

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Every logged value, reduced over ranks, as of the last logging interval or epoch end (0-dim, CPU)."""
        return self._run.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Of `callback_metrics` those that loggers get."""
        return self._run.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """Of `callback_metrics` those that the progress bar shows."""
        return self._run.progress_bar_metrics

    @property
    def global_step(self) -> int:
        """Optimizer steps completed."""
        return self._run.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed; while one runs, its index."""
        return self._run.progress.current_epoch

    @property
    def max_epochs(self) -> int | None:
        """Where training ends; None for no limit. Raise it to train on."""
        return self._run.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._run.max_epochs = value

    @property
    def max_steps(self) -> int | None:
        """Where training ends, in optimizer steps; None for no limit. Raise it to train on."""
        return self._run.max_steps

    @max_steps.setter
    def max_steps(self, value: int | None) -> None:
        self._run.max_steps = value

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of each rank in one optimizer step. Set in a run, it holds from the next epoch on, or from
        this one in `on_train_epoch_start`; all ranks must set the same."""
        return self._run.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self._run.accumulate_grad_batches = value

    @property
    def should_stop(self) -> bool:
        """Set it on any rank: training ends after the next step at the latest, on all ranks alike."""
        return self._run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._run.should_stop = value

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation before training runs."""
        return self._run.sanity_checking

    @property
    def state(self) -> TrainerState:
        """What this Trainer does: `status`, `fn` and `stage`."""
        return TrainerState(
            self._run.status, self._run.stage if self._run.status != "initializing" else None, self._stage
        )

    @property
    def training(self) -> bool:
        """Whether `fit` runs and does not validate."""
        return self._stage == "train"

    @property
    def validating(self) -> bool:
        """Whether validation runs, within `fit` too; not in the sanity check."""
        return self._stage == "validate"

    @property
    def testing(self) -> bool:
        return self._stage == "test"

    @property
    def predicting(self) -> bool:
        return self._stage == "predict"

    @property
    def interrupted(self) -> bool:
        """Whether an exception or a signal has ended the last run."""
        return self._run.status == "interrupted"

    @property
    def is_last_batch(self) -> bool:
        """Whether the running training batch is the last of the epoch; False if the loader's length is not known."""
        return self._run.batch_idx + 1 >= self._run.num_training_batches

    @property
    def model(self) -> Any:
        """The module as the strategy has wrapped it while it runs, else the module."""
        run = self._run
        return run.wrapped if run.active and run.wrapped is not None else run.module

    @property
    def lightning_module(self) -> Module | None:
        """The module that runs, or ran last."""
        return self._run.module

    @property
    def precision(self) -> str:
        """Such as "32-true", for any spelling that was given."""
        return ALIASES.get(str(self._run.arguments.precision), str(self._run.arguments.precision))

    @property
    def num_devices(self) -> int:
        """Devices of this node."""
        return self._run.strategy.num_devices

    @property
    def node_rank(self) -> int:
        return self._run.strategy.topology.node_rank

    @property
    def global_rank(self) -> int:
        return self._run.rank

    @property
    def local_rank(self) -> int:
        return self._run.strategy.topology.local_rank

    @property
    def world_size(self) -> int:
        return self._run.world_size

    @property
    def is_global_zero(self) -> bool:
        return self._run.is_global_zero

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of `configure_optimizers`, or what `on_fit_start` or `on_train_start` has set in their place; every
        rank sets it. Raises AttributeError in other hooks and on strategies that cannot exchange them."""
        return list(self._run.optimizers.values())

    @optimizers.setter
    def optimizers(self, value: Any) -> None:
        self._run.assign("optimizers", value)

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers and when each steps; set as `optimizers` is."""
        return list(self._run.schedulers)

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, value: Any) -> None:
        self._run.assign("lr_scheduler_configs", value)

    @property
    def datamodule(self) -> DataModule | None:
        return self._run.datamodule

    @property
    def train_dataloader(self) -> Any:
        """This rank's share of the training data."""
        return self._run.train_dataloader

    @property
    def val_dataloaders(self) -> Any:
        """The validation data as it was given: a loader, a list or dict of them, or None."""
        return self._run.given_loaders.get("val")

    @property
    def test_dataloaders(self) -> Any:
        """The test data as it was given."""
        return self._run.given_loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The data of `predict` as it was given."""
        return self._run.given_loaders.get("predict")

    @property
    def num_training_batches(self) -> int | float:
        """Batches of each rank in an epoch; infinite if the loader's length is not known."""
        return self._run.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each rank in a validation, for each loader."""
        return self._run.evaluation_batches["val"]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run if the loader's length and an end are known, else infinity."""
        run = self._run
        by_epochs = float("inf")
        if run.max_epochs is not None and run.windows_per_epoch is not None:
            by_epochs = sum(map(run.windows_in, range(run.max_epochs)))
        return by_epochs if run.max_steps is None else min(by_epochs, run.max_steps)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint, or None."""
        return self._run.checkpoint_callback

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return [item for item in self._run.callbacks if isinstance(item, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping, or None."""
        return next((item for item in self._run.callbacks if isinstance(item, EarlyStopping)), None)

    @property
    def loggers(self) -> list[Logger]:
        return self._run.loggers

    @property
    def logger(self) -> Logger | None:
        """The first logger; in a `fast_dev_run` one that writes nothing."""
        return next(iter(self._run.loggers), SilentLogger() if self._run.arguments.fast_dev_run else None)

    @property
    def log_dir(self) -> str | None:
        """Folder of the run; None if nothing is written."""
        return self._run.log_dir

    @property
    def _stage(self) -> str | None:
        run = self._run
        if not run.active:
            return None
        if run.sanity_checking:
            return "sanity_check"
        return run.evaluating or ("train" if run.stage == "fit" else run.stage)

    def __getattr__(self, name: str) -> Any:
        if name in _ARGUMENTS:
            return getattr(self._run.arguments, name)
        raise AttributeError(
            missing("Trainer has no attribute", name, TRAINER, () if name.startswith("_") else dir(self))
        )

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(type(self), name, None)
        if isinstance(found, property) and found.fset is None:
            raise AttributeError(f"trainer.{name} cannot be set; {SET.get(name, 'it follows the run')}")
        if name in _ARGUMENTS and found is None:
            raise AttributeError(
                f"{name} of a Trainer is fixed once it is made; make a new Trainer({name}={value!r:.60})"
            )
        super().__setattr__(name, value)


class ModuleFacts:
    """The attributes of a Module that its Trainer knows."""

    @property
    def _trainer(self) -> Trainer | None:
        return self.__dict__.get("_trainer")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())  # type: ignore[attr-defined]

    @property
    def current_epoch(self) -> int:
        """Epochs completed; the index of the running epoch."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps completed."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Any]:
        return self._trainer.loggers if self._trainer is not None else []


class SilentLogger(Logger):
    """Stands for the loggers in a `fast_dev_run`, so that user code that writes to one can be tried; does nothing."""

    @property
    def experiment(self) -> Any:
        from lockstep.callbacks._support.null_writer import (
            NullWriter,
        )  # `from lockstep import Trainer` does not need it

        return NullWriter()

    def log_metrics(self, *args: Any, **options: Any) -> None: ...
    def log_hyperparams(self, *args: Any, **options: Any) -> None: ...
    def __setitem__(self, name: Any, value: Any) -> None: ...
    def __getitem__(self, name: Any) -> SilentLogger:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: None
