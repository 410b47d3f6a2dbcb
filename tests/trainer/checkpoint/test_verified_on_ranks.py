"""Ranks verify a checkpoint together: each byte once, and what one of them finds, all of them raise."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import CheckpointError, Module
from lockstep.callbacks import Callback, Guard, ModelCheckpoint
from lockstep.strategies import DDP
from lockstep.strategies.launch import fault_injection
from lockstep.trainer.checkpoint import files
from lockstep.trainer.checkpoint.reader import read_manifest
from lockstep.trainer.checkpoint.store import open_together
from lockstep.trainer.metrics.gathering import gather_values
from tests.trainer.checkpoint.folders import cut, flip, on_ranks, save_step
from tests.trainer.toy import Net, equal, loader, net, quiet, weights

pytestmark = pytest.mark.ranks


# ---- who reads what ----------------------------------------------------------------------------------


def test_shares_are_even_cover_each_byte_once_and_begin_with_what_a_rank_has_written() -> None:
    listed = {f"model-{rank:05d}-of-00004.safetensors": {"size": 1000 + rank} for rank in (3, 1, 0, 2)}
    listed |= {"state.json": {"size": 10}, "empty.safetensors": {"size": 0}, "rank-00002.json": {"size": 7}}
    total = sum(entry["size"] for entry in listed.values())
    for world_size in (1, 2, 3, 4, 5, 64):
        shares = [files.shares(listed, rank, world_size) for rank in range(world_size)]
        sizes = [sum(size for *_, size in share) for share in shares]
        assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
        covered = sorted(part for share in shares for part in share)
        for name, entry in listed.items():
            ends = [(start, start + size) for other, start, size in covered if other == name]
            assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])][: len(ends)]
            assert (ends[-1][1] if ends else 0) == entry["size"]
    for rank, share in enumerate(files.shares(listed, rank, 4) for rank in range(4)):
        own = f"model-{rank:05d}-of-00004.safetensors"
        assert max(size for name, _, size in share if name == own) > 950


class Big(Module):
    """Weights of 9 MB that no rank is sent: they are built in the run."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        self.net = nn.Linear(1500, 1500) if self.net is None else self.net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class NotesReads(Callback):
    """Leaves the bytes that a process has read once its checkpoint is open, and before it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process, self.before = folder, os.getpid(), bytes_read()

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        before = self.before if os.getpid() == self.process else 0  # a process begins with none
        (self.folder / f"{trainer.global_rank}.read").write_text(str(bytes_read() - before))


def bytes_read() -> int:
    """By system calls. Loading tensors through a memory map makes no such calls."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this kernel does not count what a process reads")
@pytest.mark.parametrize(
    ("strategy", "devices", "stage", "path"),
    [
        ("single", 1, "fit", "auto"),
        ("ddp", 2, "fit", "auto"),
        ("ddp", 3, "fit", "given"),
        ("fsdp", 2, "fit", "last"),
        ("ddp", 2, "validate", "auto"),
        ("ddp", 2, "test", "given"),
    ],
)
def test_each_byte_is_verified_once_divided_over_the_ranks(
    tmp_path: Path, strategy: str, devices: int, stage: str, path: str
) -> None:
    data = DataLoader(torch.ones(2 * devices, 1500), 2)  # type: ignore[arg-type]
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "accelerator": "cpu"}
    options |= {"enable_checkpointing": True, "default_root_dir": tmp_path}
    first = quiet(callbacks=ModelCheckpoint(save_last=True), **options)
    first.fit(Big(), data)
    saved = Path(first.checkpoint_callback.last_model_path)
    num_bytes = sum(file.stat().st_size for file in saved.iterdir())
    assert num_bytes > 27e6

    callbacks = [NotesReads(tmp_path), ModelCheckpoint(save_last=True)]
    trainer, before = quiet(max_epochs=2, callbacks=callbacks, **options), bytes_read()
    model, ckpt_path = Big(), saved if path == "given" else path
    if stage == "fit":
        trainer.fit(model, data, ckpt_path=ckpt_path)
        assert trainer.global_step == 2
    else:
        model.test_step = model.validation_step  # type: ignore[assignment, method-assign]
        getattr(trainer, stage)(model, data, ckpt_path=ckpt_path)
    read = [int((tmp_path / f"{rank}.read").read_text()) for rank in range(devices)]
    share, beside = num_bytes / devices, 3e6  # beside: modules that are imported, JSON, messages
    assert all(share <= own < share + beside for own in read), (num_bytes, read)
    if devices > 1:
        assert bytes_read() - before < 9e6 + beside, "the process that starts the ranks reads weights that come back"


# ---- what one finds, all raise -----------------------------------------------------------------------


def opens(strategy: DDP, paths: list[str]) -> list[Any]:
    """What `open_together` raises on each rank, or the first number of the tensor that it then reads."""
    strategy.setup()
    try:
        found: Any
        try:
            found = open_together(paths[strategy.topology.rank], strategy).read("model/w")[0, 0].item()
        except CheckpointError as error:
            found = str(error)
        return gather_values(strategy, found)
    finally:
        strategy.teardown()


def opened(*paths: Path) -> list[Any]:
    strategy = DDP()
    strategy.configure(devices=len(paths), accelerator="cpu")
    return strategy.launch(opens, strategy, [str(path) for path in paths])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pieces = cut(torch.arange(3000.0).reshape(60, 50), (2,))
    on_ranks(2, tmp_path / "a", lambda rank: {"tensors": {"model/w": pieces[rank]}, "rank_state": {"rank": rank}})
    return tmp_path / "a"


@pytest.mark.long
def test_a_flipped_bit_is_found_by_the_rank_that_has_its_share_and_raised_by_all(saved: Path) -> None:
    assert opened(saved, saved, saved) == [0.0] * 3
    listed = read_manifest(saved)["files"]
    for rank in range(3):
        name, start, size = max(files.shares(listed, rank, 3), key=lambda share: share[2])
        flip(saved / name, start + size // 2)
        found = opened(saved, saved, saved)
        assert len(set(found)) == 1 and f"{saved} cannot be used: {name} has changed: its checksum is" in found[0]
        flip(saved / name, start + size // 2)
    for name in listed:
        flip(saved / name, listed[name]["size"] - 1)
        found = opened(saved, saved)
        assert len(set(found)) == 1 and f"{name} has changed" in found[0]
        flip(saved / name, listed[name]["size"] - 1)


def test_a_disk_that_fails_on_one_rank_is_named_by_all(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", f"rank=2,point=verify,action=eio,times=1,file={tmp_path}/count")
    shares = files.shares(read_manifest(saved)["files"], 2, 3)
    found = opened(saved, saved, saved)
    assert len(set(found)) == 1 and "found by rank 2 of 3" in found[0]
    # Threads read the files of a share at once, and the first of them meets the fault.
    assert any(f"{name} cannot be read (Input/output error (EIO))" in found[0] for name, *_ in shares)


def test_ranks_send_heartbeats_while_they_verify(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the watchdog takes a large checkpoint for a rank that hangs."""
    beats: list[int] = []
    monkeypatch.setattr(fault_injection, "beat", lambda: beats.append(1))
    monkeypatch.setattr(files, "_SEGMENT_BYTES", 1000)
    listed = read_manifest(saved)["files"]
    files.verify(saved, listed)
    assert len(beats) >= sum(entry["size"] for entry in listed.values()) / 1000


def remove_file(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()


def truncate(folder: Path) -> None:
    os.truncate(folder / "model-00000-of-00002.safetensors", 100)


def save_another(folder: Path) -> None:
    shutil.rmtree(folder)
    save_step(folder, 7)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_file, "model-00001-of-00002.safetensors is missing; .*found by rank 1 of 3"),
        (truncate, "model-00000-of-00002.safetensors has 100 bytes instead of .*found by rank 1 of 3"),
        (lambda folder: flip(folder / "manifest.json", 30), "manifest.json .*found by rank 1 of 3"),
        (lambda folder: flip(folder / "state.json", 1), "state.json has changed.*found by rank 1 of 3"),
        (shutil.rmtree, "there is no checkpoint at .*found by rank 1 of 3"),
        (save_another, "rank 1 sees another checkpoint there than rank 0"),
    ],
)
def test_what_one_rank_alone_cannot_read_all_raise(saved: Path, damage: Callable[[Path], object], message: str) -> None:
    """As on nodes whose file systems are not the same."""
    other = saved.parent / "b"
    shutil.copytree(saved, other)
    damage(other)
    found = opened(saved, other, saved)
    assert len({text.replace(f"{other} ", f"{saved} ") for text in found}) == 1
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(found[0])


# ---- the next older one ------------------------------------------------------------------------------


def damage_newest(folder: Path) -> str:
    """Flip a bit in the last tensor of the newest checkpoint; return its name."""
    newest = max(folder.iterdir(), key=lambda path: int(path.name.rpartition("=")[2]))
    for weights_file in (newest / "optimizer.safetensors", newest / "model.safetensors"):
        flip(weights_file, weights_file.stat().st_size - 1)
    return newest.name


def fit(devices: int, ckpt_path: Any = None, *callbacks: Callback, model: Net | None = None, **options: Any) -> Any:
    model = net(dropout=0.3) if model is None else model
    trainer = quiet(
        **{
            "strategy": "single" if devices == 1 else "ddp",
            "devices": devices,
            "accelerator": "cpu",
            "max_epochs": 2,
            "seed": 0,
            "enable_checkpointing": True,
            "default_root_dir": "runs",
            "callbacks": [ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), *callbacks],
        }
        | options
    )
    trainer.fit(model, loader(24 * devices, 4, shuffle=True), loader(8, 4), ckpt_path=ckpt_path)
    return trainer, weights(model)


@pytest.mark.long
@pytest.mark.parametrize(("devices", "path"), [(1, "auto"), (2, "auto"), (2, "last")])
def test_a_search_takes_the_next_older_checkpoint_and_says_so(devices: int, path: str) -> None:
    whole, expected = fit(devices)
    folder = Path("runs/Net/version_0/checkpoints").absolute()
    damaged = [damage_newest(folder)]
    shutil.move(folder / damaged[0], folder.parent / damaged[0])
    damaged.append(damage_newest(folder))
    shutil.move(folder.parent / damaged[0], folder / damaged[0])
    with pytest.warns(UserWarning, match="skipped: .* has changed") as caught:
        resumed, found = fit(devices, path)
    said = [str(warning.message) for warning in caught if "skipped" in str(warning.message)]
    assert [name for line, name in zip(said, damaged, strict=True) if f"/{name} cannot be used" in line] == damaged
    assert resumed.global_step == whole.global_step == 12 and equal(found, expected)
    assert not Path("runs/Net/version_1").exists()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_search_names_each_damaged_checkpoint_once(devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    fit(devices)
    folder = Path("runs/Net/version_0/checkpoints").absolute()
    oldest, flipped, cut, empty, unmarked, *others = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    flip(flipped / "model.safetensors", -1)
    (cut / "manifest.json").write_bytes(b"{")
    for file in empty.iterdir():
        file.unlink()
    (unmarked / "manifest.json").unlink()
    for other in others:
        flip(other / "model.safetensors", -1)
    (folder / "notes").mkdir()  # of somebody else
    (folder / "notes" / "read.me").touch()
    capfd.readouterr()
    with pytest.warns(UserWarning, match="skipped: ") as caught:
        fit(devices, "auto")
    said = [text for warning in caught if "skipped" in (text := str(warning.message))]
    damaged = [flipped, cut, empty, unmarked, *others]
    assert sorted(str(path) for path in damaged for text in said if f"{path} " in text) == sorted(map(str, damaged))
    assert len(said) == len(damaged)
    assert [line for line in capfd.readouterr().err.splitlines() if "resuming" in line] == [
        f"ckpt_path='auto': resuming {oldest}"
    ]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_search_goes_back_to_an_older_run_and_at_last_begins_afresh(devices: int) -> None:
    fit(devices, max_epochs=1)
    _, expected = fit(devices)
    for checkpoint in Path("runs/Net/version_1/checkpoints").iterdir():
        flip(checkpoint / "model.safetensors", -1)
    with pytest.warns(UserWarning, match="version_1/.* has changed"):
        resumed, found = fit(devices, "auto")
    assert resumed.global_step == 12 and equal(found, expected)
    assert Path(resumed.checkpoint_callback.best_model_path).parts[-3] == "version_0"
    shutil.rmtree("runs/Net/version_1")
    for checkpoint in Path("runs/Net/version_0/checkpoints").iterdir():
        flip(checkpoint / "model.safetensors", -1)
    with pytest.warns(UserWarning, match="version_0/.* has changed"), pytest.raises(CheckpointError, match="finds no"):
        fit(devices, "last")
    with pytest.warns(UserWarning, match="version_0/.* has changed"):
        resumed, found = fit(devices, "auto")
    assert equal(found, expected)
    assert Path(resumed.checkpoint_callback.best_model_path).parts[-3] == "version_1"


@pytest.mark.parametrize("devices", [1, 2])
def test_an_evaluation_takes_the_next_older_checkpoint(
    devices: int, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    fit(devices)
    folder = Path("runs/Net/version_0/checkpoints")
    damaged = damage_newest(folder)
    older = folder / "epoch=1-step=10"
    options: dict[str, Any] = {"strategy": "single" if devices == 1 else "ddp", "devices": devices}
    options |= {"accelerator": "cpu", "enable_checkpointing": True, "default_root_dir": "runs"}
    (expected,) = quiet(**options).validate(net(), loader(8, 4), ckpt_path=older, verbose=False)
    (found,) = quiet(**options).validate(net(), loader(8, 4), ckpt_path="auto", verbose=False)
    assert found == expected
    assert f"{damaged} cannot be used" in warned(recwarn) + capfd.readouterr().err


def warned(recorded: pytest.WarningsRecorder) -> str:
    return "\n".join(str(warning.message) for warning in recorded)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_given_checkpoint_is_refused_before_anything_is_built(devices: int) -> None:
    fit(devices)
    path = next(Path("runs/Net/version_0/checkpoints").iterdir())
    flip(path / "optimizer.safetensors", -1)
    before = sorted(Path("runs").rglob("*"))
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be used: optimizer.safetensors has changed"):
        fit(devices, path, NotesReads(Path.cwd()))
    assert not Path("0.read").exists(), "no hook was called"
    assert sorted(Path("runs").rglob("*")) == before


class DamagesAndDies(Callback):
    """Once, in step 5: flips a bit in the newest checkpoint and is killed."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and trainer.is_global_zero and not Path("died").exists():
            Path("died").write_text(damage_newest(Path(trainer.log_dir) / "checkpoints"))
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_a_restart_takes_the_next_older_checkpoint(devices: int) -> None:
    _, expected = fit(devices)
    with pytest.warns(UserWarning, match="skipped: .*step=4 cannot be used: .* has changed"):
        _, found = fit(devices, None, DamagesAndDies(), max_restarts=1)
    assert Path("died").exists() and equal(found, expected)


class LoadsAnother(Net):
    """Reads a checkpoint of its own in `setup`."""

    def setup(self, stage: str) -> None:
        Net.load_from_checkpoint("teacher")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_damaged_checkpoint_that_user_code_reads_is_not_that_of_the_run(devices: int) -> None:
    trainer, _ = fit(devices)
    shutil.copytree(trainer.checkpoint_callback.best_model_path, "teacher")
    flip(Path("teacher/model.safetensors"), -1)
    shutil.move("runs/Net", "runs/LoadsAnother")
    with pytest.raises(CheckpointError, match="teacher cannot be used: model.safetensors has changed"):
        fit(devices, "auto", model=LoadsAnother())


class Spoils(Callback):
    """Damages the newest checkpoint and the loss of step 5, once."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 5 or module.spoilt:
            return
        if trainer.is_global_zero:
            damage_newest(Path(trainer.log_dir) / "checkpoints")
        trainer.strategy.barrier()
        module.spoilt = True
        batch[0].fill_(float("nan"))


class Spoilt(Net):
    spoilt = False


@pytest.mark.parametrize("devices", [1, 2])
def test_going_back_in_a_run_takes_the_next_older_checkpoint(
    devices: int, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    guard = Guard(non_finite="roll_back")
    fit(devices, None, guard, Spoils(), model=Spoilt())
    text = warned(recwarn) + capfd.readouterr().err
    assert "step=4 cannot be used" in text and "skipped; back to step 2 " in text and guard.skipped_steps == 1
