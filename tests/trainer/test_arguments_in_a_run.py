"""What Trainer arguments do in a run, the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from tests.trainer.toy import Net, data, distance, equal, loader, net, quiet, weights


class StopsAtOnce(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(("least", "steps"), [(None, 2), (1, 2), (5, 5), (7, 7), (9, 9)])
def test_min_steps_holds_should_stop_back(least: int | None, steps: int) -> None:
    trainer = quiet(callbacks=[StopsAtOnce()], min_steps=least, max_epochs=3)
    trainer.fit(net(), loader(56))
    assert trainer.global_step == steps


def test_a_limit_of_prediction() -> None:
    trainer = quiet(limit_predict_batches=2, accelerator="cpu", devices=1)
    predictions = trainer.predict(net(), loader(50))
    assert [len(part) for part in predictions or []] == [8, 8]


class Undefined(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert torch.is_anomaly_enabled()
        return (self(batch[0]) * 0).sqrt().sum() * 0


def test_anomalies_are_detected_during_the_run_alone() -> None:
    with pytest.raises(RuntimeError, match="SqrtBackward0.*nan"), pytest.warns(UserWarning, match="sqrt"):
        quiet(detect_anomaly=True).fit(Undefined(), loader(8))
    assert not torch.is_anomaly_enabled()


class Seen(Net):
    def on_train_start(self) -> None:
        self.benchmark = torch.backends.cudnn.benchmark


@pytest.mark.parametrize("given", [None, True, False])
def test_benchmark_is_set_during_the_run_alone(given: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not given)
    module = Seen()
    quiet(benchmark=given).fit(module, loader(8))
    assert module.benchmark is (given if given is not None else True)
    assert torch.backends.cudnn.benchmark is (not given)


class Reloads(Net):
    """Its data is a function of the epoch in which it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    def train_dataloader(self) -> Any:
        self.loaded.append(self.current_epoch)
        size = 16 + 8 * self.current_epoch
        return torch.utils.data.DataLoader(data(size, seed=self.current_epoch), batch_size=8)


@pytest.mark.parametrize(("every", "epochs", "steps"), [(0, [0], 10), (1, [0, 1, 2, 3, 4], 20), (2, [0, 2, 4], 18)])
def test_loaders_are_made_again(every: int, epochs: list[int], steps: int) -> None:
    module = Reloads()
    trainer = quiet(reload_dataloaders_every_n_epochs=every, max_epochs=5, accelerator="cpu", devices=1)
    trainer.fit(module)
    assert module.loaded == epochs
    assert trainer.global_step == steps


def test_loaders_given_to_fit_cannot_be_made_again() -> None:
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs=1 calls train_dataloader"):
        quiet(reload_dataloaders_every_n_epochs=1).fit(net(), loader(8), loader(8))


class SavesIn(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_has_the_loaders_of_its_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5, "seed": 0}
    whole = Reloads()
    quiet(callbacks=[SavesIn(tmp_path / "c", 10)], accelerator="cpu", devices=1, **options).fit(whole)  # within epoch 3
    resumed, made = Reloads(), list[int]()
    make = resumed.train_dataloader

    def counted() -> Any:
        made.append(resumed.current_epoch)
        return make()

    monkeypatch.setattr(resumed, "train_dataloader", counted)
    quiet(accelerator="cpu", devices=1, **options).fit(resumed, ckpt_path=tmp_path / "c")
    assert made == [0, 2, 4] and resumed.loaded == whole.loaded == [0, 2, 4]
    assert equal(weights(whole), weights(resumed))


class Draws(Reloads):
    """Trains in each epoch on samples that it draws."""

    def train_dataloader(self) -> Any:
        chosen = torch.randperm(40)[:16].tolist()
        return torch.utils.data.DataLoader(torch.utils.data.Subset(data(40), chosen), batch_size=8)


@pytest.mark.ranks
def test_what_loader_methods_draw_is_the_same_on_all_ranks_and_in_a_resumed_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "seed": 0, "accelerator": "cpu"}
    options |= {"precision": "64-true", "split_batches": True}
    found = []
    for devices in (1, 2):
        for ckpt_path in (None, tmp_path / str(devices)):
            torch.manual_seed(0)
            module = Draws()
            quiet(callbacks=[SavesIn(tmp_path / str(devices), 3)], devices=devices, **options).fit(
                module, ckpt_path=ckpt_path
            )
            found.append(weights(module))
    assert equal(found[1], found[0]) and equal(found[3], found[2])
    assert distance(found[0], found[2]) < 1e-12
