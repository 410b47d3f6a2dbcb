"""GradientAccumulationScheduler against a loop by hand, on two ranks, and over a restart in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from tests.trainer.toy import Net, distance, equal, loader, net, quiet, weights

SCHEDULE = {1: 3, 2: 2}


def fit(*callbacks: Any, devices: int = 1, ckpt_path: Any = None, **options: Any) -> tuple[Net, Any]:
    module = net()
    callbacks = (GradientAccumulationScheduler(SCHEDULE), *callbacks)
    trainer = quiet(**{"precision": "64-true", "max_epochs": 3, "callbacks": list(callbacks)} | options)
    trainer.fit(module, loader(batch_size=8 // devices), ckpt_path=ckpt_path)
    return module, trainer


def by_hand() -> tuple[list[torch.Tensor], int]:
    module, steps = net().double(), 0
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for epoch in range(3):
        batches = list(loader())
        size = SCHEDULE.get(epoch, 1)
        for first in range(0, len(batches), size):
            window = batches[first : first + size]
            optimizer.zero_grad()
            count = sum(len(x) for x, _ in window)
            for x, y in window:
                (F.cross_entropy(module(x.double()), y, reduction="sum") / count).backward()
            optimizer.step()
            steps += 1
    return weights(module), steps


def test_steps_are_those_of_a_loop_by_hand() -> None:
    module, trainer = fit()
    expected, steps = by_hand()
    assert distance(weights(module), expected) <= 1e-13
    assert trainer.global_step == steps == trainer.estimated_stepping_batches == 7 + 3 + 4


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_two_ranks_step_as_one(strategy: str) -> None:
    devices = 2 if strategy == "ddp" else 1  # of a loader's batch
    module = net()
    trainer = quiet(
        strategy=strategy,
        devices=2,
        precision="64-true",
        max_epochs=3,
        callbacks=[GradientAccumulationScheduler(SCHEDULE)],
    )
    trainer.fit(module, loader(batch_size=8 // devices))
    assert distance(weights(module), by_hand()[0]) <= 1e-12


def test_a_run_resumed_within_an_epoch_is_the_whole_run(tmp_path: Path) -> None:
    """Step 9 is in epoch 1, which accumulates over three."""
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=9, save_top_k=-1, filename="{step}")
    whole, _ = fit(saving, enable_checkpointing=True)
    resumed, trainer = fit(ckpt_path=tmp_path / "step=9")
    assert equal(weights(resumed), weights(whole))
    assert trainer.global_step == 14


def test_an_assignment_in_a_hook_holds_for_the_epoch() -> None:
    class Doubles(Net):
        def on_train_epoch_start(self) -> None:
            self.trainer.accumulate_grad_batches = 1 + self.current_epoch

    trainer = quiet(max_epochs=2)
    trainer.fit(Doubles(), loader())
    assert trainer.global_step == 7 + 4


def test_manual_optimization_is_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    class Doubles(Manual):
        def on_train_epoch_start(self) -> None:
            self.trainer.accumulate_grad_batches = 2

    trainer = quiet(max_epochs=2, callbacks=[GradientAccumulationScheduler({1: 2})])
    with pytest.raises(ValueError, match="Scheduler would have no effect, as Manual sets automatic_optimization = Fa"):
        trainer.fit(Manual(), loader())
    assert trainer.global_step == 0
    with pytest.raises(ValueError, match="accumulate_grad_batches was set to 2 during the run, but Doubles optimizes"):
        quiet(max_epochs=2).fit(Doubles(), loader())


@pytest.mark.long
@pytest.mark.ranks
def test_deepspeed_is_refused() -> None:
    trainer = quiet(strategy="deepspeed", devices=2, callbacks=[GradientAccumulationScheduler({1: 2})])
    with pytest.raises(ValueError, match="GradientAccumulationScheduler cannot be used here: DeepSpeed's engine"):
        trainer.fit(net(), loader())


@pytest.mark.parametrize("scheduling", [{}, {-1: 2}, {0: 0}, {"0": 1}, {1: True}])
def test_invalid_schedules(scheduling: Any) -> None:
    with pytest.raises(ValueError, match="scheduling must"):
        GradientAccumulationScheduler(scheduling)


class Validations(Callback):
    """Where each validation came: epoch, step."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int]] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.at.append((trainer.current_epoch, trainer.global_step))


@pytest.mark.long
def test_fractions_of_an_epoch_follow_the_schedule_where_batches_are_split(tmp_path: Path) -> None:
    def run(path: Path | None = None) -> list[tuple[int, int]]:
        seen = Validations()
        trainer = quiet(
            max_epochs=3,
            split_batches=True,
            val_check_interval=0.5,
            limit_train_batches=0.9,
            enable_checkpointing=True,
            callbacks=[
                GradientAccumulationScheduler({0: 1, 1: 2, 2: 1}),
                seen,
                ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1),
            ],
        )
        trainer.fit(net(), loader(48), loader(16), ckpt_path=path)
        return [*seen.at, (3, trainer.global_step)]

    alone = run()
    assert [epoch for epoch, _ in alone] == [0, 0, 1, 1, 2, 2, 3]
    for step in (6, 7, 9):
        assert run(tmp_path / f"step={step}") == alone, step  # the callback has its list back
