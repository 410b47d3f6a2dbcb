"""Ranks draw in an optimizer's step what rank 0 draws, and are by themselves again after it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from lockstep.strategies.launch.rng import OptimizerDraws, _may_draw, _methods_of, stream_states


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
    draws = OptimizerDraws(optimizer, broadcast, False)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            optimizer.step()
    assert not torch.equal(torch.get_rng_state(), own)
    draws.leave()  # as the next step of the model begins
    assert torch.equal(torch.get_rng_state(), own)
    draws.close()


def _noise(p: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(p)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.data.add_(_noise(p))


@pytest.mark.parametrize(("kind", "may"), [(Noisy, True), (torch.optim.SGD, False), (torch.optim.AdamW, False)])
def test_an_optimizer_whose_code_names_what_draws_may_draw_later(kind: type, may: bool) -> None:
    assert _may_draw(_methods_of(kind)) is may
