"""ModelCheckpoint: what a resumed run, a second run and a copy continue with."""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.callbacks import Callback, CSVLogger, TensorBoardLogger
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.callbacks.model_checkpoint.run import Run
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("from_last", [False, True])
def test_a_resumed_run_continues_with_its_best_k(tmp_path: Path, moved: bool, from_last: bool) -> None:
    def new() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="val/loss", save_top_k=2, save_last=True)

    values = (3.0, 1.0, 2.0, 4.0, 0.5, 0.25)
    whole = Run(new(), tmp_path / "whole")
    for value in values:
        whole.epoch(val_loss=value)

    folder = tmp_path / "run"
    first = Run(new(), folder)
    for value in values[:3]:
        first.epoch(val_loss=value)
    if moved:
        folder = tmp_path / "elsewhere"
        shutil.move(tmp_path / "run", folder)
    second = Run(new(), folder, resume=str(folder / "checkpoints" / ("last" if from_last else "epoch=2-step=30")))
    assert second.callback._considered_step == 30
    second.current_epoch = 3
    for value in values[3:]:
        second.epoch(val_loss=value)
    assert second.found() == whole.found() == {"epoch=4-step=50": 50, "epoch=5-step=60": 60, "last": 60}
    assert second.callback.best_model_path == str(folder / "checkpoints" / "epoch=5-step=60")
    assert second.events == whole.events[len(first.events) :]


def test_a_kill_between_commit_and_removal_is_made_good_by_the_next_save(tmp_path: Path) -> None:
    first = Run(ModelCheckpoint(), tmp_path / "run")
    first.epoch()
    first.removes = False
    first.epoch()
    assert sorted(first.found().values()) == [10, 20]
    second = Run(ModelCheckpoint(), tmp_path / "run", resume=first.callback.best_model_path)
    second.current_epoch = 2
    second.epoch()
    assert sorted(second.found().values()) == [30]


def test_after_a_kill_between_commit_and_removal_only_what_is_among_the_best_is_saved(tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="val/loss")

    first = Run(saver(), tmp_path / "run")
    first.epoch(val_loss=0.5)
    first.removes = False
    first.epoch(val_loss=0.3)
    second = Run(saver(), tmp_path / "run", resume=first.callback.best_model_path)
    second.current_epoch = 2
    second.epoch(val_loss=0.4)
    assert not second.events, "it would be removed with the one that leaves, and with it what it supersedes"
    second.epoch(val_loss=0.2)
    assert sorted(second.found().values()) == [40]


@pytest.mark.parametrize("monitor", [None, "train/loss"])
def test_a_run_that_had_ended_has_a_last_in_the_folder_in_which_it_is_resumed(
    tmp_path: Path, monitor: str | None
) -> None:
    def fit(folder: str, **options: Any) -> ModelCheckpoint:
        saver = ModelCheckpoint(monitor=monitor, save_last=True, save_top_k=-1)
        trainer = quiet(default_root_dir=tmp_path / folder, enable_checkpointing=True, callbacks=[saver])
        trainer.fit(net(), loader(20), **options)
        return saver

    whole = fit("whole")
    for path in (whole.best_model_path, whole.last_model_path):
        again = fit("again", ckpt_path=path)
        assert again.dirpath != whole.dirpath and again.best_k_models == whole.best_k_models
        assert Path(again.last_model_path) == Path(str(again.dirpath)) / "last"
        last, expected = (Checkpoint.open(saver.last_model_path) for saver in (again, whole))
        assert last.read("model/net.0.weight").equal(expected.read("model/net.0.weight"))


def test_checkpoints_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    first = Run(ModelCheckpoint(monitor="val/loss", save_top_k=2), tmp_path / "run")
    first.epoch(val_loss=1.0).epoch(val_loss=2.0)
    shutil.rmtree(first.callback.best_model_path)
    second = Run(
        ModelCheckpoint(monitor="val/loss", save_top_k=2),
        tmp_path / "run",
        resume=str(tmp_path / "run" / "checkpoints" / "epoch=1-step=20"),
    )
    assert [score.item() for score in second.callback.best_k_models.values()] == [2.0]
    second.epoch(val_loss=3.0)
    assert sorted(second.found().values()) == [20, 30]


def test_a_second_run_with_the_same_callback_ranks_for_itself(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val/loss")
    Run(callback, tmp_path / "one").epoch(val_loss=1.0)
    second = Run(callback, tmp_path / "two").epoch(val_loss=2.0)
    assert second.found() == {"epoch=0-step=10": 10}
    assert callback.best_model_path == str(tmp_path / "two" / "checkpoints" / "epoch=0-step=10")


def test_a_save_that_waited_for_a_killed_validation_is_made_after_the_repeated_one(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("a bug")

    def fit(folder: Path, *callbacks: Callback) -> list[str]:
        savers = [
            ModelCheckpoint(filename="every-{step}", every_n_train_steps=1),
            ModelCheckpoint(filename="{step}", monitor="val/loss", every_n_train_steps=2, save_top_k=-1),
        ]
        options: dict[str, Any] = {"max_epochs": 1, "val_check_interval": 2, "default_root_dir": folder}
        trainer = quiet(enable_checkpointing=True, callbacks=[*savers, *callbacks], **options)
        trainer.fit(net(), loader(48), loader(8), ckpt_path="auto")
        return sorted(path.name for path in Path(savers[0].dirpath or "").iterdir())

    with pytest.raises(RuntimeError, match="a bug"):
        fit(tmp_path / "killed", Fails())
    resumed, undisturbed = fit(tmp_path / "killed"), fit(tmp_path / "undisturbed")
    assert "step=4" in undisturbed and resumed == undisturbed


def test_a_kill_after_a_save_by_hand_at_the_end_of_an_epoch_loses_no_save_of_its_own(tmp_path: Path) -> None:
    class SavesAndFails(Net):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(Path(self.trainer.log_dir or "") / "checkpoints" / "by hand")
            raise RuntimeError("a bug")

    def fit(folder: Path, kind: type[Net] = Net) -> list[str]:
        saver = ModelCheckpoint(filename="{step}", monitor="val/loss", save_top_k=-1)
        trainer = quiet(enable_checkpointing=True, callbacks=saver, max_epochs=2, default_root_dir=folder)
        trainer.fit(kind(), loader(48), loader(8), ckpt_path="auto")
        return sorted(Path(path).name for path in saver.best_k_models)

    folder = tmp_path / "killed"
    with pytest.raises(RuntimeError, match="a bug"):
        fit(folder, SavesAndFails)
    (folder / "SavesAndFails").rename(folder / "Net")
    assert fit(folder) == fit(tmp_path / "undisturbed") == ["step=12", "step=6"]


def test_a_resumed_run_takes_no_older_metric_for_one_of_its_weights(tmp_path: Path) -> None:
    class Seldom(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.current_epoch % 2 == 0:
                self.log("seldom", float(self.trainer.global_step))

        def on_train_epoch_end(self) -> None:
            if self.trainer.current_epoch == 1:
                self.trainer.save_checkpoint(tmp_path / "by hand")

    def fit(path: str | None = None) -> dict[str, float]:
        saver = ModelCheckpoint(tmp_path / str(path is None), "{step}", monitor="seldom", save_top_k=-1)
        trainer = quiet(enable_checkpointing=True, callbacks=saver, max_epochs=2, default_root_dir=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Seldom(), loader(48), loader(8), ckpt_path=path)
        return {Path(path).name: float(score) for path, score in saver.best_k_models.items()}

    undisturbed = fit()
    assert math.isnan(undisturbed["step=12"]) and not math.isnan(undisturbed["step=6"])
    assert math.isnan(fit(str(tmp_path / "by hand"))["step=12"])


def test_the_state_is_read_back_as_it_was_and_nothing_else_is_taken(tmp_path: Path) -> None:
    r = Run(ModelCheckpoint(monitor="val/loss", save_top_k=3, save_last=True), tmp_path / "run")
    r.epoch(val_loss=0.1).epoch(val_loss=math.nan)
    state = Checkpoint.open(r.callback.last_model_path).state["callback"]
    assert [name for name, _ in state["best_k_models"]] == ["epoch=0-step=10", "epoch=1-step=20"]
    assert state["last_model_path"] == "last"
    other = ModelCheckpoint(monitor="val/loss", save_top_k=3, save_last=True)
    other.load_state_dict(state)
    assert other.best_model_path == r.callback.best_model_path
    assert other.best_model_score == r.callback.best_model_score
    assert other.last_model_path == r.callback.last_model_path
    assert other.dirpath == r.callback.dirpath
    with pytest.raises(ValueError, match="saved state of ModelCheckpoint must have the keys"):
        other.load_state_dict({key: value for key, value in state.items() if key != "dirpath"})
    for name, values in {
        "dirpath": (0, [], False, "a\0"),
        "best_k_models": (None, {}, "x", [["a"]], [["a", []]], [["a", None]], [[1, 0.5]], [["a", True]]),
        "last_model_path": (None, 1, []),
        "current_score": ("x", [], [[1]], True),
        "considered_step": (None, -1, 0.5, True, "x", []),
        "save_on_train_epoch_end": (2, "x", []),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"saved state of ModelCheckpoint has no valid {name}, but "):
                other.load_state_dict({**state, name: value})


def test_state_keys_differ_by_what_is_decided() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"monitor": "a"},
        {"monitor": "b"},
        {"monitor": "a", "mode": "max"},
        {"every_n_train_steps": 5},
        {"train_time_interval": timedelta(hours=1)},
    ]
    assert len({ModelCheckpoint(**option).state_key for option in options}) == len(options)


def test_callbacks_can_be_copied_while_a_run_is_on(tmp_path: Path) -> None:
    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            for one, other in zip(trainer.callbacks, copy.deepcopy(trainer.callbacks), strict=True):
                assert type(one) is type(other) and other._module is None

    trainer = Trainer(
        callbacks=[Copies()],
        max_epochs=1,
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=[TensorBoardLogger(), CSVLogger()],
    )
    trainer.fit(net(), loader(32), loader(8))
    assert trainer.global_step == 4


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_fit_saves_into_the_folder_of_its_own_version(tmp_path: Path, devices: int) -> None:
    saver, module = ModelCheckpoint(save_last=True), net()
    trainer = Trainer(
        max_epochs=1,
        devices=devices,
        accelerator="cpu",
        callbacks=[saver],
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
    )
    folders = [tmp_path / "Net" / f"version_{i}" / "checkpoints" for i in (0, 1)]
    trainer.fit(module, loader(16))
    trainer.validate(module, loader(16), verbose=False)
    assert saver.dirpath == str(folders[0])
    trainer.max_epochs = 2
    trainer.fit(module, loader(16))
    assert (saver.dirpath, saver.last_model_path) == (str(folders[1]), str(folders[1] / "last"))
    steps = [Checkpoint.open(folder / "last").global_step for folder in folders]
    assert steps[1] == trainer.global_step == 2 * steps[0]
