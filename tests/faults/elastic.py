"""What every rank of the elastic runs does: `torchrun … elastic.py`, in the folder of the run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lockstep.callbacks import CSVLogger, ModelCheckpoint
from tests.trainer.toy import Net, loader, net, quiet


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pause = Path("slow")
        time.sleep(0.2 if pause.exists() else 0.0)
        Path(f"at-{self.trainer.world_size}-{self.global_rank}").write_text(f"{os.getpid()} {self.global_step}")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    model = net()
    model.__class__ = Slow
    trainer = quiet(
        strategy="ddp",
        precision="64-true",
        max_epochs=2,
        split_batches=True,
        seed=0,
        log_every_n_steps=1,
        logger=CSVLogger(version=0),
        callbacks=ModelCheckpoint(every_n_train_steps=1, save_top_k=2),
        enable_checkpointing=True,
    )
    trainer.fit(model, loader(12 * 8, 8, shuffle=True), ckpt_path="auto")
    if trainer.is_global_zero:
        Path("done").write_text(f"{trainer.world_size} {trainer.global_step}")
