"""The format of checkpoints: names, the manifest and its rules. Touches no file.

    last/
      manifest.json            format, versions, world size; size and checksum of every file; index of every tensor
      state.json               everything that is not a tensor and equal on all ranks
      rank-00000.json          what belongs to one rank (random number streams)
      model.safetensors        a plain state dict: `safetensors.torch.load_file` opens it
      optimizer-00001-of-00004.safetensors      where several ranks wrote pieces of a group

Only a folder with a valid manifest is a checkpoint. Nothing here is pickled and nothing that is read names
code to import. Readers open what the manifest lists, and only regular files directly in the folder.

A name such as `model/net.weight` is a group, which chooses the file, and the key inside that file.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.strategies.launch.failure import is_of_user
from lockstep.trainer.checkpoint.checksum import crc32
from lockstep.trainer.checkpoint.safetensors_file import DTYPES

FORMAT = 1
"""Version of the format. Readers take this one and older ones."""

MANIFEST = "manifest.json"
STATE = "state.json"
MAX_JSON_BYTES = 1 << 28

_NAME = re.compile(r"(?P<group>[a-z][a-z0-9_]{0,63})/(?P<key>[^\x00-\x1f\x7f\ud800-\udfff]{1,1024})")
_FILE = re.compile(r"state\.json|rank-\d{5,9}\.json|[a-z][a-z0-9_]{0,63}(-\d{5,9}-of-\d{5,9})?\.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. The message names the path and what to do."""


class UnusableCheckpointError(CheckpointError):
    """What is at a path cannot be read, or is not what was saved: ckpt_path='auto' and 'last' take an older one."""

    begins_run = False
    """Whether a run was to begin from it, and nothing of the run has happened yet."""


class WeightsOnlyError(CheckpointError):
    """A checkpoint of weights alone was to be resumed: ckpt_path='auto' and 'last' take an older one that can be."""


class refused:
    """Turns what state and checkpoint disagree on into CheckpointError with the path; what the user's code raises, as
    in a `load_state_dict`, stays as it is."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        kinds = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration)
        if isinstance(error, kinds) and not is_of_user(trace):
            text = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise CheckpointError(f"checkpoint {self._path}: {text}") from error
        if isinstance(error, RuntimeError) and str(error).startswith("Error(s) in loading state_dict for "):
            first, *others = map(str.strip, str(error).splitlines())
            found = " ".join(others[:3]) + (f" (and {len(others) - 3} more)" if len(others) > 3 else "")
            raise CheckpointError(
                f"checkpoint {self._path}: its weights are not those of {first.split()[-1].rstrip(':')}: "
                f"{found.rstrip('.')}; build the module with the arguments that it was saved with"
            ) from error


class MissingCheckpointError(UnusableCheckpointError, FileNotFoundError):
    """There is no checkpoint at a path."""


def manifest_fault(manifest: dict[str, Any]) -> str | None:
    """What is wrong with a parsed manifest, or None."""
    if manifest.get("checksum") != manifest_checksum(manifest):
        return "does not match its own checksum: it was changed after it was written"
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
        fault = name_fault(name)
        if fault:
            return f"lists a tensor {name!r}: {fault}"
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
            return f"has no valid dtype of {name}"
        if not _is_sizes(entry.get("shape")) or not isinstance(entry.get("pieces"), list):
            return f"has no valid shape and pieces of {name}"
        seen = set()
        for piece in entry["pieces"]:
            if not isinstance(piece, dict) or not _is_sizes(piece.get("offsets")) or not _is_sizes(piece.get("shape")):
                return f"has an invalid piece of {name}"
            file = piece.get("file")
            if not isinstance(file, str) or file not in files or not file.endswith(".safetensors") or file in seen:
                return (
                    f"has a piece of {name} in {file!r}, which is not listed, holds no tensors or has a piece of it "
                    "already"
                )
            seen.add(file)
        fault = tiling_fault(entry["shape"], entry["pieces"])
        if fault:
            return f"has an invalid index of {name}: {fault}"
    return None


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Of all but its own entry `checksum`."""
    manifest = {key: value for key, value in manifest.items() if key != "checksum"}
    return f"{crc32(json.dumps(manifest, sort_keys=True, separators=(',', ':')).encode('ascii')):08x}"


def name_fault(name: Any) -> str | None:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return "a name is a group of small letters, digits and _, then /, then a key of up to 1024 printable characters"
    if match["key"] == "__metadata__" or not {"", ".", ".."}.isdisjoint(match["key"].split("/")):
        return "a key is not `__metadata__` and has no component that is empty, `.` or `..`"
    return None


def is_file_of_one(name: str) -> bool:
    """Whether a checkpoint may have a file of this name, beside its manifest."""
    return _FILE.fullmatch(name) is not None


def split_name(name: str) -> tuple[str, str]:
    group, _, key = name.partition("/")
    return group, key


def _is_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    )


def tiling_fault(shape: Sequence[int], pieces: Sequence[dict[str, Any]]) -> str | None:
    """Why the pieces do not cover the shape exactly once, or None.

    If all lie inside and their volumes add up, they cover it exactly unless two overlap. Overlaps are looked for
    in a sweep along the dimension with most cuts, so a row-wise, column-wise or grid-wise cut costs little.
    """
    if not pieces:
        return "no shard was saved"
    for piece in pieces:
        if not len(piece["offsets"]) == len(piece["shape"]) == len(shape) or any(
            first + size > whole for first, size, whole in zip(piece["offsets"], piece["shape"], shape, strict=True)
        ):
            return (
                f"a piece of shape {tuple(piece['shape'])} at {tuple(piece['offsets'])} is outside of shape "
                f"{tuple(shape)}"
            )
    covered, whole = sum(_volume(piece["shape"]) for piece in pieces), _volume(shape)
    if covered < whole:
        return f"{whole - covered} of {whole} elements are missing"
    sweep = max(range(len(shape)), key=lambda dim: len({piece["offsets"][dim] for piece in pieces}), default=None)
    active: list[dict[str, Any]] = []
    for piece in sorted(pieces, key=lambda piece: piece["offsets"][sweep]) if sweep is not None else pieces:
        if _volume(piece["shape"]):
            active = [
                other
                for other in active
                if sweep is None or other["offsets"][sweep] + other["shape"][sweep] > piece["offsets"][sweep]
            ]
            if any(_overlap(piece, other) for other in active):
                return f"the piece of shape {tuple(piece['shape'])} at {tuple(piece['offsets'])} overlaps another"
            active.append(piece)
    return None


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one["offsets"], one["shape"], other["offsets"], other["shape"], strict=True)
    )


def _volume(shape: Sequence[int]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume


def unusable(folder: Path, what: str) -> UnusableCheckpointError:
    return UnusableCheckpointError(
        f"checkpoint {folder} cannot be used: {what}; or load another one (ckpt_path='auto' finds the newest valid one)"
    )


def reason(error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"
