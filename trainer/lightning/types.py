"""The types of `lightning.pytorch.utilities.types`, for annotations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

_NUMBER = int | float
_METRIC = Metric | Tensor | _NUMBER
_PATH = str | os.PathLike
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]
STEP_OUTPUT = Tensor | Mapping[str, Any] | None
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]


class _Word(str, Enum):
    """A member is equal to its value, and shown as it."""

    __str__ = str.__str__


class TrainerStatus(_Word):
    """Of `trainer.state.status`."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(_Word):
    """Of `trainer.state.fn`, equal to the `stage` of `setup` and `teardown`."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Word):
    """Of `trainer.state.stage`."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def dataloader_prefix(self) -> str:
        """How the names of its loaders and limits begin."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value

    @property
    def evaluating(self) -> bool:
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


class LRSchedulerConfigType(TypedDict, total=False):
    """What `configure_optimizers` may return for a scheduler."""

    scheduler: LRScheduler | ReduceLROnPlateau
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """An optimizer as a dict."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict, total=False):
    """An optimizer and its scheduler as a dict."""

    optimizer: Optimizer
    lr_scheduler: LRScheduler | ReduceLROnPlateau | LRSchedulerConfigType
    monitor: str


OptimizerLRScheduler = Optimizer | Sequence[Any] | OptimizerConfig | OptimizerLRSchedulerConfig | None
