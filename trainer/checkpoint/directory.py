"""Folders of checkpoints: hidden names while one is built or set aside, locks of living writers, renames."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from lockstep.trainer.checkpoint.manifest import MANIFEST, CheckpointError, reason

LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")
_LOCKLESS_AGE_S = 86400.0
"""Where the file system cannot tell whether a writer lives, its folder counts as abandoned after a day."""


def hidden(final: Path, kind: str) -> Path:
    # Not from `random`: saving must not move a stream that training draws from.
    return final.parent / f".{final.name}.{kind}-{secrets.token_hex(4)}"


def folders(folder: Path) -> list[Path]:
    """The real folders in `folder`, without links; none if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list checkpoints in {folder}: {reason(error)}; pass a readable folder"
        ) from error


def asides(final: Path) -> list[Path]:
    return [
        entry
        for entry in folders(final.parent)
        if (match := LEFTOVER.fullmatch(entry.name)) and match["kind"] == "old" and match["name"] == final.name
    ]


def lock(folder: Path) -> int:
    """Lock a folder against `clean`; return the descriptor whose end, or that of this process, releases it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with suppress(OSError):  # a file system without locks: `clean` goes by age there
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def abandoned(folder: Path) -> bool:
    """Whether no living writer holds the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > _LOCKLESS_AGE_S
    finally:
        os.close(descriptor)


def changed_at(folder: Path) -> float:
    """When a folder or a file in it was last changed, in seconds since the epoch; now if it is gone meanwhile."""
    try:
        return max(entry.lstat().st_mtime for entry in (folder, *folder.iterdir()))
    except OSError:
        return time.time()


def is_replaced(path: Path, there: Container[Path]) -> bool:
    """Whether a save replaces what is at `path`; `there` are the paths that were taken as it began.

    Raises CheckpointError if another run has saved a checkpoint there since.
    """
    is_there = os.path.lexists(path)
    if is_there and path not in there:
        raise CheckpointError(
            f"another run has saved the checkpoint {path} while this run saved one for the same path, and it is not "
            "replaced: give each run a dirpath of its own, or another filename"
        )
    return is_there


def put_in_place(temporary: Path, final: Path, replaces: bool) -> None:
    """Give a finished folder its name; what was there, a checkpoint, is gone or at `temporary` afterwards."""
    aside_lock = None
    if not replaces:
        os.rename(temporary, final)
    elif not exchange(temporary, final):
        # Between these two renames a kill leaves nothing at `final`; readers then take the aside copy.
        aside = hidden(final, "old")
        aside_lock = lock(final)
        os.rename(final, aside)
        try:
            os.rename(temporary, final)
        except OSError:
            os.rename(aside, final)
            raise
    sync(final.parent)
    for aside in asides(final):
        shutil.rmtree(aside, ignore_errors=True)
    if aside_lock is not None:
        os.close(aside_lock)


def exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (Linux); False where kernel, C library or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_folder, swap = -100, 2
    return (
        rename is not None
        and rename(at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), swap) == 0
    )


def refuse_foreign(path: Path, verb: str) -> None:
    """Leave alone what is not a checkpoint, whole or damaged. An empty folder is nobody's loss."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode) or (not os.path.lexists(path / MANIFEST) and os.listdir(path)):
        kind = "a link" if stat.S_ISLNK(mode) else "not a checkpoint"
        raise CheckpointError(
            f"{path} exists and is {kind}, so it is not {verb}: choose another path, or remove it by hand"
        )


def make_folders(folder: Path) -> None:
    """Like `mkdir -p`, and on the disk."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: it is renamed first, so that a kill leaves it whole or a hidden leftover.

    One process calls it. Nothing happens where nothing is. Raises CheckpointError where `path` is not a
    checkpoint (then nothing is deleted) or the file system refuses.
    """
    final = Path(os.path.abspath(path))
    try:
        for aside in asides(final):
            shutil.rmtree(aside)
        if not os.path.lexists(final):
            return
        refuse_foreign(final, "removed")
        doomed, descriptor = hidden(final, "tmp"), lock(final)  # a run that begins beside this one leaves it alone
        try:
            os.rename(final, doomed)
            sync(final.parent)
            shutil.rmtree(doomed)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"cannot remove the checkpoint {final}: {reason(error)}; remove it by hand") from error
