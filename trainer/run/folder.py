"""The folder of a run: made by one, written by one, and with an account of what happened in it.

version_0/
  config.yaml      what the run was asked to do: the resolved configuration, or the Trainer's arguments and the
                   hyperparameters
  versions.json    Python, torch, Lockstep and what they stand on
  summary.json     steps, samples, restarts, the share of steps that were not lost, how it ended and how those before it
                   did
  run.lock         held by the process that writes; counts every step that was computed, also those that a kill made
                   vain
  checkpoints/ ... logs
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import mmap
import os
import platform
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.callbacks._support.files import replacing
from lockstep.strategies.launch.watchdog import holder

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

PACKAGES = (
    "lockstep-trainer",
    "torch",
    "numpy",
    "safetensors",
    "cloudpickle",
    "tensorboard",
    "torchmetrics",
    "deepspeed",
)
_RUNNING, _KILLED = "running", "killed"
_SLOTS = 2  # steps computed, process id of the writer
_held: set[tuple[int, int]] = set()  # the locks of this process; it would lose one by opening and closing its file


class RunFolder:
    """One writer's hold on a run folder, from the start of `fit` to its end; rank 0 has it."""

    executed: memoryview | list[int]
    """Its first item counts optimizer steps computed in this folder, over all restarts: shared memory, so a kill loses
    none."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError where another process writes here. The lock of a process that died is nobody's."""
        self._account: dict[str, Any] = {}
        self._file: int | None = None
        self._take(path)

    def _take(self, path: Path) -> None:
        self.path = path
        file = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # A record lock: children of this process, such as loader workers that outlive it, do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            writer = int.from_bytes(os.pread(file, 8, 8), "little")
            os.close(file)
            raise ValueError(
                f"the run folder {path} is being written by another run (process {writer}), and two would destroy each "
                "other's files; "
                "wait for it, stop it, or begin a run of its own without ckpt_path"
            ) from None
        except OSError:
            locked = False  # a file system without locks
        else:
            locked = True
            _held.add(_identity(os.fstat(file)))
        self._file = file
        try:
            there = os.fstat(file).st_size
            while there < 8 * _SLOTS:  # on a full disk a write to memory without a block would end the process
                there += os.pwrite(file, bytes(8 * _SLOTS - there), there)
            self._map: mmap.mmap | None = mmap.mmap(file, 8 * _SLOTS)
            self.executed = memoryview(self._map).cast("q")
        except OSError:  # a full disk, or no shared memory: what is computed before a kill is not counted
            self._map, self.executed = None, [0, 0]
        self.executed[1] = os.getpid()
        before = _load(path)
        if locked and before.get("exit") == _RUNNING:  # it does no more, silently
            with suppress(OSError):
                _write_json(path / "summary.json", before | {"exit": _KILLED, "computed_steps": self.executed[0]})

    def begin(self, run: RunState, module: Module) -> None:
        """Write what is known before the first step; called once a checkpoint has been restored."""
        before = _load(self.path)
        unfinished = bool(before) and before["exit"] != "finished"
        self._account = {
            "first_step": before.get("first_step", run.progress.global_step),
            "restarts": before.get("restarts", 0) + unfinished,
            "earlier_exits": [*before.get("earlier_exits", []), *([before["exit"]] if before else [])],
        }
        if run.config is not None:
            config = run.config
        else:
            given = {
                "trainer": run.given,
                "module": f"{type(module).__module__}.{type(module).__qualname__}",
                "hyperparameters": dict(module.hparams),
            }
            config = json.dumps(given, indent=2, default=repr) + "\n"  # YAML, as all JSON is
        import torch  # here, so that runs are listed without it

        host = os.uname()  # `platform.platform` would start a process
        system = f"{host.sysname}-{host.release}-{host.machine}"
        versions = {"python": platform.python_version(), "platform": system, "cuda": torch.version.cuda}
        for name in PACKAGES:
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        try:
            _write(self.path / "config.yaml", config)
            _write(self.path / "versions.json", json.dumps(versions, indent=2) + "\n")
            self._write_summary(run, _RUNNING)
        except OSError as error:  # as for loggers: it costs a warning, never the training
            warnings.warn(
                f"{self.path} gets no account of the run, training continues: {error}", RuntimeWarning, stacklevel=2
            )

    def hold(self, run: RunState) -> None:
        """Before a save: take the folder again, and say so, if it was deleted or moved away while the run wrote to it.

        Raises ValueError where another run writes in its place by now, or it cannot be made.
        """
        with suppress(OSError):
            held = self._file is not None and _identity(os.fstat(self._file))
            if held and _identity(os.stat(self.path / "run.lock")) == held:
                return
        self._let_go()
        run.executed = self.executed
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take(self.path)
        except OSError as error:
            raise ValueError(
                f"the run folder {self.path} was deleted or moved while the run wrote to it, and cannot be made again "
                f"({error.strerror}); begin again with a default_root_dir that can be written"
            ) from error
        self.executed[0] = run.executed[0]
        run.executed = self.executed
        with suppress(OSError):
            self._write_summary(run, _RUNNING)
        warnings.warn(
            f"the run folder {self.path} was deleted or moved while the run wrote to it, and is made again: what it "
            "held is in it "
            "no more, and loggers may still write to deleted files",
            RuntimeWarning,
            stacklevel=2,
        )

    def end(self, run: RunState, error: BaseException | None) -> None:
        """Write how it ended and let the folder go."""
        if self._account and self._file is not None:
            with suppress(OSError):  # on a full disk the error that ends the run is the one to see
                self._write_summary(run, _reason(error))
        self._let_go()

    def _let_go(self) -> None:
        """Close its files, unless `hold` has and could not take the folder again; `executed` stays as numbers."""
        if self._file is None:
            return
        shared, self.executed = self.executed, [*self.executed]
        if self._map is not None:
            shared.release()  # type: ignore[union-attr]
            self._map.close()
        _held.discard(_identity(os.fstat(self._file)))
        os.close(self._file)
        self._file = None

    def _write_summary(self, run: RunState, reason: str) -> None:
        executed, useful = self.executed[0], run.progress.global_step - self._account["first_step"]
        summary = {
            "exit": reason,
            "steps": run.progress.global_step,
            "epochs": run.progress.current_epoch,
            "samples": run.progress.total_samples,
            **self._account,
            "computed_steps": executed,
            "useful_step_share": round(useful / executed, 6) if executed else 1.0,
            "world_size": run.world_size,
            "strategy": run.strategy.name,
        }
        _write_json(self.path / "summary.json", summary)


def read_summary(folder: Path) -> dict[str, Any]:
    """The account of a run's folder; empty where there is none that can be read.

    Its "exit" is "running" only while the process lives that writes, where the file system has locks, else "killed".
    """
    found = _load(folder)
    return found | {"exit": _KILLED} if found.get("exit") == _RUNNING and not is_written(folder / "run.lock") else found


def _load(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((folder / "summary.json").read_text())
        if isinstance(found, dict) and "exit" in found:
            return found
    return {}


def is_written(lock: Path) -> bool:
    """Whether a run holds this lock, or nobody can tell."""
    try:
        if _identity(os.stat(lock)) in _held:
            return True
        with open(lock, "rb", buffering=0) as file:
            return holder(file.fileno()) is not None
    except FileNotFoundError:
        return False
    except OSError:  # nobody can tell
        return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def conclude(folder: Path, error: BaseException) -> None:
    """Note the end of a run as the launcher of the ranks saw it: its writer may have been killed, or know a consequence
    only."""
    summary = read_summary(folder)
    if summary:
        with suppress(OSError):
            _write_json(folder / "summary.json", summary | {"exit": _reason(error)})


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by {signal.SIGINT.name}"
    if isinstance(error, SystemExit):
        return f"stopped with exit code {error.code}"
    return f"failed: {type(error).__name__}: {error}".splitlines()[0][:500]


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, json.dumps(content, indent=2) + "\n")
