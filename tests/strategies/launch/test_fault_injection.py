"""Each fault happens where, when and as often as its plan says; what cannot be read is refused in a sentence."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import RankFailure, Trainer
from lockstep.strategies.launch import fault_injection
from lockstep.strategies.launch.fault_injection import Fault, fault, parse
from tests.trainer.toy import loader, net, quiet


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setenv(fault_injection.VARIABLE, text)


def test_plans_as_text_and_as_json() -> None:
    text = "rank=1,step=3,point=backward,action=sigkill; point=save.write,action=ENOSPC,times=2"
    plan = [Fault("backward", "sigkill", rank=1, step=3), Fault("save.write", "enospc", times=2)]
    assert parse({fault_injection.VARIABLE: text}) == plan
    as_json = [
        {"rank": 1, "step": 3, "point": "backward", "action": "sigkill"},
        {"point": "save.write", "action": "enospc", "times": 2},
    ]
    assert parse({fault_injection.VARIABLE: json.dumps(as_json)}) == plan
    assert parse({}) == parse({fault_injection.VARIABLE: " "}) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "correct it or unset it"),
        ("point=lunch,action=raise", "point='lunch' is not one of setup, next_batch, forward"),
        ("point=forward", "action='' is not one of raise"),
        ("point=forward,action=raise,rank=-1", "rank=-1 must be at least 0"),
        ("point=forward,action=raise,rank=two", "invalid literal"),
        ("point=forward,action=raise,node=1", "it has no node, only point"),
        ("point=backward,action=nan", "action=nan needs point=forward"),
        ("point=forward,action=raise,file=/no/such/folder/x", "is in no folder"),
        ("[1]", "correct it or unset it"),
        ("{", "correct it or unset it"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_starts(planned: Any, text: str, reason: str) -> None:
    planned(text)
    with pytest.raises(
        ValueError,
        match="LOCKSTEP_FAULTS must hold faults such as rank=1,step=3,point=backward,action=sigkill, but it is",
    ) as caught:
        Trainer(max_epochs=1, devices=2)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_plan_a_point_costs_next_to_nothing() -> None:
    assert fault_injection.plan is None
    start = time.perf_counter()
    for _ in range(100_000):
        fault("save.write")
    assert time.perf_counter() - start < 0.1  # a microsecond each, on any machine


@pytest.mark.parametrize(
    "point", ["next_batch", "forward", "backward", "before_step", "after_step", "callback", "teardown"]
)
def test_each_point_of_a_run_is_reached_in_its_step(planned: Any, point: str) -> None:
    step = 3 if point != "teardown" else 7
    planned(f"rank=0,step={step},point={point},action=raise")
    trainer, model = quiet(), net()
    with pytest.raises(RuntimeError, match=f"^planned by LOCKSTEP_FAULTS at {point} of step {step}$"):
        trainer.fit(model, loader(50))
    assert trainer.global_step == step
    planned("")
    quiet().fit(net(), loader(50))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "point"),
    [("ddp", "backward"), ("fsdp", "collective"), ("pipeline", "backward"), ("tensor", "collective")],
)
def test_points_within_a_step_of_two_ranks(planned: Any, strategy: str, point: str) -> None:
    planned(f"rank=1,step=2,point={point},action=sigkill")
    with pytest.raises(RankFailure, match=r"rank 1 was killed by SIGKILL \(step 2, in training step\)"):
        quiet(strategy=strategy, devices=2).fit(net(), loader(50))


def test_another_rank_is_spared(planned: Any) -> None:
    planned("rank=1,point=forward,action=raise")
    quiet().fit(net(), loader(16))


@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO), ("erofs", errno.EROFS)])
def test_errors_of_the_file_system(planned: Any, action: str, number: int) -> None:
    planned(f"step=1,point=next_batch,action={action}")
    with pytest.raises(OSError, match="planned by LOCKSTEP_FAULTS at next_batch of step 1") as caught:
        quiet().fit(net(), loader(16))
    assert caught.value.errno == number


def test_a_loss_that_is_nan(planned: Any) -> None:
    planned("step=1,point=forward,action=nan")
    with pytest.raises(FloatingPointError, match="loss of rank 0 .*step 1"):
        quiet().fit(net(), loader(32))


@pytest.mark.parametrize("action", ["sleep", "hold_gil"])
def test_pauses(planned: Any, action: str) -> None:
    planned(f"step=1,point=forward,action={action},seconds=0.3")
    start = time.monotonic()
    quiet().fit(net(), loader(32))
    assert time.monotonic() - start > 0.3


def in_a_process(fn: Callable[[], Any]) -> int:
    """Fork, which costs no import; return the process id."""
    pid = os.fork()
    if not pid:
        try:
            fn()
        finally:
            os._exit(0)
    return pid


@pytest.mark.ranks
def test_times_are_counted_over_processes_where_a_file_is_given(planned: Any, tmp_path: Path) -> None:
    planned(f"point=backward,action=raise;point=forward,action=raise,times=4,file={tmp_path / 'count'}")

    def reach() -> None:
        fault_injection.load(0)
        for _ in range(3):
            try:
                fault("forward")
                seen = "passed"
            except RuntimeError:
                seen = "fault"
            with open("seen", "a") as file:
                file.write(f"{seen} ")

    for _ in range(2):
        os.waitpid(in_a_process(reach), 0)
    assert Path("seen").read_text().split() == ["fault"] * 4 + ["passed"] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("action", ["sigkill", "sigterm", "sigstop"])
def test_signals(planned: Any, action: str) -> None:
    planned(f"point=forward,action={action}")

    def reach() -> None:
        fault_injection.load(0)
        fault("forward")

    number = getattr(signal, action.upper())
    pid = in_a_process(reach)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if number == signal.SIGSTOP:
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == number
        os.kill(pid, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    else:
        assert os.waitstatus_to_exitcode(status) == -number
