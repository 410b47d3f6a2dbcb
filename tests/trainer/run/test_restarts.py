"""Ranks that die are started again from the newest checkpoint, and the caller sees what an undisturbed run gives."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import RankFailure, Trainer
from lockstep.callbacks import CSVLogger, ModelCheckpoint
from lockstep.strategies.launch import fault_injection
from lockstep.trainer.cli.main import main
from tests.strategies.launch.programs import another_server
from tests.trainer.toy import Net, equal, loader, net, quiet, weights

pytestmark = pytest.mark.ranks

KILLS = (
    "rank={rank},step=3,point=backward,action=sigkill,file=count;"
    "rank={rank},step=6,point=callback,action=sigkill,file=count"
)


def fit(strategy: str, devices: int, **options: Any) -> tuple[Net, Trainer]:
    model = net(dropout=0.3)
    trainer = Trainer(
        **{
            "strategy": strategy,
            "devices": devices,
            "max_epochs": 2,
            "seed": 0,
            "enable_progress_bar": False,
            "log_every_n_steps": 1,
            "logger": CSVLogger(),
            "callbacks": ModelCheckpoint(every_n_train_steps=2),
        }
        | options
    )
    trainer.fit(model, loader(20 * devices, 4, shuffle=True), loader(8, 4))
    return model, trainer


@pytest.mark.parametrize(("strategy", "devices", "rank"), [("single", 1, 0), ("ddp", 2, 1)])
def test_what_the_caller_has_is_as_after_an_undisturbed_fit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], strategy: str, devices: int, rank: int
) -> None:
    undisturbed, one = fit(strategy, devices)
    monkeypatch.setenv(fault_injection.VARIABLE, KILLS.format(rank=rank))
    model, other = fit(strategy, devices, max_restarts=3)
    lines = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    newest = Path("runs/Net/version_1/checkpoints").absolute()
    assert lines == [
        f"rank {rank} was killed by SIGKILL (step 3, in training step): restart 1 of 3 from {newest}/epoch=0-step=2",
        f"rank {rank} was killed by SIGKILL (step 6, in callbacks): restart 2 of 3 from {newest}/epoch=0-step=4",
    ]
    assert equal(weights(model), weights(undisturbed)) and model.trainer is other
    assert one.callback_metrics == other.callback_metrics and one._run.progress == other._run.progress
    assert other.checkpoint_callback.best_model_path == one.checkpoint_callback.best_model_path.replace(
        "version_0", "version_1"
    )
    assert Path("runs/Net/version_1/metrics.csv").read_text() == Path("runs/Net/version_0/metrics.csv").read_text()
    summary = json.loads(Path("runs/Net/version_1/summary.json").read_text())
    assert [reason.partition(";")[0] for reason in summary.pop("earlier_exits")] == [
        f"failed: RankFailure: rank {rank} was killed by SIGKILL (step {step}, in {phase})"
        for step, phase in ((3, "training step"), (6, "callbacks"))
    ], "the cause, not what its end did to the others"
    assert {
        name: summary[name] for name in ("exit", "steps", "samples", "restarts", "computed_steps", "useful_step_share")
    } == {
        "exit": "finished",
        "steps": 10,
        "samples": 40 * devices,
        "restarts": 2,
        "computed_steps": 13,  # steps 3, 5 and 6 were recomputed, the first without its end
        "useful_step_share": round(10 / 13, 6),
    }
    assert other.log_dir == "runs/Net/version_1" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_validation_that_comes_after_the_checkpoint_of_its_step_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit("single", 1, val_check_interval=2)
    monkeypatch.setenv(fault_injection.VARIABLE, "step=4,point=next_batch,action=sigkill,file=count")
    fit("single", 1, val_check_interval=2, max_restarts=1)
    one, other = (Path(f"runs/Net/version_{i}/metrics.csv").read_text() for i in range(2))
    assert one == other and len(one.splitlines()) > 10


def test_without_a_checkpoint_it_begins_again_and_an_earlier_runs_are_not_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"callbacks": ModelCheckpoint(dirpath="kept", every_n_train_steps=4)}
    undisturbed, _ = fit("single", 1, **options)
    assert list(Path("kept").iterdir())
    options = {"callbacks": ModelCheckpoint(dirpath="kept", every_n_train_steps=4)}
    monkeypatch.setenv(fault_injection.VARIABLE, "step=3,point=forward,action=sigkill,file=count")
    model, _ = fit("single", 1, max_restarts=1, **options)
    assert "restart 1 of 1 from the beginning" in capfd.readouterr().err
    assert equal(weights(model), weights(undisturbed))


@pytest.mark.parametrize("rank", [0, 1])
def test_without_restarts_the_summary_names_the_rank_that_died(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, f"rank={rank},step=3,point=backward,action=sigkill")
    with pytest.raises(RankFailure) as caught:
        fit("ddp", 2)
    assert not getattr(caught.value, "__notes__", [])
    summary = json.loads(Path("runs/Net/version_0/summary.json").read_text())
    assert summary["exit"] == (
        f"failed: RankFailure: rank {rank} was killed by SIGKILL (step 3, in training step); "
        "if you did not send it, this was probably the kernel's out-of-memory killer"
    )


def test_the_same_failure_at_the_same_step_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, "rank=1,step=3,point=forward,action=raise,times=9,file=count")
    with pytest.raises(RuntimeError, match="planned by LOCKSTEP_FAULTS at forward of step 3") as caught:
        fit("ddp", 2, max_restarts=5)
    assert caught.value.__notes__ == [
        "the run was not restarted: the same failure happened twice at step 3, so it would happen again (restart 1 of "
        "5)"
    ]
    assert Path("count").read_text() == "0\n0\n"
    assert "planned by LOCKSTEP_FAULTS" in json.loads(Path("runs/Net/version_0/summary.json").read_text())["exit"]


def test_when_all_restarts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, KILLS.format(rank=0))
    model, trainer = net(), quiet(max_restarts=1, max_epochs=2)
    before = weights(model)
    with pytest.raises(RankFailure, match="rank 0 was killed by SIGKILL") as caught:
        trainer.fit(model, loader(40, 4))
    assert caught.value.step == 6
    assert caught.value.__notes__ == ["the run was not restarted: all of max_restarts=1 were used"]
    assert equal(weights(model), before) and trainer.global_step == 0 and trainer.log_dir is None


class Misconfigured(Net):
    def configure_optimizers(self) -> Any:
        with open("tried", "a") as file:
            file.write("x")
        return super().configure_optimizers() if os.environ.get("FINE") else "AdamW"


def test_what_is_wrong_before_the_first_step_is_not_tried_again() -> None:
    with pytest.raises((TypeError, ValueError), match="configure_optimizers") as caught:
        quiet(max_restarts=5).fit(Misconfigured(), loader(16))
    assert Path("tried").read_text() == "x" and not hasattr(caught.value, "__notes__")


def test_a_process_that_dies_before_the_first_step_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class DiesEarly(Net):
        def setup(self, stage: str) -> None:
            if not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = quiet(max_restarts=1)
    trainer.fit(DiesEarly(), loader(16))
    assert trainer.global_step == 2


class LosesItsServer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2 and not Path("lost").exists():
            Path("lost").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(10)
        return super().training_step(batch, batch_idx)


@pytest.mark.long
def test_the_process_that_starts_the_ranks_dies(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet(max_restarts=1)
    with another_server(monkeypatch):
        trainer.fit(LosesItsServer(), loader(32))
    assert trainer.global_step == 4
    assert (
        "The process that starts the ranks was killed by SIGKILL, and its ranks ended with it: see what it printed"
        in capfd.readouterr().err
    )


def test_a_stop_that_was_asked_for_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, "step=3,point=forward,action=sigterm,times=9,file=count")
    with pytest.raises(SystemExit) as caught:
        fit("ddp", 2, max_restarts=5)
    assert caught.value.code == 143 and Path("count").read_text().count("0") == 2


def test_under_a_launcher_that_restarts_by_itself_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="max_restarts=2 is about ranks that Lockstep starts, but torchrun started these; leave it out"
    ):
        quiet(max_restarts=2).fit(net(), loader(16))


@pytest.mark.long
def test_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, repo_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, "rank=1,step=3,point=forward,action=sigkill,file=count")
    keys = [
        "strategy=ddp",
        "devices=2",
        "trainer.max_steps=6",
        "trainer.max_restarts=1",
        "trainer.enable_progress_bar=false",
        "trainer.logger=false",
    ]
    assert main(["fit", str(repo_root / "examples/digits.yaml"), *keys]) == 0
    output, errors = capfd.readouterr()
    assert "rank 1 was killed by SIGKILL (step 3, in training step): restart 1 of 1 from the beginning" in errors
    assert "6 steps" in output


def test_wrong_numbers_are_refused() -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(
            ValueError, match=f"max_restarts must be a whole number of at least 0, but max_restarts={wrong!r}"
        ):
            Trainer(max_epochs=1, max_restarts=wrong)  # type: ignore[arg-type]


def test_the_random_streams_of_the_caller_are_those_of_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed, what the caller has drawn so far decides, and a restart from the beginning draws the same
    again."""
    runs = []
    for plan in ("", "step=2,point=forward,action=sigkill,file=count"):
        monkeypatch.setenv(fault_injection.VARIABLE, plan)
        model = net(dropout=0.5)
        torch.manual_seed(7)
        quiet(max_restarts=1).fit(model, loader(40, 8, shuffle=True))
        runs.append(weights(model))
    assert equal(*runs)


class SetBack(Net):
    """The wall clock of every rank is set back by an hour once training has begun."""

    def on_train_start(self) -> None:
        real = time.time_ns
        time.time_ns = lambda: real() - 3600 * 10**9  # type: ignore[assignment]


def test_a_clock_that_is_set_back_does_not_hide_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, "rank=0,step=5,point=backward,action=sigkill,file=count")
    quiet(max_restarts=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(every_n_train_steps=2)]).fit(
        SetBack(), loader(32, 4)
    )
    assert "restart 1 of 1 from" in (shown := capfd.readouterr().err) and "step=4" in shown
