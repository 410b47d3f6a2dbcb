"""Writing one file of a checkpoint, to the disk, with its checksum."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.strategies.launch.fault_injection import fault
from lockstep.trainer.checkpoint.checksum import crc32

CHUNK_BYTES = 1 << 20
"""Small enough that a chunk is still in the processor's cache when it is written, right after its checksum."""


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
