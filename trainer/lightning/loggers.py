"""Loggers with Lightning's arguments."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep import callbacks
from lockstep.callbacks._support.hparams import write_hparams
from lockstep.callbacks._support.null_writer import NullWriter
from lockstep.callbacks.base import Logger, check_local
from lockstep.callbacks.loggers.run_logger import RunLogger
from lockstep.callbacks.loggers.wandb import STEP
from lockstep.trainer.lightning.utilities import rank_zero_only, rank_zero_warn


def rank_zero_experiment(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator of a logger's `experiment`: on other ranks than 0 it returns an object that does nothing."""

    @functools.wraps(make)
    def experiment(logger: Any) -> Any:
        return make(logger) if rank_zero_only.rank == 0 else NullWriter()

    return experiment


class _WithPrefix(Logger):
    """Begins the names of metrics with `prefix`."""

    prefix = ""
    LOGGER_JOIN_CHAR = "-"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.prefix:
            metrics = {f"{self.prefix}{self.LOGGER_JOIN_CHAR}{name}": value for name, value in metrics.items()}
        super().log_metrics(metrics, step)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        super().log_graph(model, input_array)


class _WithFolder(_WithPrefix, RunLogger):
    """Has its version and folder when they are first asked for, also before a run."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_writer = rank_zero_only.rank == 0  # before a run, too: a launcher may have started several processes

    @property
    def version(self) -> str | int:
        """Of the run. Before there is one: what was given, or the next free number, which it is from then on."""
        if self._version is None and self.run_dir is not None:
            name = Path(self.run_dir).name
            return int(name[8:]) if name[:8] == "version_" and name[8:].isdigit() else name
        if self._version is None:
            taken = [path.name.removeprefix("version_") for path in self._runs.glob("version_*")]
            self._version = max((int(number) for number in taken if number.isdigit()), default=-1) + 1
            self.took_version = True
        return self._version

    @version.setter
    def version(self, version: str | int | None) -> None:
        self._version = version

    @property
    def given_version(self) -> str | int | None:
        return self._version if type(self).version is _WithFolder.version else self.version

    @property
    def log_dir(self) -> str:
        """The folder of the run; before there is one, that of `version`."""
        folder, version = self.run_dir, self.version
        if folder is None:
            folder = str(self._runs / (f"version_{version}" if isinstance(version, int) else version))
        return os.path.join(folder, self.sub_dir) if self.sub_dir else folder

    @log_dir.setter
    def log_dir(self, folder: str | None) -> None:
        self.run_dir = folder

    def save(self) -> None:
        """Write what is held, and `hparams.yaml`, which is empty without hyperparameters."""
        super().save()
        if not self._is_writer or self._hparams or self._is_void:
            return
        if not os.path.exists(os.path.join(self.log_dir, "hparams.yaml")):
            write_hparams(self.log_dir, {})

    def finalize(self, status: str) -> None:
        self._is_void = status != "success" and self._is_empty()
        self.save()
        super().finalize(status)
        self._is_void = False

    def _is_empty(self) -> bool:
        """Whether the folder of the run has no file but its lock."""
        files = (name for _, _, names in os.walk(self.run_dir or "") for name in names)
        return all(name == "run.lock" for name in files)

    _is_void = False
    """Whether a run ends that has failed before there was anything to write."""

    sub_dir: str | None = None
    """Where the logger writes below the folder of the run."""
    _version: str | int | None = None
    took_version = False
    """Whether no version was given, and `version` has taken one."""

    @property
    def _runs(self) -> Path:
        return Path(self.save_dir or ".") / str(self.name)

    @property
    def root_dir(self) -> str:
        return str(self._runs if self.run_dir is None else Path(self.run_dir).parent)


class TensorBoardLogger(_WithFolder, callbacks.TensorBoardLogger):
    """`lockstep.callbacks.TensorBoardLogger` in `<save_dir>/<name>/version_<N>`; without a name in `save_dir` itself.
    `save()` writes before a run, too.

    Raises TypeError for options of the SummaryWriter other than `flush_secs`.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        folder, name = _place(os.path.expandvars(save_dir), name)
        flush_secs = options.pop("flush_secs", 10.0)
        _refuse("TensorBoardLogger", options, "of the SummaryWriter's options it takes flush_secs")
        super().__init__(
            folder,
            name=name,
            version=version,
            log_graph=log_graph,
            default_hp_metric=default_hp_metric,
            flush_secs=flush_secs,
        )
        self.prefix, self.sub_dir = prefix, None if sub_dir is None else os.fspath(sub_dir)

    @property
    def state_key(self) -> str:
        return f"{super().state_key}[sub_dir={self.sub_dir}, prefix={self.prefix}]"

    NAME_HPARAMS_FILE = "hparams.yaml"

    @property
    def has_folder(self) -> bool:
        return self.run_dir is not None

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """As `lockstep.callbacks.TensorBoardLogger.log_graph`; the input is the module's `example_input_array` by
        default, and one warning says that there is none."""
        example = model.example_input_array if input_array is None else input_array
        if example is not None:
            super().log_graph(model, example)
        elif self._draws_graph:
            rank_zero_warn(f"TensorBoardLogger shows no graph: {type(model).__name__} has no example_input_array")

    def save(self) -> None:
        if self._is_writer and not self.has_folder:
            self._write_hparams()
            self._hand_over_held()
        super().save()


class CSVLogger(_WithFolder, callbacks.CSVLogger):
    """`lockstep.callbacks.CSVLogger` in `<save_dir>/<name>/version_<N>`; without a name in `save_dir` itself. Before a
    run it writes too, at `save()` and after as many rows as it collects."""

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        folder, name = _place(save_dir, name)
        super().__init__(folder, name=name, version=version, flush_every=flush_logs_every_n_steps)
        self.prefix = prefix

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Without a run, and without a step, that is the number of the row."""
        super().log_metrics(metrics, self._num_rows if step is None and self._trainer is None else step)

    def log_hyperparams(
        self, params: Any = None, metrics: dict[str, float] | None = None, step: int | None = None
    ) -> None:
        super().log_hyperparams(params or {}, metrics, step)

    def log_hparams(self, params: dict[str, Any]) -> None:
        self.log_hyperparams(params)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows that are not written yet."""
        return self._rows

    @property
    def metrics_file_path(self) -> str:
        return self.path

    @property
    def hparams(self) -> dict[str, Any]:
        """What `log_hyperparams` was given, as plain data."""
        return self._hparams


class WandbLogger(_WithPrefix, callbacks.WandbLogger):
    """`lockstep.callbacks.WandbLogger`; `name` is the run's in W&B. Other keywords go to `wandb.init`.

    Raises TypeError for `experiment`, `log_model` and `checkpoint_name`.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **options: Any,
    ) -> None:
        given = {"experiment": experiment, "log_model": log_model, "checkpoint_name": checkpoint_name}
        _refuse("WandbLogger", given | {"add_file_policy": add_file_policy != "mutable"})
        if offline:
            options["mode"] = "offline"
        super().__init__(save_dir or dir, project=project, id=version or id, **options)
        self.prefix = prefix
        self._watched: list[dict[str, Any]] = []  # until there is a run
        if name is not None:
            self.options["name"] = name

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Log gradients, parameters or the graph of a module, as `wandb.watch` does; before a run, once it begins."""
        self._watched.append({"models": model, "log": log, "log_freq": log_freq, "log_graph": log_graph})
        if self.has_folder and self._is_writer:
            self._open()

    def _open(self) -> Any:
        run = super()._open()
        watched, self._watched = self._watched, []
        for options in watched:
            run.watch(**options)
        return run

    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        """A table of rows with these columns, or of a dataframe."""
        self._log_media(key, step, lambda wandb: wandb.Table(columns=columns, data=data, dataframe=dataframe))

    def log_text(  # type: ignore[override]  # Lightning's takes a table
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        """A table, as `log_table`; or a text and its step."""
        if isinstance(columns, str):
            super().log_text(key, columns, step if data is None else data)
        else:
            self.log_table(key, columns, data, dataframe, step)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **options: list[Any]) -> None:
        """Images for `wandb.Image`; options, such as `caption`, are lists with an item for each."""
        self._log_media(key, step, lambda wandb: _each(wandb.Image, images, options))

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **options: list[Any]) -> None:
        """Sounds for `wandb.Audio`, as `log_image`."""
        self._log_media(key, step, lambda wandb: _each(wandb.Audio, audios, options))

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **options: list[Any]) -> None:
        """Videos for `wandb.Video`, as `log_image`."""
        self._log_media(key, step, lambda wandb: _each(wandb.Video, videos, options))

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Record that the run reads an artifact, and return it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    def _log_media(self, key: str, step: int | None, make: Callable[[Any], Any]) -> None:
        if self._is_writer:
            name = f"{self.prefix}{self.LOGGER_JOIN_CHAR}{key}" if self.prefix else key
            self._hand_over(self._open(), {STEP: self._at(step), name: make(importlib.import_module(self.module))})


class MLFlowLogger(_WithPrefix, callbacks.MLflowLogger):
    """`lockstep.callbacks.MLflowLogger`. Raises TypeError for `log_model` and `artifact_location`."""

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        log_model: bool | str = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        _refuse("MLFlowLogger", {"log_model": log_model, "artifact_location": artifact_location})
        names = {} if run_name is None else {"mlflow.runName": run_name}
        super().__init__(
            save_dir, name=experiment_name, tracking_uri=tracking_uri, run_id=run_id, tags=(tags or {}) | names
        )
        self.prefix = prefix


def _each(kind: Any, items: Sequence[Any], options: Mapping[str, Sequence[Any]]) -> list[Any]:
    """`kind` of each item, with its own of the options."""
    for name, values in options.items():
        if len(values) != len(items):
            raise ValueError(f"{name} must have an item for each of {len(items)}, but it has {len(values)}")
    return [kind(item, **{name: values[i] for name, values in options.items()}) for i, item in enumerate(items)]


def _place(save_dir: str | os.PathLike[str], name: str | None) -> tuple[Path, str]:
    check_local("save_dir of a logger", save_dir)
    folder = Path(save_dir).expanduser()
    if name:
        return folder, name
    folder = folder.absolute()
    return folder.parent, folder.name


_OWN = "upload saved checkpoints in after_save_checkpoint of a logger of your own"
_INSTEAD = {
    "log_model": _OWN,
    "checkpoint_name": _OWN,
    "experiment": "the logger begins the run of W&B: give its project, and id= of a run to continue",
    "add_file_policy": "files of W&B are copied when they are logged",
    "artifact_location": "set it where the experiment is made, with mlflow.create_experiment",
}


def _refuse(logger: str, options: dict[str, Any], others: str = "") -> None:
    """Raise TypeError for an option that is given; `others` is what to write in the place of others."""
    for name, value in options.items():
        if value:
            raise TypeError(f"{logger} has no argument {name!r}; {_INSTEAD.get(name, others)}")
