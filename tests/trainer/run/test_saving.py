"""Checkpoints that are saved once fit has returned, and of the weights alone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import CheckpointError, DataModule, Module, Trainer
from lockstep.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lockstep.strategies import FSDP
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.trainer.toy import Net, equal, loader, net, quiet, weights


class Extra(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = 3

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.extra = checkpoint["extra"]


@pytest.mark.parametrize("strategy", ["single", "dp", "model"])
def test_what_is_saved_after_fit_is_resumed_as_if_it_had_been_saved_in_it(strategy: str, tmp_path: Path) -> None:
    devices = 1 if strategy == "single" else 2
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "accelerator": "cpu", "seed": 0}
    whole, first, second = (net(dropout=0.1) for _ in range(3))
    quiet(max_epochs=3, **options).fit(whole, loader(shuffle=True))
    trainer = quiet(max_epochs=2, **options)
    trainer.fit(first, loader(shuffle=True))
    trainer.save_checkpoint(tmp_path / "after")
    quiet(max_epochs=3, **options).fit(second, loader(shuffle=True), ckpt_path=tmp_path / "after")
    assert equal(weights(whole), weights(second))


class Stateless(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "make"),
    [("fsdp offloaded", Net), ("deepspeed_stage_2", Net), ("deepspeed_stage_3", Net), ("deepspeed_stage_3", Stateless)],
)
def test_what_an_engine_has_given_up_on_one_device_is_not_saved(name: str, make: type[Net], tmp_path: Path) -> None:
    strategy = FSDP(cpu_offload=True) if "fsdp" in name else name
    trainer, module = quiet(strategy=strategy, devices=1, accelerator="cpu", max_epochs=1), make()
    trainer.fit(module, loader())
    with pytest.raises(RuntimeError, match="save_checkpoint was called after fit, which has given up the state"):
        trainer.save_checkpoint(tmp_path / "all")
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert equal(weights(Net.load_from_checkpoint(tmp_path / "weights")), weights(module))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_save_after_fit_replaces_checkpoints_and_nothing_of_the_user(devices: int, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("notes")
    (tmp_path / "empty").mkdir()
    callbacks = [WeightAveraging(0.9), ModelCheckpoint(dirpath=tmp_path / "ck", save_last=True)]
    options: dict[str, Any] = {"callbacks": callbacks, "default_root_dir": tmp_path, "enable_checkpointing": True}
    strategy = "single" if devices == 1 else "ddp"
    trainer = quiet(accelerator="cpu", strategy=strategy, devices=devices, max_steps=2, **options)
    trainer.fit(net(), loader(16))
    last = Path(callbacks[1].last_model_path)  # type: ignore[attr-defined]
    for name, target in (("to folder", "folder"), ("to file", "file"), ("to checkpoint", last), ("to nothing", "none")):
        (tmp_path / name).symlink_to(target)
    before = sorted(tmp_path.iterdir())
    for path in [tmp_path / "folder", tmp_path / "file", *tmp_path.glob("to *"), last.parent]:
        with pytest.raises(CheckpointError, match=r"exists and is (a link|not a checkpoint), so it is not replaced"):
            trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError, match="is in the checkpoint"):
        trainer.save_checkpoint(last / "inner")
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "notes"
    for _ in range(2):  # the second one replaces the first
        trainer.save_checkpoint(tmp_path / "empty")
    trainer.save_checkpoint(last)
    assert Checkpoint.open(tmp_path / "empty").checksum == Checkpoint.open(last).checksum
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_hook_of_an_evaluation_saves_weights_alone(stage: str, tmp_path: Path) -> None:
    class Saves(Callback):
        def __init__(self, **options: Any) -> None:
            self.options = options

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            self.stage = stage

        def _save(self, trainer: Any, *_: Any) -> None:
            if self.stage != "fit":
                trainer.save_checkpoint(tmp_path / "c", **self.options)

        on_validation_end = on_test_end = on_predict_end = _save

    class Tested(Net):
        test_step = Net.validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    trainer, module = quiet(callbacks=Saves()), Tested()
    trainer.fit(module, loader(16))
    trainer.save_checkpoint(tmp_path / "first")
    getattr(trainer, stage)(module, loader(16))  # of the weights that the fit has left
    with pytest.raises(RuntimeError, match=f"called in a hook of {stage}, .*give weights_only=True"):
        getattr(trainer, stage)(module, loader(16), ckpt_path=tmp_path / "first")
    other = quiet(callbacks=Saves(weights_only=True))
    getattr(other, stage)(Tested(), loader(16), ckpt_path=tmp_path / "first")
    assert equal(weights(Tested.load_from_checkpoint(tmp_path / "c")), weights(module))


def test_an_evaluation_in_between_changes_nothing(tmp_path: Path) -> None:
    trainer = quiet(max_steps=4, max_epochs=None, accelerator="cpu", devices=1, seed=0)
    module = net()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "one")
    trainer.validate(module, loader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "other")
    one, other = (Checkpoint.open(tmp_path / name) for name in ("one", "other"))
    assert one.rank_state(0)["sums"] == other.rank_state(0)["sums"] != {}  # type: ignore[index]
    trainer.validate(module, loader(), ckpt_path=tmp_path / "one", verbose=False)
    with pytest.raises(RuntimeError, match="no state of a fit"):
        trainer.save_checkpoint(tmp_path / "third")


class Counts(DataModule):
    """Data that says how often it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader(shuffle=True)

    test_dataloader = train_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}


class SavesInTest(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("within", [False, True])
def test_a_test_in_between_is_not_in_the_checkpoint_of_the_fit(seed: int | None, within: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "seed": seed}

    class Tested(Net):
        test_step = Net.validation_step

    def module() -> Module:
        torch.manual_seed(0)
        return Tested(dropout=0.3)

    whole, first, second = module(), module(), module()
    for each, epochs in ((whole, 2), (first, 1)):
        torch.manual_seed(3)
        trainer = quiet(max_epochs=epochs, callbacks=SavesInTest(tmp_path / "in"), **options)
        trainer.fit(each, datamodule=Counts())
    shown = {**trainer.callback_metrics}
    torch.manual_seed(5)
    trainer.test(first, loader(), verbose=False)
    drawn = torch.rand(1)
    trainer.save_checkpoint(tmp_path / "after")
    state = Checkpoint.open(path := tmp_path / ("in" if within else "after")).state
    assert state["metrics"] == {name: float(value) for name, value in shown.items()}
    assert state["datamodule"] == {"asked": 1}
    assert "val/loss" in trainer.callback_metrics and not torch.equal(drawn, torch.rand(1))
    quiet(max_epochs=2, **options).fit(second, datamodule=Counts(), ckpt_path=path)
    assert equal(weights(whole), weights(second))


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    trainer, module = quiet(accelerator="cpu", devices=1), Extra()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "w", weights_only=True)
    assert not Checkpoint.open(tmp_path / "w").names("optimizer/")
    loaded = Extra.load_from_checkpoint(tmp_path / "w")
    assert equal(weights(loaded), weights(module)) and loaded.extra == 3
    with pytest.raises(CheckpointError, match="has only weights"):
        quiet().fit(Extra(), loader(), ckpt_path=tmp_path / "w")


def test_model_checkpoint_takes_its_monitor_by_place_and_saves_weights_alone(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_weights_only=True, save_last=True)
    trainer = quiet(enable_checkpointing=True, callbacks=[saver], max_epochs=2, accelerator="cpu", devices=1)
    module = net()
    trainer.fit(module, loader(), loader())
    assert saver.monitor == "val/loss"
    for path in (saver.best_model_path, saver.last_model_path):
        assert "seed" not in Checkpoint.open(path).state
    assert equal(weights(Net.load_from_checkpoint(saver.last_model_path)), weights(module))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_started_ranks_leave_what_can_be_saved(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "devices": 2, "accelerator": "cpu", "seed": 0}
    saver = ModelCheckpoint(tmp_path / "saver")
    trainer, module = quiet(enable_checkpointing=True, callbacks=[saver], max_epochs=1, **options), Extra()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "after")
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert Checkpoint.open(tmp_path / "after").state["progress"]["global_step"] == trainer.global_step
    assert equal(weights(Extra.load_from_checkpoint(tmp_path / "weights")), weights(module))
    resumed = quiet(max_epochs=2, **options)
    resumed.fit(Extra(), loader(), ckpt_path=tmp_path / "after")
    assert resumed.global_step == 2 * trainer.global_step
    with pytest.raises(RuntimeError, match="give weights_only=True, or let ModelCheckpoint"):
        resumed.save_checkpoint(tmp_path / "none")


class SavesWeights(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        trainer.save_checkpoint(self.path, weights_only=True)


@pytest.mark.long
@pytest.mark.ranks
def test_sharded_weights_are_saved_alone(tmp_path: Path) -> None:
    module = net()
    options: dict[str, Any] = {"strategy": "fsdp", "devices": 2, "accelerator": "cpu"}
    quiet(callbacks=[SavesWeights(tmp_path / "w")], **options).fit(module, loader())
    assert equal(weights(Net.load_from_checkpoint(tmp_path / "w")), weights(module))


class Factories(Module):
    def __init__(self, net: nn.Module, optimizer: Any, kinds: list[type], width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.hparams.optimizer(self.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_hyperparameters_that_are_code_are_not_saved(
    devices: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Factories(nn.Linear(8, 3), partial(torch.optim.SGD, lr=0.1), [nn.ReLU], 5)
    trainer = quiet(
        enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path)], devices=devices, accelerator="cpu"
    )
    with caplog.at_level("INFO", "lockstep"):
        trainer.fit(module, loader())
    said = [line for line in caplog.messages if "not saved" in line]
    assert said == [
        "hyperparameters that are not tensors, numbers, strings, paths, lists, tuples or dicts are not saved: "
        "net, optimizer, kinds; give them to load_from_checkpoint"
    ]
    assert set(module.hparams) == {"net", "optimizer", "kinds", "width"}
    saved = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert Checkpoint.open(saved).state["hyperparameters"] == {"width": 5}
    with pytest.raises(TypeError, match=r"Factories needs net, optimizer, kinds, which checkpoint .* does not hold"):
        Factories.load_from_checkpoint(saved)
    loaded = Factories.load_from_checkpoint(saved, net=nn.Linear(8, 3), optimizer=None, kinds=[])
    assert loaded.hparams.width == 5 and equal(weights(loaded), weights(module))


@dataclass
class Options:
    width: int = 3


class Chosen(Net):
    def __init__(
        self, act: Any = nn.functional.relu, dtype: Any = torch.float64, options: Options | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_hyperparameter_that_was_not_saved_is_never_its_default(weights_only: bool, tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(Chosen(nn.functional.gelu, options=Options()), loader())
    trainer.save_checkpoint(tmp_path / "c", weights_only=weights_only)
    with pytest.raises(TypeError, match=r"Chosen needs act, options, which checkpoint .* does not hold; give them"):
        Chosen.load_from_checkpoint(tmp_path / "c")
    loaded = Chosen.load_from_checkpoint(tmp_path / "c", act=nn.functional.gelu, options=Options(4))
    assert loaded.hparams.options.width == 4 and loaded.hparams.dtype is torch.float64


class Whole(Net):
    def __init__(self, options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(options)


def test_a_config_with_an_entry_that_was_not_saved_is_asked_for(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(Whole({"width": 3, "dtype": torch.float16}), loader())
    trainer.save_checkpoint(tmp_path / "c")
    with pytest.raises(TypeError, match="Whole needs options, which checkpoint"):
        Whole.load_from_checkpoint(tmp_path / "c")
    assert Whole.load_from_checkpoint(tmp_path / "c", options={"width": 4}).hparams.width == 4


class Reads(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint["global_step"], checkpoint["epoch"], checkpoint["hyper_parameters"]["width"]
        with pytest.raises(KeyError, match=r"checkpoint\['optimizer_states'\] cannot be set by a hook"):
            checkpoint["optimizer_states"] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["global_step"], checkpoint["epoch"], checkpoint["hyper_parameters"]["width"]
        assert checkpoint == {}


@pytest.mark.parametrize("weights_only", [False, True])
def test_hooks_read_counters_and_are_refused_states(weights_only: bool, tmp_path: Path) -> None:
    trainer, module = quiet(accelerator="cpu", devices=1), Reads()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "c", weights_only)
    assert module.saved == (7, 1, 16) == Reads.load_from_checkpoint(tmp_path / "c").loaded


def test_a_fit_removes_what_killed_ones_have_left_in_each_folder_of_checkpoints(tmp_path: Path) -> None:
    savers = [ModelCheckpoint(tmp_path / name, every_n_epochs=i) for i, name in enumerate(("one", "two"), start=1)]
    for name in ("one", "two"):
        (tmp_path / name / ".epoch=0-step=2.tmp-0123abcd").mkdir(parents=True)
        (tmp_path / name / ".epoch=0-step=2.tmp-0123abcd" / "model.safetensors").write_text("half")
        for path in (tmp_path / name / ".epoch=0-step=2.tmp-0123abcd").rglob("*"):
            os.utime(path, (0, time.time() - 4000))
        os.utime(tmp_path / name / ".epoch=0-step=2.tmp-0123abcd", (0, time.time() - 4000))
    (young := tmp_path / "two" / ".epoch=0-step=3.tmp-0123abcd").mkdir()  # a save of a run on another machine
    Trainer(max_epochs=1, enable_progress_bar=False, logger=False, callbacks=savers).fit(net(), loader())
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["epoch=0-step=7"]
    assert [*(tmp_path / "two").glob(".*")] == [young]


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            raise OSError("the machine is gone")


@pytest.mark.parametrize("own", ["own", None])
@pytest.mark.parametrize("weights_only", [False, True])
def test_auto_finds_what_any_of_the_runs_savers_has_saved(own: str | None, weights_only: bool, tmp_path: Path) -> None:
    def fit(name: str, *callbacks: Callback) -> Trainer:
        epochs = ModelCheckpoint(own and tmp_path / name / own, every_n_epochs=1, save_weights_only=weights_only)
        steps = ModelCheckpoint(tmp_path / "shared", every_n_train_steps=2)
        options: dict[str, Any] = {"default_root_dir": tmp_path / name, "enable_progress_bar": False, "logger": False}
        trainer = Trainer(max_epochs=1, callbacks=[epochs, steps, *callbacks], **options)
        trainer.fit(net(), loader(), ckpt_path="auto")
        return trainer

    for name in ("one", "two"):
        with pytest.raises(OSError, match="gone"):
            fit(name, Fails())
    assert [Path(str(fit(name)._run.begins_from)).name for name in ("one", "two")] == [
        "epoch=0-step=4",
        "epoch=0-step=4-v1",
    ], "not what another run has saved there"
