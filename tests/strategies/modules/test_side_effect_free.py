"""Numbers that a step keeps in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from lockstep.strategies.modules.side_effect_free import numbers, refuse_changed_numbers


class Stateful(nn.Module):
    warmup = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls, self.rate, self.done, self.note = 0, float("nan"), False, "a"
        self.seen = {"rows": 0}
        self.losses: list[float] = []
        self.metric = torchmetrics.SumMetric()


def plain(model: Any) -> None:
    model.note, model.losses = "b", [1.0]
    model.calls += 0
    model.rate = float("nan")
    model.metric.update(1.0)
    model.cache = torch.ones(())


def test_other_attributes_may_change() -> None:
    model = Stateful()
    before = numbers(model)
    plain(model)
    refuse_changed_numbers(model, before)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: setattr(model, "calls", 1), "the number calls of"),
        (lambda model: setattr(model, "done", True), "the number done of"),
        (lambda model: setattr(model, "rate", 0.5), "the number rate of"),
        (lambda model: setattr(model, "warmup", model.warmup + 0.1), "the number warmup of"),
        (lambda model: model.seen.update(rows=3), r"the number seen\['rows'\] of"),
        (lambda model: (setattr(model.inner, "times", 1), model.eval()), "the numbers inner.times, inner.training, "),
    ],
)
def test_a_number_that_changed_is_named(change: Any, names: str) -> None:
    model = Stateful()
    before = numbers(model)
    change(model)
    with pytest.raises(RuntimeError, match=rf"^training_step changed {names}.*; use trainer.global_step"):
        refuse_changed_numbers(model, before)
