"""How long a run is down: from the SIGKILL of a rank until the next optimizer step is done, from the newest checkpoint.

    python -m benchmarks.restart [--restarts 20] [--ranks 2] [--strategy ddp] [--json FILE]

One `fit` with `max_restarts`, a checkpoint every second step; every third step one rank kills itself, the ranks in
turns. Besides the ranks' start this holds finding the death, ending the others, verifying the checkpoint and computing
the lost step again. Expect half a minute.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._rounds import described, machine, make_parser, write_json
from lockstep import Module, Trainer
from lockstep.callbacks import ModelCheckpoint

EVERY = 3
"""Steps between kills."""


class Dies(Module):
    """A perceptron of 30,000 weights whose rank `kills % ranks` dies at the end of every third step, the first time
    that it gets there."""

    def __init__(self, folder: str, restarts: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
        self.folder, self.restarts = Path(folder), restarts

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        kills = len(list(self.folder.glob("killed*")))
        if (
            kills
            and self.global_rank == 0
            and not (again := self.folder / f"again{kills - 1}").exists()
            and self.global_step >= EVERY * kills
        ):
            again.write_text(str(time.monotonic()))
        if (
            kills < self.restarts
            and self.global_step == EVERY * (kills + 1)
            and self.global_rank == kills % self.trainer.world_size
        ):
            (self.folder / f"killed{kills}").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = make_parser("Measure how long a run is down when a rank dies.")
    parser.add_argument("--restarts", type=int, default=20, help="how often a rank is killed")
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks")
    parser.add_argument("--strategy", default="ddp")
    arguments = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        downs = measure(folder, arguments.restarts, arguments.ranks, arguments.strategy)
    p95 = sorted(downs)[math.ceil(0.95 * len(downs)) - 1]
    print(f"{described(facts)}; {arguments.ranks} ranks of {arguments.strategy}")
    print(
        f"down for {statistics.median(downs):.2f} s (median), {p95:.2f} s (95 %), {max(downs):.2f} s (worst) in "
        f"{len(downs)} restarts"
    )
    write_json(arguments.json, facts, {"downs_s": downs, "median_s": statistics.median(downs), "p95_s": p95})


def measure(folder: str, restarts: int, ranks: int, strategy: str) -> list[float]:
    """Seconds of each restart."""
    trainer = Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_steps=EVERY * (restarts + 1) + 1,
        max_restarts=restarts,
        logger=False,
        enable_progress_bar=False,
        callbacks=ModelCheckpoint(every_n_train_steps=2),
        default_root_dir=folder,
        seed=0,
    )
    trainer.fit(
        Dies(folder, restarts),
        DataLoader(TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,))), batch_size=16),
    )
    times = {
        name: [float((Path(folder) / f"{name}{i}").read_text()) for i in range(restarts)]
        for name in ("killed", "again")
    }
    return [again - killed for killed, again in zip(times["killed"], times["again"], strict=True)]


if __name__ == "__main__":
    main()
