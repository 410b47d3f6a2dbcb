"""SIGTERM, SIGINT and SIGUSR1, on any of the processes of a run: all ranks stop after the same step, with a
checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies.launch import slurm
from lockstep.trainer.checkpoint.store import is_checkpoint
from tests.trainer.toy import Net, equal, loader, net, quiet, weights

pytestmark = pytest.mark.ranks


class Signalled(Net):
    """In step 3 each of `targets`, ranks or "launcher", gets a signal."""

    number: int
    targets: tuple[Any, ...]
    launcher: int

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            if self.global_rank in self.targets:
                os.kill(os.getpid(), self.number)
            if self.global_rank == 0 and "launcher" in self.targets:
                os.kill(self.launcher, self.number)
        elif self.global_step > 3:
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class Notes(Callback):
    def on_exception(self, trainer: Trainer, module: Any, error: BaseException) -> None:
        Path(f"stopped{trainer.global_rank}").write_text(str(trainer.global_step))


def stop(number: int, to: tuple[Any, ...], devices: int, **options: Any) -> tuple[Trainer, int, BaseException]:
    model = net()
    model.__class__ = Signalled
    model.number, model.targets, model.launcher = number, to, os.getpid()
    trainer = quiet(
        devices=devices,
        max_epochs=9,
        callbacks=[Notes(), ModelCheckpoint()],
        enable_checkpointing=True,
        seed=0,
        **options,
    )
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        trainer.fit(model, loader(64 * devices, 4))
    (step,) = {int(Path(f"stopped{rank}").read_text()) for rank in range(devices)}
    assert 4 <= step < 9 * 16
    return trainer, step, caught.value


SIGNALS = [
    (signal.SIGTERM, ("launcher",)),
    (signal.SIGINT, (1,)),
    (signal.SIGUSR1, (0,)),
    (signal.SIGUSR1, ("launcher", 1)),
    (signal.SIGTERM, (0, 1)),
]


@pytest.mark.parametrize(("number", "to"), SIGNALS)
def test_two_ranks_stop_at_the_same_step(
    number: signal.Signals, to: tuple[Any, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    _, step, error = stop(number, to, 2)
    if number == signal.SIGINT:
        assert isinstance(error, KeyboardInterrupt)  # which ends a program with 130
    else:
        assert isinstance(error, SystemExit) and error.code == 143
    (path,) = Path().glob("runs/*/version_0/checkpoints/interrupted-*")
    assert path.name == f"interrupted-step={step}" and is_checkpoint(path)
    assert f"stopped by {number.name} after step {step}; resume with ckpt_path=" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_one_process(max_restarts: int) -> None:
    _, step, error = stop(signal.SIGUSR1, (0,), 1, max_restarts=max_restarts)
    assert isinstance(error, SystemExit) and error.code == 143 and step == 4
    resumed, undisturbed = net(), net()
    quiet(max_epochs=1, seed=0).fit(undisturbed, loader(64, 4))
    quiet(max_epochs=1, seed=0).fit(
        resumed, loader(64, 4), ckpt_path=next(Path().glob("runs/*/*/checkpoints/interrupted-step=4"))
    )
    assert equal(weights(resumed), weights(undisturbed))


def test_a_program_that_uses_sigusr1_itself_keeps_it() -> None:
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        model = net()
        model.__class__ = Signalled
        model.number, model.targets, model.launcher = signal.SIGUSR1, (0,), 0
        quiet().fit(model, loader(32, 4))
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert heard == [1]


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Slurm's command, as far as its interface goes: notes its arguments."""
    file = tmp_path / "bin" / "scontrol"
    file.parent.mkdir()
    file.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n[ "$2" = 42 ] || {{ echo "slurm_requeue error: Invalid job id '
        'specified" >&2; exit 1; }\n'
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    return tmp_path / "said"


@pytest.mark.parametrize("devices", [1, 2])
def test_slurms_warning_puts_the_job_back_into_the_queue_once(
    scontrol: Path, monkeypatch: pytest.MonkeyPatch, devices: int, capfd: Any
) -> None:
    for name, value in {"SLURM_JOB_ID": "42", "LOCKSTEP_REQUEUE": "1", "LOCKSTEP_LAUNCHER": "none"}.items():
        monkeypatch.setenv(name, value)
    *_, error = stop(signal.SIGUSR1, (devices - 1,), devices)
    assert isinstance(error, SystemExit) and error.code == 143
    assert scontrol.read_text() == "requeue 42\n"
    (path,) = Path().glob("runs/*/version_0/checkpoints/interrupted-*")
    assert is_checkpoint(path) and "job 42 was requeued" in capfd.readouterr().err


def test_requeuing_is_asked_for_and_what_slurm_refuses_is_said(scontrol: Path) -> None:
    assert (
        slurm.requeue({}) is slurm.requeue({"SLURM_JOB_ID": "42"}) is slurm.requeue({"LOCKSTEP_REQUEUE": "1"}) is None
    )
    assert not scontrol.exists()
    refused = slurm.requeue({"SLURM_JOB_ID": "43", "LOCKSTEP_REQUEUE": "1"})
    assert refused == "job 43 could not be requeued: slurm_requeue error: Invalid job id specified"


def test_without_slurms_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "job 42 could not be requeued: " in (slurm.requeue({"SLURM_JOB_ID": "42", "LOCKSTEP_REQUEUE": "1"}) or "")
