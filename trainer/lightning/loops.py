"""What code reads of Lightning's loops: views of where the Trainer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.trainer.run import saving

if TYPE_CHECKING:
    from lockstep.trainer.lightning.trainer import Trainer
    from lockstep.trainer.run.state import RunState


class _View:
    """A part of the loops. Raises AttributeError for what it does not have, also where that is set."""

    def __init__(self, trainer: Trainer) -> None:
        vars(self)["trainer"] = trainer

    @property
    def _run(self) -> RunState:
        return self.trainer._run

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(word for word in dir(type(self)) if not word.startswith("_"))
        raise AttributeError(f"{type(self).__name__} of lockstep.lightning has no {name!r}; it has {known}")

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(getattr(type(self), name, None), "fset", None) is None:
            raise AttributeError(f"{type(self).__name__} of lockstep.lightning has no {name!r} that can be set")
        super().__setattr__(name, value)


class _Counts(_View):
    """Batches or epochs that have begun and that are done."""

    def __init__(self, trainer: Trainer, completed: int, under_way: int) -> None:
        super().__init__(trainer)
        vars(self)["_numbers"] = completed, completed + under_way

    @property
    def completed(self) -> int:
        return self._numbers[0]

    @property
    def ready(self) -> int:
        return self._numbers[1]


class EpochProgress(_View):
    @property
    def current(self) -> EpochCounts:
        return EpochCounts(self.trainer)


class EpochCounts(_View):
    @property
    def completed(self) -> int:
        return self.trainer.current_epoch


class BatchProgress(_View):
    """Batches of training on each rank: `current` of the epoch, `total` of the run."""

    @property
    def current(self) -> _Counts:
        run = self._run
        done = run.batch_idx + 1 if run.batch_idx >= 0 else run.progress.batches_seen
        under_way = run.metrics.in_batch and run.evaluating is None
        return _Counts(self.trainer, done - under_way, under_way)

    @property
    def total(self) -> _Counts:
        run = self._run
        under_way = run.metrics.in_batch and run.evaluating is None
        before = run.progress.total_batches - run.progress.batches_seen
        done = before + run.batch_idx if under_way else run.progress.total_batches
        return _Counts(self.trainer, done, under_way)

    @property
    def is_last_batch(self) -> bool:
        return self.trainer.is_last_batch


class EvaluationLoop(_View):
    """`validate_loop`, `test_loop`, `predict_loop` and `fit_loop.epoch_loop.val_loop`."""

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        vars(self)["_kind"] = kind

    @property
    def max_batches(self) -> list[int | float]:
        """Batches of each rank, for each loader."""
        return self._run.evaluation_batches[self._kind]

    @property
    def num_dataloaders(self) -> int:
        return len(self.max_batches)


class PredictionLoop(EvaluationLoop):
    @property
    def predictions(self) -> list[Any]:
        """What the last `predict` returned; an empty list with `return_predictions=False`."""
        return self.trainer._predictions


class _Training(_View):
    @property
    def max_steps(self) -> int | None:
        return self.trainer.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._run.max_steps = None if value == -1 else value

    @property
    def min_steps(self) -> int | None:
        return self.trainer.min_steps

    @property
    def global_step(self) -> int:
        return self.trainer.global_step

    @property
    def batch_idx(self) -> int:
        """Index in the epoch of the running batch, or the last one; -1 before the first."""
        return BatchProgress(self.trainer).current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """Index in the run of the running batch, or the last one; -1 before the first."""
        return BatchProgress(self.trainer).total.ready - 1


class EpochLoop(_Training):
    @property
    def batch_progress(self) -> BatchProgress:
        return BatchProgress(self.trainer)

    @property
    def val_loop(self) -> EvaluationLoop:
        return EvaluationLoop(self.trainer, "val")


class FitLoop(_Training):
    @property
    def epoch_loop(self) -> EpochLoop:
        return EpochLoop(self.trainer)

    @property
    def epoch_progress(self) -> EpochProgress:
        return EpochProgress(self.trainer)

    @property
    def max_epochs(self) -> int | None:
        return self.trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self.trainer._limit_epochs(value)

    @property
    def min_epochs(self) -> int | None:
        return self.trainer.min_epochs

    @property
    def current_epoch(self) -> int:
        return self.trainer.current_epoch

    @property
    def max_batches(self) -> int | float:
        """Batches of each rank in an epoch."""
        return self.trainer.num_training_batches

    @property
    def done(self) -> bool:
        """Whether training has reached its end, or is to stop."""
        run = self._run
        ended = run.max_epochs is not None and run.progress.current_epoch >= run.max_epochs
        return ended or saving.is_at_last_step(run) or (run.should_stop and saving.may_stop(run))
