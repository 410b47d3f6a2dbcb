"""Checkpoints: nothing that was saved is lost, and nothing that was not saved is loaded."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint import directory, safetensors_file
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, clean, is_checkpoint, newest, remove, save

REPOSITORY = Path(__file__).parents[3]


def save_alone(path: Path, tensors: dict[str, Tensor] | None = None, state: Any = None, rank_state: Any = None) -> Path:
    shards = {name: TensorShard.whole(tensor) for name, tensor in (tensors or {}).items()}
    return save(path, rank=0, world_size=1, tensors=shards, state={} if state is None else state, rank_state=rank_state)


def save_step(path: Path, step: int) -> Path:
    return save_alone(path, {"model/weight": torch.full((8,), float(step))}, {"progress": {"global_step": step}})


def on_ranks(world_size: int, path: Path, arguments: Callable[[int], dict[str, Any]]) -> list[Any]:
    """Call `save` on `world_size` threads; return each one's path or exception."""
    barrier = threading.Barrier(world_size, timeout=20)
    slot: list[Any] = [None]
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        def broadcast(value: Any) -> Any:
            if rank == 0:
                slot[0] = json.dumps(value)
            barrier.wait()
            received = json.loads(slot[0])
            barrier.wait()
            return received

        try:
            results[rank] = save(
                path,
                rank=rank,
                world_size=world_size,
                barrier=barrier.wait,
                broadcast=broadcast,
                **{"state": {}, **arguments(rank)},
            )
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def cut(tensor: Tensor, splits: tuple[int, ...]) -> list[TensorShard]:
    """Cut into a grid of `splits` pieces a dimension, as evenly as ceil division does: the last may be empty."""
    pieces = [TensorShard.whole(tensor)]
    for dim, parts in enumerate(splits):
        size = -(-tensor.shape[dim] // parts)
        finer = []
        for piece in pieces:
            for part in range(parts):
                start = min(part * size, tensor.shape[dim])
                stop = min(start + size, tensor.shape[dim])
                offsets = (*piece.offsets[:dim], start, *piece.offsets[dim + 1 :])
                finer.append(TensorShard(piece.tensor.narrow(dim, start, stop - start), tuple(tensor.shape), offsets))
        pieces = finer
    return pieces


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(path: Path, **options: Any) -> dict[str, Any]:
    loaded = Checkpoint.open(path, **options)
    tensors = {name: (str(loaded.dtype(name)), loaded.shape(name), raw(loaded.read(name))) for name in loaded.names()}
    return {"state": repr(loaded.state), "ranks": [loaded.rank_state(rank) for rank in range(3)], **tensors}


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def script(code: str, *arguments: object, prefix: tuple[str, ...] = (), timeout_s: float = 60) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- round trips -----------------------------------------------------------------------------------


def awkward_tensors() -> dict[str, Tensor]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    shared = torch.arange(10.0)
    tensors = {
        "model/transposed": base.t(),
        "model/strided": base[:, ::2],
        "model/view of.shared": shared[2:5],
        "model/rest/of-shared": shared[3:],
        "model/expanded": torch.ones(1, 3).expand(5, 3),
        "model/scalar": torch.tensor(3.5),
        "model/empty": torch.empty(0, 7),
        "model/bool": torch.tensor([True, False, True]),
        "model/parameter": nn.Parameter(torch.randn(3)),
        "model/nan": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        "extra/complex64": torch.randn(3, 4, dtype=torch.complex64),
        "extra/complex128": torch.randn(3, 4, dtype=torch.complex128),
        "extra/conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "extra/negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "extra/complex scalar": torch.tensor(1 + 2j, dtype=torch.complex128),
        "callback/EMA/ümlaut": torch.arange(5),
    }
    for dtype in safetensors_file.CODES:
        tensors[f"dtypes/{dtype}".replace("torch.", "")] = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    return tensors


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    loaded = Checkpoint.open(save_alone(tmp_path / "a", tensors))
    assert loaded.names() == sorted(tensors)
    assert loaded.names("extra/") == sorted(name for name in tensors if name.startswith("extra/"))
    for name, tensor in tensors.items():
        back = loaded.read(name)
        assert (back.dtype, back.shape, back.device.type) == (tensor.dtype, tensor.shape, "cpu"), name
        assert loaded.dtype(name) == tensor.dtype
        assert loaded.shape(name) == tuple(tensor.shape)
        assert raw(back) == raw(tensor), name


def test_json_state_comes_back(tmp_path: Path) -> None:
    state = {
        "progress": {"global_step": 12, "samples_seen": 2**70},
        "strategy": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
        "floats": [math.inf, -math.inf, 5e-324, 0.1 + 0.2, -0.0],
        "text": 'ünï \U0001f600 \ud800 "\\\n\x00',
        "ordered": OrderedDict(b=1, a=None),
        "empty": {"": [[], {}, True]},
        "nan": math.nan,
    }
    loaded = Checkpoint.open(save_alone(tmp_path / "a", state=state, rank_state={"rng": [1, 2]}))
    assert math.isnan(loaded.state.pop("nan"))
    expected = {key: value for key, value in state.items() if key != "nan"}
    expected["strategy"] = {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.999]}]}
    assert loaded.state == expected
    assert math.copysign(1, loaded.state["floats"][-1]) == -1
    assert list(loaded.state["ordered"]) == ["b", "a"]
    assert loaded.meta == expected["strategy"]
    assert loaded.global_step == 12
    assert loaded.world_size == 1
    assert loaded.rank_state(0) == {"rng": [1, 2]}
    assert loaded.rank_state(1) is None
    assert loaded.path == tmp_path / "a"
    assert loaded.versions["torch"] == torch.__version__


def test_model_file_is_a_plain_state_dict(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5)
            self.head.weight = self.embedding.weight
            self.norm = nn.BatchNorm1d(5)

    module = Tied()
    save_alone(tmp_path / "a", {f"model/{name}": tensor for name, tensor in module.state_dict().items()})
    plain = load_file(tmp_path / "a" / "model.safetensors")
    assert plain.keys() == module.state_dict().keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in module.state_dict().items())
    Tied().load_state_dict(plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_come_back_on_the_cpu(tmp_path: Path) -> None:
    tensor = torch.randn(5, 3, device="cuda").t()
    assert torch.equal(Checkpoint.open(save_alone(tmp_path / "a", {"model/w": tensor})).read("model/w"), tensor.cpu())


# ---- several ranks ---------------------------------------------------------------------------------

LAYOUTS = [
    ((1, 1), "whole"),
    ((4, 1), "rows"),
    ((1, 3), "columns"),
    ((2, 2), "grid"),
    ((5, 1), "uneven, one piece empty"),
]


@pytest.mark.parametrize("splits", [splits for splits, _ in LAYOUTS], ids=[name for _, name in LAYOUTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_any_layout_is_read_in_any_other(tmp_path: Path, splits: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 7, dtype=dtype)
    pieces = cut(tensor, splits)
    scalar, empty = torch.tensor(7), torch.empty(0, 3)

    def arguments(rank: int) -> dict[str, Any]:
        own = {"model/w": pieces[rank], "model/empty": TensorShard.whole(empty)}
        return {
            "tensors": {**own, "optimizer/adam/w/step": TensorShard.whole(scalar)} if rank == 0 else own,
            "rank_state": {"rank": rank},
        }

    world_size = len(pieces)
    assert on_ranks(world_size, tmp_path / "a", arguments) == [tmp_path / "a"] * world_size
    loaded = Checkpoint.open(tmp_path / "a")
    assert loaded.world_size == world_size
    assert [loaded.rank_state(rank) for rank in range(world_size)] == [{"rank": rank} for rank in range(world_size)]
    assert torch.equal(loaded.read("model/w"), tensor)
    assert loaded.read("optimizer/adam/w/step") == scalar
    assert loaded.shape("model/empty") == (0, 3)
    for other, _ in LAYOUTS:
        for piece in cut(tensor, other):
            assert torch.equal(loaded.read("model/w", piece.offsets, tuple(piece.tensor.shape)), piece.tensor)
    assert torch.equal(loaded.read("model/w", (1, 2)), tensor[1:, 2:])
    # What one rank alone wrote is a plain file, and nothing of the exchange between ranks stays.
    files = set(os.listdir(tmp_path / "a"))
    assert "optimizer.safetensors" in files
    assert not any(name.startswith("part") for name in files)
    assert not leftovers(tmp_path)
    if world_size == 4:
        assert {f"model-0000{rank}-of-00004.safetensors" for rank in range(4)} <= files


def test_three_dimensions_and_random_rectangles(tmp_path: Path) -> None:
    tensor = torch.randn(5, 6, 7).to(torch.bfloat16)
    pieces = cut(tensor, (2, 1, 2))
    on_ranks(4, tmp_path / "a", lambda rank: {"tensors": {"model/w": pieces[rank]}})
    loaded = Checkpoint.open(tmp_path / "a")
    draw = random.Random(0)
    for _ in range(200):
        bounds = [sorted((draw.randint(0, size), draw.randint(0, size))) for size in tensor.shape]
        expected = tensor[tuple(slice(*bound) for bound in bounds)]
        assert torch.equal(
            loaded.read("model/w", tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)), expected
        )


def test_read_refuses_a_rectangle_outside_and_an_unknown_name(tmp_path: Path) -> None:
    loaded = Checkpoint.open(save_alone(tmp_path / "a", {"model/w": torch.zeros(4, 4)}))
    for offsets, shape in (((0, 0), (5, 4)), ((-1, 0), (1, 1)), ((0,), (4,)), ((3, 3), (2, 1)), ((5, 0), None)):
        with pytest.raises(ValueError, match="is outside of it"):
            loaded.read("model/w", offsets, shape)
    for ask in (loaded.read, loaded.shape, loaded.dtype):
        with pytest.raises(KeyError, match="model/v"):
            ask("model/v")


def whole_twice(rank: int) -> dict[str, Any]:
    return {"tensors": {"model/w": TensorShard.whole(torch.zeros(4))}}


def half_missing(rank: int) -> dict[str, Any]:
    return {"tensors": {"model/w": TensorShard(torch.zeros(1), (4,), (rank,))}}


def empty_everywhere(rank: int) -> dict[str, Any]:
    return {"tensors": {"model/w": TensorShard(torch.zeros(0), (4,), (0,))}}


def two_dtypes(rank: int) -> dict[str, Any]:
    return {
        "tensors": {
            "model/w": TensorShard(torch.zeros(2, dtype=(torch.float32, torch.float16)[rank]), (4,), (2 * rank,))
        }
    }


def one_has_a_set(rank: int) -> dict[str, Any]:
    return {"tensors": {}, "rank_state": {"seen": {1}} if rank == 1 else None}


def first_has_a_set(rank: int) -> dict[str, Any]:
    return {"tensors": {}, "rank_state": {"seen": {1}} if rank == 0 else None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (whole_twice, "model/w: over all ranks the piece .* overlaps another"),
        (half_missing, "model/w: over all ranks 2 of 4 elements are missing"),
        (empty_everywhere, "model/w: over all ranks no shard was saved"),
        (two_dtypes, "model/w: ranks differ on it: float32 .* float16"),
        (one_has_a_set, "rank_state.seen: <type set>"),
        (first_has_a_set, "rank_state.seen: <type set>"),
    ],
)
def test_a_failure_of_one_rank_raises_on_all_and_leaves_nothing(
    tmp_path: Path, arguments: Callable[[int], dict[str, Any]], message: str
) -> None:
    save_step(tmp_path / "a", 1)
    for error in on_ranks(2, tmp_path / "a", arguments):
        assert isinstance(error, CheckpointError)
        with pytest.raises(CheckpointError, match=message):
            raise error
        assert str(tmp_path / "a") in str(error)
    assert Checkpoint.open(tmp_path / "a").global_step == 1
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_unforeseen_error_comes_out_as_itself_and_the_others_learn_of_it(tmp_path: Path, culprit: int) -> None:
    class Lost(Tensor):
        def detach(self) -> Tensor:
            raise MemoryError

    def arguments(rank: int) -> dict[str, Any]:
        tensor = torch.zeros(1).as_subclass(Lost) if rank == culprit else torch.zeros(1)
        return {"tensors": {"model/w": TensorShard(tensor, (2,), (rank,))}}

    results = on_ranks(2, tmp_path / "a", arguments)
    assert isinstance(results[culprit], MemoryError)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a: rank {culprit} failed with MemoryError"):
        raise results[1 - culprit]
    assert not os.listdir(tmp_path)


def test_several_ranks_need_barrier_and_broadcast(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="barrier and broadcast"):
        save(tmp_path / "a", rank=0, world_size=2, tensors={}, state={})


# ---- what is refused -------------------------------------------------------------------------------


def itself() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    return loop


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"callbacks": {"ModelCheckpoint": {"best": {1, 2}}}}, "state.callbacks.ModelCheckpoint.best: <type set>"),
        ({"a": [0, {"b": (1, b"x")}]}, r"state\.a\[1\]\.b\[1\]: <type bytes>"),
        ({"a": {3: 1}}, "state.a: <key 3 of type int>"),
        ({"a": {None: 1}}, "state.a: <key None of type NoneType>"),
        ({"lr": torch.tensor(0.1)}, "state.lr: <type Tensor>; put tensors among the tensors"),
        ({"path": Path("x")}, "state.path: <type PosixPath>"),
        ({"f": print}, "state.f: <type builtin_function_or_method>"),
        ({"big": 1 << 100_000}, "state.big: <int of 100001 bits>"),
        (itself(), "state.loop.*<nested deeper than"),
        ([1], "state: <type list>"),
    ],
)
def test_state_that_is_not_json_is_refused_by_key_path_before_anything_is_written(
    tmp_path: Path, state: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        save_alone(tmp_path / "deep" / "a", {"model/w": torch.zeros(1)}, state)
    assert str(tmp_path / "deep" / "a") in str(caught.value)
    assert not os.listdir(tmp_path)


BAD_NAMES = [
    "weight",
    "/etc/passwd",
    "../x",
    "Model/x",
    "model/",
    "model//x",
    "model/../x",
    "model/./x",
    "model/a/..",
    "model/__metadata__",
    "model/a\nb",
    "mo.del/x",
]


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in safetensors_file.CODES if dtype.is_floating_point or dtype.is_complex], ids=str
)
def test_numbers_that_must_be_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.full((300,), largest, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    finite, spoilt = values.to(dtype), values.to(dtype, copy=True)
    spoilt.view(-1)[7:8] = torch.tensor([math.nan]).to(dtype)
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "state": {}, "finite": {"model/w"}}
    save(
        tmp_path / "a",
        tensors={
            "model/w": TensorShard.whole(finite),
            "model/free": TensorShard.whole(spoilt),
            "model/number": TensorShard.whole(torch.tensor(1)),
        },
        **options,
    )
    with pytest.raises(
        FloatingPointError,
        match="cannot save the checkpoint .*/a: model/w holds NaN or infinite values on rank 0 in step 0",
    ):
        save(tmp_path / "a", tensors={"model/w": TensorShard.whole(spoilt)}, **options)
    assert Checkpoint.open(tmp_path / "a").names() == ["model/free", "model/number", "model/w"]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_tensor_names_that_do_not_match_the_pattern_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="rename it"):
        save_alone(tmp_path / "a", {name: torch.zeros(1)})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (TensorShard.whole(torch.zeros(2, 2).to_sparse()), "layout torch.sparse_coo"),
        (TensorShard.whole(torch.zeros(2, device="meta")), "device meta"),
        (TensorShard.whole(torch.zeros(2, dtype=torch.bits8)), "<dtype torch.bits8>"),
        (TensorShard(torch.zeros(3), (4,), (2,)), "is outside of the global shape"),
        (TensorShard(torch.zeros(3), (4, 4), (0,)), "is outside of the global shape"),
        (TensorShard(torch.zeros(3), (4,), (-1,)), "is outside of the global shape"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused_by_name(tmp_path: Path, shard: TensorShard, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"model/w: .*{message}"):
        save(tmp_path / "a", rank=0, world_size=1, tensors={"model/w": shard}, state={})
    assert not os.listdir(tmp_path)


def test_a_distributed_tensor_is_refused(tmp_path: Path) -> None:
    """Its bytes are only this rank's part, so the strategy has to say which part."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        tensor = torch.distributed.tensor.distribute_tensor(torch.zeros(4), mesh, [torch.distributed.tensor.Shard(0)])
        with pytest.raises(CheckpointError, match="model/w: <type DTensor"):
            save(tmp_path / "a", rank=0, world_size=1, tensors={"model/w": TensorShard(tensor, (4,), (0,))}, state={})
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_not_a_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(save_step(tmp_path / "a", 1))
    before = sorted(os.listdir(tmp_path))
    for name in ("results", "file", "link"):
        with pytest.raises(CheckpointError, match=f"{name} exists and is"):
            save_step(tmp_path / name, 2)
        with pytest.raises(CheckpointError, match=f"{name} exists and is"):
            remove(tmp_path / name)
    with pytest.raises(CheckpointError, match="begin with a dot"):
        save_step(tmp_path / ".a", 2)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "results" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert Checkpoint.open(save_step(tmp_path / "empty", 3)).global_step == 3


# ---- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing_leaves_only_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(directory, "exchange", lambda one, other: False)
    save_alone(tmp_path / "a", {"extra/only in the first": torch.zeros(3)}, {"progress": {"global_step": 1}})
    save_step(tmp_path / "a", 2)
    loaded = Checkpoint.open(tmp_path / "a")
    assert loaded.global_step == 2
    assert loaded.names() == ["model/weight"]
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == ["manifest.json", "model.safetensors", "state.json"]


@pytest.mark.parametrize("links", [True, False])
def test_one_save_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:  # as on a file system without them

        def link(one: Path, other: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    for step in (1, 2):
        tensors = {"model/w": TensorShard.whole(torch.full((3_000_000,), float(step)))}
        state = {"progress": {"global_step": step}}
        save(
            tmp_path / f"step={step}",
            rank=0,
            world_size=1,
            tensors=tensors,
            state=state,
            also=[tmp_path / "last"],
            outdated=[tmp_path / "step=1"][: step - 1],
        )
    assert sorted(os.listdir(tmp_path)) == ["last", "step=2"]
    assert contents(tmp_path / "last") == contents(tmp_path / "step=2")
    assert os.stat(tmp_path / "last" / "model.safetensors").st_nlink == 1 + links
    remove(tmp_path / "step=2")
    assert Checkpoint.open(tmp_path / "last").global_step == 2


@pytest.mark.parametrize("can_exchange", [True, False])
def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """A kill of the process cannot show this, only of the machine: so the order of the calls is checked."""
    calls: list[str] = []
    fsync, rename, exchange = os.fsync, os.rename, directory.exchange

    def recording_fsync(descriptor: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recording_rename(one: Path, other: Path) -> None:
        calls.append("rename")
        rename(one, other)

    def recording_exchange(one: Path, other: Path) -> bool:
        calls.append("rename")
        return can_exchange and exchange(one, other)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    monkeypatch.setattr(directory, "exchange", recording_exchange)
    for number in range(2):
        calls.clear()
        save_alone(tmp_path / "deep" / "a", {"model/w": torch.zeros(1), "extra/w": torch.zeros(1)}, rank_state={})
        renames = [position for position, call in enumerate(calls) if call == "rename"]
        before = calls[: renames[0]]
        assert {"model.safetensors", "extra.safetensors", "rank-00000.json", "state.json"} <= set(before[:-2])
        assert before[-2] == "manifest.json"
        assert before[-1].startswith(".a.tmp-")
        assert calls[renames[-1] :] == ["rename", "deep"]
        assert number or tmp_path.name in before


def test_a_damaged_checkpoint_can_be_replaced(tmp_path: Path) -> None:
    (save_step(tmp_path / "a", 1) / "manifest.json").write_text("")
    assert Checkpoint.open(save_step(tmp_path / "a", 2)).global_step == 2


def test_newest_orders_by_step_then_time_and_skips_what_is_damaged(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nowhere") is None
    for name, step in (("z", 1), ("c", 10), ("b", 10), ("y", 9)):
        save_step(tmp_path / name, step)
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "z")
    assert newest(tmp_path) == tmp_path / "b"
    flip(tmp_path / "b" / "model.safetensors", -1)
    with pytest.warns(UserWarning, match=f"{tmp_path}/b cannot be used: model.safetensors has changed"):
        assert newest(tmp_path) == tmp_path / "c"
    (tmp_path / "c" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="cannot be used") as caught:
        assert newest(tmp_path) == tmp_path / "y"
    assert sorted(str(warning.message).split()[2] for warning in caught) == [f"{tmp_path}/b", f"{tmp_path}/c"]


def test_is_checkpoint_asks_for_a_manifest_and_sizes(tmp_path: Path) -> None:
    path = save_step(tmp_path / "a", 1)
    assert is_checkpoint(path)
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "b")
    with open(path / "model.safetensors", "ab") as file:
        file.write(b"x")
    assert not is_checkpoint(path)


def test_an_aside_copy_is_found_and_put_back(tmp_path: Path) -> None:
    save_step(tmp_path / "a", 1)
    os.rename(tmp_path / "a", tmp_path / ".a.old-0123abcd")
    assert Checkpoint.open(tmp_path / "a").global_step == 1
    assert newest(tmp_path) == tmp_path / ".a.old-0123abcd"
    assert clean(tmp_path) == [tmp_path / ".a.old-0123abcd"]
    assert newest(tmp_path) == tmp_path / "a"
    shutil.copytree(tmp_path / "a", tmp_path / ".a.old-0123abcd")
    save_step(tmp_path / "a", 2)
    assert os.listdir(tmp_path) == ["a"]
    shutil.copytree(tmp_path / "a", tmp_path / ".a.old-0123abcd")
    remove(tmp_path / "a")
    remove(tmp_path / "a")
    assert not os.listdir(tmp_path)
    assert newest(tmp_path) is None


def test_clean_leaves_living_writers_and_strangers_alone(tmp_path: Path) -> None:
    found: list[Any] = []
    (tmp_path / ".a.tmp-00000000").mkdir()
    (tmp_path / ".a.tmp-00000000" / "model.safetensors").write_text("half")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".b.tmp-11111111").symlink_to(tmp_path / ".git")

    def arguments(rank: int) -> dict[str, Any]:
        class Slow(Tensor):
            def detach(self) -> Tensor:
                found.append(clean(tmp_path))
                return torch.ones(1)

        return {"tensors": {"model/w": TensorShard(torch.zeros(1).as_subclass(Slow), (1,), (0,))} if rank == 0 else {}}

    assert on_ranks(2, tmp_path / "a", arguments) == [tmp_path / "a"] * 2
    assert found == [[tmp_path / ".a.tmp-00000000"]]
    assert sorted(os.listdir(tmp_path)) == [".b.tmp-11111111", ".git", "a"]
    assert is_checkpoint(tmp_path / "a")


# ---- kills -----------------------------------------------------------------------------------------

COMMON = """
import os, random, signal, sys, time, warnings
from pathlib import Path
import torch
from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint import store as checkpoint, directory
from lockstep.trainer.checkpoint.store import Checkpoint

root = Path(sys.argv[1])

def write(path, step, size=64, **more):
    tensors = {f"{group}/weight": TensorShard.whole(torch.full((size,), float(step))) for group in ("model", "optimizer")}
    checkpoint.save(path, rank=0, world_size=1, tensors=tensors, state={"progress": {"global_step": step}}, rank_state={"step": step}, **more)

def step_of(path):
    loaded = Checkpoint.open(path)
    for name in loaded.names():
        assert (loaded.read(name) == loaded.global_step).all()
    assert loaded.rank_state(0) == {"step": loaded.global_step} and len(loaded.names()) == 2
    return loaded.global_step
"""

AT_EVERY_CALL = (
    COMMON
    + """
def killed_at(point, action):
    'Fork, run the action, and kill it before its call number `point` that may change a disk. True where it ended first.'
    pid = os.fork()
    if pid == 0:
        left = point
        def count(frame, event, function):
            nonlocal left
            if event == "c_call" and function.__name__ in ("open", "write", "flush", "fsync", "mkdir", "rename", "unlink", "rmdir", "link"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(count)
        action()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0

def run(mode):
    folder = root / mode
    path = folder / "last"
    if mode == "fallback":
        checkpoint_folder.exchange = lambda one, other: False
    names = ["last", "twin"] if mode == "twins" else ["last"]
    twins = [folder / name for name in names[1:]]
    seen = set()
    for point in range(1, 1000):
        if mode == "fresh":
            checkpoint.remove(path)
            checkpoint.clean(folder)
        else:
            write(path, 2 * point, also=twins)
        ended = killed_at(point, (lambda: checkpoint.remove(path)) if mode == "remove" else (lambda: write(path, 2 * point + 1, also=twins)))
        try:
            step = step_of(path)
        except checkpoint.CheckpointError as error:
            assert mode in ("fresh", "remove") and "there is no checkpoint" in str(error), error
            step = None
        allowed = {"fresh": (None, 2 * point + 1), "remove": (2 * point, None)}.get(mode, (2 * point, 2 * point + 1))
        assert step == allowed[1] if ended else step in allowed, (point, step)
        seen.add(allowed.index(step))
        found = checkpoint.newest(folder)
        assert (None if found is None else step_of(found)) == step
        checkpoint.clean(folder)
        left = os.listdir(folder) if folder.exists() else []
        assert sorted(left) == ([] if step is None else names), left
        assert all(step_of(twin) in ((step,) if ended else allowed) for twin in twins)
        assert step is None or step_of(path) == step
        if ended:
            break
    assert ended and seen == {0, 1}
    print(mode, point, flush=True)

for mode in sys.argv[2:]:
    run(mode)
"""
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "modes",
    [("exchange", "remove"), pytest.param(("fresh", "twins", "fallback"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_a_kill_before_any_change_on_the_disk_leaves_the_old_or_the_new_one(
    tmp_path: Path, modes: tuple[str, ...]
) -> None:
    # In memory where there is such a folder, as a disk would be waited for thousands of times.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        lines = script(AT_EVERY_CALL, folder, *modes).split("\n")
    points = {line.split()[0]: int(line.split()[1]) for line in lines if line}
    assert points.keys() == set(modes)
    # Fewer would mean that the kills miss something.
    assert all(number > (5 if mode == "remove" else 25) for mode, number in points.items())


AT_RANDOM = (
    COMMON
    + """
beside, rounds = sys.argv[2] == "async", int(sys.argv[3])
draw = random.Random(0)
step = acknowledged = rounds_with_progress = 0

def train(step, writer):
    'Save one checkpoint after the other, tell which are done, keep the newest three.'
    pending = None
    while True:
        step += 1
        path = root / ("last" if step % 2 else f"step={step}")  # every second one replaces
        old = [name for name in root.glob("step=*") if int(name.name[5:]) < step - 2]
        tensors = {f"{group}/weight": TensorShard.whole(torch.full((100_000,), float(step))) for group in ("model", "optimizer")}
        options = dict(rank=0, world_size=1, tensors=tensors, state={"progress": {"global_step": step}}, rank_state={"step": step}, outdated=old)
        if not beside:
            checkpoint.save(path, **options)
            os.write(writer, step.to_bytes(4, "big"))
            continue
        if pending is not None:
            pending[1].finish(None, None)
            os.write(writer, pending[0].to_bytes(4, "big"))
        pending = step, checkpoint.begin(path, **options)
        for tensor in tensors.values():
            tensor.tensor.fill_(-1.0)  # training goes on

for round in range(rounds):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        train(step, writer)
    os.close(writer)
    before = acknowledged
    acknowledged = int.from_bytes(os.read(reader, 4), "big")  # however slow the machine is, each round gets somewhere
    time.sleep(draw.uniform(0, 0.12))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while message := os.read(reader, 4):
        acknowledged = int.from_bytes(message, "big")
    os.close(reader)
    rounds_with_progress += acknowledged > before
    found = checkpoint.newest(root)
    step = max(step, acknowledged) if found is None else step_of(found)
    assert step >= acknowledged, (step, acknowledged)
    if round % 3 == 0:
        checkpoint.clean(root)
        assert not [name for name in os.listdir(root) if name.startswith(".")]
print(rounds_with_progress, acknowledged)
"""
)


def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR on another file system than the test's folder, where there is one."""
    if os.access("/dev/shm", os.W_OK):
        monkeypatch.setenv("TMPDIR", "/dev/shm")


@pytest.mark.ranks
@pytest.mark.parametrize("rounds", [5, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_random_kills_lose_no_acknowledged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, rounds: int
) -> None:
    in_memory(monkeypatch)
    progressed, steps = map(int, script(AT_RANDOM, tmp_path, mode, rounds, timeout_s=1200).split())
    assert progressed == rounds
    assert steps >= rounds


ON_RANKS = (
    COMMON
    + """
import itertools, threading
from lockstep.strategies import FSDP
from lockstep.strategies.launch.failure import RankFailure
from lockstep.strategies.checkpoint_state import State

rounds = int(sys.argv[2])

def train(strategy, folder, beside):
    folder = Path(folder)
    strategy.setup()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
    wrapped = strategy.setup_module(model)
    optimizers = strategy.setup_optimizers(wrapped, {"main": torch.optim.AdamW(model.parameters())})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers["main"].step()
    found = checkpoint.newest(folder)
    start = 0 if found is None else Checkpoint.open(found).global_step
    start = strategy.broadcast(start)
    (folder / f"pid-{strategy.topology.rank}").write_text(str(os.getpid()))
    pending = None
    for step in itertools.count(start + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
                optimizers["main"].state[parameter]["exp_avg"].fill_(float(step))
        state = strategy.state_dict(wrapped, optimizers)
        options = dict(
            rank=strategy.topology.rank,
            world_size=strategy.topology.world_size,
            tensors={name: shard for name, shard in state.tensors.items() if name.startswith("model/") or name.endswith("exp_avg")},
            state={"progress": {"global_step": step}},
            rank_state={"step": step},
            broadcast=strategy.broadcast,
            outdated=[folder / f"step={step - 3}"],
        )
        path = folder / f"step={step}" if step % 2 else folder / "last"
        done = step
        if beside:
            if pending is not None:
                pending[1].finish(strategy.barrier, strategy.broadcast)
            done = None if pending is None else pending[0]
            pending = step, checkpoint.begin(path, **options)
        else:
            checkpoint.save(path, barrier=strategy.barrier, **options)
        if strategy.topology.rank == 0 and done is not None:
            with open(folder / "acknowledged", "a") as file:
                file.write(f"{done}\\n")

def acknowledged():
    try:
        return int((root / "acknowledged").read_text().split("\\n")[-2])
    except (FileNotFoundError, IndexError):
        return 0

def kill(victims, delay_s, before):
    end = time.monotonic() + 60
    while acknowledged() <= before and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(delay_s)
    for rank in victims:
        os.kill(int((root / f"pid-{rank}").read_text()), signal.SIGKILL)

draw = random.Random(0)
for round in range(rounds):
    before = acknowledged()
    strategy = FSDP()
    strategy.configure(devices=2, accelerator="cpu")
    killer = threading.Thread(target=kill, args=(draw.choice([(0,), (1,), (0, 1)]), draw.uniform(0, 0.2), before))
    killer.start()
    try:
        strategy.launch(train, strategy, str(root), round % 2 == 1)
    except RankFailure as error:
        assert error.signal == "SIGKILL", error
    killer.join()
    done = acknowledged()
    assert done > before, "each round gets somewhere"
    found = Checkpoint.open(checkpoint.newest(root))
    assert found.global_step >= done, (found.global_step, done)
    assert found.world_size == 2 and len(found.names()) == 8
    for name in found.names():
        assert (found.read(name) == found.global_step).all(), name
    assert [found.rank_state(rank)["step"] for rank in range(2)] == [found.global_step] * 2
    if round % 3 == 0:
        checkpoint.clean(root)
        assert not [name for name in os.listdir(root) if name.startswith(".")]
print(rounds)
"""
)


@pytest.mark.ranks
@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_random_kills_of_ranks_that_save_shards_lose_no_acknowledged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """One rank or both, every second round asynchronously."""
    in_memory(monkeypatch)
    assert script(ON_RANKS, tmp_path, rounds, timeout_s=1500).split()[-1] == str(rounds)


# ---- full and forbidden disks ----------------------------------------------------------------------

FAILING_AT_EVERY_CALL = (
    COMMON
    + """
import errno, threading

def failing_at(point, number, action):
    'Run the action with an error in place of its call number `point` that may change a disk; return how many calls were left, and what came out.'
    left = point
    def count(frame, event, function):
        nonlocal left
        if event == "c_call" and function.__name__ in ("open", "write", "flush", "fsync", "mkdir", "rename", "unlink", "rmdir", "link"):
            left -= 1
            if left == 0:
                raise OSError(number, os.strerror(number))
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        action()
        raised = None
    except Exception as error:
        raised = error
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return left, raised

def sync(path, step, **more):
    write(path, step, **more)

def beside(path, step, size=64, **more):
    tensors = {f"{group}/weight": TensorShard.whole(torch.full((size,), float(step))) for group in ("model", "optimizer")}
    state = {"progress": {"global_step": step}}
    checkpoint.begin(path, rank=0, world_size=1, tensors=tensors, state=state, rank_state={"step": step}, **more).finish(None, None)

for mode, number in ((sync, errno.EIO), (beside, errno.ENOSPC)):
    folder = root / f"{mode.__name__}-{errno.errorcode[number]}"
    refused = 0
    for point in range(1, 1000):
        old, new = 2 * point, 2 * point + 1
        mode(folder / "last", old)
        mode(folder / "older", old - 1)
        left, error = failing_at(point, number, lambda: mode(folder / "last", new, also=[folder / "also"], outdated=[folder / "older"]))
        step = step_of(folder / "last")
        newest = step_of(checkpoint.newest(folder))
        assert newest >= step >= old, (point, newest, step)
        if error is None:
            assert step == step_of(folder / "also") == new and not (folder / "older").exists(), point
        else:
            assert type(error) is checkpoint.CheckpointError, repr(error)
            assert f"{folder}/" in str(error) and errno.errorcode[number] in str(error) and "\\n" not in str(error), error
            refused += 1
            if "remove" not in str(error):
                assert " of its 512 bytes; " in str(error), error
                assert step_of(folder / "older") == old - 1, "what is older goes last"
        checkpoint.remove(folder / "also")
        checkpoint.clean(folder)
        if left > 0:
            break
    assert left > 0 and refused > 20, (left, refused)
    print(folder.name, point, refused)
"""
)


@pytest.mark.ranks
def test_an_error_of_the_disk_in_any_call_keeps_a_whole_checkpoint_and_names_the_bytes(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        assert len(script(FAILING_AT_EVERY_CALL, folder).splitlines()) == 2


FULL_DISK = (
    COMMON
    + """
import subprocess, threading
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", root], check=True)
path = root / "runs" / "last"
write(path, 1)
before = sorted(os.listdir(path))

def refused(call):
    try:
        call()
    except checkpoint.CheckpointError as error:
        assert str(path) in str(error) and "No space left on device (ENOSPC)" in str(error), error
        assert step_of(path) == 1 and os.listdir(path.parent) == ["last"] and sorted(os.listdir(path)) == before
        return str(error)
    raise AssertionError("a full disk was not noticed")

print(refused(lambda: write(path, 2, 1_000_000)))
large = {"model/w": TensorShard.whole(torch.zeros(1_000_000))}
refused(lambda: checkpoint.begin(path, rank=0, world_size=1, tensors=large, state={}).finish(None, None))

barrier, slot, errors = threading.Barrier(2, timeout=20), [None], [None, None]
def rank(number):
    def broadcast(value):
        if number == 0:
            slot[0] = value
        barrier.wait()
        received = slot[0]
        barrier.wait()
        time.sleep(0.3 * number)  # rank 0 has written its few bytes before rank 1 fills the disk
        return received
    try:
        shard = TensorShard(torch.zeros(1_000_000 if number else 1), (1_000_001,), (number,))
        checkpoint.save(path, rank=number, world_size=2, tensors={"model/w": shard}, state={}, barrier=barrier.wait, broadcast=broadcast)
    except checkpoint.CheckpointError as error:
        errors[number] = error
threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for error in errors:
    def again():
        raise error
    assert "rank 1" in refused(again)

write(path, 3)
assert step_of(path) == 3

subprocess.run(["mount", "-o", "remount,ro", root], check=True)
try:
    write(path, 4)
except checkpoint.CheckpointError as error:
    assert str(path) in str(error) and "Read-only file system (EROFS)" in str(error) and "that you can write" in str(error), error
else:
    raise AssertionError("written where that is impossible")
assert step_of(path) == 3
subprocess.run(["mount", "-o", "remount,rw", root], check=True)

os.chdir(sys.argv[2])
Path("large.py").write_text('''
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Module

class Large(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1000, 100)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 1000)))

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
''')
saver = "{class: ModelCheckpoint, filename: '{step}', every_n_train_steps: 1, async_save: true}"
words = ["module.class=large.Large", f"trainer.callbacks=[{saver}]", "max_steps=4", "logger=false", f"default_root_dir={root}/fit", "strategy=single"]
done = subprocess.run([sys.executable, "-m", "lockstep", "fit", *words, "enable_progress_bar=false"], capture_output=True, text=True)
(kept,) = (root / "fit/Large/version_0/checkpoints").iterdir()
assert done.returncode == 1 and kept.name == "step=1", (done, kept)
assert Checkpoint.open(kept).global_step == 1
last = done.stderr.splitlines()[-1]
assert "step=2: No space left on device (ENOSPC) at " in last and " of its " in last and "Traceback" not in done.stderr, done.stderr
"""
)


@pytest.mark.ranks
def test_a_full_disk_raises_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    unshare = ("unshare", "-Urm")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("unshare -Urm is not permitted here")
    (tmp_path / "disk").mkdir()
    message = script(FULL_DISK, tmp_path / "disk", tmp_path, prefix=unshare)
    assert "bytes; make room or choose another folder" in message


FORBIDDEN = (
    COMMON
    + """
os.chmod(root, 0o755)
write(root / "a", 1)
os.chmod(root, 0o555)
if os.getuid() == 0:
    os.setuid(65534)
for path in (root / "a", root / "new" / "b"):
    try:
        write(path, 2)
    except checkpoint.CheckpointError as error:
        assert str(path) in str(error) and "Permission denied (EACCES)" in str(error) and "that you can write" in str(error), error
    else:
        raise AssertionError("written where that is forbidden")
try:
    checkpoint.remove(root / "a")
except checkpoint.CheckpointError as error:
    assert "Permission denied (EACCES)" in str(error)
assert step_of(root / "a") == 1 and os.listdir(root) == ["a"]
"""
)


@pytest.mark.ranks
def test_a_forbidden_folder_raises_and_changes_nothing() -> None:
    # Not below tmp_path, whose parents only its owner may enter.
    folder = tempfile.mkdtemp()
    try:
        script(FORBIDDEN, folder)
    finally:
        os.chmod(folder, 0o755)
        shutil.rmtree(folder)


def test_a_path_below_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/a: .* after rank 0 had written 0 of its 32 bytes"):
        save_step(tmp_path / "file" / "a", 1)
    assert os.listdir(tmp_path) == ["file"]


def test_saving_moves_no_random_stream(tmp_path: Path) -> None:
    random.seed(0)
    before = random.getstate(), torch.get_rng_state()
    save_step(tmp_path / "a", 1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
