"""Damaged and hostile checkpoints: each is refused in one sentence, and nothing in them is run."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import random
import shutil
import stat
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks import Callback, EarlyStopping, LRWarmup
from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint import checksum
from lockstep.trainer.checkpoint import manifest as checkpoint_format
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, is_checkpoint
from tests.trainer.checkpoint.test_store import contents, cut, on_ranks, save_alone, script
from tests.trainer.run.test_resume import Rich
from tests.trainer.toy import loader, quiet


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two_ranks") / "a"
    pieces = cut(torch.arange(40.0).reshape(8, 5), (2,))

    def arguments(rank: int) -> dict[str, Any]:
        tensors = {"model/w": pieces[rank], "optimizer/adam/w/exp_avg": pieces[1 - rank]}
        if rank == 0:
            tensors |= {
                "model/b": TensorShard.whole(torch.arange(5)),
                "extra/flag": TensorShard.whole(torch.tensor(True)),
            }
        state = {"progress": {"global_step": 3}, "strategy": {"lr": 0.1}, "history": [1.5, math.inf, "x"]}
        return {"tensors": tensors, "state": state, "rank_state": {"rng": [rank, 2**31]}}

    assert on_ranks(2, path, arguments) == [path, path]
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a fit with everything that has state."""
    folder = tmp_path_factory.mktemp("fitted")
    fit(None, SaveAt(3, str(folder / "a")))
    return folder / "a"


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(ckpt_path: Path | None, *callbacks: Callback) -> None:
    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = quiet(
            max_epochs=None,
            max_steps=4,
            callbacks=[EarlyStopping("val/loss", patience=99), LRWarmup(steps=5), *callbacks],
        )
        trainer.fit(Rich(), loader(40, 4), loader(8), ckpt_path=ckpt_path)


def edit_json(draw: random.Random, value: Any) -> None:
    """Change one random place of a JSON tree."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.85:
            value = value[key]
            continue
        choice = draw.randrange(4)
        if choice == 0:
            del value[key]
        elif choice == 1:
            value[key] = draw.choice(
                [
                    None,
                    True,
                    -1,
                    0,
                    1,
                    2**40,
                    2**80,
                    1.5,
                    math.nan,
                    "",
                    "../x",
                    "float16",
                    "state.json",
                    [],
                    {},
                    [[]],
                    {"a": 1},
                    [1, 2, 3],
                ]
            )
        elif choice == 2 and isinstance(value, dict):
            value[draw.choice(["", "x", "model/x", "../x.json", "rank-00009.json", "format"])] = value.pop(key)
        elif type(value[key]) is int:
            value[key] += draw.choice([-1, 1, 7])
        return


def mutate(draw: random.Random, folder: Path) -> str:
    path = folder / draw.choice(sorted(os.listdir(folder)))
    content = bytearray(path.read_bytes())
    kind = draw.choice(
        ["flip", "flip", "flip", "cut", "grow", "swap bytes", "swap files", "delete", "empty", "json", "json", "zeros"]
    )
    if kind == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[draw.randrange(len(content)) :]
    elif kind == "grow":
        content += draw.randbytes(draw.randint(1, 9))
    elif kind == "swap bytes":
        one, other, size = draw.randrange(len(content)), draw.randrange(len(content)), draw.randint(1, 8)
        content[one : one + size], content[other : other + size] = (
            content[other : other + size],
            content[one : one + size],
        )
    elif kind == "swap files":
        other = folder / draw.choice(sorted(os.listdir(folder)))
        theirs = other.read_bytes()
        other.write_bytes(content)
        content[:] = theirs
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        start = draw.randrange(len(content))
        content[start : start + 16] = bytes(len(content[start : start + 16]))
    elif kind == "json" and path.suffix == ".json":
        tree = json.loads(content)
        edit_json(draw, tree)
        content[:] = json.dumps(tree).encode()
    path.write_bytes(content)
    if kind == "delete":
        path.unlink()
    return f"{kind} {path.name}"


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_mutated_checkpoint_loads_bit_identical_or_raises_checkpoint_error(
    tmp_path: Path, two_ranks: Path, fitted: Path, number: int
) -> None:
    draw = random.Random(number)
    refused = 0
    for source, count in ((two_ranks, number // 2), (fitted, number - number // 2)):
        expected = contents(source)
        for i in range(count):
            folder = tmp_path / "a"
            shutil.copytree(source, folder)
            kind = mutate(draw, folder)
            is_checkpoint(folder)
            try:
                right = contents(folder) == expected
            except CheckpointError as error:
                right = str(folder) in str(error) and "\n" not in str(error)
                refused += 1
            assert right, (source, i, kind)
            shutil.rmtree(folder)
    assert refused > 0.8 * number


def test_mutations_that_nothing_verifies_raise_nothing_but_checkpoint_error(tmp_path: Path, two_ranks: Path) -> None:
    """A forger signs what he changed: values may differ, but no other exception and no crash comes of it."""
    draw = random.Random(1)
    outcomes = [0, 0]
    for number in range(300):
        folder = tmp_path / "a"
        shutil.copytree(two_ranks, folder)
        if number % 2:
            manifest = json.loads((folder / "manifest.json").read_text())
            edit_json(draw, manifest)
            sign(folder, manifest)
        else:
            mutate(draw, folder)
        try:
            contents(folder, verify=False)
            outcomes[0] += 1
        except CheckpointError:
            outcomes[1] += 1
        shutil.rmtree(folder)
    assert min(outcomes) > 10


class Begins(Callback):
    begun = False

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.begun = True


@pytest.mark.parametrize("number", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_forged_state_is_refused_or_taken_before_a_step(tmp_path: Path, fitted: Path, number: int) -> None:
    """The same for a whole run: until training begins nothing but CheckpointError comes out of any JSON with right checksums."""
    draw = random.Random(number)
    outcomes = Counter()
    for i in range(number):
        folder = tmp_path / "a"
        shutil.copytree(fitted, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        name = draw.choice(["state.json", "state.json", "state.json", "rank-00000.json"])
        tree = json.loads((folder / name).read_text())
        for _ in range(draw.choice([1, 1, 4])):
            edit_json(draw, tree)
        replace(folder, manifest, name, json.dumps(tree).encode())
        sign(folder, manifest)
        begins = Begins()
        calls: list[Callable[[], Any]] = [
            lambda folder=folder, begins=begins: fit(folder, begins),
            lambda folder=folder: quiet().validate(Rich(), loader(8), ckpt_path=folder, verbose=False),
            lambda folder=folder: Rich.load_from_checkpoint(folder),
        ]
        for call in calls:
            try:
                call()
                outcomes["loaded"] += 1
            except CheckpointError as error:
                assert str(folder) in str(error)
                outcomes["refused"] += 1
            except Exception:
                assert begins.begun and call is calls[0], i
                outcomes["failed in training"] += 1
        shutil.rmtree(folder)
    assert min(outcomes["loaded"], outcomes["refused"]) > number / 3
    assert outcomes["failed in training"] <= number / 20


ABSURD: list[Any] = [
    10**9,
    -1,
    math.nan,
    None,
    "x",
    [],
    {"a": 1},
    math.inf,
    True,
    2**80,
    [[1]],
    "",
    {},
    0.5,
    False,
    1e308,
]


def leaves(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all leaves of a JSON tree; of long lists those at both ends."""
    if not isinstance(tree, dict | list) or not tree:
        yield at
        return
    pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in pairs if len(pairs) < 99 or isinstance(tree, dict) else [*pairs[:2], *pairs[-2:]]:
        yield from leaves(value, (*at, key))


@pytest.mark.ranks
@pytest.mark.parametrize("number", [1, pytest.param(len(ABSURD), marks=pytest.mark.slow)])
def test_an_absurd_value_at_any_leaf_is_refused_or_harmless(tmp_path: Path, fitted: Path, number: int) -> None:
    """Each in turn, signed again: CheckpointError, or a run to its end; a NaN that a rate brings is a FloatingPointError."""
    trees = {
        name: json.loads((fitted / name).read_text()) for name in ("state.json", "rank-00000.json", "manifest.json")
    }
    outcomes: Counter[str] = Counter()
    for i, (name, at) in enumerate((name, at) for name, tree in trees.items() for at in leaves(tree)):
        for j in range(number):
            value = ABSURD[(i * number + j) % len(ABSURD)]
            folder = tmp_path / "a"
            shutil.copytree(fitted, folder)
            tree = json.loads(json.dumps(trees[name]))
            inner = tree
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = value
            if name == "manifest.json":
                sign(folder, tree)
            else:
                manifest = json.loads(json.dumps(trees["manifest.json"]))
                replace(folder, manifest, name, json.dumps(tree).encode())
                sign(folder, manifest)
            calls: dict[str, Callable[[], Any]] = {"fit": lambda folder=folder: fit(folder)}
            if name == "manifest.json" or at[0] == "strategy":
                calls["validate"] = lambda folder=folder: quiet().validate(
                    Rich(), loader(8), ckpt_path=folder, verbose=False
                )
                calls["load"] = lambda folder=folder: Rich.load_from_checkpoint(folder)
            for verb, call in calls.items():
                began = time.monotonic()
                try:
                    call()
                    outcomes["harmless"] += verb == "fit"
                except CheckpointError as error:
                    assert str(folder) in str(error) and len(str(error)) < 1500
                    outcomes["refused"] += 1
                except FloatingPointError:
                    outcomes["not finite"] += 1
                except Exception as error:
                    raise AssertionError(f"{verb} with {value!r} at {name}: {at}") from error
                assert time.monotonic() - began < 20, f"{verb} with {value!r} at {name}: {at}"
            shutil.rmtree(folder)
    assert min(outcomes["refused"], 5 * outcomes["harmless"]) > 100 * number and outcomes["not finite"] < 10 * number


def test_a_metric_by_another_name_is_refused(tmp_path: Path, fitted: Path) -> None:
    for value in (None, "net", "x"):
        folder = tmp_path / "a"
        shutil.copytree(fitted, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        tree = json.loads((folder / "rank-00000.json").read_text())
        assert any(entry[6] for entry in tree["sums"].values())
        for entry in tree["sums"].values():
            entry[6] = value if entry[6] else None
        replace(folder, manifest, "rank-00000.json", json.dumps(tree).encode())
        sign(folder, manifest)
        with pytest.raises(CheckpointError, match="has different metrics in sums and torchmetrics for the name"):
            fit(folder)
        shutil.rmtree(folder)


def test_a_forged_number_of_ranks_is_refused_at_once(tmp_path: Path, two_ranks: Path, fitted: Path) -> None:
    for source, ranks in ((fitted, 10**9), (fitted, 0), (fitted, 2)):
        folder = tmp_path / "a"
        shutil.copytree(source, folder)
        sign(folder, json.loads((folder / "manifest.json").read_text()) | {"world_size": ranks})
        with pytest.raises(CheckpointError, match=f"world_size is {ranks}, but there are 1 rank files"):
            fit(folder)
        shutil.rmtree(folder)


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with its right checksum, as a forger would."""
    manifest.pop("checksum", None)
    (folder / "manifest.json").write_text(
        json.dumps({"checksum": checkpoint_format.manifest_checksum(manifest), **manifest})
    )


def replace(folder: Path, manifest: dict[str, Any], name: str, content: bytes) -> None:
    """Put a file in the folder and in the manifest, with its right size and checksum."""
    (folder / name).write_bytes(content)
    manifest["files"][name] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}


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


@pytest.mark.ranks
def test_hostile_folders_are_refused_within_128_mb(tmp_path: Path, two_ranks: Path) -> None:
    for i, case in enumerate(HOSTILE):
        folder = tmp_path / f"{i:03d}" / "a"
        shutil.copytree(two_ranks, folder)
        HOSTILE[case][0](folder)
    assert script(CONFINED, tmp_path).split() == [f"{i:03d}" for i in range(len(HOSTILE))]


UNTOUCHED = """
import sys
from pathlib import Path
from tests.trainer.checkpoint import test_damage as damage
from tests.trainer.run.test_resume import Rich
from tests.trainer.toy import loader, quiet

def everything():
    damage.fit(Path(sys.argv[1]))
    quiet().validate(Rich(), loader(8), ckpt_path=sys.argv[1], verbose=False)
    quiet().test(Tested(), loader(8), ckpt_path=sys.argv[1], verbose=False)
    quiet().predict(Tested(), loader(8), ckpt_path=sys.argv[1])
    Rich.load_from_checkpoint(sys.argv[1])

class Tested(Rich):
    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.net(self.norm(batch[0]))

everything()  # whatever is imported where it is first used
events = []
sys.addaudithook(lambda event, args: events.append((event, str(args)[:200])) if watched else None)
watched = True
everything()
watched = False
assert any(event == "open" and "manifest.json" in args for event, args in events), "the hook hears"
executing = ("pickle.", "marshal.", "import", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.", "ctypes.", "socket.", "code.")
print([event for event in events if event[0].startswith(executing)])
"""


@pytest.mark.ranks
def test_nothing_is_unpickled_imported_or_run_for_what_a_run_reads(tmp_path: Path, fitted: Path) -> None:
    """fit, validate, test, predict and load_from_checkpoint, of a checkpoint full of names of code."""
    folder = tmp_path / "a"
    shutil.copytree(fitted, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    state = json.loads((folder / "state.json").read_text())
    planted = tmp_path / "planted.py"
    planted.write_text("open('exploded', 'w')")
    code = {
        "class": "planted.Bomb",
        "__reduce__": "os.system",
        "_target_": "planted",
        "py/object": "planted.Bomb",
        "!!python/object": "planted.Bomb",
    }
    state["hyperparameters"] = state["more"] = code
    state["versions"]["lockstep"] = "planted"
    state["callbacks"]["planted.Bomb"] = code
    replace(folder, manifest, "state.json", json.dumps(state).encode())
    sign(folder, manifest)
    assert script(UNTOUCHED, folder) == "[]\n"
    assert not Path("exploded").exists()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
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


def test_files_that_the_manifest_does_not_list_are_ignored(tmp_path: Path, two_ranks: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(two_ranks, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "rank-00002.json").write_text('{"rng": "planted"}')
    (folder / "model.safetensors").symlink_to("/etc/hostname")
    assert contents(folder) == contents(two_ranks)


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
