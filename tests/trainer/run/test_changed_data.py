"""A dataset that hooks change during a fit: the next epoch is of what it then is, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from lockstep import Trainer
from lockstep.callbacks import Callback
from tests.trainer.toy import Net, data, distance, equal, loader, net, quiet, weights


class Own(Dataset[Any]):
    """What a TensorDataset is, in code of a user's."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in self.tensors)


class Changes(Callback):
    """Gives the dataset other samples after epoch 0: `times` as many, times `factor`."""

    def __init__(self, factor: float = 3.0, times: int = 1, only_rank: int | None = None) -> None:
        self.tensors, self.only_rank = changed(factor, times), only_rank

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0 and self.only_rank in (None, trainer.global_rank):
            trainer.train_dataloader.dataset.tensors = self.tensors


def changed(factor: float, times: int) -> tuple[Tensor, ...]:
    x, y = data(22).tensors
    return torch.cat([x * factor] * times), torch.cat([y] * times)


def fit(callback: Any, kind: Any = Own, given: Any = None, path: Any = None, **options: Any) -> tuple[Trainer, Net]:
    dataset = kind(*(data(22).tensors if given is None else given))
    loader = DataLoader(dataset, 4, **options.pop("loader", {"shuffle": True}))
    options = {"max_epochs": 3, "split_batches": True, "precision": "64-true", "accelerator": "cpu"} | options
    trainer, module = quiet(callbacks=callback, seed=1, **options), net()
    trainer.fit(module, loader, ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize("loader", [{"shuffle": True}, {}], ids=str)
def test_replaced_tensors_are_read(loader: Any) -> None:
    _, own = fit(Changes(), loader=loader)
    _, tensors = fit(Changes(), TensorDataset, loader=loader)
    _, unchanged = fit([], TensorDataset, loader=loader)
    assert equal(weights(tensors), weights(own)) and not equal(weights(tensors), weights(unchanged))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_grows_is_read_at_its_new_length(workers: int, tmp_path: Path) -> None:
    """22 samples are 6 batches of 4, and 44 are 11."""
    loader = {"shuffle": True, "num_workers": workers, "persistent_workers": bool(workers)}
    one, grown = fit(Changes(1.0, 2), loader=loader)
    assert (one.global_step, one.num_training_batches) == (6 + 11 + 11, 11)
    two, shared = fit(Changes(1.0, 2), loader=loader, devices=2)
    assert two.global_step == one.global_step and distance(weights(shared), weights(grown)) < 1e-12
    began, _ = fit(Changes(1.0, 2), loader=loader, max_epochs=None, max_steps=9)
    began.save_checkpoint(tmp_path / "mid")
    _, resumed = fit([], given=changed(1.0, 2), path=tmp_path / "mid", loader=loader)
    assert equal(weights(resumed), weights(grown))


def test_the_length_of_an_own_sampler_is_asked_for_in_each_epoch() -> None:
    class Grows(RandomSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter(range(len(self)))

        def __len__(self) -> int:
            return 4 * (self.epoch + 1)

    seen = []

    class Notes(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append((trainer.current_epoch, trainer.num_training_batches))

    fit(Notes(), loader={"sampler": Grows(range(22))})
    assert seen == [(0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (2, 3)]


@pytest.mark.long
@pytest.mark.ranks
def test_lengths_that_differ_by_rank_are_named() -> None:
    message = "the same length on all ranks, but that of Own is 22 on rank 0 and 44 on rank 1; change it alike"
    with pytest.raises(ValueError, match=message):
        fit(Changes(1.0, 2, only_rank=1), devices=2)


class Counts(Net):
    """Notes the samples that a validation reads, and grows its data in a hook."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.counts, self.batches = where, [], []
        self.count = 0

    def _grow(self, where: str) -> None:
        if where == self.where:
            loader = self.trainer.val_dataloaders
            loader.dataset.tensors = changed(1.0, len(loader.dataset) // 22 + 1)

    def on_fit_start(self) -> None:
        self._grow("on_fit_start")

    def on_train_epoch_end(self) -> None:
        self._grow("on_train_epoch_end")

    def on_validation_epoch_start(self) -> None:
        self._grow("on_validation_epoch_start")
        self.count = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.count += len(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.counts.append(self.count)
        self.batches += self.trainer.num_val_batches


@pytest.mark.parametrize(
    ("where", "options", "counts", "batches"),
    [
        pytest.param("on_train_epoch_end", {"workers": 1}, [22, 44, 66], [6, 11, 17], marks=pytest.mark.ranks),
        ("on_train_epoch_end", {}, [22, 44, 66], [6, 11, 17]),
        ("on_validation_epoch_start", {}, [44, 66, 88], [11, 17, 22]),
        ("on_fit_start", {"num_sanity_val_steps": -1}, [44] * 4, [11] * 4),
        ("on_fit_start", {"num_sanity_val_steps": 7, "limit_val_batches": 0.5}, [20] * 4, [5] * 4),
        ("on_validation_epoch_start", {"num_sanity_val_steps": 1, "limit_val_batches": 0.5}, [4, 32, 44, 56], None),
    ],
)
def test_validation_data_that_grows_is_read_at_its_new_length(
    where: str, options: dict[str, Any], counts: Any, batches: Any
) -> None:
    workers = options.get("workers", 0)
    held: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
    module, options = Counts(where), {name: value for name, value in options.items() if name != "workers"}
    quiet(max_epochs=3, **options).fit(module, loader(8), DataLoader(Own(*data(22).tensors), 4, **held))
    assert module.counts == counts
    assert batches is None or module.batches == batches
