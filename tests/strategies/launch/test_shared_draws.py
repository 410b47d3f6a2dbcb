"""Ranks draw in an optimizer's step what rank 0 draws, and are by themselves again after it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lockstep.strategies.launch.rng import SharedDraws, stream_states


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.rand(3)
        raise ArithmeticError


def test_a_step_that_raises_leaves_the_streams_of_the_rank() -> None:
    torch.manual_seed(1)
    data = torch.frombuffer(bytearray(pickle.dumps(stream_states())), dtype=torch.uint8)

    def broadcast(value: Any) -> Any:
        return data if isinstance(value, torch.Tensor) else data.numel()

    torch.manual_seed(2)
    own = torch.get_rng_state()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Fails([weight], lr=0.1)
    draws = SharedDraws(optimizer, broadcast, False)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            optimizer.step()
    assert not torch.equal(torch.get_rng_state(), own)
    draws.close()
    assert torch.equal(torch.get_rng_state(), own)
