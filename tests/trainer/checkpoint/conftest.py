"""Checkpoints to damage, written once for the tests of a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.strategies.checkpoint_state import TensorShard
from tests.trainer.checkpoint.damage import SaveAt, fit
from tests.trainer.checkpoint.folders import cut, on_ranks


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
