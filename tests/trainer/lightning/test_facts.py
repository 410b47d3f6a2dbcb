"""What Trainer, hooks and callbacks of `lockstep.lightning` show, in Lightning's types."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import call, patch

import pytest
from torch.nn import functional as F

import lockstep.lightning.pytorch as pl
from lockstep import callbacks, strategies
from lockstep.lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lockstep.lightning.pytorch.trainer.states import TrainerFn
from lockstep.lightning.pytorch.utilities.exceptions import SIGTERMException
from tests.trainer.lightning.differences.probe import QUIET, fit
from tests.trainer.lightning.projects import classifier, loader


@pytest.mark.parametrize("accelerator", ["cpu", "auto", CPUAccelerator()])
def test_the_accelerator_is_an_instance_of_its_class(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    trainer = pl.Trainer(**QUIET | {"accelerator": accelerator})
    assert trainer.accelerator == "cpu"
    assert isinstance(trainer.accelerator, CPUAccelerator) and not isinstance(trainer.accelerator, CUDAAccelerator)
    assert not isinstance(object(), CPUAccelerator)


@pytest.mark.parametrize("name", ["DDP", "ddp_Spawn", "DDP_FIND_UNUSED_PARAMETERS_TRUE"])
def test_strategies_are_named_in_any_case(name: str) -> None:
    trainer = pl.Trainer(**QUIET | {"devices": 2}, strategy=name)
    assert isinstance(trainer.strategy, strategies.DDP)


def test_setup_and_teardown_get_members_of_the_enum() -> None:
    stages: list[Any] = []

    class Callback(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            stages.append(stage)

    def note(self: Any, stage: str) -> None:
        stages.append(stage)

    trainer = fit(pl, classifier(pl, setup=note, teardown=note)(), callbacks=[Callback()])
    trainer.validate(classifier(pl, setup=note)(), loader(4), verbose=False)
    assert all(isinstance(stage, TrainerFn) for stage in stages)
    assert stages == ["fit", "fit", "fit", "validate", "validate"]
    assert {"fit": 1}[stages[0]] == 1


def test_a_progress_bar_reads_its_trainer_in_a_run() -> None:
    seen: list[Any] = []

    class Bar(pl.callbacks.TQDMProgressBar):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(self.trainer)
            super().on_train_end(trainer, pl_module)

    bar = Bar()
    with pytest.raises(TypeError, match="Bar has no trainer before a run"):
        _ = bar.trainer
    trainer = fit(pl, classifier(pl)(), callbacks=[bar], enable_progress_bar=True)
    assert seen == [trainer]


def test_a_rich_summary_is_a_class_of_its_own() -> None:
    rich, plain = pl.callbacks.RichModelSummary(), pl.callbacks.ModelSummary()
    assert isinstance(rich, pl.callbacks.ModelSummary) and isinstance(rich, callbacks.ModelSummary)
    assert not isinstance(plain, pl.callbacks.RichModelSummary)


def test_sigterm_raises_an_exception_that_can_be_caught(tmp_path: Path) -> None:
    seen: list[type] = []

    class Callback(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(type(exception))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(self(batch[0]), batch[1])

    module = classifier(pl, training_step=training_step)()
    with pytest.raises(SIGTERMException) as stopped:
        fit(pl, module, callbacks=[Callback()], default_root_dir=tmp_path)
    assert seen == [SIGTERMException]
    assert stopped.value.code == SIGTERMException().code == 143


def test_loggers_take_metrics_and_step_by_name_in_any_order() -> None:
    seen: dict[str, list[tuple[Any, Any]]] = {"swapped": [], "by name": [], "others": [], "more": [], "half": []}

    class Swapped(pl.loggers.Logger):
        def log_metrics(self, step: Any, metrics: Any) -> None:
            seen["swapped"].append((sorted(metrics), step))

    class ByName(pl.loggers.Logger):
        def log_metrics(self, **given: Any) -> None:
            seen["by name"].append((sorted(given["metrics"]), given["step"]))

    class Others(pl.loggers.Logger):
        def log_metrics(self, values: Any, at: Any) -> None:
            seen["others"].append((sorted(values), at))

    class More(pl.loggers.Logger):
        def log_metrics(self, values: Any = None, at: Any = None, **more: Any) -> None:
            seen["more"].append((sorted(values), at))

    class Half(pl.loggers.Logger):
        def log_metrics(self, metrics: Any, at: Any = None, **more: Any) -> None:
            seen["half"].append((sorted(metrics), at))

    fit(pl, classifier(pl)(), logger=[Swapped(), ByName(), Others(), More(), Half()])
    assert seen["swapped"] == seen["by name"] == seen["others"] == seen["more"] == seen["half"]
    assert seen["swapped"][0] == (["epoch", "train_loss_step"], 1)


def test_a_mock_in_the_place_of_log_metrics_sees_the_values_only(tmp_path: Path) -> None:
    with patch.object(pl.loggers.CSVLogger, "log_metrics") as mock:
        fit(pl, classifier(pl, training_step=_constant)(), logger=pl.loggers.CSVLogger(tmp_path))
    assert mock.mock_calls == [call(metrics={"epoch": 0, "x": 2.0}, step=step) for step in (1, 2)]


def _constant(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("x", 2.0)
    return self(batch[0]).sum()
