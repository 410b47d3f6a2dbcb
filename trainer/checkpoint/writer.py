"""Writing a checkpoint: one rank's part, from the meeting that opens a save to the outcome that all ranks share.

    open      check what is to be stored; rank 0 makes a hidden folder beside the final one and tells its name
    write     each rank's files, flushed to the disk, then a part file that says what they hold, or what failed
    commit    rank 0, once it has every part: state and manifest, then the folder gets its name
    agree     rank 0 tells how it ended; a failure is raised on every rank

Ranks meet by what lies in the folder, so a thread beside the training may write and commit without a collective.

Checksums are computed in a second thread while the first writes, and the disk is told to write from the first chunk on,
so that it, the copy into the page cache and the checksums take their time beside each other.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.strategies.launch.fault_injection import fault
from lockstep.trainer.checkpoint import safetensors_file
from lockstep.trainer.checkpoint.checksum import crc32
from lockstep.trainer.checkpoint.content import check_finite, check_json, check_tensor, refusal
from lockstep.trainer.checkpoint.directory import hidden, lock, make_folders, put_in_place, refuse_foreign, remove, sync
from lockstep.trainer.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MAX_JSON_BYTES,
    STATE,
    CheckpointError,
    manifest_checksum,
    reason,
    split_name,
    tiling_fault,
)
from lockstep.trainer.checkpoint.reader import check_files, read_manifest

_CHUNK_BYTES = 1 << 20
"""Small enough that a chunk is still in the processor's cache when it is written, right after its checksum."""
_POLL_S = 0.02
_STALLED_S = 10.0
"""After an error of its own a rank waits for a save for as long as its folder changes this often."""


class Saving:
    """One rank's part in one save. `trainer.checkpoint.save` and `begin` go through it."""

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
        self._total_bytes = 0
        self._written_bytes = 0
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
            self._state = self._encode(STATE, state)
            self._rank_state = None if rank_state is None else self._encode(_rank_file(self.rank), rank_state)
            self._global_step = _global_step(state)
            self._tensors = (
                {name: TensorShard(_host_copy(s.tensor), s.global_shape, s.offsets) for name, s in tensors.items()}
                if copy
                else tensors
            )
            if self.rank == 0:
                self._create()
        except Exception as error:
            self.failure = self._explain(error)
        told: dict[str, Any] = {
            "final": str(self.final),
            "temporary": str(self.temporary),
            "prunes": self._prunes,
            "error": self._told(),
        }
        if broadcast is not None:
            told = broadcast(told)
        if told["error"]:
            raise self.failure or _error(told["error"])
        self.final, self.temporary, self._replaces = Path(told["final"]), Path(told["temporary"]), told["prunes"]

    def write(self) -> None:
        """Write this rank's files, to the disk, and tell rank 0; a failure is kept."""
        try:
            if self.failure is None:
                self._part = self._write()
        except Exception as error:
            self.failure = self._explain(error)
        if self.rank != 0:
            self._tell({"error": self._told()} if self.failure else self._part)
        self._tensors = {}

    def commit(self) -> None:
        """Rank 0, once every rank has written: write what is left, the manifest last, and give the folder its name."""
        if self.rank != 0 or self.failure is not None:
            return
        try:
            self._commit([self._part, *map(self._part_of, range(1, self.world_size))])
            for path in self._also:
                self._link(path)
            for path in self._outdated:
                remove(path)
        except Exception as error:
            self.failure = self._explain(error)

    def agree(self, broadcast: Callable[[Any], Any] | None) -> None:
        """Raise on every rank what failed on any. One broadcast."""
        outcome = self._told()
        if broadcast is not None:
            outcome = broadcast(outcome)
        if self.failure is not None:
            raise self.failure
        if outcome:
            raise _error(outcome)

    def close(self) -> None:
        """Remove the temporary folder, which after a commit is gone or is the old checkpoint; release the locks."""
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks = []

    # ---- beside the training ---------------------------------------------------------------------------

    def start(self) -> None:
        """Write and commit in a thread of its own."""
        self.thread = threading.Thread(target=self._run, name="lockstep-save", daemon=True)
        self.thread.start()

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def finish(self, barrier: Callable[[], object] | None, broadcast: Callable[[Any], Any] | None) -> None:
        """Wait until it is done, and raise on every rank what failed on any. Every rank calls it; one barrier, one broadcast."""
        assert self.thread is not None
        self._written.wait()
        if barrier is not None:
            barrier()
        self._met.set()  # the parts that are there now are all that will come
        self.thread.join()
        self.agree(broadcast)

    def settle(self) -> str | None:
        """Wait without the other ranks, one of which may have died, as long as anything moves; return what failed, if known."""
        assert self.thread is not None
        self._written.wait()
        seen, moved_at = "", time.monotonic()
        while self.thread.is_alive() or (self.rank != 0 and self.failure is None and self.temporary.exists()):
            now = _listing(self.temporary)
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
        wanted = {_part_file(rank) for rank in range(1, self.world_size)}
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
                    f"cannot save a checkpoint at {path}: its name must not be empty or begin with a dot; choose another name"
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
        make_folders(self.final.parent)
        os.mkdir(self.temporary)
        self._locks.append(lock(self.temporary))

    @property
    def _prunes(self) -> bool:
        """Whether something older goes once this is committed, so that what was written is read back before."""
        return any(os.path.lexists(path) for path in (self.final, *self._also, *self._outdated))

    def _write(self) -> dict[str, Any]:
        """Write this rank's files; return what the manifest must know of them."""
        if not self.temporary.is_dir():
            raise CheckpointError(
                f"cannot save the checkpoint {self.final}: rank {self.rank} does not see {self.temporary}, which rank 0 made; "
                "choose a folder on a file system that all nodes share"
            )
        check_finite(self.final, self._tensors, self._finite, f"on rank {self.rank} in step {self._global_step}")
        files: dict[str, Any] = {}
        index: dict[str, Any] = {}
        groups: dict[str, dict[str, Tensor]] = {}
        for name, shard in self._tensors.items():
            group, key = split_name(name)
            file = (
                f"{group}-{self.rank:05d}-of-{self.world_size:05d}.safetensors"
                if self.world_size > 1
                else f"{group}.safetensors"
            )
            piece = {"file": file, "offsets": list(shard.offsets), "shape": list(shard.tensor.shape)}
            index[name] = {
                "dtype": str(shard.tensor.dtype).removeprefix("torch."),
                "shape": list(shard.global_shape),
                "pieces": [],
            }
            # An empty piece of a tensor that has elements says nothing; one of an empty tensor stands for it.
            if shard.tensor.numel() or 0 in shard.global_shape:
                index[name]["pieces"].append(piece)
                groups.setdefault(file, {})[key] = shard.tensor
        for file, group_tensors in groups.items():
            layout = {key: (tensor.dtype, tensor.shape) for key, tensor in group_tensors.items()}
            files[file] = self._write_file(
                self.temporary / file, safetensors_file.content(layout, group_tensors.__getitem__, {})
            )
        if self._rank_state is not None:
            name = _rank_file(self.rank)
            files[name] = self._write_file(self.temporary / name, iter((memoryview(self._rank_state),)))
        if self._replaces:
            self._read_back(files, checksums=True)
        return {"files": files, "tensors": index}

    def _tell(self, part: dict[str, Any]) -> None:
        """Leave `part` for rank 0, whole or not at all. One that cannot be written says by its absence that this rank failed."""
        path = self.temporary / _part_file(self.rank)
        with suppress(OSError):
            hidden_path = path.with_name(f".{path.name}")
            hidden_path.write_text(json.dumps(part))
            os.rename(hidden_path, path)

    def _part_of(self, rank: int) -> dict[str, Any]:
        try:
            with open(self.temporary / _part_file(rank)) as file:
                part: dict[str, Any] = json.load(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot save the checkpoint {self.final}: rank {rank} could not leave its part in {self.temporary}; "
                "see its own error, or choose a folder on a file system that all nodes share"
            ) from error
        if "error" in part:
            raise _error(part["error"])
        return part

    def _commit(self, parts: Sequence[dict[str, Any]]) -> None:
        files = {name: entry for part in parts for name, entry in part["files"].items()}
        tensors = self._merge(parts)
        # A group that one rank wrote alone is a plain file, whatever the world size.
        writers: dict[str, list[str]] = {}
        for name in files:
            if name.endswith(".safetensors"):
                writers.setdefault(re.split("[-.]", name)[0], []).append(name)
        plain = {
            names[0]: f"{group}.safetensors"
            for group, names in writers.items()
            if len(names) == 1 and self.world_size > 1
        }
        for old, new in plain.items():
            os.rename(self.temporary / old, self.temporary / new)
        for entry in tensors.values():
            for piece in entry["pieces"]:
                piece["file"] = plain.get(piece["file"], piece["file"])
        files = {plain.get(name, name): entry for name, entry in files.items()}
        files[STATE] = self._write_file(self.temporary / STATE, iter((memoryview(self._state),)))
        for rank in range(1, self.world_size):
            os.unlink(self.temporary / _part_file(rank))
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
        content = self._encode(MANIFEST, {"checksum": manifest_checksum(manifest), **manifest})
        self._write_file(self.temporary / MANIFEST, iter((memoryview(content),)))
        if self._replaces:  # each rank has read its own files back
            self._read_back(None, checksums=False)
        sync(self.temporary)
        fault("save.rename")
        put_in_place(self.temporary, self.final, os.path.lexists(self.final))

    def _link(self, path: Path) -> None:
        """Commit the same checkpoint under another name of the folder. The files are shared where the file system has hard links."""
        temporary = hidden(path, "tmp")
        os.mkdir(temporary)
        descriptor = lock(temporary)
        try:
            for name in os.listdir(self.final):
                try:
                    os.link(self.final / name, temporary / name)
                except OSError:
                    with open(self.final / name, "rb") as file:
                        self._write_file(temporary / name, map(memoryview, iter(lambda: file.read(_CHUNK_BYTES), b"")))
            sync(temporary)
            put_in_place(temporary, path, os.path.lexists(path))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)

    def _merge(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in parts:
            for name, entry in part["tensors"].items():
                known = merged.setdefault(name, {**entry, "pieces": []})
                if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                    raise refusal(
                        self.final,
                        name,
                        f"ranks differ on it: {known['dtype']} {tuple(known['shape'])} and {entry['dtype']} {tuple(entry['shape'])}",
                        "save the same tensor on all ranks",
                    )
                if 0 not in entry["shape"] or not known["pieces"]:
                    known["pieces"] += entry["pieces"]
        for name, entry in merged.items():
            fault = tiling_fault(entry["shape"], entry["pieces"])
            if fault:
                raise refusal(
                    self.final, name, f"over all ranks {fault}", "let each element be saved by exactly one rank"
                )
        return merged

    def _encode(self, name: str, value: Any) -> bytes:
        content = json.dumps(value).encode("ascii")
        if len(content) > MAX_JSON_BYTES:
            raise refusal(
                self.final,
                name,
                f"<{len(content)} bytes of JSON>",
                f"keep it below {MAX_JSON_BYTES} bytes and save large data as tensors",
            )
        return content

    def _write_file(self, path: Path, content: Iterator[memoryview]) -> dict[str, Any]:
        """Write a new file, to the disk; return its size and checksum."""
        size = checksum = 0
        try:
            fault("save.open")
            with open(path, "xb") as file:
                for chunk in _chunks(content):
                    fault("save.write")
                    checksum = crc32(chunk, checksum)
                    file.write(chunk)
                    with suppress(
                        OSError, AttributeError
                    ):  # Linux starts to write these pages to the disk, which it would leave to the fsync otherwise
                        os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
                    size += len(chunk)
                    self._written_bytes += len(chunk)
                file.flush()
                fault("save.fsync")
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            # Room for the part file that tells rank 0.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return {"size": size, "crc32": f"{checksum:08x}"}

    def _explain(self, error: Exception) -> Exception:
        """The same error, or one that says which save it stopped."""
        if not isinstance(error, OSError):
            return error
        explained = self._stopped(reason(error) + (f" at {error.filename}" if error.filename else ""), error.errno)
        explained.__cause__ = error
        return explained

    def _stopped(self, what: str, number: int | None) -> CheckpointError:
        return CheckpointError(
            f"cannot save the checkpoint {self.final}: {what}, after rank {self.rank} had written {self._written_bytes} of its "
            f"{self._total_bytes} bytes; {_ADVICE.get(number or 0, 'choose another folder')} (what was saved there before is intact)"
        )

    def _read_back(self, files: dict[str, Any] | None, *, checksums: bool) -> None:
        """Raise CheckpointError where these files, by default those of the manifest, are not on the disk as they were written."""
        try:
            check_files(
                self.temporary, read_manifest(self.temporary)["files"] if files is None else files, checksums=checksums
            )
        except CheckpointError as error:
            raise self._stopped(
                f"what was written cannot be read back ({str(error).split(': ', 1)[-1].split(';')[0]})", None
            ) from error

    def _told(self) -> dict[str, str] | None:
        """What the other ranks are told of a failure: an exception of theirs to raise, as JSON."""
        failure = self.failure
        if failure is None:
            return None
        if isinstance(failure, CheckpointError | FloatingPointError):
            return {"kind": type(failure).__name__, "text": str(failure)}
        text = f"cannot save the checkpoint {self.final}: rank {self.rank} failed with {type(failure).__name__}: {failure}; see its own error"
        return {"kind": "CheckpointError", "text": text}


_ADVICE = {
    errno.ENOSPC: "make room or choose another folder",
    errno.EDQUOT: "make room or choose another folder",
    errno.EACCES: "choose a folder that you can write",
    errno.EPERM: "choose a folder that you can write",
    errno.EROFS: "choose a folder that you can write",
}


def _chunks(content: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces that are worth a call: large ones are cut, small ones joined."""
    joined = bytearray()
    for data in content:
        if len(data) < _CHUNK_BYTES:
            joined += data
        if joined and max(len(data), len(joined)) >= _CHUNK_BYTES:
            yield memoryview(joined)
            joined = bytearray()
        if len(data) >= _CHUNK_BYTES:
            for start in range(0, len(data), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES]
    if joined:
        yield memoryview(joined)


def _error(told: dict[str, str]) -> Exception:
    return (FloatingPointError if told["kind"] == "FloatingPointError" else CheckpointError)(told["text"])


def _host_copy(tensor: Tensor) -> Tensor:
    """In memory of its own on the CPU. From a device it waits for the computation and the copy."""
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone(memory_format=torch.contiguous_format)


def _part_file(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _listing(folder: Path) -> str:
    """Names and sizes in a folder, "" where it is gone."""
    try:
        return str(sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder)))
    except OSError:
        return ""


def _own_version() -> str:
    try:
        return importlib.metadata.version("lockstep-trainer")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _global_step(state: Mapping[str, Any]) -> int:
    progress = state.get("progress")
    step = progress.get("global_step") if isinstance(progress, dict) else None
    return step if isinstance(step, int) and step >= 0 else 0
