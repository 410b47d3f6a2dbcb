"""Where a run writes, and from which checkpoint it begins: rank 0 decides, before anything is built."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.base import check_local
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.trainer.checkpoint import snapshot, store
from lockstep.trainer.checkpoint.manifest import UnusableCheckpointError, WeightsOnlyError
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError
from lockstep.trainer.run import publish
from lockstep.trainer.run.folder import RunFolder, is_written

if TYPE_CHECKING:
    from lockstep.callbacks.base import Logger
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

_log = logging.getLogger("lockstep")

_OTHERS_AGE_S = 3600.0
"""For how long what a dead writer has left stays in a folder in which other runs may save."""


def checked(run: RunState, ckpt_path: str | Path | None) -> str | None:
    """The path as a string, that of the best checkpoint for "best"; raise for a path that is not a checkpoint, before
    any process starts, and before `configure_callbacks` makes other callbacks than those of the run before."""
    if ckpt_path is None or ckpt_path in ("auto", "last"):
        return None if ckpt_path is None else str(ckpt_path)
    if not isinstance(ckpt_path, str | os.PathLike) or not str(ckpt_path):
        raise TypeError(
            f"ckpt_path must be the path of a checkpoint, 'last', 'best', 'auto' or None, but ckpt_path={ckpt_path!r}"
        )
    ckpt_path = os.path.expanduser(ckpt_path)
    if ckpt_path == "best":
        ckpt_path = getattr(run.checkpoint_callback, "best_model_path", None)
        if not ckpt_path:
            raise ValueError(
                "ckpt_path='best' needs a ModelCheckpoint that has saved in this process; fit first, or give a path"
            )
    Checkpoint.open(ckpt_path, verify=False)
    return str(ckpt_path)


def last_module(run: RunState, stage: str, ckpt_path: str | Path | None) -> tuple[Module, str | Path | None]:
    """What `stage` runs without a module: the one that ran last, and its best checkpoint if there is one.

    Raises ValueError if none has run.
    """
    if run.module is None:
        raise ValueError(f"{stage} needs a module, as this Trainer has run none yet; give it model=, or fit first")
    best = getattr(run.checkpoint_callback, "best_model_path", None)
    if ckpt_path is None and best and run.is_global_zero:
        _log.info(f"{stage} without a module takes the best checkpoint, {best}; give the module for its own weights")
    return run.module, ckpt_path or best or None


def open_checkpoint(run: RunState, ckpt_path: str | None) -> Checkpoint | None:
    """Choose the run's folder, and open and verify the checkpoint that `ckpt_path` means. Every rank calls it."""
    skipped: set[Any] = set()
    checkpoint = None
    while True:
        choice = choose(run, ckpt_path, skipped) if run.is_global_zero else None
        choice = run.strategy.broadcast(choice)
        run.begun = "error" not in choice  # as where the launcher chooses, before it starts the ranks
        choice = checked_choice(choice)
        try:
            if choice["checkpoint"] is not None:
                checkpoint = store.open_together(choice["checkpoint"], run.strategy)
            break
        except UnusableCheckpointError as error:
            if run.is_global_zero:
                _forsake(run, choice["log_dir"])
            if not searches(ckpt_path):
                error.begins_run, run.begun = True, False
                raise
            if run.is_global_zero:
                store.skip(choice["checkpoint"], error, skipped)
    run.log_dir, run.begins_from = choice["log_dir"], choice["checkpoint"]
    if checkpoint is not None and run.is_global_zero and (run.searched or ckpt_path == "auto"):
        _log.info(f"ckpt_path='auto': resuming {checkpoint.path}")
    for logger, folder in zip(run.loggers, choice["loggers"], strict=True):
        logger.run_dir = folder
    return checkpoint


def searches(ckpt_path: str | None) -> bool:
    """Whether it means the newest valid checkpoint, whichever that is."""
    return ckpt_path in ("auto", "last")


def resumable(run: RunState, path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, of which all is checked but the bytes of tensors.

    Raises CheckpointError if this stage of the run cannot begin with it.
    """
    opened = Checkpoint.open(path, verify=False)
    if run.stage == "fit":
        snapshot.check_resumable(opened)
    return opened


def will_begin_with(run: RunState, module: Module, ckpt_path: str | None) -> Checkpoint | None:
    """The checkpoint with which a fit of `module` will begin, before the run is that fit: all of it is checked but the
    bytes of tensors. Raises CheckpointError."""
    if searches(ckpt_path):
        before = run.stage, run.module
        run.stage, run.module = "fit", module
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run says by itself what it skips
                newest = _newest(run, *_base(run, [place_of(run, logger) for logger in run.loggers[:1]]), set())
        finally:
            run.stage, run.module = before
        ckpt_path = None if newest is None else newest[1]
    return None if ckpt_path is None else Checkpoint.open(ckpt_path, verify=False)


def _base(run: RunState, places: list[tuple[Path, str | int | None]]) -> tuple[Path, str | int | None]:
    """The folder of the run's versions, and its version where that is known; `places` are those of its loggers."""
    base, version = places[0] if places else (_default_place(run), None)
    return base, version if run.log_dir is None else Path(run.log_dir).name  # this Trainer continues in its folder


def choose(run: RunState, ckpt_path: str | None, skipped: set[Any]) -> dict[str, Any]:
    """Rank 0: the run's folder and the checkpoint to open, or the error, as JSON data. `skipped` are checkpoints of
    which a warning has said so, to which it adds."""
    try:
        writes = bool(run.loggers) or (run.stage == "fit" and run.checkpoint_callback is not None)
        places = [place_of(run, logger) for logger in run.loggers]
        base, version = _base(run, places)
        checkpoint = None
        if searches(ckpt_path):
            found, searched = _newest(run, base, version, skipped), _searched(run, base)
            if found is not None:
                version, checkpoint = found
            if ckpt_path == "last" and checkpoint is None:
                raise CheckpointError(
                    f"ckpt_path='last' finds no valid checkpoint below {searched.absolute()}; give a path, or 'auto' "
                    "to start afresh"
                )
            if ckpt_path == "auto" and checkpoint is None:
                _log.info(f"ckpt_path='auto': no valid checkpoint below {searched}, starting afresh")
        elif ckpt_path is not None:
            checkpoint = ckpt_path
        if checkpoint is not None and not searches(ckpt_path):
            resumable(run, checkpoint)
        folder = _run_folder(base, version) if writes else None
        if folder is not None and run.active and run.stage == "fit":
            run.folder = RunFolder(folder)
        if folder is not None:
            own = str(folder / "checkpoints")
            store.clean(own)
            for place in folders_beside(run, own):
                store.clean(place, min_age_s=_OTHERS_AGE_S)
        return {
            "log_dir": str(folder) if folder else None,
            "loggers": [str(root / (folder.name if own is None else _version(own))) for root, own in places]
            if folder
            else [],
            "checkpoint": None if checkpoint is None else str(checkpoint),
        }
    except CheckpointError as error:
        return {"error": str(error), "kind": "CheckpointError"}
    except (ValueError, OSError) as error:
        return {"error": str(error), "kind": "ValueError"}


def folders_beside(run: RunState, folder: str | Path) -> list[str]:
    """Where ModelCheckpoints with a `dirpath` save, but for `folder`, where the first one does."""
    given = [item._given_dirpath for item in run.callbacks if isinstance(item, ModelCheckpoint)]
    return [path for path in dict.fromkeys(given) if path and path != os.path.abspath(folder)]


def newest(run: RunState, folder: str | Path, without: set[Any]) -> Path | None:
    """The newest checkpoint that can be resumed in `folder`, where the first ModelCheckpoint saves, or that another one
    has saved elsewhere in the same run. `without` and what it raises are those of `store.newest`."""
    beside = folders_beside(run, folder)
    for path in (path for place in beside for path in store.folders(Path(place))):
        if not _is_of_run_in(run, folder, path):
            without.add(store.identity(path))
    return store.newest([folder, *beside], without, partial(resumable, run))


def _is_of_run_in(run: RunState, folder: str | Path, path: Path) -> bool:
    """Whether the checkpoint at `path` says that the first ModelCheckpoint of its run saves in `folder`."""
    saver = run.checkpoint_callback
    try:
        states = Checkpoint.open(path, verify=False).state["callbacks"]
        return saver is not None and bool(states[saver.state_key]["dirpath"] == os.path.abspath(folder))
    except (CheckpointError, LookupError, TypeError):  # damaged, of weights alone, or of other callbacks
        return False


def checked_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """What `choose` returned, on any rank; raises the error that it may hold."""
    if "error" in choice:
        raise {"CheckpointError": CheckpointError, "ValueError": ValueError}[choice["kind"]](choice["error"])
    return choice


def _default_place(run: RunState) -> Path:
    return Path(run.arguments.default_root_dir) / type(run.module).__name__


def place_of(run: RunState, logger: Logger) -> tuple[Path, str | int | None]:
    """The folder of a logger's experiment, and its version; the Trainer's own where the logger fails."""
    found: tuple[Path, str | int | None] = _default_place(run), None

    def read() -> None:
        nonlocal found
        default = found[0]
        root = default.parent if logger.save_dir is None else Path(logger.save_dir).expanduser()
        version = logger.given_version
        found = root / str(logger.name or default.name), version if isinstance(version, int | None) else str(version)

    publish.guarded(run, logger, read)
    check_local(f"save_dir of {type(logger).__name__}", found[0])
    return found


def _searched(run: RunState, base: Path) -> Path:
    """The folder in which the newest checkpoint is looked for."""
    callback = run.checkpoint_callback
    return Path(callback.dirpath) if callback is not None and callback.dirpath else base


def _newest(run: RunState, base: Path, version: str | int | None, skipped: set[Any]) -> tuple[str | None, str] | None:
    """The newest valid checkpoint of the given version, else of the newest version that has one.

    Raises WeightsOnlyError if there are only checkpoints of weights alone.
    """
    callback = run.checkpoint_callback
    if callback is not None and callback.dirpath:
        found = newest(run, callback.dirpath, skipped)
        return None if found is None else (None if version is None else _version(version), str(found))
    candidates = (
        [base / _version(version)]
        if version is not None
        else sorted(base.glob("version_*"), key=_version_number, reverse=True)
    )
    refused: WeightsOnlyError | None = None
    for folder in candidates:
        try:
            saved = folder / "checkpoints"
            found = newest(run, saved, skipped) if saved.is_dir() else None
        except WeightsOnlyError as error:
            refused = refused or error
            continue
        if found is not None:
            return folder.name, str(found)
    if refused is not None:
        raise refused
    return None


def _run_folder(base: Path, version: str | int | None) -> Path:
    """Make and return the folder of a version; None takes the next free number, exclusively. Raises ValueError."""
    folder = base if version is None else base / _version(version)
    try:
        str(folder).encode()  # safetensors opens no other path
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the run folder {str(folder)!r} cannot be made ({getattr(error, 'strerror', None) or error}); give the "
            "logger another name or version, or the Trainer another default_root_dir"
        ) from None
    if version is not None:
        return folder
    number = max((_version_number(path) for path in base.glob("version_*")), default=-1) + 1
    while True:
        folder = base / f"version_{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _forsake(run: RunState, log_dir: str | None) -> None:
    """Let go of the folder that `choose` took, and remove it if it was made for this run."""
    locked = run.folder is not None
    if run.folder is not None:
        run.folder.end(run, None)
        run.folder = None
    if log_dir is not None:
        remove_unused(run, log_dir, locked)


def remove_unused(run: RunState, log_dir: str, locked: bool) -> bool:
    """Remove the folder of a run that has left nothing in it, and that of the module if no run is left. Returns whether
    it did. `locked`: the lock in it was this run's. Whatever appears in it meanwhile stays."""
    folder, lock = Path(log_dir), Path(log_dir) / "run.lock"
    with suppress(OSError):  # of another process, or gone
        held = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        if folder.is_symlink() or held not in ([], [lock] if locked else []) or is_written(lock):
            return False
        for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            path.rmdir()
        lock.unlink(missing_ok=True)
        folder.rmdir()
        with suppress(OSError):  # it holds other runs
            if folder.parent == _default_place(run):
                folder.parent.rmdir()
        return True
    return False


def _version(version: str | int) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)


def _version_number(path: Path) -> int:
    digits = path.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1
