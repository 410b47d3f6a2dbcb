"""Metrics, hyperparameters and media of a run in Weights & Biases, or in a module with the same calls."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import secrets
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.callbacks._support.journal import Journal
from lockstep.callbacks._support.shadow import restored_rng
from lockstep.callbacks.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from lockstep import Module, Trainer

STEP = "trainer/global_step"
"""The metric that W&B's charts use as x-axis: optimizer steps. W&B's own step counts rows."""
OUTSIDE = "_outside"
"""Marks rows of the journal that were logged outside of a fit; W&B has no metrics whose names begin so."""
EXIT_CODES = {"success": 0, "failed": 1, "interrupted": 255}


class WandbLogger(RunLogger):
    """Logs to Weights & Biases from rank 0: a row each time that metrics are logged, with `trainer/global_step`.

    `logger.experiment` is the `wandb` run on rank 0, for images, tables and artifacts; on other ranks all its methods
    do nothing. The run begins with the first metrics. A W&B run that your code has begun is used and stays open.

    A resumed run keeps its id, and has each step once. Offline, all rows up to the checkpoint are written again, into a
    new folder `wandb/offline-run-*` below the run's folder, as a killed process may not have written the last ones;
    what that replaces, with the media in it, is moved to `wandb/replaced`. What a `validate` or `test` has logged since
    stays. Online, W&B's `resume_from` drops what was
    logged after the checkpoint.

    Args:
        save_dir: folder above all runs; None takes the Trainer's `default_root_dir`.
        name: folder of this experiment below `save_dir`; None takes the module's class name.
        version: folder of this run below `name`, a number N for `version_N`; None takes the next free one.
        project: W&B project; None takes that of the variable WANDB_PROJECT, else the experiment's name.
        id: id of the W&B run; None takes that of the run that is resumed, else a new one.
        module: the module that logs; `"trackio"` for Trackio, or another that has W&B's `init`, `log` and `finish`.
        **options: further arguments of `wandb.init`, such as `mode="offline"`, `entity` or `tags`.

    Raises ImportError if the package is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        version: str | int | None = None,
        project: str | None = None,
        id: str | None = None,
        module: str = "wandb",
        **options: Any,
    ) -> None:
        if importlib.util.find_spec(module) is None:
            extra = "'lockstep-trainer[wandb]'" if module == "wandb" else module
            raise ImportError(f"WandbLogger needs the package {module}, which is not installed: pip install {extra}")
        super().__init__(save_dir, name, version)
        self.project = project
        self.id = id
        self.module = module
        self.options = options
        self._run: Any = None
        self._is_users = False  # the run was begun by the user, who ends it
        self._run_id: str | None = None
        self._reopens = False
        self._in_fit = False  # else what is logged stays where a fit is resumed
        self._num_rows = 0  # logged so far in fits
        self._num_valid_rows: int | None = None  # as the checkpoint says that is resumed
        self._num_valid_steps: int | None = None  # W&B's own count of rows, as the checkpoint says
        self._last_valid_step: int | None = None  # rows of later optimizer steps are to be dropped
        self._old_dir: str | None = None  # the folder of the run that is resumed

    @property
    def state_key(self) -> str:
        return f"WandbLogger[module={self.module}, save_dir={self.save_dir}, name={self.name}]"

    def state_dict(self) -> dict[str, Any]:
        online = self._run is not None and self.module == "wandb" and not self._run.offline
        steps = self._run.step if online else self._num_valid_steps
        return {"id": self._run_id, "rows": self._num_rows, "steps": steps, "folder": self.log_dir}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run_id = state_dict["id"]
        self._num_rows = self._num_valid_rows = state_dict["rows"]
        self._num_valid_steps, self._old_dir = state_dict["steps"], state_dict["folder"]
        self._reopens = True

    def roll_back(self, state_dict: dict[str, Any]) -> None:
        self._num_valid_steps, self._last_valid_step, self._reopens = state_dict["steps"], self._at(None), True

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        # The next run may be in another folder; a checkpoint that it resumes is loaded later.
        self._run_id = self._old_dir = self._num_valid_rows = self._num_valid_steps = self._last_valid_step = None
        self._num_rows, self._in_fit = 0, stage == "fit"

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        # Nothing is opened here: only what the Trainer calls behind its error boundary does.
        self._last_valid_step = trainer.global_step

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._is_writer:
            self._log(metrics, step)

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        if self._is_writer:
            self._log({key: text}, step)

    def finalize(self, status: str) -> None:
        self._in_fit = False
        self.save()
        self._close(EXIT_CODES[status])

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        folder = self._folder()
        run, row = self._open(), self._row(STEP, self._at(step), values)
        self._journal(folder).append(row if self._in_fit else row | {OUTSIDE: True})
        self._num_rows += self._in_fit
        self._hand_over(run, row)

    def _hand_over(self, run: Any, row: dict[str, Any]) -> None:
        if self.module == "wandb":
            run.log(dict(row))
        else:
            run.log({key: value for key, value in row.items() if key != STEP}, step=row[STEP])

    def _journal(self, folder: str) -> Journal:
        return Journal(os.path.join(folder, f"{self.module}_rows.jsonl"))

    def _open(self) -> Any:
        if self._reopens:
            self._close(0)  # what the checkpoint says was not known yet
        if self._run is None:
            self._is_writer = False  # until it succeeds: a service that fails is not asked again
            module = importlib.import_module(self.module)
            rows = self._valid_rows()
            self._is_users = self.module == "wandb" and module.run is not None
            with restored_rng():
                self._run = module.run if self._is_users else self._begin(module, bool(rows))
            if self.module == "wandb":
                self._run.define_metric(STEP)
                self._run.define_metric("*", step_metric=STEP, step_sync=True)
            if not self._is_users and (self.module != "wandb" or self._run.offline):
                for row in rows:
                    self._hand_over(self._run, row)
            self._is_writer = True
        if not self._hparams_are_written:
            self._hparams_are_written = True
            if self.module == "wandb":
                self._run.config.update(self._hparams, allow_val_change=True)
            else:
                self._run.config.update(self._hparams)
        return self._run

    def _valid_rows(self) -> list[dict[str, Any]]:
        """What this run has logged before, without what came after the checkpoint; the folder's journal holds the
        same."""
        folder = self.log_dir or ""
        found, rows = self._journal(self._old_dir or folder).read()
        last, valid = self._last_valid_step, list[dict[str, Any]]()
        if last == 0 and self._num_valid_rows is None:
            last = -1  # what is there is of a fit that begins again, which logs its step 0 again too
        self._num_rows = 0
        for row in rows:
            if row.get("outside") is True:  # as journals were written before
                row[OUTSIDE] = row.pop("outside")
            is_own = OUTSIDE not in row
            if is_own and ((last is not None and row[STEP] > last) or self._num_rows == self._num_valid_rows):
                continue
            self._num_rows += is_own
            valid.append(row)
        self._run_id = self.id or self._run_id or found or secrets.token_hex(4)
        self._journal(folder).write(self._run_id, valid)
        self._num_valid_rows = self._last_valid_step = None
        return [{key: value for key, value in row.items() if key != OUTSIDE} for row in valid]

    def _begin(self, module: Any, again: bool) -> Any:
        folder = self.log_dir or ""
        options: dict[str, Any] = {
            "project": self.project or os.environ.get("WANDB_PROJECT") or os.path.basename(os.path.dirname(folder)),
            "name": os.path.basename(folder),
        } | self.options
        if self.module != "wandb":
            options["name"] = f"{options['name']}-{self._run_id}"
            if again:
                _remove_run(module, options["project"], f"-{self._run_id}")
            return module.init(**options, config=dict(self._hparams))
        options = {"dir": folder, "id": self._run_id, "settings": module.Settings(console="off")} | options
        for place in {folder, self._old_dir or folder}:
            for old in glob.glob(os.path.join(glob.escape(place), "wandb", f"offline-run-*-{self._run_id}")):
                os.makedirs(os.path.join(place, "wandb", "replaced"), exist_ok=True)
                os.replace(old, os.path.join(place, "wandb", "replaced", os.path.basename(old)))
        mode = options.get("mode") or os.environ.get("WANDB_MODE")
        if mode in ("offline", "dryrun", "disabled"):
            return module.init(**options)
        if self._num_valid_steps:
            try:
                return module.init(**options, resume_from=f"{self._run_id}?_step={self._num_valid_steps - 1}")
            except Exception as error:
                warnings.warn(
                    f"W&B could not drop what run {self._run_id} logged after the checkpoint, so its steps may show "
                    f"twice: {error}",
                    stacklevel=2,
                )
        return module.init(**options, resume="allow")

    def _close(self, exit_code: int) -> None:
        self._reopens = False
        run, self._run = self._run, None
        if run is not None and not self._is_users:
            if self.module == "wandb":
                run.finish(exit_code=exit_code)
            else:
                run.finish()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_run": None}  # the next use opens the run again


def _remove_run(module: Any, project: str, suffix: str) -> None:
    """Remove a run, which is written again from its first row, from a module that can do so."""
    if hasattr(module, "Api"):
        for run in module.Api().runs(project):
            if run.name.endswith(suffix):
                run.delete()
