"""The metrics of a collection that share a state are those that count the same, whatever the first samples are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassCohenKappa,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)

from lockstep import Module
from lockstep.trainer.metrics.groups import fix_groups
from tests.trainer.toy import quiet


class Thresholds(Module):
    """In the first samples both thresholds say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.scores = MetricCollection({"low": BinaryAccuracy(threshold=0.5), "high": BinaryAccuracy(threshold=0.7)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scores.update(batch[0][:, 0], batch[1])
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", 1), ("dp", 2), pytest.param("ddp", 2, marks=pytest.mark.ranks)]
)
def test_metrics_that_are_alike_in_the_first_samples_stay_two(strategy: str, devices: int) -> None:
    values = torch.full((16, 1), 0.6)
    values[:4] = 0.9
    samples = TensorDataset(values, torch.ones(16, dtype=torch.long))
    trainer = quiet(strategy=strategy, devices=devices, accelerator="cpu", max_epochs=2)
    trainer.fit(Thresholds(), DataLoader(samples, batch_size=4 if strategy == "ddp" else 8))
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {"low": 1.0, "high": 0.25}


def groups(metrics: dict[str, Metric], *given: Tensor, **options: Any) -> list[set[str]]:
    """Those of several metrics, after an update."""
    collection = MetricCollection(dict(metrics), **options)
    fix_groups(nn.ModuleList([collection]))
    collection.update(*given)
    return [set(group) for group in collection.compute_groups.values() if len(group) > 1]


RIGHT = torch.eye(3), torch.arange(3)


def classification() -> dict[str, Metric]:
    return {
        "accuracy": MulticlassAccuracy(3),
        "f1": MulticlassF1Score(3),
        "micro": MulticlassPrecision(3, average="micro"),
        "second": MulticlassAccuracy(3, top_k=2),
        "matrix": MulticlassConfusionMatrix(3),
        "kappa": MulticlassCohenKappa(3),
    }


def test_metrics_that_count_the_same_share_a_state() -> None:
    assert groups(classification(), *RIGHT) == [{"accuracy", "f1"}, {"matrix", "kappa"}]
    errors: dict[str, Metric] = {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}
    assert groups(errors, torch.ones(3), torch.zeros(3)) == [{"mse", "rmse"}]
    curves: dict[str, Metric] = {"auroc": BinaryAUROC(), "precision": BinaryAveragePrecision()}
    assert groups(curves, torch.rand(3), torch.tensor([0, 1, 1])) == [{"auroc", "precision"}]


def test_groups_that_the_user_chose_stay() -> None:
    assert groups(classification(), *RIGHT, compute_groups=False) == []
    others = [["micro"], ["second"], ["matrix"], ["kappa"]]
    assert groups(classification(), *RIGHT, compute_groups=[["accuracy", "f1"], *others]) == [{"accuracy", "f1"}]


class Above(Metric):
    """Counts values above a threshold, which `update` reads in one of several ways."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    @property
    def bound(self) -> float:
        return self.threshold

    def compute(self) -> Tensor:
        return self.total

    def update(self, values: Tensor) -> None:
        self.total += (values > self.threshold).sum()


class Decorated(Above):
    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        self.total += (values > self.threshold).sum()


class ByProperty(Above):
    def update(self, values: Tensor) -> None:
        self.total += (values > self.bound).sum()


def count(metric: Above, values: Tensor) -> Tensor:
    return (values > metric.threshold).sum()


class ByFunction(Above):
    def update(self, values: Tensor) -> None:
        self.total += count(self, values)


@pytest.mark.parametrize("kind", [Above, Decorated, ByProperty, ByFunction])
def test_what_update_reads_tells_metrics_apart(kind: type[Above]) -> None:
    assert groups({"low": kind(0.5), "high": kind(0.7)}, torch.tensor([0.9])) == []
    assert groups({"one": kind(0.5), "other": kind(0.5)}, torch.tensor([0.9])) == [{"one", "other"}]


def test_metrics_that_are_updated_one_by_one_share_no_state() -> None:
    collection = MetricCollection({"first": BinaryAccuracy(), "second": BinaryAccuracy()})
    fix_groups(nn.ModuleList([collection]))
    collection.first.update(torch.tensor([1.0]), torch.tensor([0]))
    collection.second.update(torch.tensor([1.0]), torch.tensor([1]))
    assert {name: float(value) for name, value in collection.compute().items()} == {"first": 0.0, "second": 1.0}
