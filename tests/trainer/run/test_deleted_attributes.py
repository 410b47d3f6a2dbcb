"""What hooks delete is gone after the run, on ranks that were started, and in a run that continues it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.trainer.kept.agreed import alike
from tests.trainer.toy import Net, equal, loader, quiet, weights


class Warming(Net):
    """The loss counts half while an attribute, a buffer or a flag of a callback's is there."""

    def __init__(self) -> None:
        super().__init__(optimizer="SGD", lr=0.1)
        self.warm, self.unused = [1.0], 2
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.part = Part()

    def on_train_start(self) -> None:
        del self.unused  # as each run does
        self.made = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        here = [hasattr(self, "warm"), hasattr(self, "mask"), hasattr(self, "made"), hasattr(self.part, "rate")]
        return super().training_step(batch, batch_idx) * 0.5 ** sum(here)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            del self.warm, self.mask, self.made, self.part.rate


class Part(nn.Module):
    rate: float

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5


class Lazy(Net):
    """Makes its loss, a layer without parameters, in the place of None."""

    def __init__(self) -> None:
        super().__init__(optimizer="SGD", lr=0.1)
        self.criterion: nn.Module | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.criterion is None:
            self.criterion = nn.CrossEntropyLoss()
        x, y = batch
        return self.criterion(self(x), y)


class Once(Callback):
    """Gives up what it had after an epoch."""

    def __init__(self) -> None:
        self.plan = {"a": 1}

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            del self.plan


def fit(epochs: int, ckpt_path: str | None = None, folder: str = "run", **options: Any) -> tuple[Warming, Once]:
    torch.manual_seed(0)
    model, once = Warming(), Once()
    quiet(
        seed=0,
        max_epochs=epochs,
        callbacks=[once, ModelCheckpoint()],
        enable_checkpointing=True,
        default_root_dir=folder,
        **options,
    ).fit(model, loader(16, 4), ckpt_path=ckpt_path)
    return model, once


def left(model: Warming, once: Once) -> list[bool]:
    names = ("warm", "mask", "made", "unused")
    return [*(hasattr(model, name) for name in names), hasattr(model.part, "rate"), hasattr(once, "plan")]


@pytest.mark.ranks
def test_it_is_gone_where_ranks_were_started() -> None:
    model, once = fit(1, strategy="ddp", devices=2)
    assert left(model, once) == left(*fit(1)) == [False] * 6
    assert "mask" not in model._non_persistent_buffers_set


@pytest.mark.parametrize("times", [1, 2])
def test_it_is_gone_in_a_run_that_is_resumed(times: int) -> None:
    undisturbed, _ = fit(4, folder="other")
    fit(2)
    for i in range(times):
        model, once = fit(4 if i + 1 == times else 3, ckpt_path="last")
    assert left(model, once) == [False] * 6
    assert equal(weights(model), weights(undisturbed))


def test_a_checkpoint_from_before_has_nothing_of_it() -> None:
    assert alike([{"values": {}, "lost": [], "on_device": []}])["gone"] == []
    both = [{"gone": [["", "warm"], ["", "mask"]]}, {"gone": [["", "mask"]]}]
    assert alike(both)["gone"] == [["", "mask"]]


def test_a_layer_in_the_place_of_an_attribute_deletes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Lazy()
    first, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    quiet(max_epochs=2).fit(whole, loader())
    trainer = quiet(max_epochs=1)
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "one")
    quiet(max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / "one")
    assert equal(weights(whole), weights(resumed))


@pytest.mark.ranks
def test_nor_does_it_after_ranks() -> None:
    trainer, model = quiet(strategy="ddp", devices=2, accelerator="cpu", max_steps=1), Lazy()
    trainer.fit(model, loader())
    assert model.criterion is None
    trainer.validate(model, loader(), verbose=False)
