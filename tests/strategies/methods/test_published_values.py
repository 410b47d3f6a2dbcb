"""Step values of methods whose ranks do not meet in every step: a resumed run publishes the rows of the run never
stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Module, Trainer
from lockstep.callbacks import Callback, Logger, ModelCheckpoint
from lockstep.strategies import DiLoCo, LocalSGD, ParameterServer, Strategy
from tests.strategies.methods.served import Rows, Toy

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "local_sgd": lambda: LocalSGD(learners=2, period=4),
    "diloco": lambda: DiLoCo(learners=2, period=4, fragments=2, delay=1),
    "parameter_server": lambda: ParameterServer(staleness=0, workers=2, meet_every=4),
}


class Kept(Logger):
    """The rows that it gets."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


@pytest.mark.unit
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_resumed_run_publishes_the_rows_of_the_run_never_stopped(name: str, every: int, tmp_path: Path) -> None:
    def rows(resume: Path | None) -> list[Any]:
        logger = Kept()
        trainer = Trainer(
            strategy=STRATEGIES[name](), devices=1, accelerator="cpu", max_steps=20, precision="64-true", seed=1,
            callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)], logger=logger,
            enable_progress_bar=False, log_every_n_steps=every, default_root_dir=tmp_path, split_batches=False,
        )  # fmt: skip
        trainer.fit(Toy(), DataLoader(Rows(56), 2), ckpt_path=resume)
        return logger.rows

    whole = rows(None)
    assert len(whole) > 2
    for step in (5, 10, 15):
        assert rows(tmp_path / f"step={step}") == [row for row in whole if row[0] > step]


class Stopped(Callback):
    """Asks the run to stop, as a cluster does, before its sixth step."""

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.unit
@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_saves_that_end_each_round_early_publish_rank_and_stop(name: str, tmp_path: Path) -> None:
    def run(folder: str, stop: bool = False) -> tuple[Toy, list[Any], ModelCheckpoint]:
        saver = ModelCheckpoint(tmp_path / folder, "{step}", "loss", every_n_train_steps=3, save_top_k=-1)
        module, logger = Toy(), Kept()
        trainer = Trainer(
            strategy=STRATEGIES[name](), devices=1, accelerator="cpu", max_steps=12, precision="64-true", seed=1,
            callbacks=[saver, *[Stopped()] * stop], logger=logger, enable_progress_bar=False, log_every_n_steps=1,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Rows(56), 2), ckpt_path=None if stop else "auto")
        return module, logger.rows, saver

    torch.manual_seed(0)
    whole, rows, saver = run("whole")
    assert [step for step, _ in rows] == [3, 6, 9, 12]
    losses = [row["loss"] for _, row in rows]
    assert [float(score) for score in saver.best_k_models.values()] == losses
    assert saver.best_model_path.endswith(f"step={3 * (1 + losses.index(min(losses)))}")
    torch.manual_seed(0)
    with pytest.raises(SystemExit):
        run("stopped", stop=True)
    resumed, later, _ = run("stopped")
    assert later == rows[2:]
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
