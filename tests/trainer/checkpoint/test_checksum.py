"""Checksums are zlib's, computed in constant memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from lockstep.trainer.checkpoint import checksum
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.trainer.checkpoint.folders import save_alone


@pytest.mark.ranks
def test_checksums_are_those_of_zlib_whatever_computes_them(tmp_path: Path) -> None:
    isal = pytest.importorskip("isal.isal_zlib", reason="there is no wheel of isal for this machine")
    assert checksum.crc32 is isal.crc32
    code = """
import sys
sys.modules["isal"] = None
import zlib
from lockstep.trainer.checkpoint import checksum
from lockstep.trainer.checkpoint.store import Checkpoint
assert checksum.crc32 is zlib.crc32
print(Checkpoint.open("a").files())
"""
    save_alone(tmp_path / "a", {"model/w": torch.randn(600_000), "model/v": torch.randn(3)})
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.stdout.strip() == str(Checkpoint.open(tmp_path / "a").files()), found.stderr


def test_verification_and_reading_of_a_part_take_constant_memory(tmp_path: Path) -> None:
    size = 16 << 20
    save_alone(
        tmp_path / "a",
        {"model/w": torch.zeros(size // 4, 4, dtype=torch.uint8), "model/v": torch.zeros(4 * size, dtype=torch.uint8)},
    )
    tracemalloc.start()
    loaded = Checkpoint.open(tmp_path / "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 2
    assert loaded.read("model/v", (5,), (3,)).untyped_storage().nbytes() == 3
