"""Names of Lightning that do not exist here: each is refused with what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import lockstep.callbacks
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import build
from lockstep.trainer import lightning_names
from tests.trainer.toy import Net, loader, net, quiet


@pytest.mark.parametrize("name", sorted(lightning_names.ARGUMENTS))
def test_an_argument_of_lightning_is_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(TypeError) as error:
        Trainer(**{name: 1})  # type: ignore[arg-type]
    assert str(error.value) == f"Trainer has no argument {name!r}; {lightning_names.ARGUMENTS[name]}"


@pytest.mark.parametrize("name", sorted(lightning_names.TRAINER))
def test_an_attribute_of_lightnings_trainer_is_refused_with_what_to_read(name: str) -> None:
    trainer = quiet()
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError) as error:
        getattr(trainer, name)
    assert str(error.value) == f"Trainer has no attribute {name!r}; {lightning_names.TRAINER[name]}"


@pytest.mark.parametrize("name", sorted(lightning_names.MODULE))
def test_an_attribute_of_lightnings_module_is_refused_with_what_to_write(name: str) -> None:
    class Own(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return getattr(self, name)

    with pytest.raises(AttributeError) as error:
        quiet().fit(Own(), loader(8))
    assert str(error.value) == f"Own has no attribute {name!r}; {lightning_names.MODULE[name]}"


def test_what_a_table_names_does_not_exist() -> None:
    arguments = set(inspect.signature(Trainer).parameters)
    assert not arguments & set(lightning_names.ARGUMENTS)
    assert not set(dir(Callback)) & set(lightning_names.HOOKS)
    assert not set(dir(Module)) & {*lightning_names.HOOKS, *lightning_names.METHODS}
    for table in (lightning_names.ARGUMENTS, lightning_names.TRAINER, lightning_names.MODULE, lightning_names.HOOKS):
        assert list(table.values()) == [text.strip() for text in table.values() if text]


@pytest.mark.parametrize("name", sorted(lightning_names.HOOKS))
def test_a_hook_of_lightning_is_refused_with_the_name_it_has_here(name: str) -> None:
    callback = type("Own", (Callback,), {name: lambda self, *args: None})()
    with pytest.raises(TypeError, match=f"Own.{name} is not a hook, so it would never be called; "):
        quiet(callbacks=[callback]).validate(net(), [])


def test_arguments_are_attributes_that_cannot_be_set() -> None:
    trainer = quiet(log_every_n_steps=7)
    assert (trainer.log_every_n_steps, trainer.fast_dev_run, trainer.gradient_clip_val) == (7, False, None)
    with pytest.raises(
        AttributeError, match=r"limit_val_batches of a Trainer is fixed.*new Trainer\(limit_val_batches=3\)"
    ):
        trainer.limit_val_batches = 3  # type: ignore[attr-defined]
    trainer.max_epochs = 3
    with pytest.raises(AttributeError, match="Trainer has no attribute 'globl_step'; did you mean 'global_step'"):
        _ = trainer.globl_step


def test_a_mistyped_name_of_a_package_names_the_nearest() -> None:
    with pytest.raises(
        AttributeError, match="'lockstep.callbacks' has no attribute 'EarlyStoping'; did you mean 'EarlyStopping'"
    ):
        _ = lockstep.callbacks.EarlyStoping
    assert not hasattr(lockstep, "__wrapped__") and not hasattr(lockstep, "quantum")


class Own(Trainer):
    def __init__(self, extra: int, **options: Any) -> None:
        self.extra = extra
        super().__init__(**options)


def test_a_subclass_of_the_trainer_has_attributes_of_its_own() -> None:
    assert Own(3, logger=False, enable_checkpointing=False).extra == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("DDP", "did you mean 'ddp'"),
        ("ddp_spawn", "did you mean 'ddp'"),
        ("fsdp_native", "did you mean 'fsdp'"),
        ("ddp_find_unused_parameters_true", r"give strategy=DDP\(find_unused_parameters=True\)"),
        ("DeepSpeed_Stage_2", "did you mean 'deepspeed_stage_2'"),
        ("deepspeed_stage_2_offload", r"give strategy=DeepSpeed\("),
    ],
)
def test_a_strategy_of_another_library_names_the_one_here(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"but strategy='{given}'; {said}"):
        build(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [("fp16", "16-mixed"), ("float64", "64-true"), ("FP32", "32-true"), ("half", "16-mixed")],
)
def test_a_precision_of_another_library_names_the_nearest(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"but precision='{given}'; did you mean '{said}'"):
        Trainer(precision=given)


def test_an_accelerator_in_capitals_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="but accelerator='GPU'; did you mean 'gpu'"):
        Trainer(accelerator="GPU")
