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
