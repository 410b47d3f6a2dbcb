"""Tests of two ranks on CUDA: each has a GPU of its own where there are two, or both share the only one.

Ranks that share a GPU take turns on it, so a collective of two takes 5 ms there, one of four 40 ms, and more beside
other tests that do so: one test shares at a time, and four ranks never do.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch


def needs(count: int) -> list[Any]:
    """Marks of a test of `count` ranks."""
    have = torch.cuda.device_count()
    return [
        pytest.mark.skipif(count > max(have, 2), reason=f"needs {count} CUDA devices, there are {have}"),
        pytest.mark.timeout(150, func_only=True),  # it may wait for its turn before
    ]


@contextmanager
def shared_by(count: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test of `count` ranks: they share a GPU if there are fewer."""
    if torch.cuda.device_count() >= count:
        yield
        return
    patch.setenv("LOCKSTEP_SHARE_GPU", "1")
    with Path(tempfile.gettempdir(), "lockstep-tests-share-a-gpu").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
