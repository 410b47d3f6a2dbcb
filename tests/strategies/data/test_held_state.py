"""What a dataset holds beside its generators and numbers, and objects that it holds, while these are looked for."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.strategies.data.randomness import HeldState
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.launch.program.held_search import search


class Base(Dataset[Any]):
    def __len__(self) -> int:
        return 40


class Lines(Base):
    """Knows how far it has read in a file that it opens."""

    def __init__(self, path: Any) -> None:
        self.file, self.at = path.open("rb"), 0

    def __getitem__(self, index: int) -> Any:
        if index != self.at:
            self.file.seek(index * 2)
        self.at = index + 1
        return torch.tensor(float(self.file.read(2)))


def test_a_number_beside_an_open_file_stays_with_it(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("".join(f"{i:2}" for i in range(40)))
    lines = Lines(tmp_path / "data")
    loader, state = ShardedLoader(DataLoader(lines, 40), rank=0, size=1, seed=0), HeldState({"dataset": lines})
    for _ in range(3):
        (window,) = loader.windows(0)
        assert window.micro_batches[0].batch.tolist() == [*range(40)]
        loader.put_back()
    assert state.state_dict() == {"held": {"lost": ["Lines.at"]}}
    lines.file.close()


class Fills(Base):
    """Counts what it holds in a cache that does not grow."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.held = cache, 0

    def __getitem__(self, index: int) -> Any:
        self.cache[index] = torch.tensor(float(index))
        self.held += 1
        return self.cache[index]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [None] * 40,
        lambda: [None] * 40_000,
        lambda: dict.fromkeys(range(40)),
        OrderedDict,
        lambda: np.zeros(40),
        lambda: torch.zeros(40),
    ],
)
def test_a_number_beside_a_cache_is_not_kept(make: Any) -> None:
    data, same = Fills(make()), Fills(make())
    states = [HeldState({"dataset": each}) for each in (data, same)]
    for index in range(0, 40, 8):
        data[index]
        same.held += 1
    data.cache[0] = data.cache[0]
    assert states[0].state_dict() == {"held": {"lost": ["Fills.held"]}}
    assert states[1].state_dict() == {"held": {"kept": {"dataset": {"held": {"value": 5}}}}}


class Stands:
    """Says that it is a list."""

    @property
    def __class__(self) -> Any:
        return list


def test_objects_that_stand_for_others_are_taken_for_what_they_are() -> None:
    class Listed(list[int]):
        pass

    kept, gone = Listed([1]), Listed([2])
    data = SimpleNamespace(kept=weakref.proxy(kept), gone=weakref.proxy(gone), stands=Stands(), rng=random.Random(0))
    del gone
    assert [*search({"dataset": data}).places] == [("dataset", "rng")]


def test_what_was_held_before_is_not_kept_alive() -> None:
    class Part(Base):
        def __init__(self) -> None:
            self.rng, self.array = random.Random(0), np.zeros(3)

    data = Part()
    data.part = Part()  # type: ignore[attr-defined]
    held = HeldState({"dataset": data})
    held.begin()
    before = weakref.ref(data.part.array)  # type: ignore[attr-defined]
    data.part = Part()  # type: ignore[attr-defined]
    assert before() is None
