"""Values that users put into hyperparameters, schedulers, callbacks and paths: each comes back as what it was."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lockstep import Module
from lockstep.callbacks import Callback, CSVLogger, ModelCheckpoint, TensorBoardLogger
from lockstep.strategies.checkpoint_state import TensorShard, pack, unpack
from tests.trainer.toy import Net, equal, loader, net, quiet, weights


class Mode(str, enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Configured(Net):
    def __init__(
        self,
        root: Path,
        mode: Mode,
        level: Level | None = None,
        kind=Mode.SLOW,
        width: Any = 16,
        lr: Any = 1e-2,
    ) -> None:
        super().__init__(width=int(width), lr=lr)
        self.save_hyperparameters()


class Averages(Callback):
    def __init__(self) -> None:
        self.seen = np.zeros(3)
        self.best = np.float32(math.inf)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = self.seen + np.array([1.0, batch_idx, 0.5])
        self.best = min(self.best, np.float32(batch_idx - 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "best": self.best, "where": Path("a/b"), "flag": np.bool_(True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.best = state_dict["seen"], np.float32(state_dict["best"])
        assert state_dict["where"] == Path("a/b") and bool(state_dict["flag"])


def test_hyperparameters_of_numpy_paths_and_enums_come_back_as_what_they_were(tmp_path: Path) -> None:
    module = Configured(tmp_path, Mode.FAST, Level.HIGH, width=np.int64(16), lr=np.float64(1e-2))
    root = tmp_path / "runs"
    trainer = quiet(
        enable_checkpointing=True,
        default_root_dir=root,
        logger=[CSVLogger(name="n", version="v"), TensorBoardLogger(name="n", version="v")],
        log_every_n_steps=1,
    )
    trainer.fit(module, loader(16))
    loaded = Configured.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    hparams = loaded.hparams
    assert hparams.root == tmp_path and isinstance(hparams.root, Path)
    assert hparams.mode is Mode.FAST and hparams.level is Level.HIGH and hparams.kind is Mode.SLOW
    assert (hparams.lr, hparams.width) == (1e-2, 16)
    assert equal(weights(loaded), weights(module))
    assert "mode: fast" in (root / "n" / "v" / "hparams.yaml").read_text()


class Cosine(Net):
    """Rates and options that numpy computed."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=np.float64(1e-2), weight_decay=np.float32(0.5))
        rate = LambdaLR(optimizer, lambda step: np.float64(0.5) * (1 + np.cos(np.pi * step / 8)))
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("fsdp", 2)])
def test_a_rate_of_numpy_is_saved_and_resumed_to_the_bit(tmp_path: Path, strategy: str, devices: int) -> None:
    def fit(ckpt_path: Path | None, **options: Any) -> tuple[Any, Averages]:
        torch.manual_seed(0)
        module, averages = Cosine(), Averages()
        saves = ModelCheckpoint(tmp_path / "c", "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [averages, saves] if ckpt_path is None else [averages]
        trainer = quiet(
            strategy=strategy,
            devices=devices,
            accelerator="cpu",
            callbacks=callbacks,
            enable_checkpointing=ckpt_path is None,
            seed=1,
            max_epochs=2,
            **options,
        )
        trainer.fit(module, loader(32, 8), ckpt_path=ckpt_path)
        return module, averages

    whole, one = fit(None)
    resumed, other = fit(tmp_path / "c" / "step=2")
    assert equal(weights(whole), weights(resumed))
    assert isinstance(other.seen, np.ndarray) and np.array_equal(one.seen, other.seen) and one.best == other.best


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1],
        np.zeros((0, 2), dtype=np.float16),
        np.array(1 + 2j),
        Path("/a") / "b",
        {"a": [np.float64(math.nan)], 3: (Path("x"),)},
    ],
)
def test_packing_is_undone(value: Any) -> None:
    tensors: dict[str, TensorShard] = {}
    back = unpack(pack(value, "x", tensors), lambda name: tensors[name].tensor)
    if isinstance(value, np.ndarray):
        assert back.shape == value.shape and back.dtype == value.dtype.newbyteorder("=") and np.array_equal(back, value)
    else:
        assert repr(back).replace("PosixPath", "") == repr(value).replace("PosixPath", "").replace(
            "np.float64(nan)", "nan"
        )


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), np.datetime64("2020"), object(), {1, 2}])
def test_what_a_checkpoint_cannot_hold_is_refused_with_its_key_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"x\.a\.0 is "):
        pack({"a": [value]}, "x", {})


class Backbone(Module):
    def __init__(self, body: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()


class IgnoresAfter(Backbone):
    def __init__(self, body: nn.Module, width: int = 4, depth: int = 1) -> None:
        super().__init__(body, width)
        self.save_hyperparameters(ignore=["body"])


class IgnoresBefore(Backbone):
    def __init__(self, body: nn.Module, width: int = 4, depth: int = 1) -> None:
        nn.Module.__init__(self)
        self.save_hyperparameters(ignore="body")
        super().__init__(body, width)


class AsksAgain(IgnoresAfter):
    def __init__(self, body: nn.Module) -> None:
        super().__init__(body)
        self.save_hyperparameters("body")


@pytest.mark.parametrize("cls", [IgnoresAfter, IgnoresBefore])
def test_an_argument_that_a_subclass_ignores_is_ignored(cls: type) -> None:
    assert cls(nn.Linear(1, 1)).hparams == {"width": 4, "depth": 1}
    assert set(Backbone(nn.Linear(1, 1)).hparams) == {"body", "width"}
    assert set(AsksAgain(nn.Linear(1, 1)).hparams) == {"body", "width", "depth"}


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)

    class Saves(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint("~/mine")

    trainer = quiet(
        default_root_dir="~/runs",
        logger=CSVLogger("~/logs", name="n"),
        callbacks=[ModelCheckpoint("~/kept"), Saves()],
        enable_checkpointing=True,
    )
    module = net()
    trainer.fit(module, loader(8))
    assert {path.name for path in home.iterdir()} == {"logs", "kept", "mine"} and not list(here.iterdir())
    assert equal(weights(Net.load_from_checkpoint("~/mine")), weights(module))
    quiet().validate(net(), loader(8), ckpt_path="~/mine", verbose=False)
    quiet(default_root_dir="~/runs", enable_checkpointing=True).fit(net(), loader(8))
    assert (home / "runs").is_dir() and not list(here.iterdir())


def test_keys_with_dots_have_tensors_of_their_own() -> None:
    value = {
        "net": {"0.w": torch.zeros(2), "0": {"w": torch.ones(2)}},
        "net.0": {"w": torch.full((2,), 2.0)},
        "net\\.0": {"w": torch.full((2,), 3.0)},
        1: {"key": torch.full((2,), 4.0)},
        (torch.full((2,), 5.0),): 6,
    }
    tensors: dict[str, TensorShard] = {}
    packed = pack(value, "state", tensors)
    assert len(tensors) == 6
    again = unpack(packed, lambda name: tensors[name].tensor)
    assert again["net"]["0.w"][0] == 0 and again["net"]["0"]["w"][0] == 1 and again["net.0"]["w"][0] == 2
    assert again["net\\.0"]["w"][0] == 3 and again[1]["key"][0] == 4


def test_a_state_of_before_keys_were_escaped_is_read() -> None:
    old = {"net": {"0.w": {"$tensor": "state.net.0.w"}}}
    assert unpack(old, {"state.net.0.w": torch.ones(1)}.__getitem__)["net"]["0.w"] == 1
