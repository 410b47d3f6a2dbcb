"""Which processes a program has started, and which of them still run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """What a process has started, and what that has."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
