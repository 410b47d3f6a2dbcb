"""Ways to leave a run other than by an exception: none of them ends the program with code 0 as if the work were
done."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from lockstep.strategies.launch.failure import RankFailure
from lockstep.strategies.launch.launcher import launch
from tests.trainer.toy import Net, equal, loader, net, quiet, weights

pytestmark = pytest.mark.faults


class Leaves(Net):
    """Calls `how` in step 2 of the last rank."""

    def how(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1:
            self.how()


def leaves(how: Any) -> Leaves:
    module = net()
    module.__class__ = type("Leaves", (Leaves,), {"how": lambda self: how()})
    return module


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "pipeline"])
def test_sys_exit_with_code_0_within_a_run_is_an_error(strategy: str) -> None:
    codes: tuple[Any, ...] = (0, None, 256) if strategy == "single" else (0,)
    for code in codes:
        with pytest.raises(RuntimeError, match=r"sys\.exit\(.*\) was called on rank .*should_stop"):
            quiet(strategy=strategy, devices=1 if strategy == "single" else 2).fit(
                leaves(lambda code=code: sys.exit(code)), loader(32, 4)
            )


@pytest.mark.parametrize("devices", [1, 2])
def test_other_exits_keep_their_code(devices: int) -> None:
    with pytest.raises(SystemExit) as caught:
        quiet(devices=devices).fit(leaves(lambda: sys.exit(7)), loader(32, 4))
    assert caught.value.code == 7
    with pytest.raises(KeyboardInterrupt):
        quiet(devices=devices).fit(leaves(lambda: exec("raise KeyboardInterrupt")), loader(32, 4))


def test_os_exit_of_a_rank_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 1 exited with code 0 before its work was done"):
        quiet(devices=2).fit(leaves(lambda: os._exit(0)), loader(32, 4))


def leave_alone() -> None:
    if os.environ["RANK"] == "0":
        sys.exit(0)
    time.sleep(60)


def test_a_launched_function_that_exits_with_0_has_not_returned() -> None:
    with pytest.raises(RankFailure, match=r"sys\.exit\(0\) was called on rank 0"):
        launch(leave_alone, (), 2)


def test_teardown_that_fails_after_the_last_step_fails_the_run() -> None:
    class Breaks(Net):
        def teardown(self, stage: str) -> None:
            raise LookupError("teardown")

    for devices in (1, 2):
        with pytest.raises(LookupError, match="teardown"):
            quiet(devices=devices).fit(Breaks(), loader(16, 4))


def fork_that(ends: Any) -> Any:
    def fork() -> None:
        child = os.fork()
        if not child:
            ends()
        os.waitpid(child, 0)

    return fork


def work_in_a_child() -> None:
    child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(0,))
    child.start()
    child.join()


def fail() -> None:
    raise LookupError("in the child")


@pytest.mark.parametrize(
    "how",
    [
        fork_that(lambda: sys.exit(0)),
        fork_that(lambda: sys.exit("a message")),
        fork_that(fail),
        work_in_a_child,
    ],
    ids=["exit code", "message", "exception", "multiprocessing"],
)
def test_a_child_that_a_rank_forks_does_not_answer_for_it(how: Any) -> None:
    trained, undisturbed = leaves(how), net()
    trainer = quiet(devices=2, seed=0, enable_checkpointing=True)
    trainer.fit(trained, loader(32, 4))
    quiet(devices=2, seed=0).fit(undisturbed, loader(32, 4))
    assert equal(weights(trained), weights(undisturbed)) and trainer.global_step == 4
    assert '"exit": "finished"' in (Path(trainer.log_dir or "") / "summary.json").read_text()


@pytest.mark.long
def test_a_child_that_one_process_forks_leaves_the_run_alone() -> None:
    code = """
import os, sys
from tests.trainer.toy import *
class Forks(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            child = os.fork()
            if not child:
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
trainer = quiet(enable_checkpointing=True)
trainer.fit(Forks(), loader(16, 4))
print(trainer.global_step, trainer._run.active)
"""
    import subprocess

    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "4 False\n"), done.stderr


def test_a_program_with_many_open_files_launches_ranks() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [open(os.devnull) for _ in range(1100)]  # noqa: SIM115
    try:
        quiet(devices=2, max_steps=2).fit(net(), loader(16, 4))
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Described(Exception):
    """Writes its text from something else than its arguments."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count

    def __str__(self) -> str:
        return "\n".join(f"line {i}" for i in range(self.count))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_long_message_is_printed_short_and_kept_whole(devices: int) -> None:
    long = "\n".join(f"line {i}" for i in range(5000))
    for raised in (ValueError(long), ValueError("x" * 100_000), KeyError(long), Described(5000)):

        def fail(raised: Exception = raised) -> None:
            raise raised

        with pytest.raises(type(raised)) as caught:
            quiet(devices=devices).fit(leaves(fail), loader(32, 4))
        printed = "".join(traceback.format_exception(caught.value))
        assert len(printed.splitlines()) <= 60 and len(printed) < 20_000, printed
        assert caught.value.full_message == str(raised) if devices == 2 else caught.value.full_message


def test_a_short_message_stays_as_it_is() -> None:
    with pytest.raises(ValueError) as caught:
        quiet(devices=2).fit(leaves(lambda: int("no number")), loader(32, 4))
    assert str(caught.value) == "invalid literal for int() with base 10: 'no number'"
    assert not hasattr(caught.value, "full_message")
