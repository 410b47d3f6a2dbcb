"""Virtual ranks: every bit of a run is the same on any number of ranks, of every strategy that takes them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.virtual.runs import train

LAYOUTS = [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("ddp=2,fsdp=2", 4)]
LAYOUTS += [("pipeline", 2), ("pipeline", 4), ("ddp=2,pipeline=2", 4)]
KINDS: dict[str, dict[str, Any]] = {
    "classifier": {},
    "float64 accumulated": {"precision": "64-true", "accumulate": 3, "max_steps": 5},
    "bf16 accumulated": {"precision": "bf16-mixed", "accumulate": 2},
    "writer": {"net": "writer"},
}
DAILY = [("classifier", "ddp", 2), ("classifier", "ddp=2,fsdp=2", 4), ("bf16 accumulated", "fsdp", 2)]
DAILY += [("writer", "fsdp", 2), ("classifier", "pipeline", 2)]
ALL = [(kind, *layout) for kind in KINDS for layout in LAYOUTS]


@functools.cache
def alone(kind: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return train("single", 1, Path(folder), **KINDS[kind])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "strategy", "devices"),
    [pytest.param(*case, marks=[] if case in DAILY else pytest.mark.slow) for case in ALL],
)
def test_every_bit_is_that_of_one_rank(kind: str, strategy: str, devices: int, tmp_path: Path) -> None:
    assert train(strategy, devices, tmp_path, **KINDS[kind]) == alone(kind)


PAIRS = [(a, b) for a in [("single", 1), *LAYOUTS] for b in [("single", 1), *LAYOUTS] if a != b]
DAILY_PAIRS = [(LAYOUTS[4], ("single", 1)), (LAYOUTS[0], LAYOUTS[3])]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(*pair, marks=[] if pair in DAILY_PAIRS else pytest.mark.slow, id=f"{pair[0]} to {pair[1]}")
        for pair in PAIRS
    ],
)
def test_a_killed_run_is_resumed_on_other_ranks_to_the_bit(
    first: tuple[str, int], then: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first[1] == 1:  # its process is this one
        train(*first, tmp_path / "killed", max_steps=3)
    else:
        monkeypatch.setenv("LOCKSTEP_FAULTS", f"rank={first[1] - 1},step=3,point=backward,action=sigkill")
        with pytest.raises(Exception, match="SIGKILL"):
            train(*first, tmp_path / "killed")
        monkeypatch.delenv("LOCKSTEP_FAULTS")
    (saved,) = (tmp_path / "killed").rglob("*step=2*")
    resumed = train(*then, tmp_path / "resumed", resume=str(saved))
    expected = alone("classifier")
    assert {kind: resumed[kind] for kind in resumed} == {kind: expected[kind] for kind in resumed}
