"""ModelCheckpoint: which checkpoints it keeps."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.trainer.checkpoint.store import CheckpointError
from tests.callbacks.model_checkpoint.run import Measures, Run
from tests.trainer.toy import loader, quiet

pytestmark = pytest.mark.ranks


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


def test_a_metric_of_the_training_epoch_is_read_once_it_is_there(run: Callable[..., Run]) -> None:
    r = run(monitor="train/loss", save_top_k=-1, filename="{step}-{train/loss:.1f}")
    for value in (2.0, 1.0):
        r.train(5).validate().train(5).end_epoch(train_loss=value)
    assert r.found() == {"step=10-train_loss=2.0": 10, "step=20-train_loss=1.0": 20}


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
