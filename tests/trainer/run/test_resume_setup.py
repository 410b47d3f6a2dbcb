"""What a run draws as it is set up, a resumed run draws again: data that is split at random stays split as it was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lockstep import DataModule
from lockstep.callbacks import Callback, ModelCheckpoint
from tests.trainer.toy import Net, data, net, quiet


class Split(DataModule):
    """Splits as it is set up and as it makes a loader; makes its files where they are not there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def prepare_data(self) -> None:
        if not self.file.exists():
            self.file.write_text(str(torch.rand(()).item() + random.random() + np.random.rand()))

    def setup(self, stage: str) -> None:
        both = torch.randperm(40).tolist()
        own = [random.random(), np.random.rand()]
        self.train, self.val = both[:24], both[24:]
        self.drawn = [*both, *own]

    def train_dataloader(self) -> Any:
        self.drawn += torch.randperm(24).tolist()
        return DataLoader(Subset(data(40), self.train), batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(data(40), self.val), batch_size=8)

    test_dataloader = val_dataloader


class Built(Net):
    """Draws between the two, on ranks that build on the meta device nothing."""

    def configure_model(self) -> None:
        self.net[0].reset_parameters()

    def on_fit_start(self) -> None:
        drawn = self.all_gather(torch.tensor(self.trainer.datamodule.drawn, dtype=torch.float64)).reshape(-1, 66)
        assert (drawn == drawn[0]).all()

    test_step = Net.validation_step


def fitted(tmp_path: Path, *, seed: int | None = None, **options: Any) -> list[float]:
    path = options.pop("ckpt_path", None)
    split = Split(tmp_path / "data")
    trainer = quiet(seed=seed, **options)
    model = net()
    model.__class__ = Built
    torch.manual_seed(random.SystemRandom().randrange(1000))
    trainer.fit(model, datamodule=split, ckpt_path=path)
    if path is None and "devices" not in options:
        trainer.save_checkpoint(tmp_path / "saved")
    return split.drawn


@pytest.mark.parametrize("seed", [None, 3])
def test_a_resumed_run_splits_its_data_as_it_was_split(tmp_path: Path, seed: int | None) -> None:
    whole = fitted(tmp_path, max_epochs=1, seed=seed)
    assert fitted(tmp_path, max_epochs=2, seed=seed, ckpt_path=tmp_path / "saved") == whole
    assert fitted(tmp_path, max_epochs=2, seed=4, ckpt_path=tmp_path / "saved") == whole


def test_a_checkpoint_is_evaluated_on_what_was_split_off(tmp_path: Path) -> None:
    whole = fitted(tmp_path, max_epochs=1)
    split, model = Split(tmp_path / "data"), net()
    model.__class__ = Built
    np.random.seed(3)
    quiet().test(model, datamodule=split, ckpt_path=tmp_path / "saved", verbose=False)
    assert split.drawn == whole[:42]
    assert np.random.rand() == np.random.RandomState(3).rand()  # what is drawn later is the evaluation's own


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_split_alike(tmp_path: Path, strategy: str) -> None:
    fitted(tmp_path, strategy=strategy, devices=2, accelerator="cpu")


# ---- what DataModules and callbacks have saved ----------------------------------------------------------------


class Scaled(DataModule):
    """Makes loaders by what it knows, which checkpoints have."""

    def __init__(self, scale: float) -> None:
        self.scale, self.used = scale, []

    def train_dataloader(self) -> Any:
        self.used = [*self.used, self.scale]
        return DataLoader(data(24), batch_size=8)

    val_dataloader = train_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class Counting(Callback):
    """What an evaluation may need of a run, such as an average of the weights."""

    def __init__(self) -> None:
        self.steps = self.added = 0
        self.at_start: tuple[int, int] | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.at_start = self.steps, self.added

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = 7

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.added = checkpoint["added"]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_checkpoint_gives_datamodules_and_callbacks_their_state_first(tmp_path: Path, devices: int) -> None:
    kept = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)
    options: dict[str, Any] = {"devices": devices, "accelerator": "cpu", "enable_checkpointing": True}
    trainer = quiet(max_epochs=2, callbacks=[Counting(), kept], **options)
    trainer.fit(net(), datamodule=Scaled(3.0))
    path, paths = sorted(tmp_path.glob("epoch=0*"))[0], kept.best_model_path

    resumed, steps = Scaled(1.0), trainer.global_step // 2
    quiet(max_epochs=2, callbacks=Counting(), devices=devices).fit(net(), datamodule=resumed, ckpt_path=path)
    assert set(resumed.used) == {3.0}, "loaders are made of what was saved"
    evaluated, counting = Scaled(1.0), Counting()
    quiet(callbacks=counting, devices=devices).validate(net(), datamodule=evaluated, ckpt_path=path, verbose=False)
    assert evaluated.used == [3.0] and counting.at_start == (steps, 7)
    trainer.validate(net(), datamodule=Scaled(1.0), ckpt_path=path, verbose=False)
    assert kept.best_model_path == paths, "the records of a fit are not those of an older checkpoint"
