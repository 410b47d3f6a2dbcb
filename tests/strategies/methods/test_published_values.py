"""Step values of methods whose ranks do not meet in every step: a resumed run publishes the rows of the run never
stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep import Trainer
from lockstep.callbacks import Logger, ModelCheckpoint
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
