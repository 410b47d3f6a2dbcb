"""The files of a checkpoint: written to the disk with their checksums, verified by them.

Checksums are CRC-32 of the bytes. CRC-32 finds every flipped bit and every burst of up to 32 bits and misses one
in 4e9 of other damage. Those of consecutive bytes can be joined, so that threads and ranks share a file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.strategies.launch.fault_injection import fault
from lockstep.trainer.checkpoint.checksum import crc32, joined
from lockstep.trainer.checkpoint.manifest import reason, unusable

CHUNK_BYTES = 1 << 20
"""Small enough that a chunk is still in the processor's cache when it is written, right after its checksum."""
_SEGMENT_BYTES = 16 << 20
"""What a thread verifies at a time."""
_MAX_THREADS = 16
LFS = b"version https://git-lfs.github.com/spec"
_WRITER = re.compile(r"-(\d{5,9})[-.]")
"""Which rank has written a file, in its name."""

Segment = tuple[str, int, int, int]
"""Consecutive bytes of a file: its name, first byte, number of bytes, checksum."""


def write_file(path: Path, content: Iterable[memoryview], count: Callable[[int], object]) -> dict[str, Any]:
    """Write a new file, to the disk; return its size and checksum. `count` gets the bytes of each chunk written."""
    size = checksum = 0
    try:
        fault("save.open")
        with open(path, "xb") as file:
            for chunk in _chunks(content):
                fault("save.write")
                checksum = crc32(chunk, checksum)
                file.write(chunk)
                # Linux starts to write these pages to the disk now instead of at the fsync.
                with suppress(OSError, AttributeError):
                    os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
                size += len(chunk)
                count(len(chunk))
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


def _chunks(content: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces that are worth a call: large ones are cut, small ones joined."""
    joined = bytearray()
    for data in content:
        if len(data) < CHUNK_BYTES:
            joined += data
        if joined and max(len(data), len(joined)) >= CHUNK_BYTES:
            yield memoryview(joined)
            joined = bytearray()
        if len(data) >= CHUNK_BYTES:
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]
    if joined:
        yield memoryview(joined)


def check_sizes(folder: Path, files: dict[str, Any]) -> None:
    """Raise CheckpointError for the first of `files` that is missing, no regular file or of another size."""
    for name, entry in files.items():
        with open_regular(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["size"]:
                pointer = file.read(len(LFS)) == LFS
                raise unusable(
                    folder,
                    f"{name} is a git-lfs pointer, so run `git lfs pull`"
                    if pointer
                    else f"{name} has {size} bytes instead of {entry['size']}",
                )


def verify(folder: Path, files: dict[str, Any], threads: int | None = None) -> None:
    """Raise CheckpointError for the first of `files` whose size or any byte is not as the manifest says."""
    check_sizes(folder, files)
    compare(folder, files, checksums(folder, shares(files, 0, 1), threads))


def shares(files: dict[str, Any], rank: int, world_size: int) -> list[tuple[str, int, int]]:
    """Name, first byte and number of bytes of what `rank` verifies: the files in the order of the ranks that wrote
    them, cut into `world_size` runs of as many bytes, so that a rank begins with what it reads where the layout is the
    same."""
    whole = sum(entry["size"] for entry in files.values())
    first, stop = whole * rank // world_size, whole * (rank + 1) // world_size
    found, at = [], 0
    for name in sorted(files, key=lambda name: (_writer_of(name), name)):
        begin, end = max(first, at), min(stop, at + files[name]["size"])
        if begin < end:
            found.append((name, begin - at, end - begin))
        at += files[name]["size"]
    return found


def _writer_of(name: str) -> int:
    match = _WRITER.search(name)
    return int(match[1]) if match else 0


def checksums(folder: Path, runs: list[tuple[str, int, int]], threads: int | None = None) -> list[Segment]:
    """The checksums of these runs of bytes, which threads read in segments (by default one a core)."""
    segments = [
        (name, at, min(_SEGMENT_BYTES, start + size - at))
        for name, start, size in runs
        for at in range(start, start + size, _SEGMENT_BYTES)
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(threads or cores, _MAX_THREADS, len(segments)))
    with ThreadPoolExecutor(threads, "lockstep-verify") as pool:
        try:
            found = list(pool.map(lambda segment: _checksum_of(folder, *segment), segments))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    checksums = dict.fromkeys((name for name, *_ in runs), 0)
    for (name, _, size), checksum in zip(segments, found, strict=True):
        checksums[name] = joined(checksums[name], checksum, size)
    return [(*run, checksums[run[0]]) for run in runs]


def compare(folder: Path, files: dict[str, Any], found: Iterable[Segment]) -> None:
    """Raise CheckpointError for the first of `files` whose checksum is another one by those of its runs of bytes."""
    checksums = dict.fromkeys(files, 0)
    for name, _, size, checksum in sorted(found):
        checksums[name] = joined(checksums[name], checksum, size)
    for name, entry in files.items():
        if f"{checksums[name]:08x}" != entry["crc32"]:
            raise unusable(
                folder, f"{name} has changed: its checksum is {checksums[name]:08x} instead of {entry['crc32']}"
            )


def _checksum_of(folder: Path, name: str, start: int, size: int) -> int:
    """The checksum of `size` bytes of a file from `start`."""
    checksum, left = 0, size
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_regular(folder, name) as file:
        try:
            file.seek(start)
            fault("verify")
            while left and (count := file.readinto(buffer[:left])):  # type: ignore[attr-defined]
                checksum, left = crc32(buffer[:count], checksum), left - count
        except OSError as error:
            raise unusable(folder, f"{name} cannot be read ({reason(error)})") from error
    return checksum


def open_regular(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of the folder, following no link; without blocking, should it be a pipe."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        known = {errno.ENOENT: "is missing", errno.ELOOP: "is a link"}
        what = known.get(getattr(error, "errno", 0), f"cannot be opened ({reason(error)})")
        raise unusable(folder, f"{name} {what}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise unusable(folder, f"{name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)
