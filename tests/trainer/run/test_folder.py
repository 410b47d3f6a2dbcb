"""A run folder is made once, written by one, and says what happened in it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.callbacks import Callback, CSVLogger, ModelCheckpoint
from lockstep.trainer.run.folder import RunFolder, read_summary
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.ranks

HEAD = """
import os, sys, time
from pathlib import Path
from lockstep.callbacks import Callback, CSVLogger, ModelCheckpoint
from tests.trainer.toy import Net, loader, net, quiet
"""


def start(repo_root: Path, code: str, name: str = "program.py") -> subprocess.Popen:
    Path(name).write_text(HEAD + textwrap.dedent(code))
    environ = {**os.environ, "PYTHONPATH": str(repo_root)}
    return subprocess.Popen(
        [sys.executable, name], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def summary(folder: str = "runs/Net/version_0") -> dict[str, Any]:
    return json.loads(Path(folder, "summary.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("number", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_runs_that_start_at_once_have_folders_of_their_own(repo_root: Path, number: int) -> None:
    """Real processes, forked from one that has imported torch, as so many imports would take minutes."""
    process = start(
        repo_root,
        f"""
        net().configure_optimizers()  # imports the compiler, two seconds in each child otherwise
        begin = time.time() + 1.0
        children = []
        for i in range({number}):
            pid = os.fork()
            if not pid:
                try:
                    trainer = quiet(logger=CSVLogger(), max_steps=1)
                    time.sleep(max(0, begin - time.time()))
                    trainer.fit(net(), loader(8))
                    Path(f"folder{{i}}").write_text(trainer.log_dir)
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        """,
    )
    with process:
        try:
            _, err = process.communicate(timeout=100)
        finally:
            process.kill()
    folders = [path.read_text() for path in Path().glob("folder*")]
    assert len(folders) == len(set(folders)) == number, err
    assert {path.name for path in Path("runs/Net").iterdir()} == {f"version_{i}" for i in range(number)}


@pytest.fixture
def writer(repo_root: Path) -> Any:
    """A run in version_0 that stands still in its first step, with a loader worker of its own."""
    process = start(
        repo_root,
        """
        class Waits(Net):
            def training_step(self, batch, batch_idx):
                Path("running").touch()
                while not Path("go").exists():
                    time.sleep(0.02)
                return super().training_step(batch, batch_idx)
        Waits.__name__ = "Net"
        quiet(logger=CSVLogger(), callbacks=ModelCheckpoint(every_n_train_steps=1),
            enable_checkpointing=True).fit(Waits(), loader(16, num_workers=1))
        """,
    )
    end = time.monotonic() + 60
    while not Path("running").exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


def second() -> Trainer:
    return quiet(logger=CSVLogger(version=0), callbacks=ModelCheckpoint(), enable_checkpointing=True)


@pytest.mark.long
def test_a_second_writer_is_refused_with_the_name_of_the_first(writer: subprocess.Popen) -> None:
    for trainer in (second(), quiet(logger=CSVLogger(version=0), devices=2)):
        with pytest.raises(
            ValueError,
            match=rf"the run folder runs/Net/version_0 is being written by another run \(process {writer.pid}\)",
        ):
            trainer.fit(net(), loader(16))
    third = quiet(logger=CSVLogger())
    third.fit(net(), loader(16))
    assert third.log_dir == "runs/Net/version_1", "a run of its own is fine"
    Path("go").touch()
    assert writer.wait(60) == 0
    assert summary()["exit"] == "finished" and summary()["steps"] == 2
    second().fit(net(), loader(16))


@pytest.mark.long
def test_the_lock_of_a_process_that_died_is_nobodys(writer: subprocess.Popen) -> None:
    folder = Path("runs/Net/version_0")
    assert read_summary(folder)["exit"] == summary()["exit"] == "running"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert (summary()["exit"], read_summary(folder)["exit"]) == ("running", "killed")
    trainer = second()
    with pytest.raises(ArithmeticError):  # which does not come as far as to begin an account of its own
        trainer.fit(FailsEarly(), loader(16), ckpt_path="auto")
    assert summary()["exit"] == "killed"
    second().fit(net(), loader(16), ckpt_path="auto")
    assert (summary()["exit"], summary()["restarts"], summary()["earlier_exits"]) == ("finished", 1, ["killed"])


class FailsEarly(Net):
    def configure_optimizers(self) -> Any:
        raise ArithmeticError


FailsEarly.__name__ = "Net"


def test_who_reads_the_account_of_a_run_within_it_does_not_lose_its_lock() -> None:
    seen: list[Any] = []

    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(read_summary(Path(self.trainer.log_dir))["exit"])
            pid = os.fork()  # another process, without the import of torch
            if not pid:
                try:
                    RunFolder(Path(self.trainer.log_dir))
                except ValueError:
                    os._exit(3)
                os._exit(4)
            seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return super().training_step(batch, batch_idx)

    quiet(logger=CSVLogger(), max_steps=1).fit(Reads(), loader(8))
    assert seen == ["running", 3]


def test_what_is_in_a_run_folder() -> None:
    trainer = quiet(
        logger=CSVLogger(), max_epochs=2, gradient_clip_val=1.0, callbacks=ModelCheckpoint(), enable_checkpointing=True
    )
    trainer.fit(net(width=12), loader(20))
    folder = Path("runs/Net/version_0")
    config = json.loads((folder / "config.yaml").read_text())
    assert config["trainer"]["gradient_clip_val"] == 1.0 and config["trainer"]["callbacks"] == [
        "lockstep.callbacks.model_checkpoint.ModelCheckpoint"
    ]
    assert config["hyperparameters"]["width"] == 12 and config["module"] == "tests.trainer.toy.Net"
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["torch"].startswith("2.") and versions["python"].count(".") == 2 and "lockstep-trainer" in versions
    assert summary() == {
        "exit": "finished",
        "steps": 6,
        "epochs": 2,
        "samples": 40,
        "first_step": 0,
        "restarts": 0,
        "earlier_exits": [],
        "computed_steps": 6,
        "useful_step_share": 1.0,
        "world_size": 1,
        "strategy": "SingleDevice",
    }
    trainer.max_epochs = 3
    trainer.fit(net(width=12), loader(20))
    assert (summary()["steps"], summary()["restarts"], summary()["computed_steps"]) == (9, 0, 9)


def test_where_nothing_is_to_be_written_nothing_is() -> None:
    quiet().fit(net(), loader(16))
    Trainer(fast_dev_run=True, enable_progress_bar=False).fit(net(), loader(16))
    assert not Path("runs").exists() or not list(Path("runs").glob("*/*/*"))


class Fails(Net):
    error: BaseException

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ArithmeticError("two\nlines"), "failed: ArithmeticError: two"),
        (KeyboardInterrupt(), "stopped by SIGINT"),
        (SystemExit(143), "stopped with exit code 143"),
    ],
)
def test_the_reason_of_the_end(error: BaseException, reason: str) -> None:
    model = Fails()
    model.error = error
    with pytest.raises(type(error)):
        quiet(logger=CSVLogger()).fit(model, loader(32))
    assert (summary("runs/Fails/version_0")["exit"], summary("runs/Fails/version_0")["steps"]) == (reason, 1)


def test_a_folder_that_is_deleted_during_the_run_comes_back_with_its_lock() -> None:
    class Deletes(Callback):
        def __init__(self, how: Any) -> None:
            self.how = how

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.how(Path(trainer.log_dir))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            with pytest.raises(ValueError, match="is being written by another run"):
                other_process(Path(trainer.log_dir))

    for how in (shutil.rmtree, lambda folder: folder.rename("moved")):
        trainer = quiet(enable_checkpointing=True, callbacks=[Deletes(how), ModelCheckpoint(every_n_train_steps=2)])
        with pytest.warns(RuntimeWarning, match="was deleted or moved while the run wrote to it, and is made again"):
            trainer.fit(net(), loader(32, 4))
        account = read_summary(Path(trainer.log_dir or ""))
        assert (account["exit"], account["steps"], account["computed_steps"]) == ("finished", 8, 8)


@pytest.mark.parametrize("by_a_run", [False, True])
def test_a_folder_that_cannot_come_back_is_named(by_a_run: bool) -> None:
    held = Path("held")

    class Replaces(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            folder = Path(trainer.log_dir)
            if batch_idx == 3 and not by_a_run:
                shutil.rmtree(folder)
                folder.write_text("")
            elif batch_idx == 3:
                folder.rename("moved")
                assert other.stdin is not None
                other.stdin.write(b"x")
                other.stdin.flush()
                while not held.exists():
                    time.sleep(0.01)

    code = (
        "import sys; from pathlib import Path; from lockstep.trainer.run.folder import RunFolder; sys.stdin.read(1); "
        "folder = Path('runs/Net/version_0'); folder.mkdir(parents=True); hold = RunFolder(folder); "
        "Path('held').touch(); sys.stdin.read(1)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    other = subprocess.Popen([sys.executable, "-c", code], env=environ, stdin=subprocess.PIPE)
    trainer = quiet(enable_checkpointing=True, callbacks=[Replaces(), ModelCheckpoint(every_n_train_steps=2)])
    message = "is being written by another run" if by_a_run else r"cannot be made again \(File exists\); begin again"
    try:
        with pytest.raises(ValueError, match=message):
            trainer.fit(net(), loader(32, 4))
    finally:
        other.communicate(timeout=100)
    assert not Path("runs/Net/version_0/summary.json").exists(), "it is the other run's"


def test_a_disk_that_is_full_from_the_beginning_does_not_end_the_process(tmp_path: Path) -> None:
    """Memory shared with a file that has no block of its own ends it by SIGBUS as it is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        folder = RunFolder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder.executed[0] += 1
    assert list(folder.executed) == [1, os.getpid()]
    folder._let_go()


def other_process(folder: Path) -> None:
    """Raises what another process that wants to write in the folder gets."""
    code = (
        "import sys; from pathlib import Path; from lockstep.trainer.run.folder import RunFolder; "
        "RunFolder(Path(sys.argv[1]))"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code, folder], env=environ, capture_output=True, text=True, timeout=100
    )
    if done.returncode:
        raise ValueError(done.stderr)
