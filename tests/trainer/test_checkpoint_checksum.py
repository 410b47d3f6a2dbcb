"""Checksums of files: the damage that they promise to find, the same value however the bytes come, and both formats."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.test_checkpoint import contents, save_alone
from tests.trainer.test_checkpoint_damage import sign
from trainer import checkpoint_writer
from trainer.checkpoint import Checkpoint, CheckpointError
from trainer.checkpoint_checksum import CHECKSUMS, NEWEST, Crc32, Words

PART = 32 << 20
BLOCK = 4096


def checksum(content: bytes | bytearray, *sizes: int) -> str:
    """Of bytes that come in pieces of these sizes, and the rest in one."""
    words, view = Words(), memoryview(content)
    for size in (*sizes, len(view)):
        words.update(view[:size])
        view = view[size:]
    return words.hexdigest()


def defined(content: bytes) -> str:
    """As the documentation defines it."""
    words = np.frombuffer(content + bytes(-len(content) % 8), "<u8")
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(words), PART // 8):
        part = words[start : start + PART // 8]
        for width in (4096, 4097):
            digest.update(np.pad(part, (0, -len(part) % width)).reshape(-1, width).sum(0, dtype="<u8").tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 8, 13, 8 * 4096, 8 * 4097, 300_001, PART - 8, PART, PART + 3, 2 * PART + 40_000])
def test_the_value_is_the_defined_one_however_the_bytes_come(size: int) -> None:
    content = random.Random(size).randbytes(size)
    expected = defined(content)
    assert checksum(content) == expected
    assert checksum(content, 5, 0, 3, 1, 70_001, 262_144, 9) == expected, "from other places in memory as well"
    assert checksum(content, 8 * 4095, 8 * 4097, 8 * 65536 + 8) == expected


def test_values_stay_what_they_were() -> None:
    assert checksum(b"") == "cae66941d9efbd404e4d88758ea67670"
    assert checksum(bytes(range(256)) * 999) == "b2da3d0912cc8c868d16ee0f5e9a91ca"


def identity() -> bytearray:
    """Rows of 4 KiB with a single one each: sums over rows and columns alone would not know their order."""
    return bytearray(np.eye(256, 512, dtype="<u8").tobytes())


def noise() -> bytearray:
    return bytearray(random.Random(0).randbytes(1 << 20))


CONTENTS: dict[str, Callable[[], bytearray]] = {
    "noise": noise,
    "identity": identity,
    "zeros": lambda: bytearray(1 << 20),
    "ones": lambda: bytearray(b"\xff" * (1 << 20)),
    "floats": lambda: bytearray(torch.ones(1 << 18).numpy().tobytes()),
}


def flip(draw: random.Random, content: bytearray) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def flip_signs(draw: random.Random, content: bytearray) -> None:
    """The highest bits of two or three words, which cancel in a sum modulo 2^64."""
    for word in draw.sample(range(len(content) // 8), draw.choice([2, 3])):
        content[8 * word + 7] ^= 0x80


def flip_below(draw: random.Random, content: bytearray) -> None:
    """The highest bits of two words that share a column."""
    word = draw.randrange(len(content) // 16)
    for each in (word, word + draw.choice([4096, 4097])):
        content[8 * each + 7] ^= 0x80


def burst(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content) - 32767)
    size = draw.choice([1, 4, 8, 100, 4096, 32761])
    content[start : start + size] = bytes(byte ^ 0xFF for byte in content[start : start + size])


def swap_blocks(draw: random.Random, content: bytearray) -> None:
    one, other = (BLOCK * number for number in draw.sample(range(len(content) // BLOCK), 2))
    content[one : one + BLOCK], content[other : other + BLOCK] = content[other : other + BLOCK], content[one : one + BLOCK]


def copy_block(draw: random.Random, content: bytearray) -> None:
    one, other = (BLOCK * number for number in draw.sample(range(len(content) // BLOCK), 2))
    content[one : one + BLOCK] = content[other : other + BLOCK]


def zero(draw: random.Random, content: bytearray) -> None:
    first = draw.randrange(len(content) // BLOCK)
    last = draw.randint(first + 1, len(content) // BLOCK)
    content[BLOCK * first : BLOCK * last] = bytes(BLOCK * (last - first))


def move(draw: random.Random, content: bytearray) -> None:
    """Bytes that came in late by a word, from somewhere to the end."""
    at = 8 * draw.randrange(len(content) // 8)
    content[at:at] = bytes(8)
    del content[-8:]


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("damage", [flip, flip_signs, flip_below, burst, swap_blocks, copy_block, zero, move], ids=lambda f: f.__name__)
def test_damage_is_found(kind: str, damage: Callable[[random.Random, bytearray], None]) -> None:
    draw = random.Random(7)
    whole = CONTENTS[kind]()
    expected, found = checksum(whole), 0
    for _ in range(15):
        content = bytearray(whole)
        damage(draw, content)
        assert (checksum(content) == expected) == (content == whole)
        found += content != whole
    assert found or kind in ("zeros", "ones", "floats")


def test_blocks_that_change_places_between_parts_are_found() -> None:
    content = bytearray(random.Random(1).randbytes(PART + 2 * BLOCK))
    expected = checksum(content)
    content[:BLOCK], content[PART : PART + BLOCK] = content[PART : PART + BLOCK], content[:BLOCK]
    assert checksum(content) != expected


def test_a_checkpoint_of_format_1_is_verified_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"model/w": torch.randn(300, 70), "model/b": torch.arange(5)}
    new = save_alone(tmp_path / "new", tensors)
    monkeypatch.setattr(checkpoint_writer, "NEWEST", "crc32")
    monkeypatch.setattr(checkpoint_writer, "FORMAT", 1)
    old = save_alone(tmp_path / "old", tensors)
    manifest = json.loads((old / "manifest.json").read_text())
    assert manifest["format"] == 1
    for name, entry in manifest["files"].items():
        assert entry == {"size": (old / name).stat().st_size, "crc32": f"{zlib.crc32((old / name).read_bytes()):08x}"}
    assert contents(old) == contents(new)
    content = bytearray((old / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (old / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed: its checksum is [0-9a-f]{8} instead of"):
        Checkpoint.open(old)


def test_the_manifest_has_the_newest_checksum_of_every_file(tmp_path: Path) -> None:
    path = save_alone(tmp_path / "a", {"model/w": torch.randn(300, 70)})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 2
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"size": len(content), NEWEST: defined(content)}
    assert {"words": Words, "crc32": Crc32} == CHECKSUMS


@pytest.mark.parametrize("entry", [{"sha3": "00"}, {}, {"words": 5}, {"words": None, "sha3": "00"}, {"words": "00", "crc32": "00"}])
def test_a_checksum_that_is_not_known_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = save_alone(tmp_path / "a", {"model/w": torch.randn(30, 7)})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = {"size": manifest["files"]["model.safetensors"]["size"], **entry}
    sign(path, manifest)
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=r"no valid size of model\.safetensors with one checksum that this version knows \(words or crc32\)"):
            Checkpoint.open(path, verify=verify)
