"""Reading checkpoints, and nothing but what their manifest lists.

Nothing here protects against a forger. Safety needs none: data names no code.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.trainer.checkpoint.checksum import crc32
from lockstep.trainer.checkpoint.directory import asides
from lockstep.trainer.checkpoint.files import LFS, Segment, check_sizes, checksums, compare, open_regular, shares
from lockstep.trainer.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MAX_JSON_BYTES,
    STATE,
    CheckpointError,
    MissingCheckpointError,
    UnusableCheckpointError,
    manifest_fault,
    reason,
    split_name,
    unusable,
)
from lockstep.trainer.checkpoint.safetensors_file import CODES, DTYPES, PAIRS


class Checkpoint:
    """A checkpoint that has been opened: a `lockstep.strategies.checkpoint_state.Reader` over any number of files and
    pieces.

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
    checksum: str
    """Of the manifest: the same on two ranks only if they see the same checkpoint."""

    def __init__(self, path: Path, manifest: dict[str, Any], state: dict[str, Any]) -> None:
        self.path = path
        self.state = state
        self.world_size = manifest["world_size"]
        self.global_step = manifest["global_step"]
        self.versions = manifest["versions"]
        self.checksum = manifest["checksum"]
        self._files: dict[str, dict[str, Any]] = manifest["files"]
        self._tensors: dict[str, dict[str, Any]] = manifest["tensors"]
        self._keys: dict[str, list[tuple[str, str, list[int]]]] = {}
        for name, entry in self._tensors.items():
            for piece in entry["pieces"]:
                self._keys.setdefault(piece["file"], []).append((name, entry["dtype"], piece["shape"]))
        self._opened: dict[str, Any] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = True) -> Checkpoint:
        """Open the checkpoint at `path`; with `verify` threads read and check every byte, in constant memory.

        Manifest, names, sizes, JSON files and the index of pieces are checked in any case. Without `verify` a
        flipped bit in a tensor passes until `compare` got the checksums of all of its bytes.
        Raises CheckpointError, and nothing else, for anything that is wrong with the folder.
        """
        folder = _locate(Path(path))
        manifest = read_manifest(folder)
        check_sizes(folder, manifest["files"])
        state = _read_json(folder, STATE, manifest["files"][STATE])
        if not isinstance(state.get("strategy", {}), dict):
            raise unusable(folder, f"{STATE} has no object under 'strategy'")
        checkpoint = cls(folder, manifest, state)
        if verify:
            checkpoint.compare(checkpoint.checksums())
            checkpoint.check_index()
        return checkpoint

    def checksums(self, rank: int = 0, world_size: int = 1) -> list[Segment]:
        """Read what `rank` of `world_size` is to verify; over all ranks that is each byte once, divided evenly."""
        return checksums(self.path, shares(self._files, rank, world_size))

    def compare(self, found: Iterable[Segment]) -> None:
        """Raise CheckpointError for the first file whose checksum is another one by what `checksums` of all ranks
        found."""
        compare(self.path, self._files, found)

    def check_index(self) -> None:
        """Raise CheckpointError for a file that does not hold the tensors that the manifest says. Reads no tensor."""
        for name in self._keys:
            self._file(name)

    @property
    def meta(self) -> dict[str, Any]:
        """The strategy's own JSON data, `state["strategy"]`."""
        meta: dict[str, Any] = self.state.get("strategy", {})
        return meta

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What `rank` gave as its own state, or None. Raises CheckpointError where its file is damaged."""
        name = f"rank-{rank:05d}.json"
        return _read_json(self.path, name, self._files[name]) if name in self._files else None

    def files(self) -> list[tuple[str, int, str]]:
        """Name, bytes and CRC-32 of every file but the manifest, sorted by name."""
        return sorted((name, entry["size"], entry["crc32"]) for name, entry in self._files.items())

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the tensors that begin with `prefix`."""
        return sorted(name for name in self._tensors if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape. Raises KeyError for an unknown name."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype. Raises KeyError for an unknown name."""
        return DTYPES[self._entry(name)["dtype"]]

    def read(self, name: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The whole tensor, or the rectangle of `shape` that begins at `offsets`, on CPU.

        Only the pieces that meet the rectangle are touched. Raises KeyError for an unknown name, ValueError for
        a rectangle outside of the tensor, CheckpointError where a file cannot be read.
        """
        whole, dtype = self.shape(name), self.dtype(name)
        start = (0,) * len(whole) if offsets is None else tuple(offsets)
        extent = (
            tuple(size - first for size, first in zip(whole, start, strict=False)) if shape is None else tuple(shape)
        )
        if not len(whole) == len(start) == len(extent) or any(
            f < 0 or n < 0 or f + n > size for size, f, n in zip(whole, start, extent, strict=True)
        ):
            raise ValueError(
                f"{name} has shape {whole}, so the region of shape {extent} at {start} is outside of it: pass one "
                "inside it"
            )
        result = torch.empty(extent, dtype=dtype)
        target = torch.view_as_real(result) if dtype in PAIRS else result
        key = split_name(name)[1]
        for piece in self._entry(name)["pieces"]:
            first = [max(a, b) for a, b in zip(start, piece["offsets"], strict=True)]
            stop = [
                min(a + n, b + m) for a, n, b, m in zip(start, extent, piece["offsets"], piece["shape"], strict=True)
            ]
            if any(a >= b for a, b in zip(first, stop, strict=True)):
                continue
            source = self._file(piece["file"])
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, piece["offsets"], strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, start, strict=True))
            try:
                target[there].copy_(source.get_slice(key)[inside])
            except (OSError, SafetensorError) as error:
                raise unusable(self.path, f"{name} cannot be read from {piece['file']} ({error})") from error
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
                dtype, key = DTYPES[dtype_name], split_name(tensor)[1]
                if key not in keys:
                    raise unusable(self.path, f"{name} does not hold {tensor}")
                found = opened.get_slice(key)
                stored = [*shape, 2] if dtype in PAIRS else shape
                if found.get_dtype() != CODES[dtype] or found.get_shape() != stored:
                    raise unusable(
                        self.path,
                        f"{name} holds {tensor} as {found.get_dtype()} {found.get_shape()}, the manifest as "
                        f"{CODES[dtype]} {stored}",
                    )
        except (OSError, SafetensorError) as error:
            raise unusable(self.path, f"{name} is not a valid safetensors file ({error})") from error
        self._opened[name] = opened
        return opened


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a manifest is there that is whole and every file that it lists has its size. Reads no tensor."""
    try:
        folder = Path(path)
        check_sizes(folder, read_manifest(folder)["files"])
    except CheckpointError:
        return False
    return True


def checkpoint_around(path: Path) -> Path | None:
    """The checkpoint that `path` is in, which must not change: it holds what its manifest lists, and what replaces it
    has no other files."""
    folders = Path(os.path.realpath(path.parent)).joinpath(path.name).parents
    return next((each for each in folders if os.path.lexists(each / MANIFEST) and is_checkpoint(each)), None)


def refuse_inside(path: Path) -> None:
    """Raise CheckpointError for a path in a checkpoint."""
    if (folder := checkpoint_around(path)) is not None:
        raise CheckpointError(
            f"{path} is in the checkpoint {folder}, which must not change: choose a path outside of it"
        )


def _locate(path: Path) -> Path:
    """The folder to open: `path`, or its aside copy where a kill fell between two renames."""
    path = Path(os.path.abspath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        for aside in asides(path):
            if is_checkpoint(aside):
                return aside
        raise MissingCheckpointError(f"there is no checkpoint at {path}: pass the path of an existing one") from None
    except (OSError, ValueError) as error:
        raise UnusableCheckpointError(
            f"the checkpoint {path} cannot be opened: {reason(error)}; pass a readable path"
        ) from error
    if not stat.S_ISDIR(mode):
        raise UnusableCheckpointError(
            f"{path} is not a folder, and a checkpoint is a folder with a {MANIFEST}: pass the path of one, or create "
            "one with `lockstep checkpoint import`"
        )
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """Parse the manifest and check all of it that can be checked without opening another file."""
    manifest = _read_json(folder, MANIFEST, None)
    version = manifest.get("format")
    if type(version) is int and version > FORMAT:
        raise unusable(
            folder, f"it has format {version} and this version of lockstep reads up to {FORMAT}, so upgrade lockstep"
        )

    fault = manifest_fault(manifest)
    if fault:
        raise unusable(folder, f"{MANIFEST} {fault}")
    return manifest


def _read_json(folder: Path, name: str, entry: dict[str, Any] | None) -> dict[str, Any]:
    """Parse a JSON file, which must be an object without repeated keys and have the checksum in `entry`."""
    with open_regular(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise unusable(folder, f"{name} has {size} bytes, more than the {MAX_JSON_BYTES} that are read")
        try:
            content = file.read(size)
        except OSError as error:
            raise unusable(folder, f"{name} cannot be read ({reason(error)})") from error
    if content.startswith(LFS):
        raise unusable(folder, f"{name} is a git-lfs pointer, so run `git lfs pull`")
    if entry is not None and f"{crc32(content):08x}" != entry["crc32"]:
        raise unusable(folder, f"{name} has changed: its checksum is not {entry['crc32']}")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise unusable(folder, f"{name} is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(value, dict):
        raise unusable(folder, f"{name} is not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value
