"""What DeepSpeed's engine reads of the environment."""

from __future__ import annotations

import os

import pytest

from lockstep.strategies.deepspeed.engine import place_of
from lockstep.strategies.launch.environment import variables


@pytest.mark.parametrize("before", [{}, {"LOCAL_RANK": "3"}, {"LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}])
def test_a_rank_that_sees_one_device_is_at_the_first_place_for_deepspeed_alone(
    before: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed takes LOCAL_RANK for the index of a device, and stops where mpirun's variable says something else."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    outside = dict(os.environ)
    with variables(place_of(0)) as place:
        assert os.environ["LOCAL_RANK"] == "0"
        assert all(os.environ[name] == "0" for name in before)
        with variables(place):  # code of the user's, which the engine runs
            assert dict(os.environ) == outside
        assert os.environ["LOCAL_RANK"] == "0"
    assert dict(os.environ) == outside
