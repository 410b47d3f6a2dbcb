"""What every logger can do and be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import CSVLogger, Logger, ModelCheckpoint
from lockstep.trainer.checkpoint.store import is_checkpoint
from tests.trainer.toy import loader, net, quiet


class Uploads(Logger):
    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        paths = {checkpoint_callback.best_model_path, checkpoint_callback.last_model_path} - {""}
        with self.notes.open("a") as file:
            file.write(f"{sorted(Path(path).name for path in paths if is_checkpoint(path))}\n")


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp", "devices": 2}], ids=["single", "fsdp"])
def test_a_logger_hears_of_each_save_once(options: dict[str, Any], tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True, save_top_k=1, every_n_train_steps=2)
    options = {"devices": 1, "accelerator": "cpu", "logger": Uploads(tmp_path / "notes")} | options
    quiet(**options, enable_checkpointing=True, callbacks=[saver], max_steps=5).fit(net(), loader(48, batch_size=4))
    saved = ["['epoch=0-step=2', 'last']", "['epoch=0-step=4', 'last']", "['epoch=0-step=5', 'last']"]
    assert (tmp_path / "notes").read_text().splitlines() == saved


def test_a_logger_that_fails_after_a_save_costs_a_warning(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "saved")
    with pytest.warns(RuntimeWarning, match="Uploads stops logging, training continues"):
        quiet(logger=Uploads(tmp_path), enable_checkpointing=True, callbacks=[saver], max_steps=2).fit(net(), loader())
    assert is_checkpoint(saver.best_model_path)


def test_a_logger_cannot_hear_of_a_save_that_is_not_written(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, async_save=True)
    with pytest.raises(ValueError, match=r"after_save_checkpoint of Uploads .*async_save=True.*; set async_save=False"):
        quiet(logger=Uploads(tmp_path), enable_checkpointing=True, callbacks=[saver]).fit(net(), loader())


def test_an_address_is_not_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Logger):
        save_dir = "gs://bucket"

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="save_dir of CSVLogger must be a folder, got the address 's3://bucket/logs'"):
        CSVLogger("s3://bucket/logs")
    with pytest.raises(ValueError, match="save_dir of Elsewhere must be a folder, got the address 'gs:/bucket"):
        quiet(logger=Elsewhere()).fit(net(), loader())
    with pytest.raises(ValueError, match="path of save_checkpoint must be a folder"):
        quiet().save_checkpoint("s3://bucket/a")
    assert not list(tmp_path.iterdir())
