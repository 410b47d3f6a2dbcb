"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | Path, mode: str = "w", *, durable: bool = False) -> Iterator[IO[Any]]:
    """A file opened for writing that takes the place of `path` when the block ends, and is removed if it raises.

    Text is UTF-8 with the newlines that are written. `durable` also waits until the bytes are on the disk. Raises
    OSError.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with open(beside, mode, **text) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
