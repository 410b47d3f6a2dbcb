"""A long training in which a rank is killed every 15 s: most steps are useful, and the end is, bit by bit, that of an
undisturbed one.

`LOCKSTEP_SOAK_S` sets the seconds, 1800 unless given: `LOCKSTEP_SOAK_S=120 pytest tests/faults/test_soak.py -m slow
-s`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.conftest import REPO_ROOT
from tests.faults.outcome import outcome

pytestmark = pytest.mark.faults

SECONDS = float(os.environ.get("LOCKSTEP_SOAK_S", "1800"))
EVERY_S = 15.0
STEPS = int(SECONDS * 30)  # of 20 ms of sleep and what they take
PROGRAM = """
import os
import sys
import time
from pathlib import Path

from lockstep.callbacks import CSVLogger, ModelCheckpoint
from tests.trainer.toy import Net, loader, net
from lockstep import Trainer


class Soaked(Net):
    def on_fit_start(self):
        Path(f"rank{self.global_rank}").write_text(str(os.getpid()))

    def training_step(self, batch, batch_idx):
        time.sleep(float(sys.argv[2]))
        return super().training_step(batch, batch_idx)


trainer = Trainer(
    strategy="ddp",
    devices=2,
    accelerator="cpu",
    max_steps=int(sys.argv[1]),
    max_restarts=10000,
    num_sanity_val_steps=0,
    log_every_n_steps=10,
    seed=0,
    enable_progress_bar=False,
    logger=CSVLogger(version=0),
    callbacks=ModelCheckpoint(every_n_train_steps=20, save_top_k=2),
)
module = net(dropout=0.3)
module.__class__ = Soaked
trainer.fit(module, loader(800, 4, shuffle=True))
"""


def start(folder: Path, step_s: float) -> subprocess.Popen:
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(STEPS), str(step_s)]
    with (folder / "error").open("w") as error:
        return subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(REPO_ROOT)}, stderr=error)


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS + 600)
def test_soak(tmp_path: Path) -> None:
    chance = random.Random(0)
    process = start(tmp_path / "soaked", 0.02)
    begin, kills = time.monotonic(), 0
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, begin + EVERY_S * (kills + 1) - time.monotonic()))
            break
        pid = int((tmp_path / "soaked" / f"rank{chance.randrange(2)}").read_text())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        kills += 1
    took = time.monotonic() - begin
    said = (tmp_path / "soaked" / "error").read_text()
    assert process.returncode == 0, said[-5000:]
    undisturbed = start(tmp_path / "undisturbed", 0.0)
    assert undisturbed.wait() == 0

    (tensors, state, ranks, log), (tensors_too, state_too, ranks_too, log_too) = (
        outcome(tmp_path / "soaked" / "runs/Soaked/version_0", STEPS),
        outcome(tmp_path / "undisturbed" / "runs/Soaked/version_0", STEPS),
    )
    assert tensors.keys() == tensors_too.keys() and all(
        torch.equal(tensors[name], tensors_too[name]) for name in tensors
    )
    assert state == state_too and ranks == ranks_too and log == log_too

    summary = json.loads((tmp_path / "soaked/runs/Soaked/version_0/summary.json").read_text())
    print(json.dumps({"seconds": round(took), "kills": kills, **summary}))
    assert summary["exit"] == "finished" and summary["steps"] == STEPS
    assert summary["restarts"] >= kills - 1 and kills >= SECONDS / EVERY_S / 2, (
        "a kill may fall into a moment without ranks"
    )
    assert summary["useful_step_share"] >= 0.9
