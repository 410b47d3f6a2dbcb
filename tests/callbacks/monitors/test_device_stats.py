"""DeviceStats: what it logs is what the process uses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks import CSVLogger, DeviceStats
from tests.trainer.toy import Net, loader, net, quiet


def test_memory_and_load_are_logged(tmp_path: Any) -> None:
    class Busy(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                self.held = torch.ones(200 * 2**18)  # 200 MiB
            until = time.process_time() + 0.02
            while time.process_time() < until:
                pass
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(save_dir=str(tmp_path))
    trainer = quiet(callbacks=[DeviceStats()], logger=logger, log_every_n_steps=3)
    trainer.fit(Busy(), loader())
    rows = [line.split(",") for line in Path(str(logger.log_dir), "metrics.csv").read_text().splitlines()]
    column = rows[0].index("device/process_memory_mib")
    before, after = (float(row[column]) for row in rows[1:] if row[column])
    assert after - before >= 150
    assert 0 < float(trainer.callback_metrics["device/process_cpus"]) <= 64


@pytest.mark.long
@pytest.mark.ranks
def test_the_largest_of_all_ranks_counts() -> None:
    class Uneven(Net):
        def on_train_start(self) -> None:
            self.held = torch.ones(200 * 2**18) if self.trainer.global_rank == 1 else None

    def memory(module: Net) -> float:
        trainer = quiet(strategy="ddp", devices=2, callbacks=[DeviceStats()], log_every_n_steps=3)
        trainer.fit(module, loader(batch_size=4))
        return float(trainer.callback_metrics["device/process_memory_mib"])

    assert memory(Uneven()) - memory(net()) >= 150
