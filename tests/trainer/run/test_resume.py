"""A run killed at any instant and resumed is the run that was never killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lockstep import CheckpointError, Trainer
from lockstep.callbacks import Callback, EarlyStopping, LRWarmup, ModelCheckpoint
from tests.trainer.toy import Net, data, equal, loader, quiet, weights

KILL = "LOCKSTEP_TEST_KILL"


class Killer(Callback):
    """Ends the process without warning in the batch that the environment names, once."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        where = os.environ.get(KILL)
        if where is not None and trainer.current_epoch == 1 and batch_idx == int(where) and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Rich(Net):
    """Everything that has state: two optimizers, schedulers of both intervals, dropout, BatchNorm, a torchmetrics
    sum."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        from torchmetrics.classification import MulticlassAccuracy

        self.norm = nn.BatchNorm1d(8)
        self.train_acc = MulticlassAccuracy(3)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(self.norm(x))
        self.train_acc(logits, y)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        loss = F.cross_entropy(logits, y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return {"net": loss, "norm": loss * 0.5 + logits.square().mean()}

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        second = torch.optim.SGD(self.norm.parameters(), lr=1e-2, momentum=0.9)
        return {
            "net": {
                "optimizer": first,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(first, 0.97), "interval": "step"},
            },
            "norm": {
                "optimizer": second,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(second, patience=0),
                    "monitor": "val/loss",
                },
            },
        }

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self.net(self.norm(batch[0])), batch[1]))


def run(
    root: str, devices: int, every: int | None, ckpt_path: str | None = None, workers: int = 0, **options: Any
) -> tuple[Trainer, Rich]:
    torch.manual_seed(3)
    model = Rich()
    savers = [ModelCheckpoint(every_n_train_steps=every, save_top_k=2)] if every else []
    trainer = quiet(
        default_root_dir=root,
        strategy="single" if devices == 1 else "ddp",
        devices=devices,
        max_epochs=3,
        accumulate_grad_batches=2,
        log_every_n_steps=3,
        seed=7,
        enable_checkpointing=bool(every),
        callbacks=[Killer(), EarlyStopping("val/loss", patience=10), LRWarmup(steps=5), *savers],
        **options,
    )
    trainer.fit(model, loader(84, 4, shuffle=True, num_workers=workers), loader(20), ckpt_path=ckpt_path)
    return trainer, model


def state_of(trainer: Trainer, model: Rich) -> dict[str, Any]:
    return {
        "step": trainer.global_step,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "weights": [*weights(model), *model.buffers()],
    }


def test_from_the_last_step_of_an_epoch_without_an_end(tmp_path: Path) -> None:
    """The checkpoint of that step was saved before the epoch was closed: nothing of the epoch is left, and that is no
    error."""

    def fit(steps: int, ckpt_path: Path | None) -> tuple[Trainer, Net]:
        torch.manual_seed(0)
        module = Net()
        savers = ModelCheckpoint(tmp_path / str(steps), every_n_train_steps=3, save_top_k=-1)
        trainer = quiet(max_epochs=None, max_steps=steps, callbacks=savers, enable_checkpointing=True, seed=0)
        trainer.fit(module, loader(24, 8, shuffle=True), ckpt_path=ckpt_path)
        return trainer, module

    _, whole = fit(8, None)
    trainer, resumed = fit(8, next((tmp_path / "8").glob("*step=3")))
    assert trainer.global_step == 8 and trainer.current_epoch == 2
    assert equal(weights(whole), weights(resumed))


@pytest.mark.slow  # tests/faults/test_crashes.py kills and resumes runs every day
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("devices", "kill", "every"),
    [(1, 13, 4), (1, 2, 1), (2, 7, 3)],
)
def test_killed_in_the_middle_of_an_epoch_and_resumed(tmp_path: Path, devices: int, kill: int, every: int) -> None:
    code = f"from tests.trainer.run.test_resume import run; run({str(tmp_path)!r}, {devices}, {every})"
    root = Path(__file__).parents[3]
    killed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, KILL: str(kill), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert killed.returncode != 0
    if devices == 1:
        assert killed.returncode == -signal.SIGKILL
    else:
        assert "SIGKILL" in killed.stderr and "rank 0" in killed.stderr
    assert list((tmp_path / "Rich/version_0/checkpoints").glob("epoch=1-*"))

    resumed = state_of(*run(str(tmp_path), devices, every, ckpt_path="auto"))
    undisturbed = state_of(*run(str(tmp_path / "other"), devices, None))
    assert resumed["step"] == undisturbed["step"]
    assert equal(resumed["weights"], undisturbed["weights"])
    assert resumed["metrics"] == undisturbed["metrics"]
    assert not (tmp_path / "Rich/version_1").exists(), "the run continues in its folder"


@pytest.mark.parametrize("step", range(1, 34, 4))
def test_every_checkpoint_of_a_run_leads_to_the_same_end(tmp_path: Path, step: int) -> None:
    """Steps within epochs, at their ends, and before and after validations, with val_check_interval between."""
    options: dict[str, Any] = {"val_check_interval": 6}
    expected = state_of(*run(str(tmp_path), 1, None, **options))

    class SaveAt(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (
                trainer.global_step == step
                and not trainer._run.window_is_open
                and not trainer._run.is_checkpoint("saved")
            ):
                trainer.save_checkpoint("saved")
                trainer.should_stop = True

    torch.manual_seed(3)
    first = quiet(
        max_epochs=3,
        accumulate_grad_batches=2,
        log_every_n_steps=3,
        seed=7,
        callbacks=[EarlyStopping("val/loss", patience=10), LRWarmup(steps=5), SaveAt()],
        **options,
    )
    first.fit(Rich(), loader(84, 4, shuffle=True), loader(20))
    assert first._run.is_checkpoint("saved")
    resumed = state_of(*run(str(tmp_path / "again"), 1, None, ckpt_path="saved", **options))
    assert equal(resumed["weights"], expected["weights"])
    assert resumed["metrics"] == expected["metrics"]


def test_checkpoints_of_epoch_end_hooks_do_not_repeat_the_epoch_end(tmp_path: Path) -> None:
    """ModelCheckpoint saves in on_validation_end or on_train_epoch_end: schedulers and stoppers must move once."""
    options = {"limit_val_batches": 2}
    expected = state_of(*run(str(tmp_path / "straight"), 1, None, **options))
    torch.manual_seed(3)
    first = quiet(
        default_root_dir=str(tmp_path),
        max_epochs=2,
        accumulate_grad_batches=2,
        log_every_n_steps=3,
        seed=7,
        enable_checkpointing=True,
        callbacks=[Killer(), EarlyStopping("val/loss", patience=10), LRWarmup(steps=5), ModelCheckpoint(save_top_k=-1)],
        **options,
    )
    first.fit(Rich(), loader(84, 4, shuffle=True), loader(20))
    for folder in sorted((tmp_path / "Rich/version_0/checkpoints").iterdir()):
        resumed = state_of(*run(str(tmp_path / "again"), 1, None, ckpt_path=str(folder), **options))
        assert resumed["metrics"] == expected["metrics"], folder.name
        assert equal(resumed["weights"], expected["weights"]), folder.name


def test_lists_that_an_epoch_end_sums_up_are_not_missing_after_a_resume(tmp_path: Path) -> None:
    """The checkpoint of an epoch is saved after the hooks of its end, which are not called again."""

    class Collecting(Net):
        def on_train_epoch_start(self) -> None:
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.losses.append(super().training_step(batch, batch_idx))
            return self.losses[-1]

        def on_train_epoch_end(self) -> None:
            self.log("mean", torch.stack(self.losses).mean())

    saver = ModelCheckpoint(tmp_path, monitor="val/loss")
    quiet(max_epochs=1, enable_checkpointing=True, callbacks=[saver]).fit(Collecting(), loader(16), loader(8))
    quiet(max_epochs=2).fit(Collecting(), loader(16), loader(8), ckpt_path=saver.best_model_path)


def test_longer_run_continues_where_max_steps_ended(tmp_path: Path) -> None:
    def fit(steps: int, ckpt: str | None) -> Net:
        torch.manual_seed(0)
        model = Net(dropout=0.2)
        trainer = quiet(
            default_root_dir=str(tmp_path), max_epochs=None, max_steps=steps, enable_checkpointing=True, seed=1
        )
        trainer.fit(model, loader(40, 4, shuffle=True), loader(8), ckpt_path=ckpt)
        return model

    fit(7, None)
    assert equal(weights(fit(23, "last")), weights(fit(23, None)))


@pytest.mark.ranks
@pytest.mark.slow  # tests/trainer/run/test_signals.py, without a program of its own
def test_sigterm_stops_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    code = f"""
import os, signal
from lockstep.callbacks import Callback
from tests.trainer.toy import *
class Stop(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
quiet(default_root_dir={str(tmp_path)!r}, devices=2, max_epochs=9, enable_checkpointing=True,
    callbacks=[Stop()]).fit(net(), loader(40, 4))
"""
    stopped = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert stopped.returncode == 143, stopped.stderr
    assert "stopped by SIGTERM after step 6" in stopped.stderr
    assert (tmp_path / "Net/version_0/checkpoints/interrupted-step=6/manifest.json").exists()


def test_inside_a_window_a_checkpoint_is_refused() -> None:
    class Early(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint("half")

    with pytest.raises(RuntimeError, match="inside an accumulation window"):
        quiet(accumulate_grad_batches=2, callbacks=[Early()]).fit(Net(), loader(16, 4))


def test_checkpoint_of_another_module_is_refused_by_name(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
    trainer.fit(Net(), loader(16))
    with pytest.raises(CheckpointError, match="net.0.weight has shape \\[16, 8\\]"):
        quiet().fit(Net(width=4), loader(16), ckpt_path=trainer.checkpoint_callback.best_model_path)


def test_last_without_a_checkpoint_names_the_folder_that_was_searched(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[ModelCheckpoint(dirpath=tmp_path / "kept")], enable_checkpointing=True)
    with pytest.raises(CheckpointError, match=f"'last' finds no valid checkpoint below {tmp_path / 'kept'}; give"):
        trainer.fit(Net(), loader(16), ckpt_path="last")


def test_load_from_checkpoint_rebuilds_the_module(tmp_path: Path) -> None:
    model = Net(width=5)
    trainer = quiet(callbacks=[ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
    trainer.fit(model, loader(16))
    path = trainer.checkpoint_callback.best_model_path
    loaded = Net.load_from_checkpoint(path)
    assert loaded.hparams == {"width": 5, "dropout": 0.0, "lr": 1e-2, "optimizer": "AdamW"}
    assert equal(weights(loaded), weights(model))
    assert Net.load_from_checkpoint(path, lr=0.5).hparams.lr == 0.5


class Validated(Rich):
    """Draws random numbers in validation, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noise = torch.randn_like(batch[0])
        self.log("val/loss", F.cross_entropy(self.net(self.norm(batch[0] + noise)), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.drawn = torch.rand(())


class ValidatedOnce(Validated):
    """With one loss and optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["net"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("strategy", "devices", "options"),
    [
        ("single", 1, {}),
        ("single", 1, {"virtual_ranks": 2}),
        pytest.param("ddp", 2, {}, marks=pytest.mark.ranks),
        pytest.param("ddp", 2, {"virtual_ranks": 4}, marks=pytest.mark.ranks),
    ],
)
def test_a_checkpoint_saved_by_a_validation_within_an_epoch_holds_training(
    strategy: str, devices: int, options: dict[str, Any], tmp_path: Path
) -> None:
    def fit(folder: Path, path: Path | None = None) -> tuple[Trainer, list[torch.Tensor]]:
        torch.manual_seed(0)
        module = Validated() if not options else ValidatedOnce()
        trainer = quiet(
            strategy=strategy,
            devices=devices,
            max_epochs=2,
            split_batches=True,
            val_check_interval=2,
            seed=1,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1)],
            **options,
        )
        trainer.fit(module, loader(48, shuffle=True), loader(20), ckpt_path=path)
        return trainer, [value.detach().clone() for value in module.state_dict().values()]

    trainer, expected = fit(tmp_path / "whole")
    for step in (2, 8):
        resumed, found = fit(tmp_path / f"from {step}", tmp_path / "whole" / f"step={step}")
        assert equal(found, expected), step
        assert resumed.callback_metrics == trainer.callback_metrics, step
        assert {"train/acc", "train/loss_epoch"} <= set(resumed.callback_metrics)


class Rotates(torch.optim.Optimizer):
    """Keeps a matrix that is not in the order of its memory, and multiplies by it, as SOAP does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["basis"] = torch.linalg.qr(torch.randn(32, 32, dtype=p.dtype))[0]
                assert not state["basis"].is_contiguous()
            columns = F.pad(p.grad.flatten(), (0, -p.numel() % 32)).reshape(32, -1)
            p -= 0.1 * (state["basis"] @ columns).flatten()[: p.numel()].view_as(p)


def test_a_state_in_another_order_of_memory_comes_back_in_it(tmp_path: Path) -> None:
    class Rotated(Net):
        def configure_optimizers(self) -> Any:
            return Rotates(self.parameters())

    def fit(path: Path | None = None) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        torch.manual_seed(0)
        saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
        trainer = quiet(max_epochs=2, enable_checkpointing=True, callbacks=[saver], precision="64-true", devices=1)
        trainer.fit(module := Rotated(), loader(), ckpt_path=path)
        return weights(module), [state["basis"].stride() for state in trainer.optimizers[0].state.values()]

    expected, found = fit(), fit(tmp_path / "step=3")
    assert equal(expected[0], found[0]) and expected[1] == found[1] == [(1, 32)] * 4


@pytest.mark.ranks
def test_a_rank_without_samples_takes_up_what_a_validation_has_saved(tmp_path: Path) -> None:
    def fit(steps: int, path: str | None = None) -> Trainer:
        trainer = quiet(
            strategy="ddp",
            devices=2,
            max_epochs=2,
            max_steps=steps,
            split_batches=True,
            enable_checkpointing=True,
            default_root_dir=tmp_path,
        )
        trainer.fit(Net(), loader(17), loader(20), ckpt_path=path)
        return trainer

    fit(2)
    assert fit(-1, "last").global_step == 6


@pytest.mark.parametrize("own_batches", [False, True])
@pytest.mark.parametrize("limit", [3, 5])
def test_a_limit_that_ends_within_a_split_batch_holds_after_a_resume(
    own_batches: bool, limit: int, tmp_path: Path
) -> None:
    def fit(path: Path | None = None) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        module, samples = Net(), data(24)
        batches = BatchSampler(SequentialSampler(samples), 8, False)
        trainer = quiet(
            max_epochs=2,
            split_batches=True,
            accumulate_grad_batches=2,
            limit_train_batches=limit,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)],
        )
        loaded = DataLoader(samples, batch_sampler=batches) if own_batches else DataLoader(samples, 8)
        trainer.fit(module, loaded, ckpt_path=path)
        return trainer.global_step, weights(module)

    steps, expected = fit()
    assert steps == 2 * -(-limit // 2)
    for step in range(1, steps):
        found = fit(tmp_path / f"step={step}")
        assert found[0] == steps and equal(found[1], expected), step
