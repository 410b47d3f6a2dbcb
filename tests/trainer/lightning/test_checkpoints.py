"""What is saved, under which names and when: as Lightning saves it."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lockstep.lightning.pytorch as pl
from lockstep.lightning.pytorch.callbacks import ModelCheckpoint
from lockstep.trainer.checkpoint.convert import export_weights, import_weights
from lockstep.trainer.checkpoint.store import Checkpoint


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", -float(self.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(batches: int) -> DataLoader:
    return DataLoader(torch.ones(batches, 4))


def fit(folder: Path, saver: ModelCheckpoint | None, **arguments: Any) -> pl.Trainer:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [] if saver is None else [saver]
    trainer = pl.Trainer(**quiet, **arguments, default_root_dir=folder, callbacks=callbacks)
    trainer.fit(Net(), data(10), data(1))
    return trainer


TWO: dict[str, Any] = {"max_epochs": 2}
OFTEN: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 0.3}


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ({}, TWO, ["epoch=1-step=20.ckpt"]),
        ({"save_last": True}, TWO, ["epoch=1-step=20.ckpt", "last.ckpt"]),
        ({"save_last": "link", "save_top_k": 0}, TWO, ["last.ckpt"]),
        ({"every_n_epochs": 0}, TWO, []),
        ({"every_n_epochs": 0, "every_n_train_steps": 15, "filename": "{step}"}, TWO, ["step=15.ckpt"]),
        ({"every_n_epochs": 2, "save_top_k": -1, "filename": "{epoch}"}, {"max_epochs": 3}, ["epoch=1.ckpt"]),
        ({"save_top_k": -1, "filename": "{step}"}, OFTEN, [f"step={step}.ckpt" for step in (13, 16, 19, 3, 6, 9)]),
        ({"save_top_k": -1, "filename": "{step}", "monitor": "loss"}, {"max_steps": 4}, ["step=4.ckpt"]),
        ({"filename": "{epoch}"}, {"max_steps": 4}, ["epoch=0.ckpt"]),
        (
            {"train_time_interval": timedelta(0), "every_n_epochs": 0, "save_top_k": -1, "filename": "{step}"},
            {"max_steps": 6, "log_every_n_steps": 2},
            ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"],
        ),
    ],
    ids=str,
)
def test_files(tmp_path: Path, options: Any, arguments: Any, expected: list[str]) -> None:
    fit(tmp_path / "run", ModelCheckpoint(dirpath=tmp_path / "saved", **options), **arguments)
    assert sorted(os.listdir(tmp_path / "saved")) == expected


def test_torch_saves_a_trainer_that_has_run(tmp_path: Path) -> None:
    trainer = fit(tmp_path, ModelCheckpoint(), max_steps=2)
    torch.save(trainer, tmp_path / "trainer.pt")
    loaded = torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert loaded.global_step == 2 and loaded.max_steps == 2
    assert loaded.checkpoint_callback.best_model_path == trainer.checkpoint_callback.best_model_path != ""


def test_versions_are_counted_before_the_extension(tmp_path: Path) -> None:
    for counts in (True, True, False):
        fit(tmp_path, ModelCheckpoint(tmp_path / "saved", "one", enable_version_counter=counts), max_steps=1)
    assert sorted(os.listdir(tmp_path / "saved")) == ["one-v1.ckpt", "one.ckpt"]


def test_the_name_of_a_checkpoint_is_the_one_that_lightning_gives(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch.callbacks")
    metrics = {"epoch": 2, "step": 7, "loss": torch.tensor(0.125)}
    for template in (None, "{epoch:03d}-{loss:.2f}", "best"):
        given = [cls(tmp_path, template) for cls in (ModelCheckpoint, lightning.ModelCheckpoint)]
        for options in ({}, {"ver": 3}, {"filename": "{step}"}, {"prefix": "a", "ver": 1}):
            own, theirs = (saver.format_checkpoint_name(metrics, **options) for saver in given)
            assert own == theirs
    assert ModelCheckpoint().format_checkpoint_name(metrics) == "epoch=2-step=7.ckpt"


def test_an_override_of_the_name_is_followed(tmp_path: Path) -> None:
    class Named(ModelCheckpoint):
        def format_checkpoint_name(self, metrics: dict[str, Any], *args: Any, **options: Any) -> str:
            return super().format_checkpoint_name(metrics, *args, prefix="mine", **options)

    fit(tmp_path, Named(tmp_path / "saved"), max_steps=2)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["mine-epoch=0-step=2.ckpt"]


def test_the_extension_and_the_name_of_last_are_attributes(tmp_path: Path) -> None:
    class Renamed(ModelCheckpoint):
        FILE_EXTENSION = ".pt"
        CHECKPOINT_NAME_LAST = "newest"

    saver = Renamed(tmp_path / "saved", save_last=True)
    fit(tmp_path, saver, max_epochs=1)
    assert sorted(os.listdir(tmp_path / "saved")) == ["epoch=0-step=10.pt", "newest.pt"]
    assert saver.last_model_path == str(tmp_path / "saved" / "newest.pt")
    with pytest.raises(TypeError, match=r"CHECKPOINT_NAME_LAST='\{epoch\}' of ModelCheckpoint must be one name"):
        type("Filled", (ModelCheckpoint,), {"CHECKPOINT_NAME_LAST": "{epoch}"})()
    saver.CHECKPOINT_NAME_LAST = "{epoch}-last"
    with pytest.raises(TypeError, match=r"CHECKPOINT_NAME_LAST='\{epoch\}-last' of ModelCheckpoint must be one name"):
        fit(tmp_path, saver, max_epochs=1)


def test_the_characters_and_versions_of_names_are_attributes(tmp_path: Path) -> None:
    for filename in (None, "{step}", "{step}"):
        saver = ModelCheckpoint(tmp_path / "saved", filename)
        saver.CHECKPOINT_EQUALS_CHAR, saver.CHECKPOINT_JOIN_CHAR, saver.STARTING_VERSION = ":", "_", 9
        fit(tmp_path, saver, max_steps=1)
    assert sorted(os.listdir(tmp_path / "saved")) == ["epoch:0_step:1.ckpt", "step:1-v9.ckpt", "step:1.ckpt"]
    saver = ModelCheckpoint(tmp_path)
    assert vars(pickle.loads(pickle.dumps(saver))) == vars(saver)


def test_the_default_is_the_same_callback_and_can_be_resumed(tmp_path: Path) -> None:
    first = fit(tmp_path, None, max_epochs=1)
    saver = first.checkpoint_callback
    assert isinstance(saver, ModelCheckpoint) and saver.best_model_path.endswith("checkpoints/epoch=0-step=10.ckpt")
    saver.to_yaml(tmp_path / "best.yaml")
    assert (tmp_path / "best.yaml").read_text() == f"{saver.best_model_path}: 10.0\n"
    ModelCheckpoint().to_yaml(tmp_path / "none.yaml")
    assert (tmp_path / "none.yaml").read_text() == "{}\n"
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.fit(Net(), data(10), ckpt_path=saver.best_model_path)
    assert trainer.global_step == 20


class Configured(Net):
    def __init__(self, act: Any = torch.relu, dtype: Any = torch.float32, layer: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Whole(Net):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(config)


def written(folder: Path, module: Any, hyperparameters: dict[str, Any], name: str) -> Path:
    """A file in the layout of Lightning."""
    content = {"state_dict": module.state_dict(), "hyper_parameters": hyperparameters, "hparams_name": name}
    torch.save(content, folder / "model.ckpt")
    return folder / "model.ckpt"


def test_no_hyperparameter_of_a_file_of_lightning_is_left_at_its_default(tmp_path: Path) -> None:
    given = {"act": torch.tanh, "dtype": torch.float16, "layer": torch.nn.Linear(1, 1)}
    file = written(tmp_path, Net(), given, "kwargs")
    hparams = Configured.load_from_checkpoint(file, weights_only=False).hparams
    assert hparams.act is torch.tanh and hparams.dtype is torch.float16 and isinstance(hparams.layer, torch.nn.Linear)
    import_weights(file, tmp_path / "imported", trust_pickle=True)
    with pytest.raises(TypeError, match="Configured needs act, dtype, layer, which checkpoint"):
        Configured.load_from_checkpoint(tmp_path / "imported")
    assert Configured.load_from_checkpoint(tmp_path / "imported", **given).hparams.act is torch.tanh


def test_hyperparameters_that_are_one_argument_of_a_file_of_lightning_stay_one(tmp_path: Path) -> None:
    file = written(tmp_path, Net(), {"width": 3}, "config")
    assert Whole.load_from_checkpoint(file).hparams.width == 3
    import_weights(file, tmp_path / "imported", trust_pickle=True)
    assert Whole.load_from_checkpoint(tmp_path / "imported").hparams.width == 3


def test_what_was_not_saved_is_asked_for_after_an_export_too(tmp_path: Path) -> None:
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.fit(Configured(torch.tanh), data(1))
    trainer.save_checkpoint(tmp_path / "own")
    export_weights(Checkpoint.open(tmp_path / "own"), tmp_path / "own.safetensors")
    import_weights(tmp_path / "own.safetensors", tmp_path / "again")
    with pytest.raises(TypeError, match="Configured needs act, which checkpoint"):
        Configured.load_from_checkpoint(tmp_path / "again")
