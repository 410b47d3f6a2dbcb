"""Saves of a run: asynchronously, with NaN weights, interrupted, failing. Real ranks, real files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import CheckpointError, RankFailure, Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.trainer.checkpoint.store import Checkpoint, clean, is_checkpoint, newest
from tests.trainer.toy import Net, equal, loader, quiet, weights

LAYOUTS = [
    pytest.param("single", 1, id="single"),
    pytest.param("ddp", 2, id="ddp 2", marks=pytest.mark.slow),
    pytest.param("fsdp", 2, id="fsdp 2"),
]


def fit(
    folder: Path, *callbacks: Callback, strategy: str = "single", devices: int = 1, **options: Any
) -> tuple[Trainer, Net]:
    torch.manual_seed(0)
    module = Net()
    saves = any(isinstance(item, ModelCheckpoint) for item in callbacks)
    settings = {
        "max_epochs": None,
        "max_steps": 6,
        "seed": 0,
        "default_root_dir": folder,
        "accelerator": "cpu",
        "enable_checkpointing": saves,
    } | options
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = quiet(strategy=strategy, devices=devices, callbacks=list(callbacks), **settings)
    trainer.fit(module, loader(48, 4 if devices == 2 else 8), ckpt_path=ckpt_path)
    return trainer, module


def note(folder: str | Path, name: str, text: object) -> None:
    with open(Path(folder) / name, "a") as file:
        file.write(f"{text}\n")


class Both(Callback):
    """Saves the same step in both ways, and trains on."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint("sync")
            trainer.save_checkpoint("async", wait=False)


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "devices"), LAYOUTS)
def test_a_checkpoint_saved_asynchronously_is_the_same_to_the_byte(tmp_path: Path, strategy: str, devices: int) -> None:
    fit(tmp_path, Both(), strategy=strategy, devices=devices)
    names = sorted(os.listdir("sync"))
    assert names == sorted(os.listdir("async")) and len(names) > 4
    for name in names:
        one, other = (Path(folder, name).read_bytes() for folder in ("sync", "async"))
        if name == "manifest.json":
            one, other = (
                json.dumps({k: v for k, v in json.loads(text).items() if k not in ("saved_at_ns", "checksum")}).encode()
                for text in (one, other)
            )
        assert one == other, name


class Steps(Callback):
    """Notes each finished step, and what a rank leaves with; from step `slow_from` on it pauses at the begin and end of
    each."""

    def __init__(self, folder: Path, pause_s: float = 0.0, slow_from: int = 0) -> None:
        self.folder, self.pause_s, self.slow_from = str(folder), pause_s, slow_from

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.pause(trainer)  # a save that began with the last step is written within this one, however fast the machine

    def pause(self, trainer: Any) -> None:
        time.sleep(self.pause_s if trainer.global_step >= self.slow_from else 0.0)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pause(trainer)
        committed = sorted(
            name for name in os.listdir(f"{self.folder}/kept") if is_checkpoint(f"{self.folder}/kept/{name}")
        )
        note(self.folder, f"steps-{trainer.global_rank}", f"{trainer.global_step} {' '.join(committed)}")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        note(self.folder, f"left-{trainer.global_rank}", f"{type(exception).__name__}: {exception}")


def test_training_continues_while_the_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", "point=save.fsync,action=sleep,seconds=1")
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=4, save_top_k=-1, async_save=True)
    fit(tmp_path, Steps(tmp_path, 0.05), saver, max_steps=7)
    lines = (tmp_path / "steps-0").read_text().splitlines()
    assert lines[6] == "7 ", "three steps were done before the checkpoint of the fourth was"
    opened = Checkpoint.open(tmp_path / "kept" / "step=4")
    monkeypatch.delenv("LOCKSTEP_FAULTS")
    _, module = fit(tmp_path, max_steps=4)
    assert equal([opened.read(f"model/{name}") for name, _ in module.named_parameters()], weights(module)), (
        "as it was at the fourth step"
    )
    assert Checkpoint.open(tmp_path / "kept" / "step=7").global_step == 7, "the end of fit waits for the last"


def test_a_second_save_waits_and_an_older_one_goes_only_once_the_newer_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", "point=save.manifest,action=sleep,seconds=0.3,times=9")
    saver = ModelCheckpoint(
        tmp_path / "kept", "{step}", every_n_train_steps=2, save_top_k=2, save_last=True, async_save=True
    )
    fit(tmp_path, Steps(tmp_path), saver, max_steps=8)
    lines = [set(line.split()[1:]) - {"last"} for line in (tmp_path / "steps-0").read_text().splitlines()]
    assert lines[3] == set() and lines[5] == {"step=2"} and lines[7] == {"step=2", "step=4"}
    assert sorted(os.listdir(tmp_path / "kept")) == ["last", "step=6", "step=8"]
    assert Checkpoint.open(tmp_path / "kept" / "last").global_step == 8
    assert sorted(os.path.basename(path) for path in saver.best_k_models) == ["step=6", "step=8"]
    assert os.stat(tmp_path / "kept/last/model.safetensors").st_nlink == 2, "written once"


def test_a_saver_takes_no_name_that_another_one_is_saving_asynchronously(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", "step=4,point=save.fsync,action=sleep,seconds=0.7")
    folder = tmp_path / "kept"
    savers = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=2, async_save=True),
        ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1),
    ]
    fit(tmp_path, *savers, max_steps=8)
    assert [Path(path).name for path in savers[1].best_k_models] == ["step=4-v1", "step=8-v1"]
    assert sorted(os.listdir(folder)) == ["step=4-v1", "step=8", "step=8-v1"]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(("rank", "waits"), [(0, False), (1, False), (1, True)], ids=["0 async", "1 async", "1 sync"])
def test_a_failed_write_ends_all_ranks_within_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, waits: bool
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", f"rank={rank},step=4,point=save.write,action=enospc")
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=2, save_top_k=1, async_save=not waits)
    with pytest.raises(
        CheckpointError,
        match=rf"/kept/step=4: No space left on device \(ENOSPC\) at /.*, after rank {rank} had written \d+ of its "
        rf"\d+ bytes",
    ):
        fit(tmp_path, Steps(tmp_path, 0.3, slow_from=2), saver, strategy="ddp", devices=2, max_steps=9)
    for each in range(2):
        steps = [int(line.split()[0]) for line in (tmp_path / f"steps-{each}").read_text().splitlines()]
        assert steps[-1] == 4 if waits else steps[-1] in (4, 5, 6), (
            "it fails in step 5 at the latest, and the next one is the last"
        )
        assert f"after rank {rank} had written" in (tmp_path / f"left-{each}").read_text()
    assert os.listdir(tmp_path / "kept") == ["step=2"]
    assert Checkpoint.open(tmp_path / "kept" / "step=2").global_step == 2


def test_the_callback_knows_what_is_left_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", "step=4,point=save.write,action=eio")
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=2, async_save=True)
    with pytest.raises(CheckpointError, match="Input/output error"):
        fit(tmp_path, Steps(tmp_path, 0.3), saver, max_steps=9)
    assert saver.best_model_path == str(tmp_path / "kept" / "step=2") and is_checkpoint(saver.best_model_path)


class Vandal(Callback):
    """Removes the folder that is being written."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for path in Path("kept").glob(".*") if trainer.global_rank == 0 else ():
            time.sleep(0.2)
            shutil.rmtree(path)


@pytest.mark.ranks
def test_a_folder_that_disappears_while_it_is_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", "rank=1,point=save.open,action=sleep,seconds=0.5")
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=2, async_save=True)
    with pytest.raises(
        CheckpointError,
        match=r"cannot save the checkpoint .*/kept/step=2: (No such file or directory|rank [01] does not see)",
    ):
        fit(tmp_path, Vandal(), saver, strategy="ddp", devices=2)


class Breaks(Callback):
    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            raise LookupError("the user's own mistake")


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "rank"), [("single", 0), ("ddp", 0), ("ddp", 1)])
def test_an_exception_lets_the_pending_save_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, rank: int
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", "rank=0,point=save.fsync,action=sleep,seconds=0.7")
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=4, async_save=True)
    with pytest.raises(LookupError, match="own mistake"):
        fit(tmp_path, Breaks(4, rank), saver, strategy=strategy, devices=1 if strategy == "single" else 2)
    assert os.listdir(tmp_path / "kept") == ["step=4"]
    assert Checkpoint.open(tmp_path / "kept" / "step=4").global_step == 4


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_dies_in_an_asynchronous_save_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", f"rank={rank},step=4,point=save.fsync,action=sigkill")
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=2, async_save=True)
    with pytest.raises(RankFailure, match=f"rank {rank} was killed by SIGKILL"):
        fit(tmp_path, Steps(tmp_path, 0.3, slow_from=2), saver, strategy="ddp", devices=2, max_steps=9)
    died = (tmp_path / "steps-0").stat().st_mtime
    assert time.time() - died < 12, "the others do not wait for a dead rank"
    assert newest(tmp_path / "kept") == tmp_path / "kept" / "step=2"
    assert len(clean(tmp_path / "kept")) == 1


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("a bug")


def test_auto_resumes_from_an_older_checkpoint_than_one_of_weights_alone(tmp_path: Path) -> None:
    def savers() -> list[ModelCheckpoint]:
        return [
            ModelCheckpoint(filename="{step}", every_n_train_steps=2),
            ModelCheckpoint(filename="weights", every_n_train_steps=1, save_weights_only=True),
        ]

    with pytest.raises(RuntimeError, match="a bug"):
        fit(tmp_path, *savers(), Fails())
    folder = tmp_path / "Net/version_0/checkpoints"
    assert newest(folder) == folder / "weights"
    trainer, resumed = fit(tmp_path, *savers(), ckpt_path="auto")
    assert trainer.log_dir == str(folder.parent)
    assert equal(weights(resumed), weights(fit(tmp_path / "other")[1]))
    newer = tmp_path / "Net/version_1/checkpoints"
    newer.mkdir(parents=True)
    shutil.copytree(folder / "weights", newer / "weights")
    assert fit(tmp_path, *savers(), ckpt_path="auto", max_steps=7)[0].log_dir == str(folder.parent)
    for full in folder.glob("step=*"):
        shutil.rmtree(full)
    with pytest.raises(CheckpointError, match="weights has only weights, so it cannot be resumed"):
        fit(tmp_path, *savers(), ckpt_path="auto", max_steps=8)


class Terminates(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_finishes_the_pending_save_and_a_later_checkpoint_replaces_the_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", "point=save.fsync,action=sleep,seconds=0.7")

    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(filename="{step}", every_n_train_steps=4, async_save=True)

    with pytest.raises(SystemExit) as left:
        fit(tmp_path, Terminates(4), saver())
    assert left.value.code == 143
    folder = tmp_path / "Net/version_0/checkpoints"
    assert sorted(os.listdir(folder)) == ["interrupted-step=5", "step=4"]
    monkeypatch.delenv("LOCKSTEP_FAULTS")
    with pytest.raises(SystemExit):
        fit(tmp_path, Terminates(6), saver(), ckpt_path="auto", max_steps=12)
    assert sorted(os.listdir(folder)) == ["interrupted-step=7", "step=4"], "the later one replaces it"
    _, resumed = fit(tmp_path, saver(), ckpt_path="auto", max_steps=12)
    assert os.listdir(folder) == ["step=12"]
    _, undisturbed = fit(tmp_path / "other", max_steps=12)
    assert equal(weights(resumed), weights(undisturbed))


def test_an_interrupted_checkpoint_is_replaced_at_its_own_step_but_not_by_weights(tmp_path: Path) -> None:
    folder = tmp_path / "Net/version_0/checkpoints"
    for weights_only in (True, False):
        with pytest.raises(SystemExit):  # after the last step of the epoch, before its end
            fit(tmp_path, Terminates(5), ModelCheckpoint(), max_epochs=1, max_steps=-1)
        assert os.listdir(folder) == ["interrupted-step=6"]
        saver = ModelCheckpoint(filename="{step}", save_weights_only=weights_only)
        fit(tmp_path, saver, ckpt_path="auto", max_epochs=1, max_steps=-1)
        assert sorted(os.listdir(folder)) == ["interrupted-step=6"] * weights_only + ["step=6"]
        shutil.rmtree(folder.parent)


class Spoils(Callback):
    """Makes one number of the state bad after a step, on one rank."""

    def __init__(self, what: str, step: int = 3, rank: int = 0) -> None:
        self.what, self.step, self.rank = what, step, rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        optimizer = trainer.optimizers[0]
        parameter = module.net[0].weight
        value = (
            parameter.detach()
            if self.what == "parameter"
            else module.mask
            if self.what == "buffer"
            else optimizer.state[parameter]["exp_avg"]
        )
        value = value.to_local() if hasattr(value, "to_local") else value
        if trainer.global_rank == self.rank:
            # As a fault of the machine does: what a hook writes on one rank only, ranks would find before the save.
            value.data.view(-1)[-1] = float("nan" if self.what == "parameter" else "-inf")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices", "rank", "waits", "what"),
    [
        ("single", 1, 0, True, "parameter"),
        ("ddp", 2, 0, False, "optimizer"),
        ("fsdp", 2, 1, True, "parameter"),
        ("fsdp", 2, 1, False, "optimizer"),
    ],
)
def test_nan_weights_are_not_saved(
    tmp_path: Path, strategy: str, devices: int, rank: int, waits: bool, what: str
) -> None:
    name = {"parameter": "model/net.0.weight", "optimizer": "optimizer/.*/net.0.weight/exp_avg"}[what]
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, async_save=not waits)
    with pytest.raises(
        FloatingPointError,
        match=rf"/kept/step=3: {name} holds NaN or infinite values on rank {rank} in step 3; go back to an older",
    ):
        fit(tmp_path, Steps(tmp_path, 0.2), Spoils(what, rank=rank), saver, strategy=strategy, devices=devices)
    assert os.listdir(tmp_path / "kept") == ["step=2"]
    for each in range(devices):
        assert re.match(rf"FloatingPointError: .*{name}", (tmp_path / f"left-{each}").read_text())


def test_buffers_and_large_finite_numbers_are_saved(tmp_path: Path) -> None:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2, 2), float("-inf")))

    module = Masked()
    with torch.no_grad():
        module.net[3].bias[:] = torch.finfo(torch.float32).max  # their sum overflows
    trainer = quiet(
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        max_steps=1,
        callbacks=[ModelCheckpoint(tmp_path / "kept", "{step}")],
    )
    trainer.fit(module, loader())
    assert Checkpoint.open(tmp_path / "kept" / "step=1").read("model/mask").isneginf().all()
