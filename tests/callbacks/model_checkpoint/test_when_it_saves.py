"""ModelCheckpoint: when it saves."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.callbacks import model_checkpoint as module
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.strategies.ddp import DDP
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.callbacks.model_checkpoint.run import Measures, Run
from tests.trainer.toy import loader, net, quiet

pytestmark = pytest.mark.ranks


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


def test_time_is_checked_every_log_every_n_steps(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.long
def test_ranks_with_other_clocks_save_at_the_same_steps_under_the_same_names(
    tmp_path: Path, run_ranks: Callable[..., Any]
) -> None:
    steps = [step for step in (100, 200, 300) for _ in ("epoch=0", "last")]
    both_fits = [*steps, False, False, *steps, True, True]
    assert run_ranks(_on_a_rank, 2, tmp_path) == [both_fits, both_fits]
    found = {path.name: int(Checkpoint.open(path).read("model/step")) for path in tmp_path.iterdir()}
    assert found == {"epoch=0": 300, "last": 300, "epoch=0-v1": 300, "last-v1": 300}


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
