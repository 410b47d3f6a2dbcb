"""`save_hyperparameters`, and modules that are built again from them."""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from lockstep import CheckpointError, Module
from lockstep.callbacks import ModelCheckpoint
from tests.trainer.toy import Net, equal, loader, quiet, weights


class Base(Net):
    def __init__(self, width: int = 4, *, lr: float = 0.1, **more: Any) -> None:
        Module.__init__(self)
        self.save_hyperparameters(ignore=["loss"])
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Identity(), nn.Linear(width, 3))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.hparams["lr"])


class Derived(Base):
    def __init__(self, depth: int, loss: Any = None, width: int = 5) -> None:
        super().__init__(width, lr=0.2, extra=[1, 2])
        self.depth = depth


def test_hyperparameters_of_a_frame() -> None:
    class Outer(Module):
        def __init__(self, a: int, b: int = 2) -> None:
            super().__init__()
            keep(self, inspect.currentframe())

    def keep(module: Module, frame: FrameType | None) -> None:
        module.save_hyperparameters(frame=frame, ignore="b")

    assert Outer(1).hparams == {"a": 1}


def test_save_hyperparameters_variants() -> None:
    assert Base(6).hparams == {"width": 6, "lr": 0.1}
    assert Base(6, other="x").hparams == {"width": 6, "lr": 0.1, "other": "x"}
    derived = Derived(3, loss=nn.MSELoss())
    assert derived.hparams == {"width": 5, "lr": 0.2, "extra": [1, 2], "depth": 3}
    assert derived.hparams.depth == derived.hparams["depth"] == 3
    with pytest.raises(AttributeError, match="no hyperparameter 'dept'; there are width, lr, extra, depth"):
        derived.hparams.dept  # noqa: B018

    class Named(Module):
        def __init__(self, a: int, b: int, c: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters("a", "c")

    assert Named(1, 2).hparams == {"a": 1, "c": 3}

    class Given(Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    from argparse import Namespace

    from omegaconf import OmegaConf

    for config in ({"a": 1, "b": {"c": 2}}, Namespace(a=1, b={"c": 2}), OmegaConf.create({"a": 1, "b": {"c": 2}})):
        assert Given(config).hparams == {"a": 1, "b": {"c": 2}}

    class Typo(Module):
        def __init__(self, a: int) -> None:
            super().__init__()
            self.save_hyperparameters("b")

    with pytest.raises(
        ValueError, match="save_hyperparameters\\('b'\\) names 'b', which is not an argument of __init__ \\(a\\)"
    ):
        Typo(1)


class FromConfig(Net):
    def __init__(self, config: dict[str, Any], scale: float = 1.0) -> None:
        Module.__init__(self)
        self.save_hyperparameters(config)
        self.scale = scale
        self.net = nn.Sequential(nn.Linear(8, config["width"]), nn.ReLU(), nn.Identity(), nn.Linear(config["width"], 3))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.hparams.lr)


def saved(model: Module, folder: Path) -> str:
    trainer = quiet(callbacks=[ModelCheckpoint(dirpath=folder)], enable_checkpointing=True)
    trainer.fit(model, loader(8))
    return trainer.checkpoint_callback.best_model_path


def test_load_from_checkpoint_rebuilds_what_was_saved(tmp_path: Path) -> None:
    model = Derived(3, loss=nn.MSELoss(), width=7)
    path = saved(model, tmp_path / "derived")
    loaded = Derived.load_from_checkpoint(path)
    assert loaded.hparams == {"width": 7, "lr": 0.2, "extra": [1, 2], "depth": 3} and equal(
        weights(loaded), weights(model)
    )
    for place in ("cpu", {"cuda:0": "cpu"}, lambda storage, location: storage):
        assert Derived.load_from_checkpoint(path, depth=9, loss=None, map_location=place).depth == 9
    with pytest.raises(CheckpointError, match="shape"):
        Derived.load_from_checkpoint(path, width=6)

    model = FromConfig({"width": 3, "lr": 0.1, "nested": {"a": (1, 2)}})
    path = saved(model, tmp_path / "config")
    assert equal(weights(FromConfig.load_from_checkpoint(path)), weights(model)), (
        "what was given as one dict is given as one dict"
    )
    loaded = FromConfig.load_from_checkpoint(path, config={"width": 3, "lr": 0.5}, scale=2.0)
    assert loaded.hparams.lr == 0.5 and loaded.scale == 2.0

    class More(Derived):
        def __init__(self, depth: int, width: int) -> None:
            super().__init__(depth, width=width)
            self.head = nn.Linear(1, 1)

    assert isinstance(More.load_from_checkpoint(saved(Derived(3), tmp_path / "less"), strict=False).head, nn.Linear)
    with pytest.raises(CheckpointError, match="lacks head.bias, head.weight"):
        More.load_from_checkpoint(saved(Derived(3), tmp_path / "strict"))


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


def test_members_of_an_enum_come_back_in_lists_and_beside_other_kinds(tmp_path: Path) -> None:
    class Colored(Net):
        def __init__(self, colors: list[Color], shade: Color | str = Color.RED, one: Color | None = None) -> None:
            Module.__init__(self)
            self.save_hyperparameters()
            self.net = nn.Linear(8, 3)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), 0.1)

    module = Colored([Color.RED, Color.BLUE], shade="pale", one=Color.BLUE)
    trainer = quiet(default_root_dir=tmp_path)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(tmp_path / "x")
    loaded = Colored.load_from_checkpoint(tmp_path / "x")
    assert loaded.hparams == {"colors": [Color.RED, Color.BLUE], "shade": "pale", "one": Color.BLUE}
    assert [type(color) for color in loaded.hparams.colors] == [Color, Color]


class WithConfig(Net):
    def __init__(self, cfg: dict[str, Any]) -> None:
        Module.__init__(self)
        self.save_hyperparameters(cfg)
        self.net = nn.Sequential(nn.Linear(8, cfg["width"]), nn.ReLU(), nn.Identity(), nn.Linear(cfg["width"], 3))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class AllAfter(WithConfig):
    def __init__(self, cfg: dict[str, Any], scale: float = 1.0) -> None:
        super().__init__(cfg)
        self.save_hyperparameters()
        self.scale = scale


class AllBefore(WithConfig):
    def __init__(self, cfg: dict[str, Any], scale: float = 1.0) -> None:
        Module.__init__(self)
        self.save_hyperparameters()
        WithConfig.__init__(self, cfg)
        self.scale = scale


class ConfigTwice(WithConfig):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__(cfg)
        self.save_hyperparameters(cfg)


class Renamed(WithConfig):
    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__(args)
        self.save_hyperparameters(args)


class NameAfter(WithConfig):
    def __init__(self, cfg: dict[str, Any], scale: float = 1.0) -> None:
        super().__init__(cfg)
        self.save_hyperparameters("scale")
        self.scale = scale


@pytest.mark.parametrize("kind", [AllAfter, AllBefore, NameAfter])
def test_a_config_as_a_whole_and_arguments_by_name(kind: Any, tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(kind({"width": 4}, scale=2.0), loader(8))
    trainer.save_checkpoint(tmp_path / "c", weights_only=True)
    if kind is NameAfter:
        with pytest.raises(TypeError, match="NameAfter needs cfg, which checkpoint .* does not hold"):
            kind.load_from_checkpoint(tmp_path / "c")
    given = {"cfg": {"width": 4}} if kind is NameAfter else {}
    found = kind.load_from_checkpoint(tmp_path / "c", **given)
    assert found.scale == 2.0 and found.net[0].out_features == 4


@pytest.mark.parametrize("kind", [ConfigTwice, Renamed])
def test_a_config_that_two_classes_save_is_one_argument(kind: Any, tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(kind({"width": 4}), loader(8))
    trainer.save_checkpoint(tmp_path / "c", weights_only=True)
    assert kind.load_from_checkpoint(tmp_path / "c").net[0].out_features == 4
