"""The metrics of a collection that share a state are those that count the same, whatever the first samples are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
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


def groups(**options: Any) -> list[set[str]]:
    metrics = {
        "accuracy": MulticlassAccuracy(3),
        "f1": MulticlassF1Score(3),
        "micro": MulticlassPrecision(3, average="micro"),
        "second": MulticlassAccuracy(3, top_k=2),
        "matrix": MulticlassConfusionMatrix(3),
        "kappa": MulticlassCohenKappa(3),
        "mse": MeanSquaredError(),
        "rmse": MeanSquaredError(squared=False),
        "mean": MeanMetric(),
    }
    collection = MetricCollection(metrics, **options)
    fix_groups(nn.ModuleList([collection]))
    return [set(group) for group in collection.compute_groups.values() if len(group) > 1]


def test_metrics_that_count_the_same_share_a_state() -> None:
    found = groups()
    assert len(found) == 3 and all(
        group in found for group in ({"accuracy", "f1"}, {"matrix", "kappa"}, {"mse", "rmse"})
    )


def test_groups_that_the_user_chose_stay() -> None:
    assert groups(compute_groups=False) == []
    others = [["micro"], ["second"], ["matrix"], ["kappa"], ["mse"], ["rmse"], ["mean"]]
    assert groups(compute_groups=[["accuracy", "f1"], *others]) == [{"accuracy", "f1"}]
