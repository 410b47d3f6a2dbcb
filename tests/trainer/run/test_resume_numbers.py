"""Numbers of the Trainer that user code sets: micro-batches of a step, and where training ends, in a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lockstep.callbacks import Callback, GradientAccumulationScheduler, LRScaling, LRWarmup, ModelCheckpoint
from tests.trainer.toy import Net, equal, loader, net, quiet, weights


class SetsAsItConfigures(Net):
    def configure_optimizers(self) -> Any:
        self.trainer.accumulate_grad_batches = 3
        return super().configure_optimizers()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.accumulate_grad_batches = 2


class SetsAsItStarts(Net):
    def on_fit_start(self) -> None:
        self.trainer.accumulate_grad_batches = 3
        self.trainer.max_epochs = 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.trainer.accumulate_grad_batches = 2

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.max_epochs = 3


class TrainsOn(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.trainer.max_steps = 16


class Ends(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.trainer.max_epochs = 2


class FollowsAllSteps(Net):
    """A schedule by a function, of which a checkpoint holds nothing."""

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        self.trainer.accumulate_grad_batches = 1 + self.current_epoch


class SizesBatches(Net):
    """Loaders of another batch size as accumulation changes, which is before they are made again."""

    def train_dataloader(self) -> Any:
        return loader(48, 8 // self.trainer.accumulate_grad_batches, shuffle=True)

    def on_train_epoch_start(self) -> None:
        self.trainer.accumulate_grad_batches = 2 * self.current_epoch or 1


HABITS = [SetsAsItConfigures, SetsAsItStarts, TrainsOn, Ends, FollowsAllSteps, SizesBatches]


def fit(kind: type[Net], folder: Path | None, path: Path | None = None, **options: Any) -> Net:
    torch.manual_seed(0)
    module = kind(dropout=0.2)
    if folder is not None:
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options = {"callbacks": [saves], "enable_checkpointing": True} | options
    reloads = int(kind is SizesBatches)
    data = None if reloads else loader(48, 8 // options.get("devices", 1), shuffle=True)
    trainer = quiet(**{"max_epochs": 3, "reload_dataloaders_every_n_epochs": reloads} | options)
    trainer.fit(module, data, ckpt_path=path)
    return module


@pytest.mark.parametrize("kind", HABITS)
def test_a_run_that_is_resumed_anywhere_has_the_numbers_that_hooks_had_set(kind: type[Net], tmp_path: Path) -> None:
    whole = fit(kind, tmp_path / "whole")
    steps = sorted(int(path.name.removeprefix("step=")) for path in (tmp_path / "whole").iterdir())
    for step in steps:
        resumed = fit(kind, None, tmp_path / "whole" / f"step={step}")
        assert resumed.global_step == whole.global_step, step
        assert equal(weights(resumed), weights(whole)), step


@pytest.mark.ranks
def test_they_hold_under_ranks_and_in_a_run_that_is_resumed_twice(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accelerator": "cpu"}
    whole = fit(SetsAsItStarts, tmp_path / "whole", **options)
    assert whole.trainer.max_epochs == 3 and whole.trainer.accumulate_grad_batches == 2
    fit(SetsAsItStarts, tmp_path / "first", tmp_path / "whole" / "step=2", **options)
    second = fit(SetsAsItStarts, None, tmp_path / "first" / "step=4", **options)
    assert second.global_step == whole.global_step and equal(weights(second), weights(whole))


def test_what_the_code_gives_otherwise_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Longer(Net):
        def on_fit_start(self) -> None:
            self.trainer.max_epochs = 4

    fit(TrainsOn, tmp_path / "trains")
    assert fit(TrainsOn, None, tmp_path / "trains" / "step=6", max_steps=9).global_step == 9
    fit(SetsAsItStarts, tmp_path / "starts")
    with caplog.at_level(logging.INFO, "lockstep"):
        assert fit(Longer, None, tmp_path / "starts" / "step=1").current_epoch == 4
    assert "hooks of the start have set max_epochs" in caplog.text


@pytest.mark.parametrize("make", [lambda: LRWarmup(epochs=2), lambda: LRScaling(2)], ids=["warmup", "scaling"])
def test_rates_by_the_first_accumulation_stay_where_it_has_changed(
    make: Callable[[], Callback], tmp_path: Path
) -> None:
    """A warm-up by epochs, and a rate by the size of a step, are those of the run that began."""

    def fit(**resumed: Any) -> Net:
        saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
        callbacks = [GradientAccumulationScheduler({1: 2}), make(), saves]
        module = net()
        quiet(max_epochs=3, callbacks=callbacks, enable_checkpointing=True).fit(module, loader(32, 4), **resumed)
        return module

    assert equal(weights(fit()), weights(fit(ckpt_path=tmp_path / "step=10")))


@pytest.mark.parametrize("over_epochs", [False, True])
def test_a_run_resumed_with_another_batch_size_counts_batches_and_validations_by_it(
    over_epochs: bool, tmp_path: Path
) -> None:
    class Validations(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.steps.append(trainer.global_step)

    def fit(batch_size: int, max_steps: int, path: Path | None = None) -> tuple[list[int], int]:
        validations = Validations()
        trainer = quiet(
            max_epochs=None if over_epochs else 2,
            max_steps=max_steps,
            val_check_interval=3,
            check_val_every_n_epoch=None if over_epochs else 1,
            enable_checkpointing=True,
            callbacks=[validations, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)],
        )
        trainer.fit(net(), loader(32, batch_size), loader(8), ckpt_path=path)
        return validations.steps, trainer._run.progress.total_batches

    assert fit(4, 4) == ([3, 4], 4), "16 of 32 samples"
    assert fit(2, 7, tmp_path / "step=4") == ([3, 5, 7], 11), "8 batches of 2 hold these: the next is the ninth"
    assert fit(2, 12, tmp_path / "step=7") == ([3, 5, 8, 11], 16)
    assert fit(8, 9, tmp_path / "step=7") == ([3, 5, 7], 5), "3 batches of 8 hold these, after which one is due"
