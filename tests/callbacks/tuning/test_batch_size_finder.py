"""BatchSizeFinder: with a step that runs out of memory above a known size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import DataModule
from lockstep.callbacks import BatchSizeFinder, ModelCheckpoint
from tests.trainer.toy import Net, data, equal, loader, quiet, weights

pytestmark = pytest.mark.ranks  # a search runs in processes of its own


class Limited(Net):
    """Has room for batches of 21 samples."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(data(200), self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 21:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


def find(callback: BatchSizeFinder, **options: Any) -> Limited:
    torch.manual_seed(0)
    module = Limited()
    quiet(**{"max_steps": 2, "max_epochs": None} | options, callbacks=[callback]).fit(module)
    return module


@pytest.mark.parametrize(
    ("options", "size"), [({}, 16), ({"mode": "binsearch"}, 21), ({"margin": 0.25}, 12), ({"max_trials": 2}, 4)]
)
def test_the_largest_size_that_fits_is_set_and_the_run_is_that_run(options: dict[str, Any], size: int) -> None:
    callback = BatchSizeFinder(**options)
    module = find(callback)
    assert module.batch_size == callback.result == size
    torch.manual_seed(0)
    expected = Limited(size)
    quiet(max_steps=2, max_epochs=None).fit(expected)
    assert equal(weights(module), weights(expected))


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree(devices: int) -> None:
    callback = BatchSizeFinder(mode="binsearch")
    find(callback, strategy="ddp", devices=devices)
    assert callback.result == 21


@pytest.mark.parametrize(
    ("limit", "size"),
    [({}, 64), ({"limit_train_batches": 1}, 64), ({"overfit_batches": 2}, 64), ({"limit_train_batches": 0.25}, 8)],
)
def test_the_search_ends_where_the_dataset_is_one_batch(limit: dict[str, Any], size: int) -> None:
    class Small(Net):
        batch_size = 4

        def train_dataloader(self) -> DataLoader:
            return DataLoader(data(50), self.batch_size)

    callback = BatchSizeFinder()
    quiet(callbacks=[callback], **limit).fit(Small())
    assert callback.result == size


def test_the_batch_size_of_a_datamodule_is_set() -> None:
    class Data(DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 4

        def train_dataloader(self) -> DataLoader:
            return DataLoader(data(200), self.batch_size)

    class Module(Limited):
        def __init__(self) -> None:
            super().__init__()
            del self.batch_size

        train_dataloader = None

    datamodule = Data()
    quiet(callbacks=[BatchSizeFinder()], max_steps=1, max_epochs=None).fit(Module(), datamodule=datamodule)
    assert datamodule.batch_size == 16


def test_other_errors_come_out() -> None:
    class Broken(Limited):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        quiet(callbacks=[BatchSizeFinder()]).fit(Broken())


def test_what_cannot_be_searched_is_named() -> None:
    with pytest.raises(ValueError, match="cannot change the batch size of a loader that was given"):
        quiet(callbacks=[BatchSizeFinder()]).fit(Limited(), loader())
    with pytest.raises(ValueError, match="init_val=32 does not fit"):
        find(BatchSizeFinder(init_val=32))
    with pytest.raises(ValueError, match="mode must be"):
        BatchSizeFinder(mode="half")


class Finished(DataModule):
    """Has the batch size of which the search finds another."""

    def __init__(self) -> None:
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader(data(200), self.batch_size, shuffle=True)


@pytest.mark.parametrize("of_module", [True, False])
@pytest.mark.parametrize("ckpt_path", ["path", "auto"])
def test_a_resumed_run_has_the_size_that_was_found(
    ckpt_path: str, of_module: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(folder: Path, steps: int | None, ckpt_path: Any = None) -> Limited:
        torch.manual_seed(0)
        module, finder = Limited(), BatchSizeFinder()
        callbacks = [finder, ModelCheckpoint(every_n_train_steps=5, filename="{step}")]
        options: dict[str, Any] = {"max_epochs": 2, "max_steps": steps, "default_root_dir": folder, "seed": 0}
        trainer = quiet(callbacks=callbacks, enable_checkpointing=True, **options)
        trainer.fit(module, datamodule=None if of_module else Finished(), ckpt_path=ckpt_path)
        assert finder.result == 16
        return module

    whole = run(tmp_path / "whole", None, "auto")  # of which there is none, so it searches
    run(tmp_path / "killed", 5)
    (path,) = (tmp_path / "killed").rglob("step=5")
    caplog.clear()
    resumed = run(tmp_path / "killed", None, "auto" if ckpt_path == "auto" else path)
    assert equal(weights(resumed), weights(whole)) and "BatchSizeFinder: batch_size" not in caplog.text


def test_a_checkpoint_that_does_not_hold_the_size_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_steps=2, max_epochs=None)
    trainer.fit(Limited())
    trainer.save_checkpoint(tmp_path / "saved")
    module = Limited()
    quiet(max_steps=4, max_epochs=None, callbacks=[BatchSizeFinder()]).fit(module, ckpt_path=tmp_path / "saved")
    assert module.batch_size == 2 and "does not hold what BatchSizeFinder found" in caplog.text
