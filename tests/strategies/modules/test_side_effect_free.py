"""Numbers that a step keeps in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from lockstep.strategies.modules.side_effect_free import (
    metrics_uncounted,
    numbers,
    refuse_changed_numbers,
    side_effect_free,
)


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
    with pytest.raises(RuntimeError, match=rf"^training_step, or backward, changed {names}.*; use trainer.global_step"):
        refuse_changed_numbers(model, before)


def test_attributes_stay_the_same_objects_with_the_values_they_had() -> None:
    model: Any = nn.Linear(2, 2)
    model.register_buffer("rates", torch.zeros(2))
    model.rate, model.row, model.sums = model.rates[0], model.weight.detach()[0], [torch.zeros(2)]
    model.seen, model.kept = {"rows": [1]}, [torch.zeros(3).expand(2, 3)]
    alike = sums, rows, row = model.sums, model.seen["rows"], model.row
    with side_effect_free(model):
        model.rate += 1
        model.sums[0] += 1
        model.sums = [*model.sums, 1]
        rows.append(2)
        model.seen.clear()
        with torch.no_grad():
            model.weight.fill_(3.0)  # which all ranks do alike
    assert (model.sums, model.seen["rows"], model.row) == alike and sums is model.sums and rows is model.seen["rows"]
    assert rows == [1] and len(sums) == 1 and not sums[0].any()
    model.rates.fill_(2.0)
    assert model.rate == 2 and row is model.row and row.eq(3).all()


@pytest.mark.parametrize("without_effect", [side_effect_free, metrics_uncounted])
def test_metrics_count_nothing_but_a_reset_within_holds(without_effect: Any) -> None:
    model: Any = nn.Module()
    model.all = torchmetrics.MetricCollection({"sum": torchmetrics.SumMetric(), "mean": torchmetrics.MeanMetric()})
    model.rows, model.reset, model.begun = torchmetrics.CatMetric(), torchmetrics.SumMetric(), torchmetrics.SumMetric()
    metrics = [model.all, model.rows, model.reset, model.begun]
    for metric in metrics:
        metric(2.0)
    with without_effect(model):
        for metric in metrics:
            metric(5.0)
        model.reset.reset()
        model.begun.reset()
        model.begun(1.0)
    assert not model.reset.update_called and not model.begun.update_called
    for metric in metrics:
        metric.update(4.0)
    assert model.all.compute() == {"sum": 6, "mean": 3} and model.rows.compute().tolist() == [2, 4]
    assert model.reset.compute() == model.begun.compute() == 4 and model.rows.update_count == 2


def test_a_count_of_the_users_that_is_called_as_a_metrics_is_as_it_was() -> None:
    model: Any = nn.Module()
    model.target = nn.Linear(2, 2)
    model.target._update_count = 2
    with side_effect_free(model):
        assert model.target._update_count % 3 == 2
        model.target._update_count = 0
    assert model.target._update_count == 2
