"""torchmetrics objects that callbacks hold, or that hooks make, over ranks: what one process would compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import CatMetric, MetricCollection, RunningMean, SumMetric
from torchmetrics.classification import MulticlassAUROC

from lockstep.callbacks import Callback
from lockstep.trainer.metrics.updates import ADDED, count_updates, rows_of
from tests.trainer.metrics.test_sync import Mean, Pairs
from tests.trainer.toy import Net, loader, quiet


class Measures(Callback):
    """In hooks of training, on metrics that it has from the beginning or makes in a hook."""

    def __init__(self, made: str) -> None:
        self._made = made
        if made == "before":
            self._make()

    def _make(self) -> None:
        self.pairs, self.several = Pairs(), [CatMetric(), SumMetric()]
        self.both = MetricCollection({"sum": Pairs(), "mean": Mean()})

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self._made == "fit":
            self._make()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self._made == "epoch":
            self._make()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pairs.update(batch[0])
        self.both.update(batch[0])
        for metric in self.several:
            metric.update(batch[0][:, 0])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        rows, total = (metric.compute() for metric in self.several)
        found = {"pairs": self.pairs.compute(), "total": total, "rows": (rows * torch.arange(rows.numel())).sum()}
        module.log_dict(found | self.both.compute())
        for metric in (self.pairs, self.both, *self.several):
            metric.reset()


def measured(made: str, n: int = 13, **options: Any) -> dict[str, float]:
    torch.manual_seed(0)
    trainer = quiet(accelerator="cpu", precision="64-true", max_epochs=2, callbacks=[Measures(made)], **options)
    trainer.fit(Net(), loader(n, 2))
    return {name: float(trainer.callback_metrics[name]) for name in ("pairs", "total", "rows", "sum", "mean")}


@pytest.mark.ranks
@pytest.mark.parametrize("made", ["before", "fit", pytest.param("epoch", marks=pytest.mark.slow)])
def test_metrics_of_callbacks_are_those_of_one_process(made: str) -> None:
    """A rank has no sample of the last batch, and what hooks do with its padding does not count."""
    assert measured(made, strategy="ddp", devices=2) == pytest.approx(measured(made, devices=1), rel=1e-6)


class Made(Net):
    """Makes a metric as training begins."""

    def on_train_start(self) -> None:
        self.pairs = Pairs()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pairs.update(batch[0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("pairs", self.pairs.compute())
        self.pairs.reset()


@pytest.mark.ranks
def test_metrics_that_a_hook_of_the_module_makes_keep_the_order() -> None:
    def fit(**options: Any) -> float:
        torch.manual_seed(0)
        trainer = quiet(accelerator="cpu", precision="64-true", **options)
        trainer.fit(Made(), loader(12, 2))
        return float(trainer.callback_metrics["pairs"])

    assert fit(strategy="ddp", devices=2) == pytest.approx(fit(devices=1), rel=1e-6)


class Groups(Callback):
    def __init__(self) -> None:
        self.both = MetricCollection({"sum": Pairs(), "mean": Mean()})

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.both.update(batch[0])


def test_a_collection_of_a_callback_is_refused_with_virtual_ranks_as_a_metric_is() -> None:
    trainer = quiet(accelerator="cpu", virtual_ranks=2, callbacks=[Groups()])
    with pytest.raises(RuntimeError, match="on_train_batch_end changed Groups.both"):
        trainer.fit(Net(), loader(8, 2))


@pytest.mark.parametrize("option", ["dist_sync_on_step=True", "sync_on_compute=False"])
def test_a_metric_that_gathers_in_each_step_or_never_is_refused_with_virtual_ranks(option: str) -> None:
    name, _, value = option.partition("=")
    module = Net()
    module.metric = SumMetric(**{name: value == "True"})
    with pytest.raises(ValueError, match=rf"metric \(SumMetric\) has {option}, but a rank runs its shares of 2"):
        quiet(accelerator="cpu", virtual_ranks=2).fit(module, loader(8, 2))
    assert "_sync_dist" not in vars(module.metric)
    quiet(accelerator="cpu", devices=1).fit(module, loader(8, 2))


def test_what_forward_adds_is_not_kept_over_resets() -> None:
    """`forward` of a metric without `full_state_update` updates from nothing each time."""
    metric = MulticlassAUROC(3, thresholds=None)
    count_updates(metric)
    for _ in range(4):
        for _ in range(3):
            metric(torch.randn(6, 3).softmax(1), torch.arange(6) % 3)
        assert rows_of(metric) == [[1, 1]] * 3
        metric.reset()
    assert len(vars(metric)[ADDED]) <= 3


class Smooths(Callback):
    def __init__(self) -> None:
        self.mean = RunningMean(3)


@pytest.mark.ranks
def test_a_metric_of_a_callback_over_the_last_updates_is_refused_on_several_ranks() -> None:
    trainer = quiet(strategy="ddp", devices=2, accelerator="cpu", callbacks=[Smooths()])
    with pytest.raises(Exception, match=r"Smooths.mean \(RunningMean\) is over the last 3 updates"):
        trainer.fit(Net(), loader(8, 2))
