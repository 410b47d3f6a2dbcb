"""Starts the programs of `test_signals_anywhere`: forked from here, where torch is imported already, or one of its own
(`cold`).

Reads a JSON object a line, `{"folder", "strategy", "workers", "resume"}`; answers with the process id of a program that
trains in that folder and leads a process group, and with its exit code (negative for a signal) once it has ended. Ends
with its input.
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
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.callbacks.base import Logger
from tests.trainer.toy import Net, loader, net, weights

NUM_STEPS = 12


class Paced(Net):
    """Takes its time in every phase, so that there is time to be signalled in, and notes each step that is done."""

    def setup(self, stage: str) -> None:
        Path("pids").mkdir(exist_ok=True)
        Path("pids", f"{os.getpid()}").touch()
        time.sleep(0.05)

    def on_fit_start(self) -> None:
        time.sleep(0.05)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        time.sleep(0.05)

    def on_train_end(self) -> None:
        time.sleep(0.05)

    def teardown(self, stage: str) -> None:
        time.sleep(0.05)


class Steps(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            Path("steps").write_text(str(trainer.global_step))


class Last(Logger):
    """The last code of the user's that a run calls."""

    version = 0

    def finalize(self, status: str) -> None:
        if status == "success":
            Path("finished").write_text(str(time.monotonic()))


def train(strategy: str, workers: int, resume: bool) -> None:
    model = net(dropout=0.3)
    model.__class__ = Paced
    options = {"num_workers": workers, "persistent_workers": bool(workers)}
    trainer = Trainer(
        strategy=strategy,
        devices=1 if strategy == "single" else 2,
        accelerator="cpu",
        max_epochs=2,
        split_batches=True,
        num_sanity_val_steps=1,
        val_check_interval=3,
        seed=0,
        enable_progress_bar=False,
        logger=Last(),
        callbacks=[Steps(), ModelCheckpoint()],
    )
    batches = loader(NUM_STEPS // 2 * 8, 8, shuffle=True, **options)
    trainer.fit(model, batches, loader(16, 8, **options), ckpt_path="auto" if resume else None)
    Path("weights.json").write_text(json.dumps([weight.tolist() for weight in weights(model)]))


def program(order: dict[str, Any]) -> int:
    """Train, and return what the interpreter would exit with."""
    os.chdir(order["folder"])
    try:
        train(order["strategy"], order["workers"], order["resume"])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def forked(order: dict[str, Any]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # ignored where the tests run in the background of a shell
        log = os.open(Path(order["folder"], "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if order["cold"]:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", "tests.faults.signalled", json.dumps(order)])
        code = program(order)
    except KeyboardInterrupt:
        code = 130
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(program(json.loads(sys.argv[1])))
    net().configure_optimizers()  # imports the compiler
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            forked(json.loads(line))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
