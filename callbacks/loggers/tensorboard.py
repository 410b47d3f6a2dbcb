"""Curves, hyperparameters, text, graph, images and sound of a run, written for TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.callbacks._support.hparams import flatten, to_yaml, write_hparams
from lockstep.callbacks._support.shadow import fitting, restored_rng, shadow
from lockstep.callbacks.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from lockstep import Module, Trainer

HOLD_S = 0.5
"""Seconds between two turns of handing scalars to the thread that writes: to wake it at each interval of fast steps
costs more than the writing."""
MISSING = "TensorBoardLogger needs the package tensorboard, which is not installed: pip install tensorboard"


class TensorBoardLogger(RunLogger):
    """Writes TensorBoard event files and `hparams.yaml` into the run's folder; `tensorboard --logdir <save_dir>` shows
    them.

    `logger.experiment` is a `torch.utils.tensorboard.SummaryWriter` on rank 0, for `add_image`,
    `add_histogram`, `add_audio`, `add_figure` and the like; on other ranks all its methods do nothing.

    Hyperparameters that are logged before the first metrics are written together with them: TensorBoard
    keeps the first set that a run has. Its HPARAMS page compares runs by every scalar that they logged.

    When `fit` begins in a folder that has events already, TensorBoard hides those of later
    steps than the one it begins at, and of the very step of a checkpoint what a killed run logged after it is not
    written again, so a resumed run has each step once. What was logged before a checkpoint is on disk before it. A file
    that cannot be written any more, on a full disk for example, costs one warning.

    Args:
        save_dir: folder above all runs; None takes the Trainer's `default_root_dir`.
        name: folder of this experiment below `save_dir`; None takes the module's class name.
        version: folder of this run below `name`, a number N for `version_N`; None takes the next free one.
        log_graph: trace `forward` on the module's `example_input_array` and show its graph.
        default_hp_metric: log `hp_metric` = -1 with hyperparameters that come without metrics.
        flush_secs: seconds after which what was logged is on disk; what came in the last half second before steps
            stall may take until the next logging interval, validation, checkpoint or end.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        version: str | int | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = False,
        flush_secs: float = 10.0,
    ) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(MISSING)
        super().__init__(save_dir, name, version)
        self.default_hp_metric = default_hp_metric
        self.flush_secs = flush_secs
        self._draws_graph = log_graph
        self._purge_step: int | None = None
        self._held: list[tuple[dict[str, float], int, float]] = []  # scalars, their step and when they were logged
        self._next_turn = 0.0  # by the monotonic clock
        self._writer: SummaryWriter | None = None
        self._saved: tuple[str, int] | None = None  # of the checkpoint that is resumed: event file and its bytes
        self._began_folder = False
        """Whether `experiment` has opened a folder without events before a run, which hides none of them then."""

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}[save_dir={self.save_dir}, name={self.name}, version={self.given_version}]"

    def state_dict(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # its folder was deleted
            if self._writer is not None:
                path = self._event_file(self._writer).path
                return {"file": os.path.basename(path), "bytes": os.path.getsize(path)}
        return {"file": "", "bytes": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["file"], state_dict["bytes"]

    def roll_back(self, state_dict: dict[str, Any]) -> None:
        self._purge_step = self._at(None) + 1
        self._held = [held for held in self._held if held[1] < self._purge_step]
        self._close()

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._saved = None  # a checkpoint that the run resumes is loaded later

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        # The disk is touched only by what the Trainer calls behind its error boundary.
        self._purge_step = None if self._began_folder and not trainer.global_step else trainer.global_step + 1
        self._began_folder = False

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        self._hand_over_held()

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._hand_over_held()  # it may last

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        self.save()  # a run that resumes from it does not log those steps again

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._is_writer:
            return
        if self.has_folder:
            self._write_hparams()
        self._held.append(({key: float(value) for key, value in metrics.items()}, self._at(step), time.time()))
        if self.has_folder and time.monotonic() >= self._next_turn:
            self._hand_over_held()

    def log_hyperparams(self, params: Any, metrics: dict[str, float] | None = None, step: int | None = None) -> None:
        """Show `params` on the HPARAMS and TEXT pages (nested names as `a/b`), and log `metrics` as scalars to compare
        runs by.

        Written with the first metrics, or by `save` or `finalize`.
        """
        if metrics is None and self.default_hp_metric:
            metrics = {"hp_metric": -1.0}
        super().log_hyperparams(params, metrics, step)

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        if self._is_writer:
            self._open().add_text(key, text, self._at(step))

    def log_graph(self, module: Module, example_input: Any) -> None:
        """Show the graph of `forward`, where the logger was made with `log_graph=True`; a failure costs one warning.

        Parameters that are sharded over ranks cannot be traced on one rank: a warning says so.
        """
        if not (self._draws_graph and self._is_writer):
            return
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            warnings.warn(
                "TensorBoardLogger cannot trace the graph of a model that is sharded over ranks; set log_graph=False",
                stacklevel=2,
            )
            return
        writer = self._open()
        try:
            # Buffers are cloned: tracing runs forward, which moves the statistics of BatchNorm.
            copy = shadow(module, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.clone())
            for child in copy.modules():  # the tracer reads all properties, also those that are there in a run only
                if getattr(child, "_trainer", child) is None:
                    vars(child)["_trainer"] = SimpleNamespace()
            # The tracer warns of every Python branch, and torch prints the error that it raises.
            with restored_rng(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                writer.add_graph(copy, fitting(module, example_input), use_strict_trace=False)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"TensorBoardLogger could not trace the graph of {type(module).__name__}.forward: {reason}",
                stacklevel=2,
            )

    def forget_held(self) -> None:
        self._held, self._began_folder = [], False

    def save(self) -> None:
        if not self._is_writer:
            return
        if self.has_folder:  # else they stay held
            self._write_hparams()
            self._hand_over_held()
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        self._write_hparams()
        self._hand_over_held()
        if self._hparams and self._writer is not None and status == "success":
            # Only success is final: TensorBoard keeps the first status of a run, and others may be resumed.
            self._add_hparams_summary(2)
        self._close()

    def _write_hparams(self) -> None:
        if self._hparams_are_written or not self._hparams or not self._is_writer or self.log_dir is None:
            return
        self._hparams_are_written = True
        write_hparams(self.log_dir, self._hparams)
        self._add_hparams_summary(1)
        self._open().add_text("hparams", f"```yaml\n{to_yaml(self._hparams)}```", self._at(None))

    def _add_hparams_summary(self, part: int) -> None:
        """Add one of the three summaries of the HPARAMS plugin: 1 starts the session, 2 ends it.

        The first one (0) would fix the columns of all runs to those of one run; without it TensorBoard
        gathers them from all.
        """
        from torch.utils.tensorboard.summary import hparams

        writer: Any = self._open()
        flat = {key: str(value) if isinstance(value, bool) else value for key, value in flatten(self._hparams).items()}
        writer.file_writer.add_summary(hparams(flat, {})[part])

    def _open(self) -> SummaryWriter:
        writer = self._opened()
        self._hand_over(writer)  # what comes now is later
        return writer

    def _hand_over_held(self) -> None:
        if self._held and self._is_writer:
            self._open()

    def _opened(self) -> SummaryWriter:
        if self._purge_step is not None:
            self._close()  # events of this step and later are hidden as the next file is opened
        if self._writer is None:
            folder = self._folder()
            self._began_folder = not self.has_folder and not any(Path(folder).glob("events.out.*"))
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(MISSING) from error
            options: Any = {"max_queue": 1000, "flush_secs": self.flush_secs - self._hold_s}
            with _named_later(folder):
                self._writer = SummaryWriter(folder, purge_step=self._purge_step, **options)
            file_writer: Any = self._writer.file_writer
            file_writer.event_writer = _EventFile(file_writer.event_writer)
            saved = ("", 0) if self._saved is None and self._purge_step == 1 else self._saved  # it begins again
            if saved is not None and self._purge_step is not None:
                self._event_file(self._writer).skip_known(folder, *saved, self._purge_step - 1)
            self._purge_step = None
        return self._writer

    @staticmethod
    def _event_file(writer: SummaryWriter) -> _EventFile:
        file_writer: Any = writer.file_writer
        return file_writer.event_writer

    @property
    def _hold_s(self) -> float:
        return min(HOLD_S, self.flush_secs / 2)

    def _hand_over(self, writer: SummaryWriter) -> None:
        """Give `writer` what is held: an event for all scalars of a step, as the thread that writes works on each event
        for itself."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        held, self._held = self._held, []
        file_writer = writer._get_file_writer()
        for metrics, step, when in held:
            file_writer.add_summary(
                Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]),
                step,
                when,
            )
        self._next_turn = time.monotonic() + self._hold_s

    def _close(self) -> None:
        if self._writer is not None:
            self._hand_over(self._writer)
            writer, self._writer = self._writer, None
            writer.close()

    def __getstate__(self) -> dict[str, Any]:
        # A writer owns a thread and a file; the next use opens another.
        return super().__getstate__() | {"_writer": None}


class _EventFile:
    """An event file that costs one warning when it cannot be written, also where users write through `experiment`."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._step, self._there = -1, Counter[bytes]()
        self._failed = False
        worker = getattr(getattr(file, "_async_writer", None), "_worker", None)
        if worker is not None:
            # The thread that writes keeps its exception for the next call, and prints it as well: that is one time too
            # many.
            worker._invoke_excepthook = lambda thread: None

    @property
    def path(self) -> str:
        return str(self._file._file_name)

    def skip_known(self, folder: str, name: str, size: int, step: int) -> None:
        """Write no value of `step` that is in `folder` already, behind the first `size` bytes of file `name` or in
        later files."""
        self._step, self._there = step, Counter()
        for path in sorted(Path(folder).glob("events.out.tfevents.*")):
            if name <= path.name < os.path.basename(self.path):
                self._find(path, size if path.name == name else 0)

    def _find(self, path: Path, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        with contextlib.suppress(Exception), path.open("rb") as file:
            file.seek(start)
            while header := file.read(12):  # the length of an event, and a checksum; a kill may have cut the last short
                event = Event.FromString(file.read(int.from_bytes(header[:8], "little")))
                file.read(4)
                if event.session_log.status == SessionLog.START and event.step <= self._step:
                    self._there.clear()  # hidden
                elif event.step == self._step:
                    self._there.update(value.SerializeToString() for value in event.summary.value)

    def get_logdir(self) -> str:
        return self._file.get_logdir()

    def add_event(self, event: Any) -> None:
        if self._there and event.step == self._step and event.summary.value:
            new = [value for value in event.summary.value if not self._is_there(value.SerializeToString())]
            if not new:
                return
            del event.summary.value[:]
            event.summary.value.extend(new)
        self._try(self._file.add_event, event)

    def flush(self) -> None:
        self._try(self._file.flush)

    def close(self) -> None:
        self._try(self._file.close)

    def _is_there(self, value: bytes) -> bool:
        self._there[value] -= 1
        return self._there[value] >= 0

    def _try(self, method: Callable[..., None], *args: Any) -> None:
        if self._failed:
            return
        try:
            method(*args)
        except Exception as error:
            self._failed = True
            warnings.warn(f"TensorBoardLogger stops logging, training continues: {error}", RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def _named_later(folder: str) -> Iterator[None]:
    """Let the event file that is opened have a name behind those in `folder`: TensorBoard reads them by name, which
    begins with a second, and the run may be started again within a second, or by a clock that is behind."""
    from tensorboard.summary.writer import event_file_writer

    files, me = os.listdir(folder) if os.path.isdir(folder) else [], threading.get_ident()
    seconds = [int(found[1]) for name in files if (found := re.match(r"events\.out\.tfevents\.(\d+)\.", name))]
    first = max(seconds, default=-1) + 1
    event_file_writer.time = SimpleNamespace(  # the thread that writes flushes by the true time
        time=lambda: max(time.time(), first) if threading.get_ident() == me else time.time()
    )
    try:
        yield
    finally:
        event_file_writer.time = time
