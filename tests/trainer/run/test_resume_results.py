"""What a Trainer shows, and what was asked of it, continue in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Trainer
from lockstep.callbacks import Callback, EarlyStopping
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
