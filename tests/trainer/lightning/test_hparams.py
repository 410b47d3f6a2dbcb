"""Hyperparameters: configs of omegaconf, what is refused, and what a checkpoint gives back."""

from __future__ import annotations

from argparse import Namespace
from enum import Enum
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import lockstep.lightning.pytorch as pl
from lockstep import CheckpointError
from lockstep.lightning.pytorch.core.mixins import HyperparametersMixin
from lockstep.lightning.pytorch.core.saving import (
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    save_hparams_to_tags_csv,
    save_hparams_to_yaml,
)
from lockstep.lightning.pytorch.utilities import AttributeDict
from tests.trainer.lightning.test_checkpoints import Net, data

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_steps": 1,
}  # fmt: skip


class Color(Enum):
    RED = 1


class Whole(Net):
    def __init__(self, conf: Any) -> None:
        super().__init__()
        self.width = conf.net.width if hasattr(conf.net, "width") else conf.net["width"]
        self.save_hyperparameters(conf)


class Part(Net):
    def __init__(self, conf: Any, more: Any = None, lr: float = 0.1) -> None:
        super().__init__()
        self.width = conf.net.width
        self.save_hyperparameters()


def saved(module: Net, folder: Path) -> Path:
    trainer = pl.Trainer(**QUIET, default_root_dir=folder)
    trainer.fit(module, data(1))
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def config() -> Any:
    return OmegaConf.create({"size": 3, "net": {"width": "${size}", "layers": [1, {"a": 2}]}})


@pytest.mark.parametrize("make", [config, lambda: Namespace(net={"width": 3})], ids=["config", "namespace"])
def test_a_config_given_whole_is_read_by_attributes_again(tmp_path: Path, make: Any) -> None:
    path = saved(Whole(make()), tmp_path)
    again = Whole.load_from_checkpoint(path)
    assert again.width == 3 and again.hparams.net["width"] == 3


def test_configs_among_the_arguments_are_saved_as_configs(tmp_path: Path) -> None:
    module = Part(config(), [config()])
    assert module.hparams.conf.net.layers[1].a == 2
    again = Part.load_from_checkpoint(saved(module, tmp_path), lr=0.2)
    assert OmegaConf.is_config(again.hparams.conf) and again.hparams.conf.net.width == 3
    assert again.hparams.more[0].net.layers[1].a == 2 and again.hparams.lr == 0.2


@pytest.mark.parametrize(
    "form", [dict, AttributeDict, lambda held: Namespace(**held), OmegaConf.create], ids=lambda form: form.__name__
)
def test_hyperparameters_in_a_file(tmp_path: Path, form: Any) -> None:
    held = {"lr": 0.5, "nested": {"a": 1}, "layers": [1, 2]}
    save_hparams_to_yaml(tmp_path / "hparams.yaml", form(held))
    assert load_hparams_from_yaml(tmp_path / "hparams.yaml").nested.a == 1
    assert load_hparams_from_yaml(tmp_path / "hparams.yaml", use_omegaconf=False) == held


def test_hyperparameters_in_a_file_replace_those_of_a_checkpoint(tmp_path: Path) -> None:
    path, file = saved(Part(config()), tmp_path), tmp_path / "hparams.yaml"
    save_hparams_to_yaml(file, {"lr": 0.5, "more": Color.RED, "unknown": 1})
    again = Part.load_from_checkpoint(path, hparams_file=file)
    assert (again.hparams.lr, again.hparams.more, again.hparams.conf.net.width) == (0.5, "RED", 3)
    assert Part.load_from_checkpoint(path, hparams_file=file, lr=0.25).hparams.lr == 0.25


class Wider(Part):
    def __init__(self, conf: Any, more: Any = None, lr: float = 0.1) -> None:
        super().__init__(conf, more, lr)
        self.extra = torch.nn.Linear(2, 2)
        self.strict_loading = more != "loose"


@pytest.mark.parametrize("given", [dict, Namespace])
def test_a_table_of_hyperparameters_gives_its_values_back(given: Any, tmp_path: Path) -> None:
    file, values = tmp_path / "tags.csv", {"lr": 0.25, "size": 3, "flag": True, "none": None, "name": 'a, "b"'}
    save_hparams_to_tags_csv(file, given(**values))
    assert load_hparams_from_tags_csv(file) == values
    assert file.read_text().splitlines()[:2] == ["key,value", "lr,0.25"]


def test_a_checkpoint_takes_hyperparameters_of_a_table(tmp_path: Path) -> None:
    path = saved(Part(config()), tmp_path)
    save_hparams_to_tags_csv(tmp_path / "tags.csv", {"lr": 0.25})
    assert Part.load_from_checkpoint(path, hparams_file=tmp_path / "tags.csv").hparams.lr == 0.25


@pytest.mark.parametrize("name", ["none.yaml", "none.csv"])
def test_a_file_of_hyperparameters_that_is_missing_costs_a_warning(name: str, tmp_path: Path) -> None:
    path = saved(Part(config(), lr=0.25), tmp_path)
    with pytest.warns(RuntimeWarning, match=f"{name} does not exist, so it gives no hyperparameters"):
        again = Part.load_from_checkpoint(path, hparams_file=tmp_path / name)
    assert again.hparams.lr == 0.25


def test_a_module_says_whether_it_is_loaded_strictly(tmp_path: Path) -> None:
    path = saved(Part(config()), tmp_path)
    assert Wider.load_from_checkpoint(path, more="loose").hparams.more == "loose"
    with pytest.raises(CheckpointError, match="extra"):
        Wider.load_from_checkpoint(path, lr=0.1)
    assert Wider.load_from_checkpoint(path, "cpu", None, False, more="loose").hparams.lr == 0.1
    with pytest.raises(ValueError, match="strict=False is in conflict with Wider.strict_loading=True; drop one"):
        Wider.load_from_checkpoint(path, strict=False)


class Data(pl.LightningDataModule):
    def __init__(self, folder: str, lock: Any = None, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self) -> Any:
        return data(self.hparams.size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_a_data_module_is_not_built_from_a_run_without_one(tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "a")
    pl.Trainer(**QUIET | {"enable_checkpointing": True}, callbacks=[saver]).fit(Net(), data(2))
    with pytest.raises(TypeError, match=r"Data needs folder, lock, size, which checkpoint .* does not hold"):
        Data.load_from_checkpoint(tmp_path / "a.ckpt")
    assert Data.load_from_checkpoint(tmp_path / "a.ckpt", folder="here", lock=None, size=5).hparams.size == 5


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_data_module_is_built_from_a_checkpoint(tmp_path: Path, weights_only: bool) -> None:
    module = Data("here", size=3)
    module.seen = 7
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "a", save_weights_only=weights_only)
    pl.Trainer(**QUIET | {"enable_checkpointing": True}, callbacks=[saver]).fit(Net(), datamodule=module)
    again = Data.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu", folder="there")
    assert (again.hparams.folder, again.hparams.size, again.seen) == ("there", 3, 0 if weights_only else 7)
    save_hparams_to_yaml(tmp_path / "data.yaml", {"size": 4})
    assert Data.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=tmp_path / "data.yaml").hparams.size == 4
    assert pl.LightningDataModule.load_from_checkpoint(tmp_path / "a.ckpt").hparams == {}
    with pytest.raises(TypeError, match=r"makes a new object .* call Data\.load_from_checkpoint"):
        again.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_data_module_needs_what_its_checkpoint_does_not_hold(tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "a")
    trainer = pl.Trainer(**QUIET | {"enable_checkpointing": True}, callbacks=[saver])
    trainer.fit(Net(), datamodule=Data("here", Lock()))
    with pytest.raises(TypeError, match="Data needs lock, which checkpoint .* does not hold; give them to"):
        Data.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_data_module_is_built_from_a_file_of_lightning(tmp_path: Path) -> None:
    content = {"state_dict": {}, "datamodule_hyper_parameters": {"folder": "here", "size": 5}, "Data": {"seen": 9}}
    torch.save(content, tmp_path / "l.ckpt")
    again = Data.load_from_checkpoint(tmp_path / "l.ckpt")
    assert (again.hparams.folder, again.hparams.size, again.seen) == ("here", 5, 9)


def test_what_load_from_checkpoint_refuses(tmp_path: Path) -> None:
    path = saved(Part(config()), tmp_path)
    with pytest.raises(TypeError, match=r"^Part takes no argument 'mor'; did you mean 'more'\?$"):
        Part.load_from_checkpoint(path, mor=1)
    save_hparams_to_yaml(tmp_path / "hparams.yaml", {"rate": 0.5})
    with pytest.raises(TypeError, match="holds no argument of Part, which takes conf, more, lr; give what it holds as"):
        Part.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")
    with pytest.raises(TypeError, match=r"load_from_checkpoint makes a new object .* call Part\.load_from_checkpoint"):
        Part(config()).load_from_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        Part.load_from_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("value", [42, [1, 2]], ids=str)
def test_other_objects_in_place_of_names_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="save_hyperparameters takes names of arguments, or a dict, a Namespace or a"):
        Net().save_hyperparameters(value)


@pytest.mark.parametrize("base", [pl.LightningModule, pl.LightningDataModule, HyperparametersMixin])
def test_what_was_saved_first_is_kept(base: type) -> None:
    class Saved(base):  # type: ignore[misc, valid-type]
        def __init__(self, layers: list[int], lock: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    lock = Lock()
    made = Saved([1], lock)
    made.hparams.layers.append(2)
    made.hparams.more = 3
    assert made.hparams_initial == {"layers": [1], "lock": lock}
    assert made.hparams == {"layers": [1, 2], "lock": lock, "more": 3}
    assert base().hparams_initial == {}
