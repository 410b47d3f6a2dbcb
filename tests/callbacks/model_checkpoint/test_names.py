"""ModelCheckpoint: its folder, the names of checkpoints, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from tests.callbacks.model_checkpoint.run import Run

pytestmark = pytest.mark.ranks


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
def test_names_are_made_of_epoch_step_and_metrics(template: str | None, insert: bool, name: str) -> None:
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


def test_a_folder_that_cannot_be_created_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint folder .*file/checkpoints cannot be created \(Not a directory\)"):
        Run(ModelCheckpoint(), tmp_path / "file")


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
        (
            {"every_n_epochs": 0},
            "every_n_epochs of ModelCheckpoint must be a whole number of at least 1, or None, got 0",
        ),
        ({"every_n_epochs": 1, "every_n_train_steps": 1}, "every_n_train_steps and every_n_epochs"),
        ({"every_n_train_steps": 1, "save_on_train_epoch_end": True}, "save_on_train_epoch_end=True"),
        ({"every_n_train_steps": 1.5}, "every_n_train_steps .* must be a whole number .*, got 1.5"),
        ({"save_top_k": True}, "got True"),
        ({"train_time_interval": 5}, "must be a timedelta of at least 0, or None, got 5"),
        ({"train_time_interval": timedelta(seconds=-1)}, "must be a timedelta of at least 0"),
        ({"dirpath": 3}, "dirpath of ModelCheckpoint must be a path, or None, got 3"),
        ({"dirpath": "s3://b/c"}, "dirpath of ModelCheckpoint must be a folder, got the address 's3://b/c'; mount it"),
        ({"filename": 3}, "filename of ModelCheckpoint must be a name that begins with no dot, got 3"),
        ({"filename": "é" * 121 + "{step}"}, "at most 241 bytes, .* has 242 besides its placeholders: shorten it"),
        ({"filename": ".."}, "must be a name that begins with no dot"),
        ({"filename": "{epoch:zz}"}, "'zz'"),
        ({"filename": "{epoch"}, "unmatched brace"),
        ({"filename": "last", "save_last": True}, "another filename"),
    ],
)
def test_invalid_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**options)
