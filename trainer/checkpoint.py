"""Checkpoints: a folder of safetensors and JSON, committed in one rename.

    last/
      manifest.json            format, versions, world size; size and checksum of every file; index of every tensor
      state.json               everything that is not a tensor and equal on all ranks
      rank-00000.json          what belongs to one rank (random number streams)
      model.safetensors        a plain state dict: `safetensors.torch.load_file` opens it
      optimizer-00001-of-00004.safetensors      where several ranks wrote pieces of a group

Only a folder with a valid manifest is a checkpoint. Nothing here is pickled and nothing that is read names
code to import. Readers open what the manifest lists, and only regular files directly in the folder.

A name such as `model/net.weight` is a group, which chooses the file, and the key inside that file.
complex128 has no code in safetensors and lies there as float64 with a last dimension of 2.

Checksums are CRC-32 of the bytes on their way to the file. CRC-32 finds every flipped bit and every burst of up
to 32 bits and misses one in 4e9 of other damage. A second thread computes it at 7 GB/s while the first writes:
320 MB at 2.4 GB/s to an NVMe disk, fsync included, take 132 ms without, 135 ms with and 172 ms in one thread.
It is no defence against a forger. Safety needs none: data names no code.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import stat
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strategies.state import Shard

FORMAT = 1
"""Version of the format. Readers take this one and older ones."""

MANIFEST = "manifest.json"
STATE = "state.json"

_CHUNK_BYTES = 4 << 20
_MAX_JSON_BYTES = 1 << 30
_MAX_DEPTH = 64
_MAX_INT_BITS = 4096
"""Python refuses to parse integers of more than 4300 digits."""
_LOCKLESS_AGE_S = 86400.0
"""Where the file system cannot tell whether a writer lives, its folder counts as abandoned after a day."""

_NAME = re.compile(r"(?P<group>[a-z][a-z0-9_]{0,63})/(?P<key>[^\x00-\x1f\x7f\ud800-\udfff]{1,1024})")
_FILE = re.compile(r"state\.json|rank-\d{5,9}\.json|[a-z][a-z0-9_]{0,63}(-\d{5,9}-of-\d{5,9})?\.safetensors")
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")
_LFS = b"version https://git-lfs.github.com/spec"

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "F64",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}
_PAIRS = {torch.complex128}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. The message names the path and what to do."""


def save(
    path: str | os.PathLike[str],
    *,
    rank: int,
    world_size: int,
    tensors: Mapping[str, Shard],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any] | None = None,
    barrier: Callable[[], object] | None = None,
    broadcast: Callable[[Any], Any] | None = None,
) -> Path:
    """Write a checkpoint at `path`, replacing the one that is there; return its absolute path.

    Every rank calls it, with the folder of rank 0 visible to all. `tensors` are this rank's pieces: over all ranks
    each element of each name exactly once. `state` is JSON data equal on all ranks, of which rank 0's is written;
    `rank_state` is JSON data of this rank. Tuples, and subclasses of JSON types, come back as the plain type; NaN
    and infinities come back. `barrier()` waits for all ranks and `broadcast(value)` returns rank 0's JSON value;
    both may be left out for one rank.

    When it returns, the checkpoint is on the disk. When it raises, what was at `path` is still there whole and
    nothing else is left. A kill at any instant leaves the old or the new one, and at worst a hidden leftover that
    `clean` removes.

    Every rank goes through the same two broadcasts and one barrier, in this order, whatever fails on it: a failure
    is kept, told through the rank's part file (or its absence) and raised after the meeting. So nobody waits for
    a rank that lives, and all ranks raise; only a dead rank makes the others wait, for as long as `barrier` does.

    Raises CheckpointError with the key path for state that is not JSON and for names, dtypes or pieces that cannot
    be stored, before anything is written by that rank; CheckpointError with path, reason and bytes where the file
    system refuses. Other errors (out of memory, a lost device) come out as themselves on the rank that had them.
    """
    if world_size > 1 and (barrier is None or broadcast is None):
        raise ValueError(f"save needs barrier and broadcast where world_size is {world_size}: pass those of the strategy")
    writer = _Writer(Path(os.path.abspath(path)), rank, world_size)
    failure: Exception | None = None
    part: dict[str, Any] = {}
    try:
        try:
            writer.check(tensors, state, rank_state)
            if rank == 0:
                writer.create()
        except Exception as error:
            failure = writer.explain(error)
        told: dict[str, Any] = {"final": str(writer.final), "temporary": str(writer.temporary), "error": writer.text(failure)}
        if broadcast is not None:
            told = broadcast(told)
        if told["error"]:
            raise failure or CheckpointError(told["error"])
        writer.final, writer.temporary = Path(told["final"]), Path(told["temporary"])

        if failure is None:
            try:
                part = writer.write(tensors, rank_state)
            except Exception as error:
                failure = writer.explain(error)
        if rank != 0:
            writer.tell({"error": writer.text(failure)} if failure else part)
        if barrier is not None:
            barrier()

        if rank == 0 and failure is None:
            try:
                writer.commit([part, *map(writer.part_of, range(1, world_size))], state)
            except Exception as error:
                failure = writer.explain(error)
        outcome = writer.text(failure)
        if broadcast is not None:
            outcome = broadcast(outcome)
        if failure is not None:
            raise failure
        if outcome:
            raise CheckpointError(outcome)
        return writer.final
    finally:
        writer.close()


class Checkpoint:
    """A checkpoint that has been opened: a `strategies.state.Reader` over any number of files and pieces.

    Any process may open it. Tensors are read on demand, through the page cache, into new CPU memory.
    """

    path: Path
    """Where it was found: what was asked for, or its aside copy where a kill fell between two renames."""
    state: dict[str, Any]
    """What every rank shares, as it was given to `save`."""
    world_size: int
    """Number of ranks that wrote it."""
    global_step: int
    """`state["progress"]["global_step"]`, 0 where there is none."""
    versions: dict[str, str]
    """What wrote it: Python, torch, lockstep."""

    def __init__(self, path: Path, manifest: dict[str, Any], state: dict[str, Any]) -> None:
        self.path = path
        self.state = state
        self.world_size = manifest["world_size"]
        self.global_step = manifest["global_step"]
        self.versions = manifest["versions"]
        self._files: dict[str, dict[str, Any]] = manifest["files"]
        self._tensors: dict[str, dict[str, Any]] = manifest["tensors"]
        self._keys: dict[str, list[tuple[str, str, list[int]]]] = {}
        for name, entry in self._tensors.items():
            for piece in entry["pieces"]:
                self._keys.setdefault(piece["file"], []).append((name, entry["dtype"], piece["shape"]))
        self._opened: dict[str, Any] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = True) -> Checkpoint:
        """Open the checkpoint at `path`; with `verify` every byte is read and checked, in constant memory.

        Manifest, names, sizes, JSON files and the index of pieces are checked in any case. Without `verify` a
        flipped bit in a tensor passes, so leave it out only where another rank has just verified.
        Raises CheckpointError, and nothing else, for anything that is wrong with the folder.
        """
        folder = _locate(Path(path))
        manifest = _read_manifest(folder)
        _check_files(folder, manifest["files"], checksums=verify)
        state = _read_json(folder, STATE, manifest["files"][STATE])
        if not isinstance(state.get("strategy", {}), dict):
            raise _unusable(folder, f"{STATE} has no object under 'strategy'")
        checkpoint = cls(folder, manifest, state)
        if verify:
            for name in checkpoint._keys:
                checkpoint._file(name)
        return checkpoint

    @property
    def meta(self) -> dict[str, Any]:
        """The strategy's own JSON data, `state["strategy"]`."""
        meta: dict[str, Any] = self.state.get("strategy", {})
        return meta

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What `rank` gave as its own state, or None. Raises CheckpointError where its file is damaged."""
        name = f"rank-{rank:05d}.json"
        return _read_json(self.path, name, self._files[name]) if name in self._files else None

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the tensors that begin with `prefix`."""
        return sorted(name for name in self._tensors if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape. Raises KeyError for an unknown name."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype. Raises KeyError for an unknown name."""
        return _DTYPES[self._entry(name)["dtype"]]

    def read(self, name: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The whole tensor, or the rectangle of `shape` that begins at `offsets`, on CPU.

        Only the pieces that meet the rectangle are touched. Raises KeyError for an unknown name, ValueError for
        a rectangle outside of the tensor, CheckpointError where a file cannot be read.
        """
        whole, dtype = self.shape(name), self.dtype(name)
        start = (0,) * len(whole) if offsets is None else tuple(offsets)
        extent = tuple(size - first for size, first in zip(whole, start, strict=False)) if shape is None else tuple(shape)
        if not len(whole) == len(start) == len(extent) or any(f < 0 or n < 0 or f + n > size for size, f, n in zip(whole, start, extent, strict=True)):
            raise ValueError(f"{name} has shape {whole}, so a rectangle of shape {extent} at {start} does not lie in it: pass one that does")
        result = torch.empty(extent, dtype=dtype)
        target = torch.view_as_real(result) if dtype in _PAIRS else result
        key = _split(name)[1]
        for piece in self._entry(name)["pieces"]:
            first = [max(a, b) for a, b in zip(start, piece["offsets"], strict=True)]
            stop = [min(a + n, b + m) for a, n, b, m in zip(start, extent, piece["offsets"], piece["shape"], strict=True)]
            if any(a >= b for a, b in zip(first, stop, strict=True)):
                continue
            source = self._file(piece["file"])
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, piece["offsets"], strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, start, strict=True))
            try:
                target[there].copy_(source.get_slice(key)[inside])
            except (OSError, SafetensorError) as error:
                raise _unusable(self.path, f"{name} cannot be read from {piece['file']} ({error})") from error
        return result

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._tensors:
            raise KeyError(f"checkpoint {self.path} holds no tensor {name!r}")
        return self._tensors[name]

    def _file(self, name: str) -> Any:
        """The open safetensors file, checked once against the index."""
        if name in self._opened:
            return self._opened[name]
        try:
            opened: Any = safe_open(self.path / name, "pt")
            keys = set(opened.keys())
            for tensor, dtype_name, shape in self._keys[name]:
                dtype, key = _DTYPES[dtype_name], _split(tensor)[1]
                if key not in keys:
                    raise _unusable(self.path, f"{name} does not hold {tensor}")
                found = opened.get_slice(key)
                stored = [*shape, 2] if dtype in _PAIRS else shape
                if found.get_dtype() != _CODES[dtype] or found.get_shape() != stored:
                    raise _unusable(self.path, f"{name} holds {tensor} as {found.get_dtype()} {found.get_shape()}, the manifest as {_CODES[dtype]} {stored}")
        except (OSError, SafetensorError) as error:
            raise _unusable(self.path, f"{name} is no safetensors file ({error})") from error
        self._opened[name] = opened
        return opened


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a manifest is there that is whole and every file that it lists has its size. Reads no tensor."""
    try:
        folder = Path(path)
        _check_files(folder, _read_manifest(folder)["files"], checksums=False)
    except CheckpointError:
        return False
    return True


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the highest (global_step, time of saving) that verifies, or None.

    Reads every byte of the one that it returns. Warns once for each damaged one that is newer. Temporary folders
    are skipped; an aside copy counts where a kill fell between the two renames of a replacement.
    """
    folder = Path(os.path.abspath(folder))
    found: list[tuple[int, int, Path]] = []
    for entry in _folders(folder):
        leftover = _LEFTOVER.fullmatch(entry.name)
        if leftover and (leftover["kind"] == "tmp" or os.path.lexists(folder / leftover["name"])):
            continue
        if not os.path.lexists(entry / MANIFEST):
            continue
        try:
            manifest = _read_manifest(entry)
        except CheckpointError as error:
            warnings.warn(f"skipped: {error}", stacklevel=2)
        else:
            found.append((manifest["global_step"], manifest["saved_at_ns"], entry))
    for _, _, entry in sorted(found, reverse=True):
        try:
            return Checkpoint.open(entry).path
        except CheckpointError as error:
            warnings.warn(f"skipped: {error}", stacklevel=2)
    return None


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: it is renamed first, so that a kill leaves it whole or a hidden leftover.

    One process calls it. Nothing happens where nothing is. Raises CheckpointError where `path` is not a
    checkpoint (then nothing is deleted) or the file system refuses.
    """
    final = Path(os.path.abspath(path))
    try:
        for aside in _asides(final):
            shutil.rmtree(aside)
        if not os.path.lexists(final):
            return
        _refuse_foreign(final, "removed")
        doomed = _hidden(final, "tmp")
        os.rename(final, doomed)
        _sync(final.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CheckpointError(f"cannot remove the checkpoint {final}: {_reason(error)}; remove it by hand") from error


def clean(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what dead writers left in `folder` and return it; put back a checkpoint that they had set aside.

    One process calls it, at the start of a run. A writer holds a lock on its temporary folder, which the kernel
    releases when the writer dies, so folders of living writers stay, of this or another run on this machine. Where
    the file system has no locks on folders (NFS), only folders unchanged for a day are removed.
    """
    folder = Path(os.path.abspath(folder))
    done: list[Path] = []
    for entry in _folders(folder):
        leftover = _LEFTOVER.fullmatch(entry.name)
        if not leftover or not _abandoned(entry):
            continue
        try:
            if leftover["kind"] == "old" and not os.path.lexists(folder / leftover["name"]) and is_checkpoint(entry):
                os.rename(entry, folder / leftover["name"])
                _sync(folder)
            else:
                shutil.rmtree(entry)
        except OSError as error:
            warnings.warn(f"{entry} was left by an interrupted save and cannot be cleaned up ({_reason(error)}): remove it by hand", stacklevel=2)
        else:
            done.append(entry)
    return done


# ---- writing ---------------------------------------------------------------------------------------


class _Writer:
    """One rank's part in one save."""

    def __init__(self, final: Path, rank: int, world_size: int) -> None:
        self.final = final
        self.temporary = _hidden(final, "tmp")
        self.rank = rank
        self.world_size = world_size
        self.replaces = False
        self.total_bytes = 0
        self.written_bytes = 0
        self.locks: list[int] = []

    def check(self, tensors: Mapping[str, Shard], state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Refuse what cannot be stored. Touches no file."""
        if not self.final.name or self.final.name.startswith("."):
            raise CheckpointError(f"cannot save a checkpoint at {self.final}: its name must not be empty or begin with a dot; choose another name")
        for where, value in (("state", state), ("rank_state", rank_state)):
            if value is not None and not isinstance(value, dict):
                raise self._refusal(where, f"<type {type(value).__name__}>", "pass a dict")
            self._check_json(where, value, 0)
        for name, shard in tensors.items():
            self._check_tensor(name, shard)
            self.total_bytes += shard.tensor.numel() * shard.tensor.element_size()

    def create(self) -> None:
        """Rank 0: make the temporary folder beside the final one, and lock it against `clean`."""
        if os.path.lexists(self.final):
            _refuse_foreign(self.final, "replaced")
            self.replaces = True
        _make_folders(self.final.parent)
        os.mkdir(self.temporary)
        self._lock(self.temporary)

    def write(self, tensors: Mapping[str, Shard], rank_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Write this rank's files; return what the manifest must know of them."""
        if not self.temporary.is_dir():
            raise CheckpointError(
                f"cannot save the checkpoint {self.final}: rank {self.rank} does not see {self.temporary}, which rank 0 made; "
                "choose a folder on a file system that all nodes share"
            )
        files: dict[str, Any] = {}
        index: dict[str, Any] = {}
        groups: dict[str, dict[str, Tensor]] = {}
        for name, shard in tensors.items():
            group, key = _split(name)
            file = f"{group}-{self.rank:05d}-of-{self.world_size:05d}.safetensors" if self.world_size > 1 else f"{group}.safetensors"
            piece = {"file": file, "offsets": list(shard.offsets), "shape": list(shard.tensor.shape)}
            index[name] = {"dtype": str(shard.tensor.dtype).removeprefix("torch."), "shape": list(shard.global_shape), "pieces": []}
            # An empty piece of a tensor that has elements says nothing; one of an empty tensor stands for it.
            if shard.tensor.numel() or 0 in shard.global_shape:
                index[name]["pieces"].append(piece)
                groups.setdefault(file, {})[key] = shard.tensor
        for file, group_tensors in groups.items():
            files[file] = self._write_file(file, _safetensors(group_tensors))
        if rank_state is not None:
            name = f"rank-{self.rank:05d}.json"
            files[name] = self._write_json(name, rank_state)
        return {"files": files, "tensors": index}

    def tell(self, part: dict[str, Any]) -> None:
        """Leave `part` for rank 0. A part that cannot be written says by its absence that this rank failed."""
        with suppress(OSError), open(self.temporary / _part(self.rank), "x") as file:
            json.dump(part, file)

    def part_of(self, rank: int) -> dict[str, Any]:
        try:
            with open(self.temporary / _part(rank)) as file:
                part: dict[str, Any] = json.load(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot save the checkpoint {self.final}: rank {rank} could not leave its part in {self.temporary}; "
                "see its own error, or choose a folder on a file system that all nodes share"
            ) from error
        if "error" in part:
            raise CheckpointError(part["error"])
        return part

    def commit(self, parts: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
        """Rank 0: write what is left, the manifest last, and put the folder in place."""
        files = {name: entry for part in parts for name, entry in part["files"].items()}
        tensors = self._merge(parts)
        # A group that one rank wrote alone is a plain file, whatever the world size.
        writers: dict[str, list[str]] = {}
        for name in files:
            if name.endswith(".safetensors"):
                writers.setdefault(re.split("[-.]", name)[0], []).append(name)
        plain = {names[0]: f"{group}.safetensors" for group, names in writers.items() if len(names) == 1 and self.world_size > 1}
        for old, new in plain.items():
            os.rename(self.temporary / old, self.temporary / new)
        for entry in tensors.values():
            for piece in entry["pieces"]:
                piece["file"] = plain.get(piece["file"], piece["file"])
        files = {plain.get(name, name): entry for name, entry in files.items()}
        files[STATE] = self._write_json(STATE, state)
        for rank in range(1, self.world_size):
            os.unlink(self.temporary / _part(rank))
        manifest = {
            "format": FORMAT,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "lockstep": _own_version()},
            "saved_at_ns": time.time_ns(),
            "global_step": _global_step(state),
            "world_size": self.world_size,
            "files": files,
            "tensors": tensors,
        }
        self._write_json(MANIFEST, {"checksum": _manifest_checksum(manifest), **manifest})
        _sync(self.temporary)
        self._put_in_place()

    def explain(self, error: Exception) -> Exception:
        """The same error, or one that says which save it stopped."""
        if not isinstance(error, OSError):
            return error
        where = f" at {error.filename}" if error.filename else ""
        explained = CheckpointError(
            f"cannot save the checkpoint {self.final}: {_reason(error)}{where}, after rank {self.rank} had written {self.written_bytes} of its "
            f"{self.total_bytes} bytes; {_ADVICE.get(error.errno or 0, 'choose another folder')} (what was saved there before is intact)"
        )
        explained.__cause__ = error
        return explained

    def text(self, failure: Exception | None) -> str | None:
        """What the other ranks are told of a failure."""
        if failure is None:
            return None
        if isinstance(failure, CheckpointError):
            return str(failure)
        return f"cannot save the checkpoint {self.final}: rank {self.rank} failed with {type(failure).__name__}: {failure}; see its own error"

    def close(self) -> None:
        """Remove the temporary folder, which after a commit is gone or is the old checkpoint; release the locks."""
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
        for descriptor in self.locks:
            os.close(descriptor)

    def _put_in_place(self) -> None:
        if not self.replaces:
            os.rename(self.temporary, self.final)
        elif not _exchange(self.temporary, self.final):
            # Between these two renames a kill leaves nothing at `final`; readers then take the aside copy.
            aside = _hidden(self.final, "old")
            self._lock(self.final)
            os.rename(self.final, aside)
            try:
                os.rename(self.temporary, self.final)
            except OSError:
                os.rename(aside, self.final)
                raise
        _sync(self.final.parent)
        for aside in _asides(self.final):
            shutil.rmtree(aside, ignore_errors=True)

    def _lock(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self.locks.append(descriptor)
        with suppress(OSError):  # a file system without locks: `clean` goes by age there
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _merge(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in parts:
            for name, entry in part["tensors"].items():
                known = merged.setdefault(name, {**entry, "pieces": []})
                if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                    raise self._refusal(
                        name,
                        f"ranks differ on it: {known['dtype']} {tuple(known['shape'])} and {entry['dtype']} {tuple(entry['shape'])}",
                        "save the same tensor on all ranks",
                    )
                if 0 not in entry["shape"] or not known["pieces"]:
                    known["pieces"] += entry["pieces"]
        for name, entry in merged.items():
            fault = _tiling_fault(entry["shape"], entry["pieces"])
            if fault:
                raise self._refusal(name, f"over all ranks {fault}", "let each element be saved by exactly one rank")
        return merged

    def _check_tensor(self, name: str, shard: Shard) -> None:
        fault = _name_fault(name)
        if fault:
            raise self._refusal(repr(name), fault, "rename it")
        tensor = shard.tensor
        if tensor.layout != torch.strided or tensor.device.type == "meta" or hasattr(tensor, "__tensor_flatten__"):
            raise self._refusal(name, f"<type {type(tensor).__name__}, layout {tensor.layout}, device {tensor.device}>", "pass a dense tensor with data")
        if tensor.dtype not in _CODES:
            raise self._refusal(name, f"<dtype {tensor.dtype}>", "convert it first")
        if not tensor.dim() == len(shard.offsets) == len(shard.global_shape) or any(
            first < 0 or first + size > whole for first, size, whole in zip(shard.offsets, tensor.shape, shard.global_shape, strict=True)
        ):
            raise self._refusal(
                name,
                f"a piece of shape {tuple(tensor.shape)} at {tuple(shard.offsets)} does not lie in the global shape {tuple(shard.global_shape)}",
                "correct the shard",
            )

    def _check_json(self, where: str, value: Any, depth: int) -> None:
        if value is None or isinstance(value, bool | float | str):
            return
        if isinstance(value, int):
            if value.bit_length() > _MAX_INT_BITS:
                raise self._refusal(where, f"<int of {value.bit_length()} bits>", f"keep integers below {_MAX_INT_BITS} bits or save a string")
        elif depth > _MAX_DEPTH:
            raise self._refusal(where[:200] + "...", f"<nested deeper than {_MAX_DEPTH}>", "flatten it, or look for a container that holds itself")
        elif isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise self._refusal(where, f"<key {key!r} of type {type(key).__name__}>", "use str keys")
                self._check_json(f"{where}.{key}", inner, depth + 1)
        elif isinstance(value, list | tuple):
            for position, inner in enumerate(value):
                self._check_json(f"{where}[{position}]", inner, depth + 1)
        elif isinstance(value, Tensor):
            raise self._refusal(where, f"<type {type(value).__name__}>", "put tensors among the tensors, or save tensor.item() or tensor.tolist()")
        else:
            raise self._refusal(where, f"<type {type(value).__name__}>", "save only dict, list, str, int, float, bool and None")

    def _refusal(self, where: str, what: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"cannot save the checkpoint {self.final}: {where}: {what}; {remedy}")

    def _write_json(self, name: str, value: Any) -> dict[str, Any]:
        content = json.dumps(value).encode("ascii")
        if len(content) > _MAX_JSON_BYTES:
            raise self._refusal(name, f"<{len(content)} bytes of JSON>", f"keep it below {_MAX_JSON_BYTES} bytes and save large data as tensors")
        return self._write_file(name, iter((memoryview(content),)))

    def _write_file(self, name: str, content: Iterator[memoryview]) -> dict[str, Any]:
        """Write a new file, to the disk; return its size and checksum."""
        path = self.temporary / name
        size = checksum = 0
        try:
            with ThreadPoolExecutor(1) as pool, open(path, "xb", buffering=_CHUNK_BYTES) as file:
                for data in content:
                    for start in range(0, len(data), _CHUNK_BYTES):
                        chunk = data[start : start + _CHUNK_BYTES]
                        if len(chunk) < _CHUNK_BYTES // 4:  # starting the other thread would take longer
                            checksum = zlib.crc32(chunk, checksum)
                            file.write(chunk)
                        else:
                            running = pool.submit(zlib.crc32, chunk, checksum)
                            file.write(chunk)
                            checksum = running.result()
                        size += len(chunk)
                        self.written_bytes += len(chunk)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            # Room for the part file that tells rank 0.
            path.unlink(missing_ok=True)
            raise
        return {"size": size, "crc32": f"{checksum:08x}"}


_ADVICE = {
    errno.ENOSPC: "make room or choose another folder",
    errno.EDQUOT: "make room or choose another folder",
    errno.EACCES: "choose a folder that you can write",
    errno.EPERM: "choose a folder that you can write",
    errno.EROFS: "choose a folder that you can write",
}


def _safetensors(tensors: dict[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, one tensor at a time, so that only one is copied to the host at once.

    Format: 8 bytes little-endian length of the header, JSON header, data. Larger elements come first, so that
    every tensor is aligned to its element size. https://github.com/huggingface/safetensors#format
    """
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        tensor = tensors[key]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = [*tensor.shape, 2] if tensor.dtype in _PAIRS else [*tensor.shape]
        header[key] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for key in order:
        # Conjugate and negative views are flags on the same memory: resolve them before bytes are taken.
        tensor = tensors[key].detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (Linux); False where kernel, C library or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_folder, swap = -100, 2
    return rename is not None and rename(at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), swap) == 0


def _refuse_foreign(path: Path, verb: str) -> None:
    """Leave alone what is not a checkpoint, whole or damaged. An empty folder is nobody's loss."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode) or (not os.path.lexists(path / MANIFEST) and os.listdir(path)):
        kind = "a link" if stat.S_ISLNK(mode) else "no checkpoint"
        raise CheckpointError(f"{path} exists and is {kind}, so it is not {verb}: choose another path, or remove it by hand")


def _make_folders(folder: Path) -> None:
    """Like `mkdir -p`, and on the disk."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(final: Path, kind: str) -> Path:
    # Not from `random`: saving must not move a stream that training draws from.
    return final.parent / f".{final.name}.{kind}-{secrets.token_hex(4)}"


def _part(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _own_version() -> str:
    try:
        return importlib.metadata.version("lockstep")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _global_step(state: Mapping[str, Any]) -> int:
    progress = state.get("progress")
    step = progress.get("global_step") if isinstance(progress, dict) else None
    return step if isinstance(step, int) and step >= 0 else 0


# ---- reading ---------------------------------------------------------------------------------------


def _locate(path: Path) -> Path:
    """The folder to open: `path`, or its aside copy where a kill fell between two renames."""
    path = Path(os.path.abspath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        for aside in _asides(path):
            if is_checkpoint(aside):
                return aside
        raise CheckpointError(f"there is no checkpoint at {path}: give the path of an existing one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be opened: {_reason(error)}; give a path that can be read") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is no folder, and a checkpoint is a folder with a {MANIFEST}: give the path of one")
    return path


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Parse the manifest and check all of it that can be checked without opening another file."""
    manifest = _read_json(folder, MANIFEST, None)
    version = manifest.get("format")
    if type(version) is int and version > FORMAT:
        raise _unusable(folder, f"it has format {version} and this version of lockstep reads up to {FORMAT}, so upgrade lockstep")

    fault = _manifest_fault(manifest)
    if fault:
        raise _unusable(folder, f"{MANIFEST} {fault}")
    return manifest


def _manifest_fault(manifest: dict[str, Any]) -> str | None:
    """What is wrong with a parsed manifest, or None."""
    if manifest.pop("checksum", None) != _manifest_checksum(manifest):
        return "does not have its own checksum: it was changed after it was written"
    if not _is_sizes([manifest.get(key) for key in ("format", "global_step", "saved_at_ns", "world_size")]):
        return "has no valid format, global_step, saved_at_ns and world_size"
    files, tensors = manifest.get("files"), manifest.get("tensors")
    if not isinstance(files, dict) or not isinstance(tensors, dict) or not isinstance(manifest.get("versions"), dict):
        return "has no objects files, tensors and versions"
    if STATE not in files:
        return f"does not list {STATE}"
    for name, entry in files.items():
        if not _FILE.fullmatch(name):
            return f"lists a file with a forbidden name: {name!r}"
        if not isinstance(entry, dict) or not _is_sizes([entry.get("size")]) or not isinstance(entry.get("crc32"), str):
            return f"has no valid size and crc32 of {name}"
    for name, entry in tensors.items():
        fault = _name_fault(name)
        if fault:
            return f"lists a tensor {name!r}: {fault}"
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _DTYPES:
            return f"has no valid dtype of {name}"
        if not _is_sizes(entry.get("shape")) or not isinstance(entry.get("pieces"), list):
            return f"has no valid shape and pieces of {name}"
        seen = set()
        for piece in entry["pieces"]:
            if not isinstance(piece, dict) or not _is_sizes(piece.get("offsets")) or not _is_sizes(piece.get("shape")):
                return f"has an invalid piece of {name}"
            file = piece.get("file")
            if not isinstance(file, str) or file not in files or not file.endswith(".safetensors") or file in seen:
                return f"has a piece of {name} in {file!r}, which is not listed, holds no tensors or has a piece of it already"
            seen.add(file)
        fault = _tiling_fault(entry["shape"], entry["pieces"])
        if fault:
            return f"has a wrong index: of {name} {fault}"
    return None


def _check_files(folder: Path, files: dict[str, Any], *, checksums: bool) -> None:
    for name, entry in files.items():
        with _open_regular(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["size"]:
                pointer = file.read(len(_LFS)) == _LFS
                raise _unusable(
                    folder, f"{name} is a git-lfs pointer, so run `git lfs pull`" if pointer else f"{name} has {size} bytes instead of {entry['size']}"
                )
            if not checksums:
                continue
            checksum = 0
            buffer = memoryview(bytearray(min(_CHUNK_BYTES, size) or 1))
            try:
                while count := file.readinto(buffer):  # type: ignore[attr-defined]
                    checksum = zlib.crc32(buffer[:count], checksum)
            except OSError as error:
                raise _unusable(folder, f"{name} cannot be read ({_reason(error)})") from error
            if f"{checksum:08x}" != entry["crc32"]:
                raise _unusable(folder, f"{name} has changed: its checksum is {checksum:08x} instead of {entry['crc32']}")


def _read_json(folder: Path, name: str, entry: dict[str, Any] | None) -> dict[str, Any]:
    """Parse a JSON file, which must be an object without repeated keys and have the checksum in `entry`."""
    with _open_regular(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_JSON_BYTES:
            raise _unusable(folder, f"{name} has {size} bytes, more than the {_MAX_JSON_BYTES} that are read")
        try:
            content = file.read(size)
        except OSError as error:
            raise _unusable(folder, f"{name} cannot be read ({_reason(error)})") from error
    if content.startswith(_LFS):
        raise _unusable(folder, f"{name} is a git-lfs pointer, so run `git lfs pull`")
    if entry is not None and f"{zlib.crc32(content):08x}" != entry["crc32"]:
        raise _unusable(folder, f"{name} has changed: its checksum is not {entry['crc32']}")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _unusable(folder, f"{name} is no valid JSON ({str(error)[:200]})") from error
    if not isinstance(value, dict):
        raise _unusable(folder, f"{name} holds no JSON object")
    return value


def _open_regular(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of the folder, following no link; without blocking, should it be a pipe."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        known = {errno.ENOENT: "is missing", errno.ELOOP: "is a link"}
        what = known.get(getattr(error, "errno", 0), f"cannot be opened ({_reason(error)})")
        raise _unusable(folder, f"{name} {what}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unusable(folder, f"{name} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(',', ':')).encode('ascii')):08x}"


def _name_fault(name: Any) -> str | None:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return "a name is a group of small letters, digits and _, then /, then a key of up to 1024 printable characters"
    if match["key"] == "__metadata__" or not {"", ".", ".."}.isdisjoint(match["key"].split("/")):
        return "a key is not `__metadata__` and has no component that is empty, `.` or `..`"
    return None


def _split(name: str) -> tuple[str, str]:
    group, _, key = name.partition("/")
    return group, key


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def _tiling_fault(shape: Sequence[int], pieces: Sequence[dict[str, Any]]) -> str | None:
    """Why the pieces do not cover the shape exactly once, or None.

    If all lie inside and their volumes add up, they cover it exactly unless two overlap. Overlaps are looked for
    in a sweep along the dimension with most cuts, so a row-wise, column-wise or grid-wise cut costs little.
    """
    if not pieces:
        return "no piece was saved"
    for piece in pieces:
        if not len(piece["offsets"]) == len(piece["shape"]) == len(shape) or any(
            first + size > whole for first, size, whole in zip(piece["offsets"], piece["shape"], shape, strict=True)
        ):
            return f"a piece of shape {tuple(piece['shape'])} at {tuple(piece['offsets'])} does not lie in shape {tuple(shape)}"
    covered, whole = sum(_volume(piece["shape"]) for piece in pieces), _volume(shape)
    if covered < whole:
        return f"{whole - covered} of {whole} elements are missing"
    sweep = max(range(len(shape)), key=lambda dim: len({piece["offsets"][dim] for piece in pieces}), default=None)
    active: list[dict[str, Any]] = []
    for piece in sorted(pieces, key=lambda piece: piece["offsets"][sweep]) if sweep is not None else pieces:
        if _volume(piece["shape"]):
            active = [other for other in active if sweep is None or other["offsets"][sweep] + other["shape"][sweep] > piece["offsets"][sweep]]
            if any(_overlap(piece, other) for other in active):
                return f"the piece of shape {tuple(piece['shape'])} at {tuple(piece['offsets'])} overlaps another"
            active.append(piece)
    return None


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one["offsets"], one["shape"], other["offsets"], other["shape"], strict=True))


def _volume(shape: Sequence[int]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume


# ---- folders ---------------------------------------------------------------------------------------


def _folders(folder: Path) -> list[Path]:
    """The real folders in `folder`, links left out; none where it is not there."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {_reason(error)}; give a folder that can be read") from error


def _asides(final: Path) -> list[Path]:
    return [entry for entry in _folders(final.parent) if (match := _LEFTOVER.fullmatch(entry.name)) and match["kind"] == "old" and match["name"] == final.name]


def _abandoned(folder: Path) -> bool:
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


def _unusable(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} cannot be used: {what}; otherwise load another one (ckpt_path='auto' finds the newest that is whole)")


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"
