"""Ranks that stand still, whatever holds them, are found from outside, named with their stacks and ended; slow ones are
left alone."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lockstep import Trainer
from lockstep.strategies.launch import environment, fault_injection, process_group, sidecar, watchdog
from lockstep.strategies.launch.failure import RankFailure, RankTraceback
from lockstep.strategies.launch.launcher import launch
from lockstep.strategies.launch.phase import set_phase
from tests.trainer.toy import Net, data, loader, net, quiet

pytestmark = pytest.mark.ranks

LIMIT_S = 1.5


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watchdog.VARIABLE, str(LIMIT_S))


def hang(trainer: Trainer, train: Any) -> tuple[RankFailure, str]:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        trainer.fit(net(), train)
    assert time.monotonic() - start < 15
    assert isinstance(caught.value.__cause__, RankTraceback)
    text = str(caught.value.__cause__)
    assert len(text.splitlines()) <= 35
    return caught.value, text


@pytest.mark.parametrize(
    ("action", "point", "state"),
    [
        ("sleep", "forward", r"waiting( \(in \w+\))?"),
        ("hold_gil", "next_batch", r"waiting( \(in \w+\))?"),
        ("sigstop", "forward", r"stopped by a signal \(SIGSTOP\)"),
    ],
)
def test_a_rank_that_hangs_is_named_with_step_phase_and_stacks(
    monkeypatch: pytest.MonkeyPatch, action: str, point: str, state: str
) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, f"rank=1,step=3,point={point},action={action}")
    error, text = hang(quiet(strategy="ddp", devices=2), loader(64))
    phase = {"forward": "training step", "next_batch": "loading data"}[point]
    assert (error.rank, error.step, error.phase) == (1, 3, phase)
    assert re.match(
        rf"rank 1 hangs \(step 3, in {phase}\): no heartbeat for 1.5 s, and it is {state}; the run was ended",
        str(error),
    ), error
    first, _, beside = text.partition("beside it rank 0")
    assert "fault_injection.py" in first if action != "sigstop" else "stopped by a signal" in first
    assert "step_agreement.py" in beside or "_engine_run_backward" in beside, "what the other rank waits in"


@pytest.mark.long
def test_a_run_that_hung_is_started_again(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, "rank=0,step=3,point=forward,action=sigstop,file=count")
    trainer = quiet(strategy="ddp", devices=2, max_restarts=1)
    trainer.fit(net(), loader(64))
    assert trainer.global_step == 4
    assert (
        "rank 0 hangs (step 3, in training step): no heartbeat for 1.5 s, and it is stopped by a signal (SIGSTOP): "
        "restart 1 of 1" in capfd.readouterr().err
    )


class Stuck(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index >= 32:
            time.sleep(600)
        return data(64)[index]


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_that_blocks(workers: int) -> None:
    error, text = hang(quiet(devices=2, max_steps=8), DataLoader(Stuck(), batch_size=4, num_workers=workers))
    assert error.phase == "loading data"
    assert "in __getitem__" in text, "also from a worker of the loader"


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        "the rendezvous",
        *(pytest.param(hook, marks=pytest.mark.slow) for hook in ("configure_model", "setup", "train_dataloader")),
    ],
)
def test_a_rank_that_hangs_while_it_is_set_up(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    model = net()
    if where == "the rendezvous":
        monkeypatch.setenv(fault_injection.VARIABLE, "rank=1,point=setup,action=sleep")
    else:
        model.__class__ = type(
            "Blocks", (Net,), {where: lambda self, stage=None: time.sleep(600) if self.global_rank == 1 else loader(64)}
        )
    with pytest.raises(RankFailure, match=r"rank 1 hangs \(in setting up\): no heartbeat for 1.5 s") as caught:
        quiet(strategy="ddp", devices=2).fit(model, None if where == "train_dataloader" else loader(64))
    assert (caught.value.rank, caught.value.step, caught.value.phase) == (1, None, "setting up")
    text, _, beside = str(caught.value.__cause__).partition("beside it rank 0, in setting up")
    assert (
        "fault_injection.py" if where == "the rendezvous" else "test_watchdog.py"
    ) in text and "torch/distributed" in beside, "the other rank waits"


class Prepares(Net):
    """Takes less than the limit to prepare data and again to set up, and more in all."""

    def prepare_data(self) -> None:
        time.sleep(0.75 * LIMIT_S)

    def setup(self, stage: str) -> None:
        time.sleep(0.6 * LIMIT_S)


@pytest.mark.long
def test_the_end_of_prepare_data_is_a_sign() -> None:
    quiet(strategy="ddp", devices=2).fit(Prepares(), loader(64))


@pytest.mark.long
def test_a_rank_whose_import_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocks = "import os, time\ntime.sleep(600 if os.environ.get('RANK') == '1' else 0)\n"
    waits = (
        "from lockstep.strategies.launch import environment, process_group\n"
        "def work():\n    process_group.init_process_group(environment.detect(), 'gloo')\n"
    )
    (tmp_path / "blocking.py").write_text(blocks + waits)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankFailure, match=r"rank 1 hangs \(in starting\): no heartbeat") as caught:
        launch(importlib.import_module("blocking").work, (), 2)
    assert "blocking.py" in str(caught.value.__cause__)


QUICK_S = 1.2


def works_without_a_sign(mark: Path) -> int:
    """While ranks are set up one computes, then it prepares data; in steps it names them, the other waits for it. At
    the end both may take any time."""
    if os.environ["RANK"] == "0":
        end = time.monotonic() + 1.5 * QUICK_S
        while time.monotonic() < end:
            pass
        prepare_data()
        for i in range(12):
            time.sleep(QUICK_S / 4)
            set_phase(1, f"validation batch {i}") if i < 6 else fault_injection.fault("save.write")
        mark.touch()
    else:
        while not mark.exists():
            time.sleep(0.05)
        set_phase(1, "waiting")
    set_phase(None, "end")
    time.sleep(2 * QUICK_S)
    return 7


def prepare_data() -> None:
    time.sleep(1.8 * QUICK_S)  # the third look, at 3 x QUICK_S, is within it


@pytest.mark.long
def test_no_alarm_while_a_rank_gives_signs_or_has_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(watchdog.VARIABLE, str(QUICK_S))
    assert launch(works_without_a_sign, (tmp_path / "mark",), 2) == 7


@pytest.mark.long
def test_zero_is_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watchdog.VARIABLE, "0")
    monkeypatch.setenv(fault_injection.VARIABLE, f"rank=1,step=3,point=forward,action=sleep,seconds={3 * LIMIT_S}")
    quiet(devices=2).fit(net(), loader(64))


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_the_limit_is_checked(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(watchdog.VARIABLE, text)
    with pytest.raises(
        ValueError, match=f"LOCKSTEP_WATCHDOG_S must be a number of seconds, or 0 for no watchdog, but it is '{text}'"
    ):
        Trainer(max_epochs=1)


def test_a_sign_costs_less_than_a_microsecond() -> None:
    assert launch(cost_of_a_sign, (), 1) < 1.5e-6  # measured at 0.5; the machine may be busy


def cost_of_a_sign() -> float:
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for i in range(1000):
            set_phase(i, "training step")
        best = min(best, (time.perf_counter() - start) / 1000)
    return best


SCRIPT = """
from tests.trainer.toy import loader, net, quiet
quiet(strategy="auto").fit(net(), loader(64))
"""


@pytest.mark.parametrize("parent", [0, 1 << 30])
def test_a_rank_whose_parent_is_outside_its_container_has_a_watchdog(
    parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(os, "getppid", lambda: parent)
    end = sidecar.guard(0)
    assert list(sidecar.private_folder().glob("*-0.heartbeat"))
    end()


@pytest.mark.slow
def test_beside_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch, repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environ = {
        **os.environ,
        "PYTHONPATH": str(repo_root),
        fault_injection.VARIABLE: "rank=1,step=3,point=forward,action=hold_gil",
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert re.search(
        r"^rank 1 hangs \(step 3, in training step\): no heartbeat for 1.5 s", done.stderr, re.MULTILINE
    ), done.stderr
    assert "fault_injection.py" in done.stderr and "rank 0 hangs" not in done.stderr


WAITS_THEN_BLOCKS = """
import os, time
from torch.utils.data import DataLoader
from lockstep.callbacks import Callback
from lockstep.strategies.launch.fault_injection import fault
from tests.strategies.launch.test_watchdog import LIMIT_S, Stuck
from tests.trainer.toy import data, loader, net, quiet

class Works(Callback):
    def on_train_batch_end(self, trainer, *args):
        for i in range(12 if os.environ["RANK"] == "1" and trainer.global_step == 2 else 0):
            time.sleep(LIMIT_S / 4)
            fault("save.write")

dataset = Stuck() if os.environ["RANK"] == "1" else data(64)
quiet(strategy="ddp", callbacks=[Works()]).fit(net(), DataLoader(dataset, batch_size=4, num_workers=1))
"""


@pytest.mark.slow
def test_under_torchrun_a_rank_waits_for_one_that_works_and_workers_end_with_one_that_hangs(
    repo_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WAITS_THEN_BLOCKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(repo_root)}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode != 0, "and the pipes are closed: no worker holds them"
    assert re.search(r"^rank 1 hangs \(step 4, in loading data\): no heartbeat for 1.5 s", done.stderr, re.MULTILINE), (
        done.stderr
    )
    assert "in __getitem__" in done.stderr and "rank 0 hangs" not in done.stderr


def wait_without_a_pause() -> None:
    """Rank 0 waits for rank 1, which sleeps, and computes meanwhile, as NCCL does."""
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(world)
    if world.rank == 1:
        time.sleep(60)
    threading.Thread(target=lambda: [None for _ in itertools.count()], daemon=True).start()
    dist.barrier()


@pytest.mark.long
def test_a_rank_that_waits_for_others_without_a_pause_does_not_compute() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 hangs") as caught:
        launch(wait_without_a_pause, (), 2)
    assert time.monotonic() - start < 30 and "beside it rank 0" in str(caught.value.__cause__)


def test_boards_lie_where_no_other_user_can_write() -> None:
    folder = sidecar.private_folder()
    status = folder.stat()
    assert status.st_uid == os.getuid() and not status.st_mode & 0o077
    folder.chmod(0o755)
    try:
        with pytest.raises(RuntimeError, match=f"{folder}, which must be a folder that only this user may enter"):
            sidecar.private_folder()
    finally:
        folder.chmod(0o700)


def test_a_board_that_others_may_write_is_nobodys(tmp_path: Path) -> None:
    """Its process id would be believed, and the process killed."""
    file = tmp_path / "job-1.heartbeat"
    file.write_bytes(watchdog.FORMAT.pack(0, 3, time.monotonic_ns(), b"training step"))
    holds = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, os, struct, sys, time; file = open(sys.argv[1], 'r+b', buffering=0); "
            "fcntl.lockf(file, fcntl.LOCK_EX); file.write(struct.pack('q', os.getpid())); print(flush=True); "
            "time.sleep(60)",
            file,
        ],
        stdout=subprocess.PIPE,
    )
    with holds:
        assert holds.stdout is not None
        holds.stdout.readline()
        file.chmod(0o666)
        assert watchdog._living(tmp_path, "job") == {}
        file.chmod(0o600)
        assert watchdog._living(tmp_path, "job") == {1: file}
        holds.kill()


def stop_the_server(folder: Path) -> str:
    server = os.getppid()
    if os.environ["RANK"] == "0":
        os.kill(server, signal.SIGSTOP)
    return "done"


@pytest.mark.long
def test_a_server_that_is_stopped_is_continued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert launch(stop_the_server, (tmp_path,), 2) == "done"
    assert time.monotonic() - start < 30
    assert "was stopped by a signal (SIGSTOP), and is continued" in capfd.readouterr().err
