"""Tensors are read in any layout, whichever ranks wrote them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.trainer.checkpoint.folders import cut, leftovers, on_ranks, save_alone

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
