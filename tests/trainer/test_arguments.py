"""The Trainer's arguments are one record: its signature, its checks, and what fast_dev_run implies."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from lockstep import Trainer
from lockstep.callbacks import ModelCheckpoint
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
