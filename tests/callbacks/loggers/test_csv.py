"""CSVLogger: the file as a spreadsheet reads it."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from lockstep.callbacks import Guard, Logger, ModelCheckpoint
from lockstep.callbacks.loggers.csv import CSVLogger
from tests.trainer.toy import Net, loader, net, quiet


def begun(log_dir: Path, *, global_step: int = 0, rank: int = 0, **options: Any) -> CSVLogger:
    """A logger whose `fit` has just begun."""
    trainer: Any = SimpleNamespace(is_global_zero=rank == 0, global_step=global_step)
    module: Any = nn.Linear(1, 1)
    logger = CSVLogger(**options)
    logger.log_dir = str(log_dir)
    logger.setup(trainer, module, "fit")
    logger.on_fit_start(trainer, module)
    return logger


def table(log_dir: Path) -> list[dict[str, str]]:
    with open(log_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_columns_grow_and_rows_are_there_at_once(tmp_path: Path) -> None:
    logger = begun(tmp_path)
    logger.log_metrics({"loss": 1.5}, step=1)
    assert table(tmp_path) == [{"step": "1", "loss": "1.5"}]
    logger.log_metrics({"loss": torch.tensor(0.5), "a, b": float("nan")}, step=2)  # type: ignore[dict-item]
    logger.log_metrics({"a, b": 3.0}, step=3)
    assert table(tmp_path) == [
        {"step": "1", "loss": "1.5", "a, b": ""},
        {"step": "2", "loss": "0.5", "a, b": "nan"},
        {"step": "3", "loss": "", "a, b": "3.0"},
    ]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_a_resumed_run_has_each_step_once_even_after_a_torn_line(tmp_path: Path) -> None:
    killed = begun(tmp_path)
    for step in (10, 20, 30, 40):
        killed.log_metrics({"loss": 1.0, "acc": 0.5}, step=step)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("5")  # of 50,1.0,0.5
    resumed = begun(tmp_path, global_step=20)
    for step in (30, 40):
        resumed.log_metrics({"loss": 2.0}, step=step)
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [
        ("10", "1.0"),
        ("20", "1.0"),
        ("30", "2.0"),
        ("40", "2.0"),
    ]


def test_rows_wait_for_flush_every_and_none_is_lost(tmp_path: Path) -> None:
    logger = begun(tmp_path, flush_every=3)
    for step in range(5):
        logger.log_metrics({"loss": 1.0}, step=step)
    assert len(table(tmp_path)) == 3
    logger.finalize("failed")
    assert len(table(tmp_path)) == 5


def test_rows_of_before_a_checkpoint_outlive_a_kill(tmp_path: Path) -> None:
    killed = begun(tmp_path, flush_every=10)
    killed.log_metrics({"loss": 1.0}, step=1)
    trainer: Any = SimpleNamespace(global_step=1)
    killed.on_save_checkpoint(trainer, nn.Linear(1, 1), {})  # type: ignore[arg-type]
    saved = killed.state_dict()
    killed.log_metrics({"loss": 2.0}, step=2)
    resumed = begun(tmp_path, global_step=1, flush_every=10)
    resumed.load_state_dict(saved)
    resumed.log_metrics({"loss": 3.0}, step=2)
    resumed.finalize("success")
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [("1", "1.0"), ("2", "3.0")]


def test_hyperparameters_given_before_the_run_reach_its_folder(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.log_hyperparams({"lr": 1e-5, "net": {"width": np.int64(8)}, "act": nn.ReLU})
    logger.log_dir = str(tmp_path)
    logger.setup(SimpleNamespace(is_global_zero=True), nn.Identity(), "fit")  # type: ignore[arg-type]
    logger.log_hyperparams({"seed": 3})
    logger.log_metrics({"loss": 1.0}, step=1)
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {
        "lr": 1e-5,
        "net": {"width": 8},
        "act": str(nn.ReLU),
        "seed": 3,
    }


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    logger = begun(tmp_path, rank=1)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    assert not list(tmp_path.iterdir())


def test_flush_every_is_checked() -> None:
    with pytest.raises(ValueError, match="flush_every must be at least 1 row, but it is 0"):
        CSVLogger(flush_every=0)


class KeepsItsRoot(Logger):
    """A logger of a user's own, as they are written for other libraries."""

    def __init__(self, folder: Path) -> None:
        self.root_dir = folder

    @property
    def experiment(self) -> Logger:
        return self

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        (self.root_dir / "steps.txt").write_text(str(step))


def test_a_logger_of_the_users_own_may_have_a_root_dir(tmp_path: Path) -> None:
    quiet(logger=KeepsItsRoot(tmp_path), log_every_n_steps=1, default_root_dir=tmp_path).fit(net(), loader(16))
    assert (tmp_path / "steps.txt").read_text() == "2"


class Named(CSVLogger):
    name = property(lambda self: "d")  # type: ignore[assignment]
    version = property(lambda self: "own")  # type: ignore[assignment]


def test_each_logger_writes_into_its_own_version(tmp_path: Path) -> None:
    loggers = [CSVLogger(name="a", version=3), CSVLogger(name="b", version="mine"), CSVLogger(name="c"), Named()]
    quiet(logger=loggers, log_every_n_steps=1, default_root_dir=tmp_path).fit(net(), loader(16))
    found = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("metrics.csv")}
    assert found == {"a/version_3", "b/mine", "c/version_3", "d/own"}


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_a_subclass_may_define_where_it_writes(devices: int, tmp_path: Path) -> None:
    class Records(Logger):
        """As loggers for Lightning are written: everything that names a place is a property."""

        def __init__(self, root: Path) -> None:
            self.root = root

        @property
        def name(self) -> str:  # type: ignore[override]
            return "mine"

        @property
        def version(self) -> str:  # type: ignore[override]
            return "first"

        @property
        def log_dir(self) -> str:  # type: ignore[override]
            return os.path.join(self.root, "elsewhere")

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            os.makedirs(self.log_dir, exist_ok=True)
            (Path(self.log_dir) / f"{step}").write_text(str(metrics))

    class Elsewhere(CSVLogger):
        @property
        def log_dir(self) -> str:  # type: ignore[override]
            return os.path.join(str(self.root_dir), "elsewhere")

    records, table_of = Records(tmp_path / "records"), Elsewhere(tmp_path, name="table", version="v")
    trainer = quiet(
        logger=[records, table_of], log_every_n_steps=2, devices=devices, accelerator="cpu", default_root_dir=tmp_path
    )
    trainer.fit(net(), loader(64))
    assert trainer.log_dir == str(tmp_path / "mine" / "first") and trainer.log_dir == records.run_dir
    written = sorted(int(file.name) for file in (tmp_path / "records" / "elsewhere").iterdir())
    assert written == list(range(2, trainer.global_step + 1, 2))
    assert sorted({int(row["step"]) for row in table(tmp_path / "table" / "elsewhere")}) == written
    assert table_of.log_dir == str(tmp_path / "table" / "elsewhere")


class WithTest(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", 1.0)


def test_rows_of_a_test_stay_where_another_program_resumes(tmp_path: Path) -> None:
    def trainer(epochs: int) -> Any:
        kept = ModelCheckpoint(save_top_k=-1)
        options = {"enable_checkpointing": True, "default_root_dir": tmp_path, "log_every_n_steps": 1}
        return quiet(max_epochs=epochs, logger=CSVLogger(version=0), callbacks=[kept], **options)

    trainer(1).fit(WithTest(), loader(4))
    trainer(1).test(WithTest(), loader(4), ckpt_path="last", verbose=False)
    folder = tmp_path / "WithTest" / "version_0"
    (first,) = (folder / "checkpoints").iterdir()
    for epochs, path in ((2, first), (3, "auto"), (2, first)):
        trainer(epochs).fit(WithTest(), loader(4), ckpt_path=path)
        rows = [row for row in table(folder) if row["tested"] or row["train/loss_step"]]
        steps = [(int(row["step"]), bool(row["tested"])) for row in rows]
        assert steps == [(1, False), (0, True), *((step, False) for step in range(2, epochs + 1))]


class Breaks(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * (float("nan") if self.calls == 7 else 1)


@pytest.mark.parametrize("flush_every", [1, 100])
def test_a_run_that_goes_back_to_a_checkpoint_has_each_step_once(flush_every: int, tmp_path: Path) -> None:
    trainer = quiet(
        max_epochs=3,
        logger=CSVLogger(tmp_path, flush_every=flush_every),
        callbacks=[ModelCheckpoint(every_n_train_steps=4), Guard(non_finite="roll_back")],
        enable_checkpointing=True,
        log_every_n_steps=1,
        check_val_every_n_epoch=3,  # whose columns come last
    )
    trainer.fit(Breaks(), loader(32), loader(8))
    rows = table(Path(str(trainer.log_dir)))
    assert [int(row["step"]) for row in rows if row["train/loss_step"]] == [*range(1, 10)]
    assert [int(row["step"]) for row in rows if row["train/loss_epoch"]] == [4, 5, 9], "an epoch is not run again"
    assert rows[-1]["val/loss"]


def test_a_metric_named_step_leaves_the_step_and_every_row(tmp_path: Path) -> None:
    logger = begun(tmp_path)
    logger.log_metrics({"step": 0.0, "loss": 1.0}, step=1)
    logger.log_metrics({"step": 1.0, "loss": 0.5}, step=2)
    logger.log_metrics({"val": 2.0}, step=2)  # a new column: the file is written again
    assert table(tmp_path) == [
        {"step": "1", "metric/step": "0.0", "loss": "1.0", "val": ""},
        {"step": "2", "metric/step": "1.0", "loss": "0.5", "val": ""},
        {"step": "2", "metric/step": "", "loss": "", "val": "2.0"},
    ]
