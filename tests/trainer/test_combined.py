"""Training on several loaders at once: the same numbers on any number of ranks, and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from lockstep import CombinedLoader
from lockstep.callbacks import Callback
from tests.trainer.toy import Net, data, distance, equal, quiet, weights

pytestmark = pytest.mark.ranks


class Noisy(Dataset[Any]):
    """Samples with noise from the random state of the process that reads them."""

    def __init__(self, n: int) -> None:
        self.rows = data(n)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + 0.01 * torch.randn(8), y


class Joint(Net):
    """A supervised loss on one loader's batch and a consistency loss on the other's; either may be missing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, list):
            batch = {"labeled": batch}
        losses = [F.cross_entropy(self(batch["labeled"][0]), batch["labeled"][1])] if batch.get("labeled") else []
        losses += [self(batch["more"][0]).square().mean()] if batch.get("more") else []
        self.log("train/loss", sum(losses), on_step=False, on_epoch=True)
        return sum(losses)


class SaveAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not trainer._run.window_is_open:
            trainer.save_checkpoint("saved")
            trainer.should_stop = True


def train(
    mode: str,
    ranks: int,
    accumulate: int,
    ckpt_path: Any = None,
    dataset: Any = data,
    stop: int | None = None,
    **options: Any,
) -> tuple[Joint, float]:
    torch.manual_seed(0)
    model = Joint(dropout=0.2 if dataset is Noisy else 0.0)
    loaders = {"labeled": DataLoader(dataset(41), 4, shuffle=True), "more": DataLoader(dataset(13), 3, shuffle=True)}
    trainer = quiet(
        **{"precision": "64-true", "max_epochs": 2, "seed": 3} | options,
        strategy="single" if ranks == 1 else "ddp",
        devices=ranks,
        accumulate_grad_batches=accumulate,
        callbacks=[SaveAt(stop)] if stop else [],
    )
    trainer.fit(model, CombinedLoader(loaders, mode), ckpt_path=ckpt_path)
    return model, trainer.callback_metrics["train/loss"].item()


@pytest.mark.parametrize(
    "mode",
    [
        "max_size_cycle",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("min_size", "max_size")),
        "sequential",
    ],
)
def test_ranks_give_the_numbers_of_one_process_and_continue_on_others(mode: str) -> None:
    reference, loss = train(mode, 1, 6)
    train(mode, 2, 3, stop=2 if mode == "min_size" else 3)
    for model, its in (train(mode, 3, 2), train(mode, 3, 3, ckpt_path="saved")):
        assert distance(weights(model), weights(reference)) < 1e-12
        assert its == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(tmp_path: Path, ranks: int) -> None:
    """Augmentations and dropout draw from the random state of the run: nothing is read before its turn."""
    expected, loss = train("max_size_cycle", ranks, 2, dataset=Noisy)
    train("max_size_cycle", ranks, 2, dataset=Noisy, stop=4)
    model, its = train("max_size_cycle", ranks, 2, "saved", dataset=Noisy)
    assert equal(weights(model), weights(expected)) and its == loss


def test_an_empty_one_is_an_error_before_ranks_start() -> None:
    with pytest.raises(ValueError, match="train_dataloaders is empty"):
        quiet(devices=2).fit(Joint(), CombinedLoader([DataLoader(data(8), 4), DataLoader(data(0), 4)]))


class OfSeveral(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum")


def test_functions_and_lists_of_batches_are_loaders_beside_a_dataloader() -> None:
    batches = [[torch.zeros(4, 8), torch.zeros(4)], [torch.zeros(2, 8), torch.zeros(2)]]
    for devices, others in ((1, batches), (2, batches), (1, lambda: iter(batches)), (2, lambda: iter(batches))):
        loaders: Any = [others, DataLoader(data(5), 2)]
        found = quiet(devices=devices, accelerator="cpu").validate(OfSeveral(), loaders, verbose=False)
        assert found == [{"samples/dataloader_idx_0": 6.0}, {"samples/dataloader_idx_1": 5.0}]
    found = quiet().validate(OfSeveral(), [lambda: iter(batches), lambda: iter(batches)], verbose=False)
    assert [*map(len, found)] == [1, 1]
