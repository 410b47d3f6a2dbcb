"""Checkpoints: saved in one rename, opened with every byte checked, found, removed.

`manifest.py` says what a checkpoint is, `writer.py` how one is written.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from lockstep.strategies.base import Strategy
from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint.directory import (
    LEFTOVER,
    abandoned,
    changed_at,
    folders,
    hidden,
    lock,
    make_folders,
    put_in_place,
    refuse_foreign,
    remove,
    sync,
)
from lockstep.trainer.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    UnusableCheckpointError,
    WeightsOnlyError,
    is_file_of_one,
    reason,
    unusable,
)
from lockstep.trainer.checkpoint.reader import Checkpoint, is_checkpoint, read_manifest, refuse_inside
from lockstep.trainer.checkpoint.writer import Saving
from lockstep.trainer.metrics.gathering import gather_values

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Saving",
    "begin",
    "clean",
    "copy",
    "folders",
    "identity",
    "is_checkpoint",
    "newest",
    "open_newest",
    "open_together",
    "present",
    "remove",
    "save",
    "skip",
]


def save(
    path: str | os.PathLike[str],
    *,
    rank: int,
    world_size: int,
    tensors: Mapping[str, TensorShard],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any] | None = None,
    barrier: Callable[[], object] | None = None,
    broadcast: Callable[[Any], Any] | None = None,
    finite: Container[str] = (),
    also: Sequence[str | os.PathLike[str]] = (),
    outdated: Sequence[str | os.PathLike[str]] = (),
) -> Path:
    """Write a checkpoint at `path`, replacing one that is there; return its absolute path.

    Every rank calls it, with the folder of rank 0 visible to all. `tensors` are this rank's pieces: over all ranks
    each element of each name exactly once. `state` is JSON data equal on all ranks, of which rank 0's is written;
    `rank_state` is JSON data of this rank. Tuples, and subclasses of JSON types, come back as the plain type; NaN
    and infinities come back. `barrier()` waits for all ranks and `broadcast(value)` returns rank 0's JSON value;
    both may be skipped for one rank.

    `finite` are names of tensors that must hold finite numbers. `also` are paths in the same folder at which the
    checkpoint is committed as well, sharing its files where the file system has hard links. `outdated` are
    checkpoints to remove then, in this order. Before an older one goes, each rank reads back what it has written.

    When it returns, the checkpoint is on the disk. When it raises, what was at `path` is still there whole and
    nothing else is left. A kill at any instant leaves the old or the new one, and at worst a hidden leftover that
    `clean` removes.

    Every rank goes through the same two broadcasts and one barrier, in this order, whatever fails on it: a failure
    is kept, reported in the rank's part file (or its absence) and raised after the meeting. So nobody waits for
    a rank that lives, and all ranks raise; only a dead rank makes the others wait, for as long as `barrier` does.

    Raises CheckpointError with the key path for state that is not JSON and for names, dtypes or pieces that cannot
    be stored, before anything is written by that rank; FloatingPointError with the name of a tensor in `finite` that
    holds a NaN or an infinity; CheckpointError with path, reason and bytes where the file system refuses. Other
    errors (out of memory, a lost device) come out as themselves on the rank that had them.
    """
    _check_meeting(world_size, barrier, broadcast)
    saving = Saving(path, rank, world_size)
    try:
        saving.open(tensors, state, rank_state, broadcast, finite=finite, also=also, outdated=outdated, copy=False)
        saving.write()
        if barrier is not None:
            barrier()
        saving.commit()
        saving.agree(broadcast)
        return saving.final
    finally:
        saving.close()


def copy(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Copy a checkpoint, replacing one at `path`; verified before it gets its name. Raises CheckpointError, also for a
    `path` at which `save` would not save."""
    final = Path(os.path.abspath(path))
    temporary = hidden(final, "tmp")
    with ExitStack() as copying:
        try:
            if os.path.lexists(final):
                refuse_foreign(final, "replaced")
                if os.path.samefile(source, final):
                    return
            refuse_inside(final)
            make_folders(final.parent)
            os.mkdir(temporary)
            copying.callback(os.close, lock(temporary))
            copying.callback(shutil.rmtree, temporary, ignore_errors=True)
            shutil.copytree(source, temporary, dirs_exist_ok=True)
            for folder, _, names in os.walk(temporary):
                for name in names:
                    with open(Path(folder) / name, "rb") as file:
                        os.fsync(file.fileno())
                sync(Path(folder))
            Checkpoint.open(temporary)
            put_in_place(temporary, final, replaces=os.path.lexists(final))
        except OSError as error:
            raise CheckpointError(f"cannot copy {source} to {final}: {reason(error)}; choose another path") from error


def begin(
    path: str | os.PathLike[str],
    *,
    rank: int,
    world_size: int,
    tensors: Mapping[str, TensorShard],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any] | None = None,
    broadcast: Callable[[Any], Any] | None = None,
    finite: Container[str] = (),
    also: Sequence[str | os.PathLike[str]] = (),
    outdated: Sequence[str | os.PathLike[str]] = (),
) -> Saving:
    """Like `save`, but return once the state is copied to host memory; files are written and committed in a thread.

    Every rank calls it, one save at a time, and `finish(barrier, broadcast)` on what it returns, which waits and
    raises on all ranks what failed on any. `failure` tells before that whether it is known to have failed. Costs
    host memory for this rank's pieces until they are written.
    """
    saving = Saving(path, rank, world_size)
    try:
        saving.open(tensors, state, rank_state, broadcast, finite=finite, also=also, outdated=outdated, copy=True)
        saving.start()
    except BaseException:
        saving.close()
        raise
    return saving


def newest(
    places: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    without: set[Any] | None = None,
    opens: Callable[[Path], Checkpoint] = Checkpoint.open,
) -> Path | None:
    """The checkpoint with the highest (global_step, time of saving) that `opens` finds valid, or None; `places` are one
    folder or several.

    By default that reads every byte of the one that is returned. Warns of each damaged one that is newer. Temporary
    folders are skipped; an aside copy counts where a kill fell between the two renames of a replacement. Those in
    `without`, which are values of `identity`, do not count; those of which it warns are added.

    Raises WeightsOnlyError, which `opens` has raised for the newest, if all valid ones hold only weights.
    """
    weights_only: WeightsOnlyError | None = None
    without = set() if without is None else without
    each = [places] if isinstance(places, str | os.PathLike) else places
    found: list[tuple[int, int, Path]] = []
    for entry in (entry for place in each for entry in folders(Path(os.path.abspath(place)))):
        leftover = LEFTOVER.fullmatch(entry.name)
        if leftover and (leftover["kind"] == "tmp" or os.path.lexists(entry.parent / leftover["name"])):
            continue
        if identity(entry) in without or not is_like_one(entry):
            continue
        try:
            manifest = read_manifest(entry)
        except CheckpointError as error:
            skip(entry, error, without)
        else:
            found.append((manifest["global_step"], manifest["saved_at_ns"], entry))
    for _, _, entry in sorted(found, reverse=True):
        try:
            return opens(entry).path
        except UnusableCheckpointError as error:
            skip(entry, error, without)
        except WeightsOnlyError as error:
            weights_only = weights_only or error
    if weights_only is not None:
        raise weights_only
    return None


def open_together(path: str | os.PathLike[str], strategy: Strategy) -> Checkpoint:
    """Open the checkpoint at `path`, each byte of it verified by one of the ranks, which share them evenly.

    Every rank calls it. They tell each other what they have found, so all of them raise the same CheckpointError, which
    names the file, where a byte has changed, where one of them cannot read what it should, and where they see different
    checkpoints at `path`.
    """
    rank, world_size = strategy.topology.rank, strategy.topology.world_size
    own: dict[str, Any] = {}
    failure: CheckpointError | None = None
    try:
        checkpoint = Checkpoint.open(path, verify=False)
        own = {"manifest": checkpoint.checksum, "segments": checkpoint.checksums(rank, world_size)}
    except UnusableCheckpointError as error:
        failure, own = error, {"error": str(error)}
    found = gather_values(strategy, own)
    if failure is not None and all(part == own for part in found):
        raise failure
    for other, part in enumerate(found):
        if "error" in part:
            raise UnusableCheckpointError(f"{part['error']} (found by rank {other} of {world_size})") from failure
        if part["manifest"] != found[0]["manifest"]:
            raise unusable(checkpoint.path, f"rank {other} sees another checkpoint there than rank 0")
    checkpoint.compare(tuple(segment) for part in found for segment in part["segments"])
    checkpoint.check_index()  # of files that are the same on all ranks by now
    return checkpoint


def open_newest(
    finds: Callable[[set[Any]], Path | None], strategy: Strategy, without: Iterable[Any]
) -> Checkpoint | None:
    """The newest checkpoint that `finds` returns, opened by `open_together`, or None; `finds` is called with what is
    skipped, as `newest` takes it, beginning with `without`. Every rank calls it."""
    skipped: set[Any] = {*without}
    while True:
        found = None
        if strategy.topology.rank == 0:
            with suppress(WeightsOnlyError):
                found = finds(skipped)
        found = strategy.broadcast(None if found is None else str(found))
        if found is None:
            return None
        try:
            return open_together(found, strategy)
        except UnusableCheckpointError as error:
            if strategy.topology.rank == 0:
                skip(found, error, skipped)


def skip(path: str | Path, error: CheckpointError, skipped: set[Any]) -> None:
    """Warn that the checkpoint at `path` is not taken, and add to `skipped` what `newest` shall leave."""
    warnings.warn(f"skipped: {error}", stacklevel=3)
    skipped.add(identity(Path(path)))


def is_like_one(folder: Path) -> bool:
    """Whether a folder is a checkpoint or what is left of one: it has files of checkpoints, or nothing in it."""
    if os.path.lexists(folder / MANIFEST):
        return True
    try:
        names = os.listdir(folder)
    except OSError:  # gone, or of somebody else
        return False
    return not names or any(map(is_file_of_one, names))


def present(folder: str | os.PathLike[str]) -> set[Any]:
    """What is in `folder` now, for `newest`: no clock tells what was saved later, as clocks are set back."""
    return {*map(identity, folders(Path(os.path.abspath(folder))))}


def identity(entry: Path) -> tuple[int, int] | str:
    """What a checkpoint keeps when it is renamed, and one that replaces it has not; its path if it has no manifest."""
    try:
        status = os.stat(entry / MANIFEST)
    except OSError:
        return str(entry)
    return status.st_ino, status.st_mtime_ns


def clean(folder: str | os.PathLike[str], min_age_s: float = 0.0) -> list[Path]:
    """Remove what dead writers left in `folder` and return it; put back a checkpoint that they had set aside.

    One process calls it, at the start of a run. A writer holds a lock on its temporary folder, which the kernel
    releases when the writer dies, so folders of living writers stay, of this or another run on this machine. Where
    the file system has no locks on folders (NFS), only folders unchanged for a day are removed. `min_age_s`: for how
    long a folder must be unchanged at least, where another run may save, on a machine that sees no lock of this one's.
    """
    folder = Path(os.path.abspath(folder))
    done: list[Path] = []
    for entry in folders(folder):
        leftover = LEFTOVER.fullmatch(entry.name)
        if not leftover or not abandoned(entry) or time.time() - changed_at(entry) < min_age_s:
            continue
        try:
            if leftover["kind"] == "old" and not os.path.lexists(folder / leftover["name"]) and is_checkpoint(entry):
                os.rename(entry, folder / leftover["name"])
                sync(folder)
            else:
                shutil.rmtree(entry)
        except OSError as error:
            warnings.warn(
                f"{entry} was left by an interrupted save and cannot be cleaned up ({reason(error)}): remove it by "
                "hand",
                stacklevel=2,
            )
        else:
            done.append(entry)
    return done


def _check_meeting(world_size: int, barrier: Any, broadcast: Any) -> None:
    if world_size > 1 and (barrier is None or broadcast is None):
        raise ValueError(f"save needs barrier and broadcast if world_size is {world_size}: pass those of the strategy")
