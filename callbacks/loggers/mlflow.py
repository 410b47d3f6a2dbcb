"""Metrics, hyperparameters and texts of a run in MLflow."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lockstep.callbacks._support.hparams import flatten
from lockstep.callbacks._support.shadow import restored_rng
from lockstep.callbacks.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from lockstep import Module, Trainer

STATUSES = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
LONGEST_PARAM = 6000
RUN_FILE = "mlflow.json"
"""In the run's folder: which MLflow run it is."""


class MLflowLogger(RunLogger):
    """Logs to MLflow from rank 0, each metric at its optimizer step.

    `logger.experiment` is an `mlflow.tracking.MlflowClient` on rank 0, whose methods take `logger.run_id`; on other
    ranks all its methods do nothing. The run begins with the first metrics. Characters that MLflow does not allow in
    names become `_`.

    A resumed run keeps its run id, and so does a killed one that begins again in its folder. MLflow cannot remove
    values, so those that a killed run logged after the checkpoint stay, and are not logged again: each metric has each
    step once.

    Args:
        save_dir: folder above all runs; None takes the Trainer's `default_root_dir`.
        name: MLflow's experiment, and folder below `save_dir`; None takes the module's class name.
        version: folder of this run below `name`, a number N for `version_N`; None takes the next free one. It is also
            the run's name.
        tracking_uri: where MLflow writes: a server, a database or `file:FOLDER`. None takes the environment's
            `MLFLOW_TRACKING_URI`, else `mlruns` below `save_dir`.
        run_id: run to continue; None takes that of the run that is resumed, else a new one.
        tags: tags of a new run.

    Raises ImportError if the package is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        version: str | int | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ImportError(
                "MLflowLogger needs the package mlflow, which is not installed: pip install 'lockstep-trainer[mlflow]'"
            )
        super().__init__(save_dir, name, version)
        self.tracking_uri = tracking_uri
        self.run_id = run_id
        """Id of the MLflow run; None until it has begun."""
        self.tags = dict(tags or {})
        self._given_id = run_id
        self._folder_of_run: str | None = None
        self._client: Any = None
        self._first_step: int | None = None  # of a resumed run: values of later steps may be there already
        self._known: dict[str, tuple[set[int], set[float]]] = {}  # by metric, later steps; values at the first step
        self._last: dict[str, tuple[int, float]] = {}  # by metric

    @property
    def state_key(self) -> str:
        return f"MLflowLogger[tracking_uri={self.tracking_uri}, save_dir={self.save_dir}, name={self.name}]"

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "folder": self.log_dir}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._given_id is None:
            self.run_id, self._folder_of_run = state_dict["run_id"], state_dict["folder"]

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        if self._given_id is None and self._folder_of_run != self.log_dir:
            self.run_id = None  # another run; a checkpoint that it resumes is loaded later
        self._first_step = None

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self._first_step, self._known = trainer.global_step, {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._is_writer:
            return
        at, client = self._at(step), self._open()
        from mlflow.entities import Metric

        now, points = int(time.time() * 1000), []
        for name, value in metrics.items():
            key, number = _allowed(name), float(value)
            if not self._is_there(client, key, at, number) and self._last.get(key) != (at, number):
                self._last[key] = at, number
                points.append(Metric(key, number, now, at))
        if points:
            client.log_batch(self.run_id, metrics=points)

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Write a text as the artifact `KEY.md`, or `KEY-step=N.md` if `step` is given and not 0."""
        if self._is_writer:
            client = self._open()
            client.log_text(self.run_id, text, f"{_allowed(key)}-step={step}.md" if step else f"{_allowed(key)}.md")

    def finalize(self, status: str) -> None:
        self.save()
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self.run_id, STATUSES[status])

    def _open(self) -> Any:
        folder = self._folder()
        if self._client is None:
            self._is_writer = False  # until it succeeds: a service that fails is not asked again
            uri, root = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), os.path.dirname(folder)
            uri = uri or f"file:{os.path.abspath(os.path.join(os.path.dirname(root), 'mlruns'))}"
            if uri.startswith("file:"):
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.7 and later ask for it
            with restored_rng():
                from mlflow.tracking import MlflowClient

                client = MlflowClient(tracking_uri=uri)
                if self.run_id is None:
                    self.run_id = _left_running(client, folder, uri)
                if self.run_id is None:
                    name = os.path.basename(root)
                    found = client.get_experiment_by_name(name)
                    experiment = client.create_experiment(name) if found is None else found.experiment_id
                    run = client.create_run(experiment, run_name=os.path.basename(folder), tags=self.tags)
                    self.run_id, self._first_step = run.info.run_id, None
                    os.makedirs(folder, exist_ok=True)
                    with open(os.path.join(folder, RUN_FILE), "w") as file:
                        json.dump({"tracking_uri": uri, "run_id": self.run_id}, file)
                else:
                    client.update_run(self.run_id, status="RUNNING")
            self._client, self._folder_of_run, self._is_writer = client, folder, True
        if not self._hparams_are_written:
            self._hparams_are_written = True
            self._write_hparams(self._client)
        return self._client

    def _write_hparams(self, client: Any) -> None:
        from mlflow.entities import Param

        params = {_allowed(key): str(value)[:LONGEST_PARAM] for key, value in flatten(self._hparams).items()}
        there = client.get_run(self.run_id).data.params
        changed = sorted(key for key, value in params.items() if there.get(key, value) != value)
        if changed:
            warnings.warn(
                f"MLflow keeps the first value of a hyperparameter; these changed since run {self.run_id} began: "
                f"{', '.join(changed)}",
                stacklevel=2,
            )
        new = [Param(key, value) for key, value in params.items() if key not in there]
        client.log_batch(self.run_id, params=new)

    def _is_there(self, client: Any, key: str, step: int, value: float) -> bool:
        """Whether MLflow has `key` of a resumed run from before: any value of a step after the checkpoint, or this one
        of the very step of the checkpoint, which may have been logged before it or after it."""
        first = self._first_step
        if first is None:
            return False
        if key not in self._known:
            history = client.get_metric_history(self.run_id, key)
            later = {point.step for point in history if point.step > first}
            self._known[key] = later, {point.value for point in history if point.step == first}
        later, values = self._known[key]
        return step in later or (step == first and value in values)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_client": None}  # the next use connects again


def _left_running(client: Any, folder: str, uri: str) -> str | None:
    """The run that a killed process began for this folder, which now begins again."""
    try:
        with open(os.path.join(folder, RUN_FILE)) as file:
            begun = json.load(file)
    except (OSError, ValueError):
        return None
    if not isinstance(begun, dict) or begun.get("tracking_uri") != uri:
        return None
    with suppress(Exception):  # of the store, which may not have it any more
        info = client.get_run(begun["run_id"]).info
        return begun["run_id"] if (info.status, info.lifecycle_stage) == ("RUNNING", "active") else None
    return None


def _allowed(name: str) -> str:
    return re.sub(r"[^\w.\- :/]", "_", name)
