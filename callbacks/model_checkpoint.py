"""ModelCheckpoint: when to save, under which name, and which checkpoints to keep."""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.callbacks._support.checkpoint_options import (
    SAVED,
    check_options,
    check_template,
    exact,
    filled,
    make_writable,
    placeholders,
    versioned,
)
from lockstep.callbacks._support.monitored_metric import MonitoredMetric, check_state
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class ModelCheckpoint(Callback):
    """Save the run periodically, under a name made of its metrics, and keep the best or the latest few.

    A checkpoint is a folder `<dirpath>/<filename>`. All ranks decide alike, by what rank 0 knows: its
    metrics, its clock, which names are taken. Nothing is saved
    in the sanity check, with `fast_dev_run`, outside `fit`, or twice for the same step.

    When: without one of the `every_n_...`, after every validation and, where that has not saved the
    same step, at the end of every training epoch; with `monitor` only at the one of the two moments
    that brings the metric. When training ends, its last state is saved too, unless it is saved already
    or `monitor` alone decides.

    Which are kept: with `monitor` the `save_top_k` best, without it the `save_top_k` latest. A new one
    is committed and read back before an older one is removed, so `save_top_k + 1` are on the disk for a moment. NaN
    counts as the worst value, and so does a metric that was not measured on the weights that are saved,
    if a step or time asks for a save at which no validation is due (one that is due is waited for); among
    those the newest is kept, so there is always something to resume from.
    Only checkpoints that this callback has made, in its own `dirpath`, are ever removed.

    Args:
        dirpath: Folder of the checkpoints; None takes `<trainer.log_dir>/checkpoints`.
        filename: Template such as "{epoch}-{step}-{val/loss:.3f}" of `epoch` (the running one, from 0),
            `step` (optimizer steps completed) and metrics with format specifications; "/" becomes "_".
            A name that is taken gets "-v1". None takes "{epoch}-{step}".
        monitor: Metric in `trainer.callback_metrics`, "step" or "epoch". One that is missing raises ValueError.
        mode: "min" where lower is better, "max" where higher is.
        save_top_k: How many to keep; -1 keeps all, 0 none.
        save_last: Keep the latest state as `<dirpath>/last` besides, replaced atomically. It shares its
            files with the checkpoint of the same step where there is one and the file system has hard links.
        save_weights_only: Save no state of training: such checkpoints cannot be resumed.
        save_trainable_only: Leave frozen weights out of all checkpoints of the run, which the code must build again.
        async_save: Training waits only while the state is copied to host memory; files are written and committed
            asynchronously. A new save, and the end of training, waits for the previous one to finish. A failed one
            ends training within a step, on all ranks.
        every_n_train_steps: Save every that many optimizer steps instead.
        every_n_epochs: Save only in every that-many-th epoch.
        train_time_interval: Save whenever so much time has passed instead, checked every `log_every_n_steps` steps.
        save_on_train_epoch_end: False saves after validations only, True only at the ends of training epochs.
        auto_insert_metric_name: Write "val_loss=0.123" where False writes "0.123".
        verbose: Rank 0 prints what it saves.
    """

    dirpath: str | None
    """Absolute; None until `setup` where none was given."""
    best_k_models: dict[str, Tensor]
    """Paths of the checkpoints kept, and what ranks them (0-dim, CPU): the metric, or the step without `monitor`."""
    last_model_path: str
    """Path of the `last` checkpoint, or ""."""
    current_score: Tensor | None
    """The metric when it was last checked."""
    _extension = ""

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        *,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        save_weights_only: bool = False,
        save_trainable_only: bool = False,
        async_save: bool = False,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        save_on_train_epoch_end: bool | None = None,
        auto_insert_metric_name: bool = True,
        verbose: bool = False,
    ) -> None:
        check_options(
            dirpath, mode, save_top_k, every_n_train_steps, every_n_epochs, train_time_interval, save_on_train_epoch_end
        )
        self.filename = filename or "{epoch}-{step}"
        check_template(self.filename)
        if save_last and self.filename == "last":
            raise ValueError(
                'filename="last" of ModelCheckpoint is reserved by save_last=True: choose another filename'
            )
        self.dirpath = self._given_dirpath = None if dirpath is None else os.path.abspath(os.path.expanduser(dirpath))
        self.monitor, self.mode = monitor, mode
        self.save_top_k, self.save_last = save_top_k, save_last
        self.save_weights_only, self.save_trainable_only = save_weights_only, save_trainable_only
        self.async_save = async_save
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps, every_n_epochs
        self.train_time_interval = train_time_interval
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.auto_insert_metric_name, self.verbose = auto_insert_metric_name, verbose
        self.best_k_models, self.last_model_path, self.current_score = {}, "", None
        self._metric: MonitoredMetric | None = None
        if monitor not in (None, "step", "epoch"):
            self._metric = MonitoredMetric(monitor, "ModelCheckpoint", save_on_train_epoch_end)
        self._fitting = self._ended = False
        self._saving: tuple[str, dict[str, Tensor]] | None = None  # the path saved last, and what was kept before
        self._warnings: set[str] = set()  # given already
        self._moved_from: str | None = None  # dirpath of the run before this one, until paths are found again
        self._considered_step = 0  # the last step that was checked, saved or not
        self._waits_at = self._ends_at = -1  # the step whose save waits for its validation, or its epoch's end
        self._seen_step = 0  # global_step at the last batch end
        self._saved_at = 0.0  # this process's clock, in seconds, at the last save by time

    @property
    def state_key(self) -> str:
        options = ("monitor", "mode", "every_n_train_steps", "every_n_epochs", "train_time_interval")
        return f"ModelCheckpoint[{', '.join(f'{name}={getattr(self, name)}' for name in options)}]"

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, or the latest without `monitor`; "" where there is none."""
        return min(self.best_k_models, key=self._badness, default="")

    @property
    def best_model_score(self) -> Tensor | None:
        """The metric of `best_model_path`; None without `monitor`."""
        return self.best_k_models.get(self.best_model_path) if self.monitor is not None else None

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the `save_top_k` best, the next to go; "" while there are fewer than `save_top_k`."""
        ranked = sorted(self.best_k_models, key=self._badness, reverse=True)  # more after a kill before a removal
        return ranked[-self.save_top_k] if 0 < self.save_top_k <= len(ranked) else ""

    @property
    def kth_value(self) -> Tensor | None:
        """What ranks `kth_best_model_path`."""
        return self.best_k_models.get(self.kth_best_model_path)

    def format_checkpoint_name(self, metrics: dict[str, Any]) -> str:
        """The folder's name for these values; one that is missing is written as nan."""
        return filled(self.filename, metrics, self.auto_insert_metric_name)

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": self.dirpath,
            "best_k_models": [[self._relative(path), float(score)] for path, score in self.best_k_models.items()],
            "last_model_path": self._relative(self.last_model_path),
            "current_score": None if self.current_score is None else float(self.current_score),
            "considered_step": self._considered_step,
            "save_on_train_epoch_end": self._metric.at_epoch_end if self._metric else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state("ModelCheckpoint", state_dict, SAVED)
        self._moved_from = state_dict["dirpath"]
        self.dirpath = self.dirpath or self._moved_from
        folder = self._moved_from or ""
        self.best_k_models = {os.path.join(folder, path): exact(score) for path, score in state_dict["best_k_models"]}
        last = state_dict["last_model_path"]
        self.last_model_path = os.path.join(folder, last) if last else ""
        self.current_score = None if state_dict["current_score"] is None else exact(state_dict["current_score"])
        self._considered_step = state_dict["considered_step"]
        if self._metric and self._metric.at_epoch_end is None:
            self._metric.at_epoch_end = state_dict["save_on_train_epoch_end"]

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.arguments.fast_dev_run
        if not self._fitting:
            return
        before, folder = self.dirpath, trainer._run.log_dir or trainer.arguments.default_root_dir
        self.dirpath = self._given_dirpath or os.path.abspath(os.path.join(folder, "checkpoints"))
        self._moved_from = self._moved_from or (None if before == self.dirpath else before)
        if trainer.is_global_zero:
            make_writable(self.dirpath)

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if not self._fitting:
            return
        self._saving = None
        if self._metric:
            self._metric.restart()
        if trainer.global_step == 0:  # a run of its own, perhaps the second with this callback
            self.best_k_models, self.last_model_path, self.current_score, self._considered_step = {}, "", None, 0
        elif self._moved_from is not None:
            self._find_again(trainer, self._moved_from)
        self._moved_from = None

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._seen_step, self._saved_at = trainer.global_step, time.monotonic()
        step = trainer.global_step
        if self.every_n_train_steps and step % self.every_n_train_steps == 0 and self._considered_step < step:
            self._waits_at = step  # in a validation that is repeated, as another saver saved before it
        if trainer._run.progress.validated_at == step > self._considered_step:
            self._ends_at = step  # a save by hand came first

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, seen, interval = trainer.global_step, self._seen_step, self.train_time_interval
        if step == seen or not self._fitting or (interval is not None and not trainer.strategy.ranks_meet):
            return
        self._seen_step = step
        if self.every_n_train_steps is not None:
            due = step // self.every_n_train_steps > seen // self.every_n_train_steps
        elif interval is not None:
            every = trainer.arguments.log_every_n_steps
            due = step // every > seen // every and trainer.strategy.broadcast(
                time.monotonic() - self._saved_at >= interval.total_seconds()
            )
        else:
            return
        if due:
            self._saved_at = time.monotonic()
            if self._metric and trainer._run.validation_follows:
                self._waits_at = step  # for the metric of these weights
            else:
                self._consider(trainer)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._fitting and not trainer.sanity_checking:
            self._consider_epoch(trainer, epoch_end=False)
            if self._waits_at == trainer.global_step:
                self._consider(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._fitting:
            self._consider_epoch(trainer, epoch_end=True)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if self._fitting and (self.save_last or self.monitor is None):
            self._ended, again = True, self._considered_step == trainer.global_step and not self.last_model_path
            if again and self.save_last:  # of a run that had ended, resumed into another folder
                self._considered_step = 0
            self._consider(trainer, rank=self.monitor is None and not again)
            self._ended = False

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        saving = self._saving
        if saving is not None and not trainer._run.is_checkpoint(saving[0]):  # an asynchronous save that failed
            self.best_k_models = saving[1]

    def _consider_epoch(self, trainer: Trainer, *, epoch_end: bool) -> None:
        if self._metric:
            due = self._metric.fresh(trainer, epoch_end=epoch_end)
            self._complain(trainer)
        else:
            due = self.save_on_train_epoch_end in (None, epoch_end)
        due = due or (epoch_end and self._ends_at == trainer.global_step)
        by_epochs = self.every_n_train_steps is None and self.train_time_interval is None
        if due and by_epochs and (trainer.current_epoch + 1) % (self.every_n_epochs or 1) == 0:
            if not epoch_end and self.save_on_train_epoch_end is None and trainer._run.progress.epoch_validated:
                self._ends_at = trainer.global_step  # its hooks come first: a resumed run lacks what they sum up
            else:
                self._consider(trainer)

    def _consider(self, trainer: Trainer, rank: bool = True) -> None:
        """Save the state after the last step where it belongs among those to keep; with `rank` False only as `last`."""
        if trainer.global_step in (0, self._considered_step):
            return
        self._considered_step = trainer.global_step
        trainer._run.finish_saving()  # also of another saver, before names are looked up on the disk
        trainer._run.publish_due()  # what is monitored, of learners within a round
        if self.save_last and not self.last_model_path:  # before the first save: every checkpoint knows whose `last` is
            self.last_model_path = self._free_path(trainer, "last")
        ranked = rank and self._save_ranked(trainer, self._score(trainer))
        if self.save_last and not ranked:
            trainer.save_checkpoint(self.last_model_path, weights_only=self.save_weights_only, wait=not self.async_save)
        if ranked or self.save_last:
            trainer._run.has_saved(self)

    def _save_ranked(self, trainer: Trainer, score: Tensor) -> bool:
        """Save the state, as `last` too, unless it is not among those to keep; whether it was."""
        replaced, worst = self.kth_best_model_path, self.kth_value
        unranked = worst is not None and math.isnan(float(worst)) and math.isnan(float(score))
        if self.save_top_k == 0 or (worst is not None and not unranked and not self._order(score) < self._order(worst)):
            return False
        kept = dict(self.best_k_models)
        name = trainer.strategy.broadcast(self._name(trainer))
        if os.path.dirname(replaced) == self.dirpath and re.fullmatch(
            re.escape(name) + r"(-v\d+)?" + re.escape(self._extension), os.path.basename(replaced)
        ):
            path = replaced  # the same name again: replaced atomically
            del self.best_k_models[path]
        else:
            path = self._free_path(trainer, name)
        self.best_k_models[path] = score  # before the save, so that the checkpoint knows of itself
        ranked = sorted(self.best_k_models, key=self._badness, reverse=True)
        leaving = ranked[: -self.save_top_k] if self.save_top_k > 0 else []
        try:
            trainer.save_checkpoint(
                path,
                weights_only=self.save_weights_only,
                wait=not self.async_save,
                also=[self.last_model_path] if self.save_last else [],
                outdated=[gone for gone in leaving if os.path.dirname(gone) == self.dirpath],
            )
        except BaseException:
            self.best_k_models = kept
            raise
        self._saving = path, kept
        for gone in leaving:
            del self.best_k_models[gone]
        if self.verbose:
            reached = "" if self.monitor is None else f"{self.monitor} = {float(score):.6g}, "
            trainer.print(
                f"ModelCheckpoint: epoch {self._epoch(trainer)}, step {trainer.global_step}: {reached}saved {path}"
            )
        return True

    def _score(self, trainer: Trainer) -> Tensor:
        if self._metric is None:
            score = exact(self._epoch(trainer) if self.monitor == "epoch" else trainer.global_step)
        else:
            self._metric.read(trainer)
            self._complain(trainer)
            value = self._metric.value
            score = exact(math.nan) if value is None or not self._metric.is_of_now else value
            if value is None:
                self._warn_once(
                    trainer,
                    f"{self.monitor!r}, which ModelCheckpoint monitors, has no value yet: checkpoints saved until "
                    "then rank as the worst",
                )
        self.current_score = None if self.monitor is None else score
        return score

    def _epoch(self, trainer: Trainer) -> int:
        """The epoch that is running; once training has ended, the last one that ran."""
        is_over = self._ended and not trainer._run.progress.batches_seen
        return trainer.current_epoch - (is_over and trainer.current_epoch > 0)

    def _complain(self, trainer: Trainer) -> None:
        if self._metric and (problem := self._metric.overdue(trainer)):
            raise ValueError(problem)

    def _order(self, score: Tensor) -> tuple[bool, float]:
        """A key that grows from the best to the worst."""
        value = float(score)
        lower_is_better = self.mode == "min" and self.monitor is not None
        return (True, 0.0) if math.isnan(value) else (False, value if lower_is_better else -value)

    def _badness(self, path: str) -> tuple[bool, float]:
        return self._order(self.best_k_models[path])

    def _name(self, trainer: Trainer) -> str:
        metrics = {**trainer.callback_metrics, "epoch": self._epoch(trainer), "step": trainer.global_step}
        for name in placeholders(self.filename):
            if name not in metrics and name != self.monitor:
                self._warn_once(
                    trainer,
                    f"the filename of ModelCheckpoint names {name!r}, which has no value now and is written as nan",
                )
        return self.format_checkpoint_name(metrics)

    def _free_path(self, trainer: Trainer, name: str) -> str:
        """A path for this name that nothing has, equal on all ranks."""
        path = os.path.join(str(self.dirpath), name)
        return str(trainer.strategy.broadcast(versioned(path, self._extension) if trainer.is_global_zero else path))

    def _warn_once(self, trainer: Trainer, text: str) -> None:
        if trainer.is_global_zero and text not in self._warnings:
            self._warnings.add(text)
            warnings.warn(text, stacklevel=2)

    def _relative(self, path: str) -> str:
        return os.path.basename(path) if os.path.dirname(path) == self.dirpath else path

    def _find_again(self, trainer: Trainer, folder: str) -> None:
        """Look up the checkpoints of the resumed run: in `dirpath` where it was moved there, else where they were, or
        forget them."""

        def find(path: str) -> str:
            moved = os.path.join(str(self.dirpath), os.path.basename(path))
            places = [moved, path] if os.path.dirname(path) == folder else [path]
            return next((place for place in places if trainer.is_global_zero and trainer._run.is_checkpoint(place)), "")

        paths = [*self.best_k_models, self.last_model_path]
        *found, last = trainer.strategy.broadcast([find(path) if path else "" for path in paths])
        kept = zip(found, self.best_k_models.values(), strict=True)
        self.best_k_models = {path: score for path, score in kept if path}
        self.last_model_path = last if os.path.dirname(last) == self.dirpath else ""
