"""Checksums are zlib's, computed in constant memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch

from lockstep.trainer.checkpoint import checksum, files
from lockstep.trainer.checkpoint.reader import read_manifest
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError
from tests.trainer.checkpoint.folders import save_alone


@pytest.mark.long
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


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 9), (9, 0), (1, 1), (3, 1 << 20), (70_001, 4_097)])
def test_checksums_of_runs_of_bytes_are_joined(first: int, second: int) -> None:
    one, other = os.urandom(first), os.urandom(second)
    assert checksum.joined(zlib.crc32(one), zlib.crc32(other), second) == zlib.crc32(one + other)


def test_threads_verify_segments_of_one_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, together = 4 * files.CHUNK_BYTES, threading.Barrier(2)
    save_alone(tmp_path / "a", {"model/w": torch.zeros(size, dtype=torch.uint8)})
    listed = read_manifest(tmp_path / "a")["files"]
    big = {name: entry for name, entry in listed.items() if entry["size"] >= size}
    assert len(big) == 1
    monkeypatch.setattr(files, "_SEGMENT_BYTES", size // 2)
    met = []

    def meet(data: memoryview, value: int = 0) -> int:
        if value == 0 and len(data) == files.CHUNK_BYTES:  # the first chunk of a segment, but for the file's end
            met.append(together.wait(timeout=10))
        return zlib.crc32(data, value)

    monkeypatch.setattr(files, "crc32", meet)
    files.verify(tmp_path / "a", big, threads=2)
    assert sorted(met) == [0, 1]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_changed_file_is_named_wherever_its_changed_byte_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(files, "_SEGMENT_BYTES", 1000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 300)
    save_alone(tmp_path / "a", {"model/w": torch.randn(1999), "optimizer/adam/w/m": torch.randn(500)})
    listed = read_manifest(tmp_path / "a")["files"]
    files.verify(tmp_path / "a", listed, threads=threads)
    big = [name for name, entry in listed.items() if entry["size"] > 2000]
    assert len(big) == 2
    for place in (0, 299, 999, 1000, 1999, listed[big[0]]["size"] - 1):
        whole = {name: (tmp_path / "a" / name).read_bytes() for name in big}
        for name in big:
            changed = bytearray(whole[name])
            changed[min(place, len(changed) - 1)] ^= 1
            (tmp_path / "a" / name).write_bytes(changed)
        with pytest.raises(CheckpointError, match=f"{big[0]} has changed: its checksum is"):
            files.verify(tmp_path / "a", listed, threads=threads)
        for name in big:
            (tmp_path / "a" / name).write_bytes(whole[name])
