"""The optimizer that DeepSpeed's engine steps, as user code finds it."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.strategies.deepspeed.optimizer_view import OptimizerView


def test_a_state_that_user_code_puts_in_place_of_another_is_guarded_too() -> None:
    model, flat = nn.Linear(2, 2, bias=False), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([flat])
    wrapped: Any = SimpleNamespace(model=model)
    view = OptimizerView(optimizer, [[model.weight]], ["state", "param_groups"], wrapped)
    optimizer.state = defaultdict(dict)
    with view.of_engine():
        optimizer.state[flat]["step"] = 1
    assert optimizer.state[flat] == {"step": 1}
    with pytest.raises(RuntimeError, match="the state of Adam was asked for a parameter of the model"):
        _ = optimizer.state[model.weight]
    optimizer.state = defaultdict(dict, {model.weight: {"step": 1}})
    with (
        pytest.raises(RuntimeError, match="the state of Adam was asked for a parameter of the model"),
        view.of_engine(),
    ):
        pass
