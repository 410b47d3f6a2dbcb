"""Hyperparameters: configs of omegaconf, what is refused, and what a checkpoint gives back."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from omegaconf import OmegaConf

import lockstep.lightning.pytorch as pl
from lockstep.lightning.pytorch.core.mixins import HyperparametersMixin
from tests.trainer.lightning.test_checkpoints import Net, data

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_steps": 1,
}  # fmt: skip


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


def test_what_load_from_checkpoint_refuses(tmp_path: Path) -> None:
    path = saved(Part(config()), tmp_path)
    with pytest.raises(TypeError, match=r"^Part takes no argument 'mor'; did you mean 'more'\?$"):
        Part.load_from_checkpoint(path, mor=1)
    with pytest.raises(TypeError, match="no argument 'hparams_file'; hyperparameters are in the checkpoint"):
        Part.load_from_checkpoint(path, hparams_file="hparams.yaml")
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
