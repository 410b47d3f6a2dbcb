"""A run resumed from any of its checkpoints, those of its last step too, ends as it did: the same validations, hooks,
values, rates and epochs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep import Trainer
from lockstep.callbacks import Callback, Logger, ModelCheckpoint
from lockstep.trainer.progress import Progress
from tests.trainer.toy import Net, data, equal, loader, quiet, weights

HOOKS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_end",
)
CASES: dict[str, dict[str, Any]] = {
    "steps that end with an epoch": {"max_epochs": None, "max_steps": 6},
    "steps that end within an epoch": {"max_epochs": None, "max_steps": 5},
    "fewer steps than an epoch has": {"max_epochs": 4, "max_steps": 2},
    "epochs": {"max_epochs": 2},
    "validation within epochs": {"max_epochs": None, "max_steps": 5, "val_check_interval": 2},
    "validation every second epoch": {"max_epochs": None, "max_steps": 9, "check_val_every_n_epoch": 2},
    "no length": {"max_epochs": None, "max_steps": 6},
    "no loss in the last batches": {"max_epochs": None, "max_steps": 5, "accumulate_grad_batches": 2},
}


class Seen(Callback):
    """The hooks of a run, and where it was; and a value at the end of each epoch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.calls.append(("on_train_epoch_end", trainer.current_epoch, trainer.global_step))
        module.log("epochs", float(trainer.current_epoch))


def _noted(name: str) -> Any:
    def note(self: Seen, trainer: Any, *_: Any) -> None:
        self.calls.append((name, trainer.current_epoch, trainer.global_step))

    return note


for _name in HOOKS:
    if _name not in vars(Seen):
        setattr(Seen, _name, _noted(_name))


class Values(Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))


class Ending(Net):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.case == "no loss in the last batches" and batch_idx > 1 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(data(24))


def fitted(
    case: str, folder: Path, ckpt_path: Path | None = None, **options: Any
) -> tuple[Trainer, Seen, Values, Ending]:
    torch.manual_seed(0)
    seen, values, module = Seen(), Values(), Ending(case)
    by_step = ModelCheckpoint(folder / "steps", every_n_train_steps=1, save_top_k=-1)
    by_epoch = ModelCheckpoint(folder / "epochs", save_top_k=-1)
    trainer = quiet(
        callbacks=[seen, by_step, by_epoch],
        logger=values,
        enable_checkpointing=True,
        log_every_n_steps=1,
        seed=0,
        default_root_dir=str(folder),
        **CASES[case] | options,
    )
    train = DataLoader(Stream(), batch_size=8) if case == "no length" else loader(24, 8, shuffle=True)
    trainer.fit(module, train, loader(8), ckpt_path=ckpt_path)
    return trainer, seen, values, module


@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_leads_to_the_same_end(case: str, tmp_path: Path) -> None:
    trainer, seen, values, module = fitted(case, tmp_path / "whole")
    paths = [path for path in (tmp_path / "whole").rglob("*step=*") if path.is_dir()]
    assert len(paths) > trainer.global_step
    for i, path in enumerate(sorted(paths)):
        again, calls, rows, other = fitted(case, tmp_path / str(i), path)
        assert (again.current_epoch, again.global_step) == (trainer.current_epoch, trainer.global_step), path
        assert again.callback_metrics == trainer.callback_metrics, path
        assert again.optimizers[0].param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"], path
        assert seen.calls[-len(calls.calls) :] == calls.calls, path
        assert rows.rows == values.rows[len(values.rows) - len(rows.rows) :], path
        assert equal(weights(other), weights(module)), path


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "local_sgd"])
def test_the_last_step_leads_to_the_same_end_on_ranks(strategy: str, tmp_path: Path) -> None:
    options = {"strategy": strategy, "devices": 2, "accelerator": "cpu"}
    trainer, seen, _, module = fitted("steps that end within an epoch", tmp_path / "whole", **options)
    (path,) = (tmp_path / "whole/steps").glob("*step=5")
    again, calls, _, other = fitted("steps that end within an epoch", tmp_path / "again", path, **options)
    assert again.callback_metrics == trainer.callback_metrics
    assert seen.calls[-len(calls.calls) :] == calls.calls and "on_validation_end" in dict(
        call[:2] for call in calls.calls
    )
    assert equal(weights(other), weights(module))


def test_progress_of_an_older_checkpoint_is_read() -> None:
    saved = Progress(global_step=3, batches_seen=3).state_dict()
    del saved["validated_at"], saved["ended_at"], saved["publishes"]
    progress = Progress()
    progress.load_state_dict(saved)
    assert (progress.global_step, progress.validated_at, progress.ended_at) == (3, 0, 0)
