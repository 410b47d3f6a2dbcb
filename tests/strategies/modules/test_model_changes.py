"""What is noted of a model that user code changes."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.strategies.modules.model_changes import ModelChanges


def test_a_buffer_that_each_step_replaces_is_noted_once() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2))
    changes = ModelChanges(model, set())
    for _ in range(3):
        model.mean = torch.ones(2)
        nn.Linear(1, 1).register_buffer("of_another_model", torch.zeros(1))
    changes.close()
    assert [*changes.set_buffers] == [(model, "mean")]
