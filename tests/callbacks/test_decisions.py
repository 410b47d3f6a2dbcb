"""Callbacks that decide do so alike on all ranks, by the value over all samples, also where each rank's own would say
otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from tests.trainer.toy import Net, loader, quiet

pytestmark = pytest.mark.ranks

MEANS = [5.0, 3.0, 4.0, 4.5, 4.6, 4.7]
"""What is monitored, over all ranks, epoch by epoch: best after the second."""
SPREAD = [4.0, -9.0, 8.0, -8.0, 9.0, -9.0]
"""By how much rank 1's value exceeds the mean, and rank 0's falls short: alone they would choose other epochs."""


class Apart(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        sign = 0 if self.trainer.world_size == 1 else 1 if self.global_rank else -1
        self.log("val/score", MEANS[self.current_epoch] + sign * SPREAD[self.current_epoch])

    def on_train_end(self) -> None:
        Path(f"stopped-{self.trainer.world_size}-{self.global_rank}").write_text(
            f"{self.current_epoch} {self.global_step}"
        )


@pytest.mark.long
def test_ranks_keep_and_stop_by_the_value_over_all_of_them() -> None:
    assert min(range(6), key=lambda i: MEANS[i] - SPREAD[i]) != 1 and min(
        range(6), key=lambda i: MEANS[i] + SPREAD[i]
    ) not in (0, 2)
    found = []
    for devices in (1, 2):
        saver = ModelCheckpoint(monitor="val/score", filename="{epoch}", dirpath=f"kept-{devices}")
        stopper = EarlyStopping("val/score", patience=2)
        trainer = quiet(devices=devices, max_epochs=6, enable_checkpointing=True, callbacks=[saver, stopper])
        trainer.fit(Apart(), loader(16, 8 // devices), loader(8, 4))
        found.append(
            (
                Path(saver.best_model_path).name,
                float(saver.best_model_score),
                trainer.current_epoch,
                stopper.state_dict(),
            )
        )
        assert {Path(f"stopped-{devices}-{rank}").read_text() for rank in range(devices)} == {"4 8"}
    assert found[0] == found[1]
    assert found[0][:3] == ("epoch=1", 3.0, 4)
