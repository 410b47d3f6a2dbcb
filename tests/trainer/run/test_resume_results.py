"""What a Trainer shows, and what was asked of it, continue in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import (
    ClasswiseWrapper,
    KendallRankCorrCoef,
    MaxMetric,
    Metric,
    MetricCollection,
    MinMaxMetric,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.image import PeakSignalNoiseRatio

from lockstep import Trainer
from lockstep.callbacks import Callback, EarlyStopping
from lockstep.trainer.checkpoint.manifest import CheckpointError
from tests.trainer.toy import Net, equal, loader, net, quiet, weights


class Ask(Callback):
    """Asks to stop after step `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            trainer.should_stop = True


class Save(Callback):
    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = str(path), at

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("asked", "saved", "ends", "options"),
    [
        (2, 4, 6, {"min_epochs": 2}),
        (2, 3, 6, {"min_epochs": 2}),
        (2, 4, 5, {"min_steps": 5}),
        (4, 4, 5, {}),
        (3, 3, 3, {}),
    ],
)
def test_a_request_to_stop_outlives_the_run(
    asked: int, saved: int, ends: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """An epoch has 3 steps. Between the steps of an epoch a request takes effect one step later."""
    runs = []
    for path, callbacks in ((None, [Ask(asked), Save(tmp_path / "ck", saved)]), (tmp_path / "ck", [])):
        trainer, module = quiet(max_epochs=5, seed=0, callbacks=callbacks, **options), net()
        trainer.fit(module, loader(24, shuffle=True), ckpt_path=path)
        runs.append((trainer.global_step, weights(module)))
    assert runs[0][0] == runs[1][0] == ends
    assert equal(runs[0][1], runs[1][1])


def test_a_run_that_has_stopped_is_continued(tmp_path: Path) -> None:
    quiet(max_epochs=2, callbacks=[Ask(1), Save(tmp_path / "ck", 2)]).fit(net(), loader(24))
    resumed = quiet(max_epochs=2)
    resumed.fit(net(), loader(24), ckpt_path=tmp_path / "ck")
    assert resumed.global_step == 6


@pytest.mark.ranks
def test_a_callback_whose_class_is_defined_in_a_function_has_its_state_back_on_a_rank(tmp_path: Path) -> None:
    class Counts(Callback):
        count = 0

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    first, second = quiet(callbacks=[Counts()]), Counts()
    first.fit(net(), loader(24))
    first.save_checkpoint(tmp_path / "ck")
    of_its_own = {"max_restarts": 1, "default_root_dir": tmp_path}  # a process for the one rank
    quiet(max_epochs=2, callbacks=[second], **of_its_own).fit(net(), loader(24), ckpt_path=tmp_path / "ck")
    assert second.count == 6


class LogsOnce(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.log("first", 1.0, prog_bar=True)


def test_metrics_of_loggers_and_of_the_progress_bar_come_back(tmp_path: Path) -> None:
    shown = []
    for path, callbacks in ((None, [Save(tmp_path / "ck", 4)]), (tmp_path / "ck", [])):
        trainer = quiet(max_epochs=2, seed=0, log_every_n_steps=2, callbacks=callbacks)
        torch.manual_seed(0)
        trainer.fit(LogsOnce(), loader(24), ckpt_path=path)
        shown.append((trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics))
    assert shown[0] == shown[1]
    assert "first" in shown[1][1] and "first" in shown[1][2]


class InValidation(Callback):
    """Saves in one of the hooks of the first validation, and notes the metrics of each."""

    def __init__(self, path: Path, hook: str) -> None:
        self.path, self.seen = str(path), []
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *_: Any) -> None:
        if not Path(self.path).exists():
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.seen.append((trainer.global_step, trainer.callback_metrics["accuracy"].item()))


class Accurate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"max_steps": 2}, {"virtual_ranks": 2}])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_epoch_end"])
def test_a_validation_within_which_a_checkpoint_was_saved_is_repeated(
    hook: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Its value counts for EarlyStopping and the best checkpoint, and each sample once."""
    runs = []
    for path in (None, tmp_path / "ck"):
        torch.manual_seed(0)
        saves, stopping = InValidation(tmp_path / "ck", hook), EarlyStopping("accuracy", mode="max", patience=9)
        quiet(**{"max_epochs": 2, "seed": 0, "callbacks": [saves, stopping], **options}).fit(
            Accurate(), loader(24), loader(24), ckpt_path=path
        )
        runs.append((saves.seen, stopping.state_dict()))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) == (1 if "max_steps" in options else 2)


class Extremes(Net):
    """Of sums that are 1, 2, 3 and so on in the epochs, after 100 in a sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.total = MinMaxMetric(SumMetric())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = 100.0 if self.trainer.sanity_checking else self.current_epoch + 1.0
        self.total.update(value * len(batch[0]) / 24)
        self.log("total", self.total)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_the_extremes_of_a_metric_are_those_of_the_epochs_of_its_run(devices: int, tmp_path: Path) -> None:
    found = []
    for path, callbacks in ((None, [Save(tmp_path / "ck", 7 if devices == 1 else 5)]), (tmp_path / "ck", [])):
        options: dict[str, Any] = {"devices": devices, "accelerator": "cpu", "num_sanity_val_steps": -1}
        trainer, module = quiet(max_epochs=4, seed=0, callbacks=callbacks, **options), Extremes()
        trainer.fit(module, loader(24), loader(24), ckpt_path=path)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items() if "total" in name})
        assert (float(module.total.min_val), float(module.total.max_val)) == pytest.approx((1, 4))
    assert found[0] == found[1] == pytest.approx({"total/raw": 4, "total/max": 4, "total/min": 1})


class LogsCollection(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scores = MetricCollection([MulticlassAccuracy(3)])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.update(self(batch[0]), batch[1])
        self.log("scores", self.scores)


def test_a_collection_of_metrics_is_logged_by_another_name_of_log() -> None:
    with pytest.raises(TypeError, match="but got MetricCollection; log what is in it by self.log_dict"):
        quiet().validate(LogsCollection(), loader(8), verbose=False)


class WithinValidation(Save):
    """Saves after the first batch of the last validation."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None: ...

    def on_validation_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and not Path(self.path).exists():
            trainer.save_checkpoint(self.path)


def test_metrics_in_metrics_begin_a_repeated_validation_again(tmp_path: Path) -> None:
    for path, callbacks in ((None, [WithinValidation(tmp_path / "ck", 0)]), (tmp_path / "ck", [])):
        trainer = quiet(max_epochs=2, seed=0, callbacks=callbacks)
        trainer.fit(Extremes(), loader(24), loader(24), ckpt_path=path)
        assert float(trainer.callback_metrics["total/raw"]) == pytest.approx(2)


class OwnMax(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="max")
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        self.largest, self.number = torch.maximum(self.largest, values.max()), self.number + len(values)

    def compute(self) -> torch.Tensor:
        return self.largest + self.number


class Measures(Net):
    """Metrics that torchmetrics does not merge by itself."""

    def __init__(self, *more: Metric) -> None:
        super().__init__()
        self.of_values = torch.nn.ModuleList([MaxMetric(), MinMetric(), OwnMax()])
        self.of_classes = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.of_pairs = torch.nn.ModuleList([KendallRankCorrCoef(), PeakSignalNoiseRatio(4.0), *more])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        for i, metric in enumerate(self.of_values):
            metric.update(logits.detach())
            self.log(f"values {i}", metric, on_step=False, on_epoch=True)
        for i, metric in enumerate(self.of_pairs):
            metric.update(logits[:, 0].detach(), logits[:, 1].detach())
            self.log(f"pairs {i}", metric, on_step=False, on_epoch=True)
        self.of_classes.update(logits, batch[1])
        self.log("classes", self.of_classes, on_step=False, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, batch[1])


def measured(module: Net, path: Path | None = None, **options: Any) -> dict[str, float]:
    trainer = quiet(accelerator="cpu", precision="64-true", seed=0, split_batches=True, **options)
    torch.manual_seed(0)
    trainer.fit(module, loader(24), ckpt_path=path)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "loss" not in name}


@pytest.mark.ranks
def test_any_metric_whose_states_can_be_joined_continues_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = measured(net_of(), callbacks=[Save(tmp_path / "1", 2)])
    assert measured(net_of(), devices=2, callbacks=[Save(tmp_path / "2", 2)]) == pytest.approx(expected)
    assert measured(net_of(), strategy="dp", devices=2) == pytest.approx(expected)
    assert measured(net_of(), virtual_ranks=2, devices=2) == measured(net_of(), virtual_ranks=2)
    for began, devices in ((1, 1), (1, 2), (2, 1), (2, 2)):
        assert measured(net_of(), tmp_path / str(began), devices=devices) == pytest.approx(expected)


def net_of(*more: Metric) -> Measures:
    torch.manual_seed(0)
    return Measures(*more)


@pytest.mark.ranks
def test_a_metric_whose_states_cannot_be_joined_is_refused_by_name(tmp_path: Path) -> None:
    message = "PearsonCorrCoef keeps mean_x with dist_reduce_fx=None, which cannot be joined .*; "
    measured(net_of(PearsonCorrCoef()), devices=2, callbacks=[Save(tmp_path / "2", 2)])
    with pytest.raises(CheckpointError, match=message + "resume on as many ranks"):
        measured(net_of(PearsonCorrCoef()), tmp_path / "2")
    with pytest.raises(ValueError, match=message + "use strategy='ddp'"):
        measured(net_of(PearsonCorrCoef()), strategy="dp", devices=2)


class Continues(IterableDataset[Any]):
    """Continues where it was left, and begins again after its end."""

    place = 0

    def __iter__(self) -> Any:
        while self.place < 6:
            self.place += 1
            yield torch.full((8,), float(self.place))
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Evaluated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("sum", batch[:, 0].sum(), reduce_fx="sum")


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_each_validation_reads_the_same_of_a_dataset_that_continues(devices: int) -> None:
    for limit, expected in ((None, 21.0), (2 // devices, 10.0)):
        for sanity in (0, 1):
            options: dict[str, Any] = {"num_sanity_val_steps": sanity, "limit_val_batches": limit, "max_epochs": 2}
            trainer = quiet(accelerator="cpu", devices=devices, **options)
            trainer.fit(Evaluated(), loader(24), DataLoader(Continues(), batch_size=2))
            assert float(trainer.callback_metrics["sum"]) == expected
