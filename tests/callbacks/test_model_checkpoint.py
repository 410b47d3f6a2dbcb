"""ModelCheckpoint with real checkpoints: when it saves, what it keeps, what a resumed run continues with."""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import Trainer
from lockstep.callbacks import Callback, CSVLogger, TensorBoardLogger
from lockstep.callbacks import model_checkpoint as module
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.strategies.base import Topology
from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.strategies.ddp import DDP
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, is_checkpoint, save
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.ranks


class Run:
    """What ModelCheckpoint uses of a Trainer, and the loop's calls of its hooks; checkpoints and files are real."""

    def __init__(self, callback: ModelCheckpoint, log_dir: Path, resume: str | None = None, start: bool = True) -> None:
        self.callback = callback
        self.log_dir = str(log_dir)
        self.arguments = SimpleNamespace(default_root_dir=str(log_dir.parent), fast_dev_run=False, log_every_n_steps=50)
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self._run = self
        self.measured_at: dict[str, int] = {}
        self.validation_follows = False
        self.progress = SimpleNamespace(batches_seen=0)
        self.global_step = self.current_epoch = 0
        self.is_global_zero = True
        self.sanity_checking = False
        self.num_val_batches: list[int] = [1]
        self.strategy: Any = SimpleNamespace(topology=Topology(), broadcast=lambda value: value, barrier=lambda: None)
        self.print = print
        self.events: list[str] = []
        self.removes = True
        if start:
            self.start(resume)

    def start(self, resume: str | None = None) -> Run:
        self("setup", "fit")
        if resume:
            state = Checkpoint.open(resume).state
            self.global_step = state["progress"]["global_step"]
            self.callback.load_state_dict(state["callback"])
        self("on_fit_start")
        self("on_train_start")
        return self

    def __call__(self, hook: str, *args: Any) -> None:
        getattr(self.callback, hook)(self, None, *args)

    def save_checkpoint(
        self,
        path: str,
        weights_only: bool = False,
        wait: bool = True,
        also: Sequence[str] = (),
        outdated: Sequence[str] = (),
    ) -> None:
        assert wait and not weights_only
        self.events.append(f"save {os.path.basename(path)}")
        tensors = {"model/step": TensorShard.whole(torch.tensor(self.global_step))}
        state = {"progress": {"global_step": self.global_step}, "callback": self.callback.state_dict()}
        s = self.strategy
        save(
            path,
            rank=s.topology.rank,
            world_size=s.topology.world_size,
            tensors=tensors if s.topology.rank == 0 else {},
            state=state,
            barrier=s.barrier,
            broadcast=s.broadcast,
            also=also,
            outdated=outdated if self.removes else (),
        )
        self.events += [
            *(f"save {os.path.basename(name)}" for name in also),
            *(f"remove {os.path.basename(name)}" for name in outdated),
        ]

    def is_checkpoint(self, path: str) -> bool:
        return is_checkpoint(path)

    def train(self, steps: int, micro_batches: int = 1) -> Run:
        for _ in range(steps):
            for _ in range(micro_batches - 1):
                self("on_train_batch_end", None, None, 0)
            self.global_step += 1
            self.progress.batches_seen += 1
            self("on_train_batch_end", None, None, 0)
        return self

    def measure(self, metrics: dict[str, float]) -> None:
        measured = {name.replace("_", "/", 1): torch.tensor(value) for name, value in metrics.items()}
        self.callback_metrics |= measured
        self.measured_at |= dict.fromkeys(measured, self.global_step)

    def validate(self, **metrics: float) -> Run:
        self.measure(metrics)
        self("on_validation_end")
        return self

    def end_epoch(self, **metrics: float) -> Run:
        self.measure(metrics)
        self("on_train_epoch_end")
        self.current_epoch += 1
        self.progress.batches_seen = 0
        return self

    def epoch(self, **metrics: float) -> Run:
        return self.train(10).validate(**metrics).end_epoch()

    def found(self) -> dict[str, int]:
        """Every checkpoint on the disk, and the step that its tensors are of; asserts that nothing else is there."""
        folder = Path(self.callback.dirpath or "")
        assert all(is_checkpoint(path) for path in folder.iterdir())
        return {path.name: int(Checkpoint.open(path).read("model/step")) for path in folder.iterdir()}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    return lambda *args, start=True, **options: Run(ModelCheckpoint(*args, **options), tmp_path / "run", start=start)


# ---- when ------------------------------------------------------------------------------------------


def test_by_default_the_latest_state_after_each_validation_is_kept(run: Callable[..., Run], tmp_path: Path) -> None:
    r = run()
    r.epoch()
    assert r.found() == {"epoch=0-step=10": 10}
    r.train(5).validate().train(5).validate().end_epoch()
    assert r.events == [
        "save epoch=0-step=10",
        "save epoch=1-step=15",
        "remove epoch=0-step=10",
        "save epoch=1-step=20",
        "remove epoch=1-step=15",
    ]
    assert r.callback.dirpath == str(tmp_path / "run" / "checkpoints")
    assert r.callback.best_model_path == str(tmp_path / "run" / "checkpoints" / "epoch=1-step=20")
    assert r.callback.best_model_score is None


def test_without_validation_epoch_ends_save(run: Callable[..., Run]) -> None:
    r = run(save_top_k=-1)
    for _ in range(2):
        r.train(10).end_epoch()
    assert r.found() == {"epoch=0-step=10": 10, "epoch=1-step=20": 20}


@pytest.mark.parametrize(("at_epoch_end", "steps"), [(False, {5}), (True, {10}), (None, {5, 10})])
def test_the_moment_can_be_chosen(run: Callable[..., Run], at_epoch_end: bool | None, steps: set[int]) -> None:
    r = run(save_top_k=-1, save_on_train_epoch_end=at_epoch_end)
    r.train(5).validate().train(5).end_epoch()
    assert set(r.found().values()) == steps


def test_nothing_is_saved_in_sanity_check_outside_fit_in_fast_dev_run_and_before_the_first_step(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    r = run(save_last=True)
    r.validate().end_epoch()
    r.train(1)
    r.sanity_checking = True
    r.validate()
    r.sanity_checking = False
    r("setup", "validate")
    r.validate()
    assert r.events == []
    r = run(dirpath=tmp_path / "never", save_last=True, start=False)
    r.arguments.fast_dev_run = True
    r.start().epoch()
    r("on_train_end")
    assert r.events == []
    assert not (tmp_path / "never").exists()


def test_the_final_state_is_saved_unless_it_is_there_already(run: Callable[..., Run]) -> None:
    r = run()
    r.epoch().train(3)
    r("on_train_end")
    r("on_train_end")
    assert r.events == ["save epoch=0-step=10", "save epoch=1-step=13", "remove epoch=0-step=10"]

    r = run(dirpath="monitored", monitor="val/loss")
    r.epoch(val_loss=1.0).train(3)
    r("on_train_end")
    assert r.events == ["save epoch=0-step=10"]

    r = run(dirpath="last", monitor="val/loss", save_last=True)
    r.epoch(val_loss=1.0).train(3)
    r("on_train_end")
    assert r.found() == {"epoch=0-step=10": 10, "last": 13}


def test_steps_are_optimizer_steps_and_saving_falls_between_windows(run: Callable[..., Run]) -> None:
    r = run(every_n_train_steps=3, save_top_k=-1)
    r.train(7, micro_batches=4).validate().end_epoch()
    assert r.events == ["save epoch=0-step=3", "save epoch=0-step=6"]


def test_a_resumed_run_does_not_save_in_the_middle_of_its_first_window(run: Callable[..., Run]) -> None:
    r = run(every_n_train_steps=3)
    r.train(2)
    r.save_checkpoint("by-hand")
    r.train(1)
    again = Run(ModelCheckpoint(every_n_train_steps=2), Path("again"), resume="by-hand")
    again.train(1, micro_batches=2)
    assert again.events == []
    again.train(1, micro_batches=2)
    assert again.events == ["save epoch=0-step=4"]


def test_every_n_epochs(run: Callable[..., Run]) -> None:
    r = run(every_n_epochs=2, save_top_k=-1, filename="{epoch}")
    for _ in range(5):
        r.epoch()
    assert set(r.found()) == {"epoch=1", "epoch=3"}


def test_time_is_looked_at_every_log_every_n_steps(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    r = run(train_time_interval=timedelta(minutes=1), save_top_k=-1)
    for _ in range(300):
        now += 1.0
        r.train(1)
    r.validate().end_epoch()
    assert sorted(r.found().values()) == [100, 200, 300]


def _on_a_rank(folder: Path) -> list[list[int]]:
    """Two fits of 300 steps of one second, but none by rank 1's clock; for each rank and fit the steps saved at, and
    which names got a version."""
    strategy = DDP()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    now = 0.0
    module.time = SimpleNamespace(monotonic=lambda: now)  # type: ignore[assignment]
    saved = []
    for _ in range(2):  # the second finds the names taken
        run = Run(
            ModelCheckpoint(folder, "{epoch}", train_time_interval=timedelta(minutes=1), save_last=True),
            folder,
            start=False,
        )
        run.strategy, run.is_global_zero = strategy, strategy.topology.rank == 0
        run.start()
        for _ in range(300):
            now += 1.0 if strategy.topology.rank == 0 else 0.0
            run.train(1)
            saved += [run.global_step] * len(run.events)
            run.events.clear()
        saved += [run.callback.best_model_path.endswith("-v1"), run.callback.last_model_path.endswith("-v1")]
    steps: list[list[int]] = strategy.all_gather(torch.tensor(saved)).tolist()
    strategy.teardown()
    return steps


def test_ranks_with_other_clocks_save_at_the_same_steps_under_the_same_names(
    tmp_path: Path, run_ranks: Callable[..., Any]
) -> None:
    steps = [step for step in (100, 200, 300) for _ in ("epoch=0", "last")]
    both_fits = [*steps, False, False, *steps, True, True]
    assert run_ranks(_on_a_rank, 2, tmp_path) == [both_fits, both_fits]
    found = {path.name: int(Checkpoint.open(path).read("model/step")) for path in tmp_path.iterdir()}
    assert found == {"epoch=0": 300, "last": 300, "epoch=0-v1": 300, "last-v1": 300}


# ---- which -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kept", "best", "worst"), [("min", {20: 0.5, 40: 0.25}, 40, 20), ("max", {10: 2.0, 30: 1.0}, 10, 30)]
)
def test_the_best_k_are_kept(run: Callable[..., Run], mode: str, kept: dict[int, float], best: int, worst: int) -> None:
    r = run(monitor="val/loss", mode=mode, save_top_k=2)
    for value in (2.0, 0.5, 1.0, 0.25, 0.5):
        r.epoch(val_loss=value)
    c = r.callback
    assert set(r.found().values()) == set(kept)
    assert {int(path.rsplit("=")[-1]): score.item() for path, score in c.best_k_models.items()} == kept
    assert c.best_model_path.endswith(f"step={best}")
    assert c.best_model_score is not None
    assert c.best_model_score.item() == kept[best]
    assert c.kth_best_model_path.endswith(f"step={worst}")
    assert c.kth_value is not None
    assert c.kth_value.item() == kept[worst]
    assert c.current_score is not None
    assert c.current_score.item() == 0.5


def test_all_or_none_are_kept(run: Callable[..., Run]) -> None:
    everything, nothing, last = (
        run(dirpath=name, monitor="val/loss", **options)
        for name, options in (
            ("a", {"save_top_k": -1}),
            ("n", {"save_top_k": 0}),
            ("l", {"save_top_k": 0, "save_last": True}),
        )
    )
    for r in (everything, nothing, last):
        for value in (1.0, 2.0, 3.0):
            r.epoch(val_loss=value)
    assert sorted(everything.found().values()) == [10, 20, 30]
    assert nothing.found() == {}
    assert last.found() == {"last": 30}
    assert nothing.callback.best_model_path == ""


def test_the_latest_k_are_kept_without_monitor(run: Callable[..., Run]) -> None:
    r = run(save_top_k=2)
    for _ in range(4):
        r.epoch()
    assert sorted(r.found().values()) == [30, 40]


def test_step_and_epoch_can_be_monitored(run: Callable[..., Run]) -> None:
    r = run(monitor="step", mode="max", save_top_k=1, every_n_train_steps=5)
    r.train(12)
    assert sorted(r.found().values()) == [10]


def test_nan_is_the_worst(run: Callable[..., Run]) -> None:
    r = run(monitor="val/loss", save_top_k=1, filename="{step}-{val/loss:.1f}")
    r.epoch(val_loss=math.nan)
    assert r.found() == {"step=10-val_loss=nan": 10}
    r.epoch(val_loss=math.nan)
    assert r.found() == {"step=20-val_loss=nan": 20}, "the newest of those that nothing ranks"
    r.epoch(val_loss=math.inf)
    r.epoch(val_loss=5.0)
    r.epoch(val_loss=math.nan)
    assert r.found() == {"step=40-val_loss=5.0": 40}


def test_a_step_before_the_first_validation_is_kept_until_something_ranks(run: Callable[..., Run]) -> None:
    r = run(monitor="val/loss", every_n_train_steps=5, filename="{step}-{val/loss:.1f}")
    with pytest.warns(UserWarning, match="'val/loss', which ModelCheckpoint monitors, has no value yet"):
        r.train(5)
    r.train(5)
    assert r.found() == {"step=10-val_loss=nan": 10}
    r.validate(val_loss=3.0).end_epoch().train(5)
    assert r.found() == {"step=15-val_loss=3.0": 15}


# ---- the monitored metric ----------------------------------------------------------------------------


def test_a_metric_that_nothing_logs_is_an_error_once_it_should_be_there(run: Callable[..., Run]) -> None:
    r = run(monitor="val/los")
    r.train(10).validate(val_loss=1.0, val_acc=0.5)
    with pytest.raises(
        ValueError, match=r"ModelCheckpoint monitors 'val/los', which was not logged: .*: val/acc, val/loss"
    ):
        r.end_epoch()
    r = run(dirpath="b", monitor="train/los")
    r.num_val_batches = []
    with pytest.raises(ValueError, match="one of the logged metrics: none"):
        r.train(10).end_epoch()


def test_a_metric_of_a_validation_that_comes_every_second_epoch_is_waited_for(run: Callable[..., Run]) -> None:
    r = run(monitor="val/loss", save_top_k=-1)
    r.train(10).end_epoch().train(10).validate(val_loss=1.0).end_epoch()
    r.train(10).end_epoch().train(10).validate(val_loss=2.0).end_epoch()
    assert sorted(r.found().values()) == [20, 40]


def test_a_metric_of_the_training_epoch_is_looked_at_when_it_is_there(run: Callable[..., Run]) -> None:
    r = run(monitor="train/loss", save_top_k=-1, filename="{step}-{train/loss:.1f}")
    for value in (2.0, 1.0):
        r.train(5).validate().train(5).end_epoch(train_loss=value)
    assert r.found() == {"step=10-train_loss=2.0": 10, "step=20-train_loss=1.0": 20}


# ---- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "insert", "name"),
    [
        (None, True, "epoch=3-step=400"),
        ("{epoch}-{step}-{val/loss:.3f}", True, "epoch=3-step=400-val_loss=0.123"),
        ("{epoch:02d}-{val/loss:.2f}", False, "03-0.12"),
        ("loss/{val/loss:.2e}", False, "loss_1.23e-01"),
        ("best", True, "best"),
        ("{count:03d}-{val/loss:d}", False, "007-0.123"),
        ("{none:.2f}", True, "none=nan"),
    ],
)
def test_names(template: str | None, insert: bool, name: str) -> None:
    metrics = {"epoch": 3, "step": 400, "val/loss": torch.tensor(0.123, dtype=torch.float64), "count": torch.tensor(7)}
    assert ModelCheckpoint(filename=template, auto_insert_metric_name=insert).format_checkpoint_name(metrics) == name


def test_a_name_of_something_that_is_not_logged_is_said_once(run: Callable[..., Run]) -> None:
    r = run(filename="{step}-{nothing}")
    with pytest.warns(UserWarning, match="names 'nothing', which has no value now and is written as nan") as caught:
        r.epoch().epoch()
    assert len(caught) == 1
    assert r.found() == {"step=20-nothing=nan": 20}


def test_a_taken_name_gets_a_version_and_what_was_there_stays(run: Callable[..., Run]) -> None:
    first = run(filename="{epoch}", save_last=True)
    first.epoch()
    second = run(filename="{epoch}", save_last=True)
    second.epoch().epoch()
    second.current_epoch = 0
    second.epoch()
    assert second.found() == {"epoch=0": 10, "last": 10, "epoch=0-v1": 30, "last-v1": 30}
    assert second.callback.last_model_path.endswith("last-v1")


def test_a_constant_name_is_replaced_in_place(run: Callable[..., Run]) -> None:
    r = run(filename="best", monitor="val/loss")
    for value in (3.0, 2.0, 5.0, 1.0):
        r.epoch(val_loss=value)
    assert r.found() == {"best": 40}
    assert r.events == ["save best"] * 3
    assert list(r.callback.best_k_models.values()) == [torch.tensor(1.0)]


# ---- failure and resume ------------------------------------------------------------------------------


def test_a_save_that_fails_comes_out_and_leaves_the_older_checkpoint(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    r = run()
    r.epoch()

    def full(path: str, **options: Any) -> None:
        raise CheckpointError(f"no space for {path}")

    monkeypatch.setattr(r, "save_checkpoint", full)
    with pytest.raises(CheckpointError, match="no space"):
        r.epoch()
    assert r.found() == {"epoch=0-step=10": 10}
    assert r.callback.best_model_path.endswith("epoch=0-step=10")


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint folder .*file/checkpoints cannot be created \(Not a directory\)"):
        Run(ModelCheckpoint(), tmp_path / "file")


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("from_last", [False, True])
def test_a_resumed_run_goes_on_with_its_best_k(tmp_path: Path, moved: bool, from_last: bool) -> None:
    def new() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="val/loss", save_top_k=2, save_last=True)

    values = (3.0, 1.0, 2.0, 4.0, 0.5, 0.25)
    whole = Run(new(), tmp_path / "whole")
    for value in values:
        whole.epoch(val_loss=value)

    folder = tmp_path / "run"
    first = Run(new(), folder)
    for value in values[:3]:
        first.epoch(val_loss=value)
    if moved:
        folder = tmp_path / "elsewhere"
        shutil.move(tmp_path / "run", folder)
    second = Run(new(), folder, resume=str(folder / "checkpoints" / ("last" if from_last else "epoch=2-step=30")))
    assert second.callback._considered_step == 30
    second.current_epoch = 3
    for value in values[3:]:
        second.epoch(val_loss=value)
    assert second.found() == whole.found() == {"epoch=4-step=50": 50, "epoch=5-step=60": 60, "last": 60}
    assert second.callback.best_model_path == str(folder / "checkpoints" / "epoch=5-step=60")
    assert second.events == whole.events[len(first.events) :]


def test_a_kill_between_commit_and_removal_is_made_good_by_the_next_save(tmp_path: Path) -> None:
    first = Run(ModelCheckpoint(), tmp_path / "run")
    first.epoch()
    first.removes = False
    first.epoch()
    assert sorted(first.found().values()) == [10, 20]
    second = Run(ModelCheckpoint(), tmp_path / "run", resume=first.callback.best_model_path)
    second.current_epoch = 2
    second.epoch()
    assert sorted(second.found().values()) == [30]


def test_checkpoints_of_another_folder_rank_but_are_never_removed(tmp_path: Path) -> None:
    first = Run(ModelCheckpoint(monitor="val/loss", save_last=True), tmp_path / "one")
    first.epoch(val_loss=1.0)
    second = Run(
        ModelCheckpoint(monitor="val/loss", save_last=True), tmp_path / "two", resume=first.callback.best_model_path
    )
    second.epoch(val_loss=2.0)
    assert second.callback.best_model_path == first.callback.best_model_path
    second.epoch(val_loss=0.5)
    assert second.found() == {"epoch=1-step=30": 30, "last": 30}
    assert first.found() == {"epoch=0-step=10": 10, "last": 10}


def test_checkpoints_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    first = Run(ModelCheckpoint(monitor="val/loss", save_top_k=2), tmp_path / "run")
    first.epoch(val_loss=1.0).epoch(val_loss=2.0)
    shutil.rmtree(first.callback.best_model_path)
    second = Run(
        ModelCheckpoint(monitor="val/loss", save_top_k=2),
        tmp_path / "run",
        resume=str(tmp_path / "run" / "checkpoints" / "epoch=1-step=20"),
    )
    assert [score.item() for score in second.callback.best_k_models.values()] == [2.0]
    second.epoch(val_loss=3.0)
    assert sorted(second.found().values()) == [20, 30]


def test_a_second_run_with_the_same_callback_ranks_for_itself(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val/loss")
    Run(callback, tmp_path / "one").epoch(val_loss=1.0)
    second = Run(callback, tmp_path / "two").epoch(val_loss=2.0)
    assert second.found() == {"epoch=0-step=10": 10}
    assert callback.best_model_path == str(tmp_path / "two" / "checkpoints" / "epoch=0-step=10")


def test_the_state_is_read_back_as_it_was_and_nothing_else_is_taken(tmp_path: Path) -> None:
    r = Run(ModelCheckpoint(monitor="val/loss", save_top_k=3, save_last=True), tmp_path / "run")
    r.epoch(val_loss=0.1).epoch(val_loss=math.nan)
    state = Checkpoint.open(r.callback.last_model_path).state["callback"]
    assert [name for name, _ in state["best_k_models"]] == ["epoch=0-step=10", "epoch=1-step=20"]
    assert state["last_model_path"] == "last"
    other = ModelCheckpoint(monitor="val/loss", save_top_k=3, save_last=True)
    other.load_state_dict(state)
    assert other.best_model_path == r.callback.best_model_path
    assert other.best_model_score == r.callback.best_model_score
    assert other.last_model_path == r.callback.last_model_path
    assert other.dirpath == r.callback.dirpath
    for wrong in ({**state, "more": 1}, {key: value for key, value in state.items() if key != "dirpath"}):
        with pytest.raises(ValueError, match="saved state of ModelCheckpoint must have the keys"):
            other.load_state_dict(wrong)


def test_state_keys_differ_by_what_is_decided() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"monitor": "a"},
        {"monitor": "b"},
        {"monitor": "a", "mode": "max"},
        {"every_n_train_steps": 5},
        {"train_time_interval": timedelta(hours=1)},
    ]
    assert len({ModelCheckpoint(**option).state_key for option in options}) == len(options)


def test_verbose_says_what_was_saved(run: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    r = run(monitor="val/loss", verbose=True)
    r.epoch(val_loss=0.5)
    assert (
        capsys.readouterr().out
        == f"ModelCheckpoint: epoch 0, step 10: val/loss = 0.5, saved {r.callback.best_model_path}\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "auto"}, "'auto'"),
        ({"save_top_k": -2}, "got -2"),
        ({"every_n_epochs": 0}, "every_n_epochs of ModelCheckpoint must be at least 1, got 0"),
        ({"every_n_epochs": 1, "every_n_train_steps": 1}, "every_n_train_steps and every_n_epochs"),
        ({"every_n_train_steps": 1, "save_on_train_epoch_end": True}, "save_on_train_epoch_end=True"),
        ({"filename": "{epoch:zz}"}, "'zz'"),
        ({"filename": "{epoch"}, "unmatched brace"),
        ({"filename": "last", "save_last": True}, "another filename"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**options)


class Measures(Net):
    """Its validation metric falls from step to step, or rises."""

    sign = -1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.sign * self.global_step)


@pytest.mark.filterwarnings("ignore:.*has no value yet")
@pytest.mark.parametrize(
    ("every", "kept"), [(2, {"step=4": -4.0, "step=8": -8.0}), (3, {"step=12": -12.0, "step=9": math.nan})]
)
def test_saves_by_steps_are_ranked_by_what_was_measured_on_their_weights(
    tmp_path: Path, every: int, kept: dict[str, float]
) -> None:
    """Validation comes every fourth step: a save at that step waits for it, any other has no value, whatever was
    measured before."""
    callback = ModelCheckpoint(tmp_path / "kept", "{step}", monitor="val/loss", every_n_train_steps=every, save_top_k=2)
    steps = 8 if every == 2 else 12
    quiet(
        callbacks=[callback],
        enable_checkpointing=True,
        max_epochs=None,
        max_steps=steps,
        val_check_interval=4,
        check_val_every_n_epoch=None,
    ).fit(Measures(), loader(64), loader(8))
    found = {os.path.basename(path): float(score) for path, score in callback.best_k_models.items()}
    assert found.keys() == kept.keys()
    assert all(found[name] == kept[name] or (math.isnan(kept[name]) and math.isnan(found[name])) for name in kept)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == set(kept)


def test_saves_by_steps_at_the_end_of_an_epoch_wait_for_its_validation(tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        tmp_path / "kept", "{epoch}-{step}", monitor="val/loss", every_n_train_steps=4, save_top_k=1
    )
    quiet(callbacks=[callback], enable_checkpointing=True, max_epochs=3).fit(Measures(), loader(32), loader(8))
    assert os.path.basename(callback.best_model_path) == "epoch=2-step=12" and float(callback.best_model_score) == -12.0


@pytest.mark.parametrize(
    ("end", "name"),
    [({"max_epochs": 2}, "epoch=1-step=8"), ({"max_steps": 6}, "epoch=1-step=6"), ({"max_steps": 8}, "epoch=1-step=8")],
)
def test_the_save_at_the_end_is_named_by_the_last_epoch_that_ran(
    tmp_path: Path, end: dict[str, int], name: str
) -> None:
    callback = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5, save_top_k=-1)
    quiet(**{"callbacks": [callback], "enable_checkpointing": True, "max_epochs": None} | end).fit(net(), loader(32))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"epoch=1-step=5", name}


def test_callbacks_can_be_copied_while_a_run_is_on(tmp_path: Path) -> None:
    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            for one, other in zip(trainer.callbacks, copy.deepcopy(trainer.callbacks), strict=True):
                assert type(one) is type(other) and other._module is None

    trainer = Trainer(
        callbacks=[Copies()],
        max_epochs=1,
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=[TensorBoardLogger(), CSVLogger()],
    )
    trainer.fit(net(), loader(32), loader(8))
    assert trainer.global_step == 4
