"""Where a run writes, and from which checkpoint it begins: rank 0 decides, before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import checkpoint as files
from trainer import snapshot
from trainer.checkpoint import Checkpoint, CheckpointError
from trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def checked(trainer: Trainer, ckpt_path: str | Path | None) -> str | None:
    """The path as a string; raise for a path that is no checkpoint, before any process starts."""
    if ckpt_path is None or ckpt_path in ("auto", "last"):
        return None if ckpt_path is None else str(ckpt_path)
    if ckpt_path == "best":
        if not getattr(trainer.checkpoint_callback, "best_model_path", None):
            raise ValueError("ckpt_path='best' needs a ModelCheckpoint that has saved; fit first, or give a path")
    else:
        Checkpoint.open(ckpt_path, verify=False)
    return str(ckpt_path)


def plan(trainer: Trainer, ckpt_path: str | None) -> dict[str, Any]:
    """Rank 0: the run's folder and the checkpoint to open, or the error, as JSON data."""
    try:
        writes = bool(trainer.loggers) or (trainer._stage == "fit" and trainer.checkpoint_callback is not None)
        first = trainer.logger
        base = Path((first.save_dir if first else None) or trainer.default_root_dir) / (
            (first.name if first else None) or type(trainer._module).__name__
        )
        version, checkpoint = first.version if first else None, None
        if trainer.log_dir is not None:  # this Trainer goes on in its folder
            version = Path(trainer.log_dir).name
        if ckpt_path in ("auto", "last"):
            found = _newest(trainer, base, version)
            if found is not None:
                version, checkpoint = found
            if ckpt_path == "last" and checkpoint is None:
                raise CheckpointError(
                    f"ckpt_path='last' finds no valid checkpoint below {base.absolute()}; give a path, or 'auto' to start afresh"
                )
            if ckpt_path == "auto":
                print(
                    f"ckpt_path='auto': {f'resuming {checkpoint}' if checkpoint else f'no valid checkpoint below {base}, starting afresh'}",
                    file=sys.stderr,
                )
        elif ckpt_path == "best":
            checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", None)
            if not checkpoint:
                raise ValueError("ckpt_path='best' needs a ModelCheckpoint that has saved; fit first, or give a path")
        elif ckpt_path is not None:
            checkpoint = ckpt_path
        if checkpoint is not None:
            opened = Checkpoint.open(checkpoint)
            if trainer._stage == "fit":
                snapshot.check_resumable(opened)
        folder = _run_folder(base, version) if writes else None
        if folder is not None and trainer.running and trainer._stage == "fit":
            trainer._folder = RunFolder(folder)
        if folder is not None and (folder / "checkpoints").is_dir():
            files.clean(folder / "checkpoints")
        folders = []
        for logger in trainer.loggers:
            root = Path(logger.save_dir or trainer.default_root_dir) / (logger.name or type(trainer._module).__name__)
            folders.append(str(root / folder.name))  # type: ignore[union-attr]
        return {
            "log_dir": str(folder) if folder else None,
            "loggers": folders,
            "checkpoint": None if checkpoint is None else str(checkpoint),
        }
    except CheckpointError as error:
        return {"error": str(error), "kind": "CheckpointError"}
    except (ValueError, OSError) as error:
        return {"error": str(error), "kind": "ValueError"}


def carried_out(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan on any rank; raises the error that it may hold."""
    if "error" in plan:
        raise {"CheckpointError": CheckpointError, "ValueError": ValueError}[plan["kind"]](plan["error"])
    return plan


def _newest(trainer: Trainer, base: Path, version: str | int | None) -> tuple[str | None, str] | None:
    """The newest valid checkpoint of the given version, else of the newest version that has one."""
    callback = trainer.checkpoint_callback
    if callback is not None and callback.dirpath:
        found = files.newest(callback.dirpath)
        return None if found is None else (None if version is None else _version(version), str(found))
    candidates = (
        [base / _version(version)]
        if version is not None
        else sorted(base.glob("version_*"), key=_version_number, reverse=True)
    )
    for folder in candidates:
        found = files.newest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
        if found is not None:
            return folder.name, str(found)
    return None


def _run_folder(base: Path, version: str | int | None) -> Path:
    """Make and return the folder of a version; None takes the next free number, exclusively."""
    if version is not None:
        folder = base / _version(version)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    base.mkdir(parents=True, exist_ok=True)
    number = max((_version_number(path) for path in base.glob("version_*")), default=-1) + 1
    while True:
        folder = base / f"version_{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _version(version: str | int) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)


def _version_number(path: Path) -> int:
    digits = path.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1
