"""Starts launchers of the crash suite: forked from here, where torch is imported already, so that one costs
milliseconds.

Reads a JSON object a line, `{"folder", "undisturbed", "strategy", "devices", "steps", "restarts", "faults"}`; answers
each with the process id of a launcher, which trains in that folder, and continues from what it finds there; before,
unless that is done, without faults in the folder `undisturbed`. Ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from lockstep import Trainer
from lockstep.callbacks import CSVLogger, ModelCheckpoint
from lockstep.strategies import DDP
from lockstep.strategies.launch import fault_injection
from tests.trainer.toy import Net, loader, net


class Slow(Net):
    """Leaves its process ids, and takes its time, so that there is time to be killed in."""

    def on_fit_start(self) -> None:
        Path("pids", f"{os.getpid()}").touch()
        if os.environ.get("RANK"):
            Path("pids", f"{os.getppid()}").touch()  # the server

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def train(strategy: str, devices: int, steps: int, restarts: int) -> None:
    model = net(dropout=0.3)
    model.__class__ = Slow
    name, _, compress = strategy.partition(" ")
    trainer = Trainer(
        strategy=DDP(compress=compress) if compress else name,
        devices=devices,
        accelerator="cpu",
        max_epochs=2,
        max_restarts=restarts,
        split_batches=True,
        num_sanity_val_steps=0,
        val_check_interval=steps // 4,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        seed=0,
        enable_progress_bar=False,
        logger=CSVLogger(version=0),
        callbacks=ModelCheckpoint(every_n_train_steps=2, save_top_k=2),
    )
    trainer.fit(model, loader(steps // 2 * 8, 8, shuffle=True), loader(16, 8), ckpt_path="auto")
    Path("done.json").write_text(json.dumps({"log_dir": trainer.log_dir, "steps": trainer.global_step}))


def launcher(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        for folder, plan in ((order["undisturbed"], ""), (order["folder"], order["faults"])):
            os.chdir(folder)
            Path("pids").mkdir(exist_ok=True)
            Path("pids", str(os.getpid())).touch()
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ[fault_injection.VARIABLE] = plan
            if not Path("done.json").exists():
                train(order["strategy"], order["devices"], order["steps"], order["restarts"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    net().configure_optimizers()  # imports the compiler
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # launchers leave no zombies
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            launcher(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
