"""Attributes of the Trainer of `lockstep.lightning`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import lockstep.lightning.pytorch as pl
from lockstep.lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lockstep.lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lockstep.lightning.pytorch.loggers import CSVLogger
from tests.trainer.lightning.differences import probe
from tests.trainer.lightning.projects import classifier, loader

QUIET: dict[str, Any] = {
    name: value for name, value in probe.QUIET.items() if name not in ("max_epochs", "log_every_n_steps")
}


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ({"max_steps": 1}, -1),
        ({"max_time": {"hours": 1}, "max_steps": 1}, -1),
        ({"callbacks": pl.callbacks.Timer({"hours": 1})}, -1),
        ({}, 1000),
    ],
)
def test_max_epochs_is_unset_until_fit_unless_it_is_given(limit: dict[str, Any], found: int) -> None:
    trainer = pl.Trainer(**QUIET, **limit)
    assert trainer.max_epochs is None
    module = classifier(pl, on_train_start=lambda self: setattr(self.trainer, "should_stop", True))
    trainer.fit(module(), loader(8))
    assert trainer.max_epochs == found


def test_max_epochs_that_is_set_is_the_limit() -> None:
    for given in ({"fast_dev_run": True}, {"max_epochs": 1}):
        assert pl.Trainer(**QUIET, **given).max_epochs == 1
    trainer = pl.Trainer(**QUIET)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(classifier(pl)(), loader(8))
    assert trainer.max_epochs == trainer.current_epoch == 2


def test_loggers_can_be_set_between_runs(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path, name="first"), CSVLogger(tmp_path, name="second")
    trainer = pl.Trainer(**QUIET | {"logger": first}, max_epochs=1, log_every_n_steps=1)
    trainer.logger = second
    assert trainer.logger is second and trainer.loggers == [second]
    trainer.fit(classifier(pl)(), loader(8))
    assert [path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("metrics.csv")] == ["second"]
    trainer.loggers = [first, second]
    assert trainer.loggers == [first, second]
    for none in (None, []):
        trainer.loggers = none
        assert trainer.loggers == [] and trainer.logger is None
    with pytest.raises(TypeError, match="must be a Logger, but one is 'tensorboard'"):
        trainer.logger = "tensorboard"


def test_another_logger_takes_a_folder_that_is_free(tmp_path: Path) -> None:
    def trainer(root: Path) -> pl.Trainer:
        options = QUIET | {"logger": CSVLogger(root), "enable_checkpointing": True, "log_every_n_steps": 1}
        return pl.Trainer(**options, max_epochs=1)

    trainer(tmp_path / "other").fit(classifier(pl)(), loader(8))
    (saved,) = (tmp_path / "other").rglob("*.ckpt")
    moved = trainer(tmp_path / "own")
    moved.fit(classifier(pl)(), loader(8))
    moved.logger, moved.max_epochs = CSVLogger(tmp_path / "other"), 2
    moved.fit(classifier(pl)(), loader(8))
    assert saved.exists() and str(moved.log_dir).endswith("version_1")


def test_loggers_cannot_be_set_in_a_run() -> None:
    module = classifier(pl, on_train_start=lambda self: setattr(self.trainer, "logger", None))
    with pytest.raises(RuntimeError, match="cannot be set while it runs fit; set them before"):
        pl.Trainer(**QUIET, max_epochs=1).fit(module(), loader(8))


def test_a_trial_run_has_its_model_checkpoint_which_saves_nothing(tmp_path: Path) -> None:
    saver = ModelCheckpoint()
    options = QUIET | {"enable_checkpointing": True, "default_root_dir": tmp_path, "fast_dev_run": True}
    trainer = pl.Trainer(**options, callbacks=[saver])
    trainer.fit(classifier(pl)(), loader(8))
    assert trainer.checkpoint_callback is saver and trainer.checkpoint_callbacks == [saver]
    assert saver.best_model_path == "" and saver.dirpath == str(tmp_path / "checkpoints")
    assert list(tmp_path.iterdir()) == []
    assert isinstance(pl.Trainer(**options).checkpoint_callback, ModelCheckpoint)
    assert pl.Trainer(**QUIET, fast_dev_run=True).checkpoint_callback is None


def test_the_accelerator_is_of_lightnings_class() -> None:
    for given in ("cpu", CPUAccelerator()):
        accelerator = pl.Trainer(**QUIET | {"accelerator": given}, max_epochs=1).accelerator
        assert isinstance(accelerator, CPUAccelerator) and not isinstance(accelerator, CUDAAccelerator)
        assert accelerator == "cpu"
        assert isinstance(pickle.loads(pickle.dumps(accelerator)), CPUAccelerator)


def test_an_accelerator_can_be_given_and_is_described_as_its_word(tmp_path: Path) -> None:
    options = QUIET | {"accelerator": CPUAccelerator(), "logger": CSVLogger(tmp_path, name="run")}
    pl.Trainer(**options, max_epochs=1).fit(classifier(pl)(), loader(8))
    (config,) = tmp_path.rglob("config.yaml")
    assert '"accelerator": "cpu",' in config.read_text()


def test_the_progress_bar_knows_the_batches_of_the_epoch() -> None:
    found: list[Any] = []

    def on_train_epoch_end(self: Any) -> None:
        bar = self.trainer.progress_bar_callback
        found.append((bar.total_train_batches, bar.total_val_batches))

    bar = TQDMProgressBar(refresh_rate=0)
    with pytest.raises(TypeError, match="has no trainer before a run"):
        bar.total_val_batches  # noqa: B018
    options = QUIET | {"enable_progress_bar": True, "callbacks": [bar], "check_val_every_n_epoch": 2}
    trainer = pl.Trainer(**options, max_epochs=2)
    trainer.fit(classifier(pl, on_train_epoch_end=on_train_epoch_end)(), loader(16), [loader(8), loader(4)])
    train, *val = trainer.num_training_batches, *trainer.num_val_batches
    assert found == [(train, 0), (train, sum(val))]
    assert bar.trainer is trainer
    trainer = pl.Trainer(**options, max_steps=1)
    trainer.fit(classifier(pl)(), loader(16))
    assert bar.total_train_batches == 0
