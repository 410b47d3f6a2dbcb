"""How ranks write one checkpoint together, and how it takes its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch import Tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint import directory
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, remove, save
from tests.trainer.checkpoint.folders import contents, on_ranks, save_alone, save_step


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
