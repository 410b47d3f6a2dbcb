"""Writing a checkpoint: one rank's part, from the meeting that opens a save to the outcome that all ranks share.

    open      check what is to be stored; rank 0 makes a hidden folder beside the final one and sends its name
    write     each rank's files, flushed to the disk, then a part file that says what they hold, or what failed
    commit    rank 0, once it has every part: state and manifest, then the folder gets its name
    agree     rank 0 reports how it ended; a failure is raised on every rank

Ranks meet by what is in the folder, so a background thread may write and commit without a collective.

The kernel starts to write a file with its first chunk, while later chunks are checksummed and copied.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.strategies.launch.fault_injection import fault
from lockstep.trainer.checkpoint import directory, safetensors_file
from lockstep.trainer.checkpoint.content import (
    check_finite,
    check_json,
    check_tensor,
    encode,
    global_step_of,
    host_copies,
    refusal,
)
from lockstep.trainer.checkpoint.directory import hidden, lock, make_folders, put_in_place, refuse_foreign, remove, sync
from lockstep.trainer.checkpoint.files import CHUNK_BYTES, check_sizes, verify, write_file
from lockstep.trainer.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    CheckpointError,
    manifest_checksum,
    reason,
)
from lockstep.trainer.checkpoint.parts import (
    failure_of,
    index_tensors,
    leave_part,
    listing,
    merge_tensors,
    part_file,
    plain_names,
    rank_file,
    read_part,
)
from lockstep.trainer.checkpoint.reader import read_manifest, refuse_inside

_POLL_S = 0.02
_STALLED_S = 10.0
"""After an error of its own a rank waits for a save for as long as its folder changes this often."""


class Saving:
    """One rank's part in one save. `store.save` and `store.begin` go through it."""

    def __init__(self, path: str | os.PathLike[str], rank: int, world_size: int) -> None:
        self.final = Path(os.path.abspath(path))
        self.temporary = hidden(self.final, "tmp")
        self.rank = rank
        self.world_size = world_size
        self.failure: Exception | None = None
        """What stopped this rank's part; rank 0's is that of the whole."""
        self.thread: threading.Thread | None = None
        self._written = threading.Event()
        self._met = threading.Event()
        self._replaces = False
        """Whether something older goes once this is committed: then what was written is read back before."""
        self._total_bytes = 0
        self._written_bytes = 0
        self._there: set[Path] = set()  # of its paths those that were taken as it began
        self._locks: list[int] = []
        self._tensors: Mapping[str, TensorShard] = {}
        self._part: dict[str, Any] = {}

    # ---- the stages ----------------------------------------------------------------------------------

    def open(
        self,
        tensors: Mapping[str, TensorShard],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None,
        broadcast: Callable[[Any], Any] | None,
        *,
        finite: Container[str],
        also: Sequence[str | os.PathLike[str]],
        outdated: Sequence[str | os.PathLike[str]],
        copy: bool,
    ) -> None:
        """Take what is to be stored, with `copy` into memory of its own, and agree on the folder. One broadcast."""
        try:
            self._also = [Path(os.path.abspath(path)) for path in also]
            self._outdated = [Path(os.path.abspath(path)) for path in outdated]
            self._finite = finite
            fault("save.snapshot")
            self._check(tensors, state, rank_state)
            self._state = encode(self.final, STATE, state)
            self._rank_state = None if rank_state is None else encode(self.final, rank_file(self.rank), rank_state)
            self._global_step = global_step_of(state)
            self._tensors = host_copies(tensors) if copy else tensors
            if self.rank == 0:
                self._create()
        except Exception as error:
            self.failure = self._explain(error)
        opened: dict[str, Any] = {
            "final": str(self.final),
            "temporary": str(self.temporary),
            "replaces": any(os.path.lexists(path) for path in (self.final, *self._also, *self._outdated)),
            "error": self._failure_part(),
        }
        if broadcast is not None:
            opened = broadcast(opened)
        if opened["error"]:
            raise self.failure or failure_of(opened["error"])
        self.final, self.temporary = Path(opened["final"]), Path(opened["temporary"])
        self._replaces = opened["replaces"]

    def write(self) -> None:
        """Write this rank's files, to the disk, and report to rank 0; a failure is kept."""
        try:
            if self.failure is None:
                self._part = self._write()
        except Exception as error:
            self.failure = self._explain(error)
        if self.rank != 0:
            leave_part(self.temporary, self.rank, {"error": self._failure_part()} if self.failure else self._part)
        self._tensors = {}

    def commit(self) -> None:
        """Rank 0, once every rank has written: write what is left, the manifest last, and give the folder its name."""
        if self.rank != 0 or self.failure is not None:
            return
        try:
            self._commit(
                [self._part, *(read_part(self.temporary, rank, self.final) for rank in range(1, self.world_size))]
            )
            for path in self._also:
                self._link(path)
            for path in self._outdated:
                remove(path)
        except Exception as error:
            self.failure = self._explain(error)

    def agree(self, broadcast: Callable[[Any], Any] | None) -> None:
        """Raise on every rank what failed on any. One broadcast."""
        outcome = self._failure_part()
        if broadcast is not None:
            outcome = broadcast(outcome)
        if self.failure is not None:
            raise self.failure
        if outcome:
            raise failure_of(outcome)

    def close(self) -> None:
        """Remove the temporary folder, which after a commit is gone or is the old checkpoint; release the locks."""
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks = []

    # ---- asynchronously ---------------------------------------------------------------------------

    def start(self) -> None:
        """Write and commit in a thread of its own."""
        self.thread = threading.Thread(target=self._run, name="lockstep-save", daemon=True)
        self.thread.start()

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def finish(self, barrier: Callable[[], object] | None, broadcast: Callable[[Any], Any] | None) -> None:
        """Wait until it is done, and raise on every rank what failed on any.

        Every rank calls it; one barrier, one broadcast.
        """
        assert self.thread is not None
        self._written.wait()
        if barrier is not None:
            barrier()
        self._met.set()  # the parts that are there now are all that will come
        self.thread.join()
        self.agree(broadcast)

    def settle(self) -> str | None:
        """Wait as long as anything moves, without the other ranks, one of which may have died.

        Returns what failed, if known.
        """
        assert self.thread is not None
        self._written.wait()
        seen, moved_at = "", time.monotonic()
        while self.thread.is_alive() or (self.rank != 0 and self.failure is None and self.temporary.exists()):
            now = listing(self.temporary)
            if now != seen:
                seen, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > _STALLED_S:
                return f"the other ranks did not finish the checkpoint {self.final}"
            time.sleep(_POLL_S)
        return None if self.failure is None else str(self.failure)

    def _run(self) -> None:
        try:
            self.write()
            self._written.set()
            if self.rank == 0:
                self._await_parts()  # also after a failure: the others are writing into the folder
                self.commit()
        except Exception as error:  # someone has removed the folder
            self.failure = self.failure or self._explain(error)
        finally:
            self.close()
            self._written.set()

    def _await_parts(self) -> None:
        wanted = {part_file(rank) for rank in range(1, self.world_size)}
        # A listing, as a file that was asked for too early may stay unknown for a minute on NFS.
        while not wanted <= set(os.listdir(self.temporary)) and not self._met.wait(_POLL_S):
            pass

    # ---- the work of a stage -----------------------------------------------------------------------------

    def _check(
        self, tensors: Mapping[str, TensorShard], state: Mapping[str, Any], rank_state: Mapping[str, Any] | None
    ) -> None:
        """Refuse what cannot be stored. Touches no file."""
        for path in (self.final, *self._also):
            if not path.name or path.name.startswith("."):
                raise CheckpointError(
                    f"cannot save a checkpoint at {path}: its name must not be empty or begin with a dot; "
                    "choose another name"
                )
        for where, value in (("state", state), ("rank_state", rank_state)):
            if value is not None and not isinstance(value, dict):
                raise refusal(self.final, where, f"<type {type(value).__name__}>", "pass a dict")
            check_json(self.final, where, value)
        for name, shard in tensors.items():
            check_tensor(self.final, name, shard)
            self._total_bytes += shard.tensor.numel() * shard.tensor.element_size()

    def _create(self) -> None:
        """Rank 0: make the temporary folder beside the final one, and lock it against `clean`."""
        for path in (self.final, *self._also):
            if os.path.lexists(path):
                refuse_foreign(path, "replaced")
                self._there.add(path)
            refuse_inside(path)
        make_folders(self.final.parent)
        os.mkdir(self.temporary)
        self._locks.append(lock(self.temporary))

    def _write(self) -> dict[str, Any]:
        """Write this rank's files; return what the manifest must know of them."""
        if not self.temporary.is_dir():
            raise CheckpointError(
                f"cannot save the checkpoint {self.final}: rank {self.rank} does not see {self.temporary}, "
                "which rank 0 created; choose a folder on a file system that all nodes share"
            )
        check_finite(self.final, self._tensors, self._finite, f"on rank {self.rank} in step {self._global_step}")
        files: dict[str, Any] = {}
        index, groups = index_tensors(self._tensors, self.rank, self.world_size)
        for file, group_tensors in groups.items():
            layout = {key: (tensor.dtype, tensor.shape) for key, tensor in group_tensors.items()}
            files[file] = self._write_one(
                self.temporary / file, safetensors_file.content(layout, group_tensors.__getitem__, {})
            )
        if self._rank_state is not None:
            name = rank_file(self.rank)
            files[name] = self._write_one(self.temporary / name, iter((memoryview(self._rank_state),)))
        if self._replaces:
            self._read_back(files, checksums=True)
        return {"files": files, "tensors": index}

    def _commit(self, parts: Sequence[dict[str, Any]]) -> None:
        files = {name: entry for part in parts for name, entry in part["files"].items()}
        tensors = merge_tensors(parts, self.final)
        renamed = plain_names(files) if self.world_size > 1 else {}
        for old, new in renamed.items():
            os.rename(self.temporary / old, self.temporary / new)
        for entry in tensors.values():
            for piece in entry["pieces"]:
                piece["file"] = renamed.get(piece["file"], piece["file"])
        files = {renamed.get(name, name): entry for name, entry in files.items()}
        files[STATE] = self._write_one(self.temporary / STATE, iter((memoryview(self._state),)))
        for rank in range(1, self.world_size):
            os.unlink(self.temporary / part_file(rank))
        manifest = {
            "format": FORMAT,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "lockstep": _own_version()},
            "saved_at_ns": time.time_ns(),
            "global_step": self._global_step,
            "world_size": self.world_size,
            "files": files,
            "tensors": tensors,
        }
        fault("save.manifest")
        content = encode(self.final, MANIFEST, {"checksum": manifest_checksum(manifest), **manifest})
        self._write_one(self.temporary / MANIFEST, iter((memoryview(content),)))
        if self._replaces:  # each rank has read its own files back
            self._read_back(None, checksums=False)
        sync(self.temporary)
        fault("save.rename")
        put_in_place(self.temporary, self.final, directory.is_replaced(self.final, self._there))

    def _link(self, path: Path) -> None:
        """Commit the same checkpoint under another name, with hard links if the file system has them."""
        temporary = hidden(path, "tmp")
        os.mkdir(temporary)
        descriptor = lock(temporary)
        try:
            for name in os.listdir(self.final):
                try:
                    os.link(self.final / name, temporary / name)
                except OSError:
                    with open(self.final / name, "rb") as file:
                        self._write_one(temporary / name, map(memoryview, iter(lambda: file.read(CHUNK_BYTES), b"")))
            sync(temporary)
            put_in_place(temporary, path, directory.is_replaced(path, self._there))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)

    def _write_one(self, path: Path, content: Iterable[memoryview]) -> dict[str, Any]:
        return write_file(path, content, self._count)

    def _count(self, size: int) -> None:
        self._written_bytes += size

    def _explain(self, error: Exception) -> Exception:
        """The same error, or one that says which save it stopped."""
        if not isinstance(error, OSError):
            return error
        explained = self._stopped(reason(error) + (f" at {error.filename}" if error.filename else ""), error.errno)
        explained.__cause__ = error
        return explained

    def _stopped(self, what: str, number: int | None) -> CheckpointError:
        advice = _ADVICE.get(number or 0, "choose another folder")
        return CheckpointError(
            f"cannot save the checkpoint {self.final}: {what}, after rank {self.rank} had written "
            f"{self._written_bytes} of its {self._total_bytes} bytes; {advice} "
            "(the previous checkpoint there is intact)"
        )

    def _read_back(self, files: dict[str, Any] | None, *, checksums: bool) -> None:
        """Raise CheckpointError if these files, by default the manifest's, are not on the disk as they were written."""
        try:
            files = read_manifest(self.temporary)["files"] if files is None else files
            if checksums:
                verify(self.temporary, files, threads=1)  # asynchronous saves leave the other cores to the training
            else:
                check_sizes(self.temporary, files)
        except CheckpointError as error:
            raise self._stopped(
                f"what was written cannot be read back ({str(error).split(': ', 1)[-1].split(';')[0]})", None
            ) from error

    def _failure_part(self) -> dict[str, str] | None:
        """The failure as the other ranks raise it, as JSON."""
        failure = self.failure
        if failure is None or isinstance(failure, CheckpointError | FloatingPointError):
            return None if failure is None else {"kind": type(failure).__name__, "text": str(failure)}
        text = (
            f"cannot save the checkpoint {self.final}: rank {self.rank} failed with {type(failure).__name__}: "
            f"{failure}; see its own error"
        )
        return {"kind": "CheckpointError", "text": text}


_ADVICE = {
    errno.ENOSPC: "make room or choose another folder",
    errno.EDQUOT: "make room or choose another folder",
    errno.EACCES: "choose a folder that you can write",
    errno.EPERM: "choose a folder that you can write",
    errno.EROFS: "choose a folder that you can write",
}


def _own_version() -> str:
    try:
        return importlib.metadata.version("lockstep-trainer")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
