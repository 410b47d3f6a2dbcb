"""What cannot be stored is refused by name before anything is written."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint import safetensors_file
from lockstep.trainer.checkpoint.content import host_copies
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, save
from tests.trainer.checkpoint.folders import save_alone


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
def test_non_finite_numbers_are_refused_where_finite_ones_are_required(tmp_path: Path, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_have_memory_of_their_own(device: str) -> None:
    tensors = {str(i): torch.randn(i, 4, device=device).T for i in range(1, 9)}
    shards = {name: TensorShard(tensor, (8, i), (4, 0)) for i, (name, tensor) in enumerate(tensors.items(), 1)}
    copies = host_copies(shards)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    for name, copy in copies.items():
        assert copy.tensor.device.type == "cpu" and copy.tensor.is_contiguous()
        assert copy.tensor.is_pinned() == (device == "cuda")
        assert torch.equal(copy.tensor, before[name].cpu())
        assert (copy.global_shape, copy.offsets) == (shards[name].global_shape, shards[name].offsets)
