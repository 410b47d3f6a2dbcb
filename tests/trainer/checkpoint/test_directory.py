"""Folders of checkpoints: what is replaced, removed, found again and cleaned up."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch import Tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint import writer
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, clean, is_checkpoint, newest, remove, save
from tests.trainer.checkpoint.folders import leftovers, on_ranks, save_step


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


@pytest.mark.parametrize("name", ["a", "last"])
def test_what_another_run_has_saved_meanwhile_is_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_beside(point: str) -> None:
        if point == "save.manifest":
            monkeypatch.undo()
            save_step(tmp_path / name, 1)

    state = {"progress": {"global_step": 2}}
    monkeypatch.setattr(writer, "fault", save_beside)
    with pytest.raises(CheckpointError, match=f"another run has saved the checkpoint .*/{name} "):
        save(tmp_path / "a", rank=0, world_size=1, tensors={}, state=state, also=[tmp_path / "last"])
    assert Checkpoint.open(tmp_path / name).global_step == 1
    assert not leftovers(tmp_path)


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


def test_a_run_that_begins_leaves_alone_what_another_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path / "a", 1)
    delete, cleaned = shutil.rmtree, list[Path]()

    def delete_beside_a_new_run(path: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", delete)
        cleaned.extend(clean(tmp_path))
        delete(path)

    monkeypatch.setattr(shutil, "rmtree", delete_beside_a_new_run)
    remove(tmp_path / "a")
    assert not cleaned and not os.listdir(tmp_path)


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
