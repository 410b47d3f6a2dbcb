"""The Trainer's arguments are one record: its signature, its checks, and what fast_dev_run implies."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Trainer
from lockstep.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from lockstep.trainer.arguments import TrainerArguments


def test_the_trainer_has_the_signature_of_the_record() -> None:
    parameters = inspect.signature(Trainer).parameters
    assert list(parameters) == [field.name for field in fields(TrainerArguments)]
    assert parameters["max_epochs"].annotation == "int | None"
    assert parameters["log_every_n_steps"].default == 50
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())


def test_every_argument_is_documented() -> None:
    text = inspect.getdoc(TrainerArguments) or ""
    assert [field.name for field in fields(TrainerArguments) if f"`{field.name}`" not in text] == []


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^Trainer has no argument 'max_epoch'; did you mean 'max_epochs'\?$"):
        Trainer(max_epoch=3)  # type: ignore[call-arg]


def test_the_record_is_frozen_and_normalized() -> None:
    arguments = TrainerArguments(max_epochs=-1, max_steps=-1, callbacks=ModelCheckpoint(), default_root_dir="~/runs")
    assert arguments.max_epochs is arguments.max_steps is None
    assert len(list(arguments.callbacks)) == 1  # type: ignore[arg-type]
    assert arguments.default_root_dir == str(Path.home() / "runs")
    with pytest.raises(FrozenInstanceError):
        arguments.seed = 3  # type: ignore[misc]


def test_fast_dev_run_replaces_limits_and_writers() -> None:
    given = TrainerArguments(fast_dev_run=True, max_epochs=9, min_epochs=4, callbacks=[ModelCheckpoint()])
    effective = given.effective()
    assert (effective.max_epochs, effective.limit_val_batches, effective.fast_dev_run) == (1, 1, 1)
    assert effective.all_callbacks()[-1].__class__ is not ModelCheckpoint
    assert given.described()["max_epochs"] == 9


@pytest.mark.parametrize(
    ("given", "count"), [(-1, 1), ("-1", 1), ([0, 1], 2), ("0,1", 2), ("0,", 1), ([3], 1), (3, 3), ("2", 2)]
)
def test_devices_may_be_listed(given: Any, count: int) -> None:
    assert Trainer(devices=given, accelerator="cpu", logger=False, enable_checkpointing=False).num_devices == count


@pytest.mark.parametrize("given", [[], [0, True], "0,x", [-1, 0], 0, -2])
def test_wrong_devices_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="devices must be .*devices="):
        Trainer(devices=given, accelerator="cpu")


def test_gpus_that_are_not_the_first_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"set CUDA_VISIBLE_DEVICES=1,3 and give devices=2"):
        Trainer(devices=[1, 3])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_steps": 3, "max_steps": 2}, "min_steps=3 is more than max_steps=2"),
        ({"benchmark": True, "deterministic": True}, "benchmark=True .* deterministic=True"),
        ({"deterministic": "warm"}, "deterministic must be True, False or 'warn'"),
        (
            {"default_root_dir": "s3://bucket/runs"},
            "default_root_dir must be a folder, got the address 's3://bucket/ru",
        ),
        ({"limit_predict_batches": -1}, "limit_predict_batches must be"),
        ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs must be"),
    ],
)
def test_arguments_that_cannot_hold_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainerArguments(**given)


@pytest.mark.parametrize(
    ("bar", "summary", "shown"), [(True, None, True), (False, None, False), (True, False, False), (False, True, True)]
)
def test_the_summary_follows_the_bar_unless_it_is_asked_for(bar: bool, summary: bool | None, shown: bool) -> None:
    kinds = {
        type(item) for item in TrainerArguments(enable_progress_bar=bar, enable_model_summary=summary).all_callbacks()
    }
    assert (ModelSummary in kinds, ProgressBar in kinds) == (shown, bar)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("epochs", "max_epochs"),
        ("num_steps", "max_steps"),
        ("accumulate", "accumulate_grad_batches"),
        ("num_gpus", "devices"),
        ("max_grad_norm", "gradient_clip_val"),
        ("output_dir", "default_root_dir"),
    ],
)
def test_short_names_lead_to_the_arguments(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"no argument {name!r}; did you mean {near!r}"):
        Trainer(**{name: 1})


def test_a_trainer_can_be_pickled() -> None:
    trainer = pickle.loads(pickle.dumps(Trainer(max_epochs=2, logger=False, enable_progress_bar=False)))
    assert trainer.max_epochs == 2 and trainer.callbacks


class Collects(Callback):
    """One that is empty at first, and can be iterated over."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_a_callback_that_is_a_container_is_one_callback() -> None:
    collects = Collects()
    assert collects in Trainer(max_epochs=1, callbacks=collects).callbacks
