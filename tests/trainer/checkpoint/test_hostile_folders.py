"""Folders made to harm a reader are refused by name, in little memory, and nothing in them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, is_checkpoint
from tests.trainer.checkpoint.damage import replace, sign
from tests.trainer.checkpoint.folders import contents, script

MODEL = "model-00000-of-00002.safetensors"


def forge(edit: Callable[[Path, dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        edit(folder, manifest)
        sign(folder, manifest)

    return apply


def piece(manifest: dict[str, Any], name: str = "model/w", number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = manifest["tensors"][name]["pieces"][number]
    return found


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def to_link(folder: Path) -> None:
    shutil.move(folder / MODEL, folder.parent / "elsewhere")
    (folder / MODEL).symlink_to(folder.parent / "elsewhere")


def to_pipe(folder: Path) -> None:
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")


def to_folder(folder: Path) -> None:
    (folder / "rank-00001.json").unlink()
    (folder / "rank-00001.json").mkdir()


def to_device(folder: Path) -> None:
    (folder / "state.json").unlink()
    try:
        os.mknod(folder / "state.json", stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:  # only root may: something else that has no end
        (folder / "state.json").symlink_to("/dev/zero")


def to_sparse(name: str, size: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        os.truncate(folder / name, size)

    return apply


def swap(one: str, other: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        os.rename(folder / one, folder / "x")
        os.rename(folder / other, folder / one)
        os.rename(folder / "x", folder / other)

    return apply


class Bomb:
    """Unpickling it makes a file in the working folder."""

    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(4, 5), "x": Bomb()}, buffer)
    return buffer.getvalue()


def outside(folder: Path, manifest: dict[str, Any]) -> None:
    content = (folder / MODEL).read_bytes()
    (folder.parent / "x.safetensors").write_bytes(content)
    manifest["files"]["../x.safetensors"] = manifest["files"].pop(MODEL)
    piece(manifest)["file"] = "../x.safetensors"


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"

DEEP = b"[" * 200_000 + b"]" * 200_000

HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "not valid JSON"),
    "manifest is a list": (lambda f: (f / "manifest.json").write_text("[]"), "not a JSON object"),
    "manifest is binary": (lambda f: (f / "manifest.json").write_bytes(b"\x80\x04\xff\x00"), "not valid JSON"),
    "manifest is deep": (lambda f: (f / "manifest.json").write_bytes(b'{"a":' + DEEP + b"}"), "not valid JSON"),
    "manifest has a huge number": (
        lambda f: (f / "manifest.json").write_text('{"a":' + "9" * 5000 + "}"),
        "not valid JSON",
    ),
    "manifest repeats a key": (
        lambda f: (f / "manifest.json").write_text('{"format":1,"format":1}'),
        "a key occurs twice",
    ),
    "manifest edited": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace('"float32"', '"float16"')),
        "own checksum",
    ),
    "manifest is a git-lfs pointer": (lambda f: (f / "manifest.json").write_text(LFS), "git lfs pull"),
    "tensors are a git-lfs pointer": (lambda f: (f / MODEL).write_text(LFS), "git lfs pull"),
    "future format": (forge(lambda f, m: m.update(format=2)), "upgrade lockstep"),
    "no format": (forge(lambda f, m: m.pop("format")), "no valid format"),
    "format is true": (forge(lambda f, m: m.update(format=True)), "no valid format"),
    "world size is text": (forge(lambda f, m: m.update(world_size="2")), "world_size"),
    "files are a list": (forge(lambda f, m: m.update(files=[])), "no objects"),
    "state not listed": (forge(lambda f, m: m["files"].pop("state.json")), "does not list state.json"),
    "size is a float": (forge(lambda f, m: m["files"]["state.json"].update(size=1.0)), "no valid size"),
    "empty file": (lambda f: (f / MODEL).write_bytes(b""), "0 bytes instead of"),
    "missing file": (lambda f: (f / MODEL).unlink(), "is missing"),
    "file is a link": (to_link, "is a link"),
    "file is a pipe": (to_pipe, "not a regular file"),
    "file is a folder": (to_folder, "not a regular file"),
    "file outside": (forge(outside), "forbidden name"),
    "file with an absolute path": (
        forge(lambda f, m: m["files"].update({"/etc/hostname": {"size": 1, "crc32": "0"}})),
        "forbidden name",
    ),
    "file that is code": (forge(lambda f, m: replace(f, m, "model.pkl", b"x")), "forbidden name"),
    "tensor without a group": (
        forge(lambda f, m: m["tensors"].update(w=m["tensors"].pop("model/w"))),
        "lists a tensor 'w'",
    ),
    "tensor name climbs": (
        forge(lambda f, m: m["tensors"].update({"model/../w": m["tensors"].pop("model/w")})),
        "lists a tensor",
    ),
    "dtype names code": (forge(lambda f, m: m["tensors"]["model/w"].update(dtype="os.system")), "no valid dtype"),
    "dtype is a list": (forge(lambda f, m: m["tensors"]["model/w"].update(dtype=[])), "no valid dtype"),
    "wrong dtype": (
        forge(lambda f, m: m["tensors"]["model/w"].update(dtype="int32")),
        r"F32 \[4, 5\], the manifest as I32",
    ),
    "wrong shape": (
        forge(
            lambda f, m: m["tensors"]["model/b"].update(
                shape=[1, 5], pieces=[{**piece(m, "model/b"), "shape": [1, 5], "offsets": [0, 0]}]
            )
        ),
        r"I64 \[5\]",
    ),
    "negative shape": (forge(lambda f, m: m["tensors"]["model/w"].update(shape=[-8, 5])), "no valid shape"),
    "huge shape": (forge(lambda f, m: m["tensors"]["model/w"].update(shape=[2**61, 2**61])), "elements are missing"),
    "shape that overflows": (forge(lambda f, m: m["tensors"]["model/w"].update(shape=[2**64, 5])), "no valid shape"),
    "missing piece": (forge(lambda f, m: m["tensors"]["model/w"]["pieces"].pop()), "20 of 40 elements are missing"),
    "overlapping pieces": (forge(lambda f, m: piece(m, number=1).update(offsets=[3, 0])), "overlaps another"),
    "piece out of range": (forge(lambda f, m: piece(m, number=1).update(offsets=[5, 0])), "is outside of shape"),
    "piece without file": (forge(lambda f, m: piece(m).pop("file")), "not listed"),
    "piece in an unlisted file": (forge(lambda f, m: piece(m).update(file="extra2.safetensors")), "not listed"),
    "piece in a JSON file": (forge(lambda f, m: piece(m).update(file="state.json")), "not listed"),
    "two pieces in a file": (forge(lambda f, m: piece(m, number=1).update(file=MODEL)), "a piece of it already"),
    "piece in another file": (forge(lambda f, m: piece(m).update(file="extra.safetensors")), "does not hold model/w"),
    "no pieces": (forge(lambda f, m: m["tensors"]["model/w"].update(pieces=[])), "no shard was saved"),
    "huge header": (forge(lambda f, m: replace(f, m, MODEL, header(b"{}", 2**63))), "not a valid safetensors file"),
    "header beyond the end": (
        forge(lambda f, m: replace(f, m, MODEL, header(b"{}", 10**6))),
        "not a valid safetensors file",
    ),
    "deep header": (
        forge(lambda f, m: replace(f, m, MODEL, header(b'{"w":' + DEEP + b"}"))),
        "not a valid safetensors file",
    ),
    "header with data out of range": (
        forge(lambda f, m: replace(f, m, MODEL, header(b'{"w":{"dtype":"F32","shape":[4,5],"data_offsets":[0,80]}}'))),
        "not a valid safetensors file",
    ),
    "header with overflow": (
        forge(
            lambda f, m: replace(
                f,
                m,
                MODEL,
                header(b'{"w":{"dtype":"F32","shape":[4611686018427387905,4],"data_offsets":[0,16]}}') + bytes(16),
            )
        ),
        "not a valid safetensors file",
    ),
    "pickle instead of tensors": (
        forge(lambda f, m: replace(f, m, MODEL, b"\x80\x04cos\nsystem\n(S'echo'\ntR.")),
        "not a valid safetensors file",
    ),
    "state repeats a key": (forge(lambda f, m: replace(f, m, "state.json", b'{"a":1,"a":2}')), "a key occurs twice"),
    "state is deep": (forge(lambda f, m: replace(f, m, "state.json", b'{"a":' + DEEP + b"}")), "not valid JSON"),
    "state is a number": (forge(lambda f, m: replace(f, m, "state.json", b"1")), "not a JSON object"),
    "state without strategy": (forge(lambda f, m: replace(f, m, "state.json", b'{"strategy":[]}')), "'strategy'"),
    "state is a device": (to_device, "not a regular file|is a link"),
    "manifest without end": (to_sparse("manifest.json", 1 << 40), "more than the"),
    "tensors without end": (to_sparse(MODEL, 1 << 40), "1099511627776 bytes instead of"),
    "shards swapped": (
        swap("optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"),
        "its checksum is",
    ),
    "ranks swapped": (swap("rank-00000.json", "rank-00001.json"), "its checksum is"),
    "groups swapped": (swap(MODEL, "extra.safetensors"), "bytes instead of"),
    "rank state is binary": (forge(lambda f, m: replace(f, m, "rank-00001.json", b"\xff")), "not valid JSON"),
}

NAMES = [
    "manifest.json",
    "state.json",
    "rank-00000.json",
    "rank-00001.json",
    MODEL,
    "model-00001-of-00002.safetensors",
    "extra.safetensors",
]

HOSTILE |= {
    f"{name} is empty": ((lambda f, name=name: (f / name).write_bytes(b"")), f"{name} (has 0 bytes|is not valid JSON)")
    for name in NAMES
}

for kind, content in (("pickle", pickle.dumps(Bomb())), ("torch file", torch_file())):
    HOSTILE |= {
        f"{name} is a {kind}": (
            (lambda f, content=content: (f / "manifest.json").write_bytes(content))
            if name == "manifest.json"
            else forge(lambda f, m, name=name, content=content: replace(f, m, name, content)),
            f"{name} is not (valid JSON|a valid safetensors file)",
        )
        for name in NAMES
    }


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_are_refused_by_name(tmp_path: Path, two_ranks: Path, case: str) -> None:
    folder = tmp_path / "a"
    shutil.copytree(two_ranks, folder)
    edit, message = HOSTILE[case]
    edit(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        contents(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("exploded").exists()


CONFINED = """
import os, resource, sys
from pathlib import Path
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), used + (128 << 20)))
for folder in sorted(Path(sys.argv[1]).glob("*/a")):
    try:
        opened = Checkpoint.open(folder)
        [opened.read(name) for name in opened.names()]
        [opened.rank_state(rank) for rank in range(opened.world_size)]
    except CheckpointError as error:
        print(folder.parent.name)
"""


@pytest.mark.long
@pytest.mark.ranks
def test_hostile_folders_are_refused_within_128_mb(tmp_path: Path, two_ranks: Path) -> None:
    for i, case in enumerate(HOSTILE):
        folder = tmp_path / f"{i:03d}" / "a"
        shutil.copytree(two_ranks, folder)
        HOSTILE[case][0](folder)
    assert script(CONFINED, tmp_path).split() == [f"{i:03d}" for i in range(len(HOSTILE))]


def test_paths_that_are_not_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, message in (
        (tmp_path / "model.ckpt", "is not a folder"),
        (tmp_path / "nothing", "no checkpoint at"),
        (tmp_path / "model.ckpt" / "x", "cannot be opened: Not a directory"),
        (tmp_path / "loop", "cannot be opened: Too many levels"),
        (Path("/dev/zero"), "is not a folder"),
        (tmp_path / "pipe", "is not a folder"),
        (tmp_path / "a\0b", "cannot be opened: embedded null"),
        (tmp_path, "manifest.json is missing"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)
        assert not is_checkpoint(path)


def test_files_that_the_manifest_does_not_list_are_ignored(tmp_path: Path, two_ranks: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(two_ranks, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "rank-00002.json").write_text('{"rng": "planted"}')
    (folder / "model.safetensors").symlink_to("/etc/hostname")
    assert contents(folder) == contents(two_ranks)
