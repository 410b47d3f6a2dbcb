"""A run with `reload_dataloaders_every_n_epochs` that is resumed has the loaders of the run that was saved."""

from __future__ import annotations

import json
import logging
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from lockstep import DataModule, Module, Trainer
from lockstep.callbacks import Callback
from lockstep.trainer.checkpoint.store import CheckpointError
from tests.trainer.checkpoint.damage import replace, sign
from tests.trainer.toy import Net, data, loader, quiet


def some(number: float, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Subset(data(64), range(int(number))), batch_size=batch_size, shuffle=True)


class Counts(Net):
    """Trains on more samples each time its loader is made, by a count that `configure_optimizers` reads as well."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.calls, self.batches = 0, 0
        self.latest: Any = None

    def train_dataloader(self) -> Any:
        self.calls += 1
        made = some(12 + 8 * self.calls)
        self.batches, self.latest = len(made), made
        return made

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.batches)]


class Raises(Net):
    """A hook makes the data harder, and a count that the loader reads moves on within the epoch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.level = self.steps = 0

    def on_train_epoch_end(self) -> None:
        self.level += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def train_dataloader(self) -> Any:
        return some(16 + 4 * self.level + self.steps % 5)


class Starts(Raises):
    def on_fit_start(self) -> None:
        self.level = 2


class Measures(Net):
    def train_dataloader(self) -> Any:
        shown = float(self.trainer.callback_metrics.get("train/loss_epoch", 0.0))
        return some(24 + int(shown * 1e4) % 17 + self.trainer.global_step % 5)


class GrowsBatches(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        return some(32, 2 * self.calls)


class Data(DataModule):
    """Draws from a generator of its own, as many samples as a hook of the module says."""

    def __init__(self) -> None:
        self.level = 0
        self.generator = torch.Generator().manual_seed(5)

    def train_dataloader(self) -> Any:
        chosen = torch.randperm(64, generator=self.generator)[: 16 + 4 * self.level]
        return DataLoader(Subset(data(64), chosen.tolist()), batch_size=4)


class HasData(Net):
    data = Data

    def on_train_epoch_end(self) -> None:
        datamodule: Any = self.trainer.datamodule
        datamodule.level += 1


class Listed(DataModule):
    """The loader has the list that a hook replaces, and one to which hooks add."""

    def __init__(self) -> None:
        self.chosen, self.added = list(range(16)), [16]
        self.shift = torch.zeros(8)

    def train_dataloader(self) -> Any:
        chosen, added, shift = self.chosen, self.added, self.shift

        def collate(samples: list[Any]) -> Any:
            x, y = torch.utils.data.default_collate(samples)
            return x + len(added) + shift, y

        return DataLoader(Subset(data(64), chosen), batch_size=4, collate_fn=collate)


class Lists(Net):
    data = Listed

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        data: Any = self.trainer.datamodule
        if self.global_step % 3 == 2:
            data.chosen = [(i + 5) % 64 for i in data.chosen]
            data.shift = data.shift + 0.25
        data.added.append(1)


class Tells(DataModule):
    """Says itself what is saved."""

    def __init__(self) -> None:
        self.calls = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        return some(12 + 8 * self.calls)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]


class HasTold(Net):
    data = Tells


class Packaged(Tells):
    """As if it were written in a package that is installed."""

    __module__ = "numpy"


class HasPackaged(Net):
    data = Packaged


class Buffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.tensor(0))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.level += 1

    def train_dataloader(self) -> Any:
        return some(16 + 4 * (int(self.level) % 5))


class Warms(Net):
    """A flag that the loader method sets, and a hook takes back."""

    is_warm = False

    def train_dataloader(self) -> Any:
        self.is_warm = self.current_epoch > 0
        return some(24)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.is_warm:
            batch[0].mul_(0.5)
            self.is_warm = False


class Logged(Net):
    def train_dataloader(self) -> Any:
        shown = float(self.trainer.logged_metrics.get("train/loss_step", 0.0))
        return some(24 + int(shown * 1e4) % 17)


class Sized(Net):
    """As many samples as its weights say, so only at the end of an epoch what they were is known."""

    def train_dataloader(self) -> Any:
        return some(16 + int(float(self.net[0].weight.detach().double().sum().abs()) * 1e4) % 23)


class Saves(Callback):
    """Saves, and ends the run, after a step or at the end of an epoch."""

    def __init__(self, path: Path, step: int | None = None, epoch: int | None = None, ends: bool = True) -> None:
        self.path, self.step, self.epoch, self.ends = path, step, epoch, ends

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer, trainer.global_step == self.step)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        self.save(trainer, trainer.current_epoch == self.epoch)

    def save(self, trainer: Trainer, now: bool) -> None:
        if now:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.ends

    def state_dict(self) -> dict[str, Any]:
        return {}


def fit(kind: type[Module], ckpt_path: Path | None = None, saves: Saves | None = None, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = kind()
    options = {"devices": 1, "reload_dataloaders_every_n_epochs": 1, **options}
    trainer = quiet(max_epochs=4, seed=0, accelerator="cpu", callbacks=[saves] if saves else [], **options)
    trainer.fit(module, datamodule=getattr(kind, "data", lambda: None)(), ckpt_path=ckpt_path)
    return [torch.tensor(trainer.global_step), *(p.detach() for p in module.parameters())]


def is_equal(one: list[Tensor], other: list[Tensor], within: float = 0.0) -> bool:
    return all((a - b).abs().max().item() <= within for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", [Counts, Raises, Starts, Measures, GrowsBatches, HasData, Lists, Buffers])
def test_loaders_are_those_of_the_run_that_was_saved(kind: type[Module], every: int, tmp_path: Path) -> None:
    whole = fit(kind, reload_dataloaders_every_n_epochs=every)
    path: Path | None = None
    for i, when in enumerate([{"step": 7}, {"step": 13}, {"epoch": 3}]):
        fit(kind, path, Saves(tmp_path / str(i), **when), reload_dataloaders_every_n_epochs=every)
        path = tmp_path / str(i)
        assert is_equal(fit(kind, path, reload_dataloaders_every_n_epochs=every), whole)


@pytest.mark.parametrize("kind", [Warms, Logged, HasTold])
def test_and_what_else_loader_methods_see(kind: type[Module], tmp_path: Path) -> None:
    fit(kind, saves=Saves(tmp_path / "saved", step=8))
    assert is_equal(fit(kind, tmp_path / "saved"), fit(kind))


def test_without_a_reload_the_loader_keeps_what_was_replaced(tmp_path: Path) -> None:
    fit(Lists, saves=Saves(tmp_path / "saved", step=6), reload_dataloaders_every_n_epochs=0)
    resumed = fit(Lists, tmp_path / "saved", reload_dataloaders_every_n_epochs=0)
    assert is_equal(resumed, fit(Lists, reload_dataloaders_every_n_epochs=0))


def test_an_epoch_that_is_over_has_no_more_batches(tmp_path: Path) -> None:
    whole = fit(Sized)
    for epoch in (0, 1, 3):
        fit(Sized, saves=Saves(tmp_path / f"{epoch}", epoch=epoch))
        assert is_equal(fit(Sized, tmp_path / f"{epoch}"), whole)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Measures, GrowsBatches, HasData])
def test_and_on_another_number_of_ranks(kind: type[Module], tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "64-true", "split_batches": True}
    whole = fit(kind, devices=2, **options)
    fit(kind, saves=Saves(tmp_path / "saved", step=8), devices=2, **options)
    assert is_equal(fit(kind, tmp_path / "saved", devices=1, **options), whole, within=1e-12)


@pytest.mark.ranks
def test_batches_of_another_size_are_those_of_as_many_ranks_as_before(tmp_path: Path) -> None:
    whole = fit(GrowsBatches, devices=2, precision="64-true")
    fit(GrowsBatches, saves=Saves(tmp_path / "saved", step=5), devices=2, precision="64-true")
    resumed = fit(GrowsBatches, tmp_path / "saved", devices=1, precision="64-true")
    assert is_equal(resumed, whole, within=1e-12)


class Draws(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(Subset(data(64), torch.randperm(64)[:24].tolist()), batch_size=4)


def test_a_second_fit_is_resumed_with_its_first_loaders(tmp_path: Path) -> None:
    def trainer(*callbacks: Callback) -> Trainer:
        options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "devices": 1, "accelerator": "cpu"}
        return quiet(max_epochs=2, seed=0, callbacks=[*callbacks], **options)

    torch.manual_seed(0)
    whole, first = Draws(), trainer(Saves(tmp_path / "saved", step=15, ends=False))
    first.fit(whole)
    first.max_epochs = 4
    first.fit(whole)
    resumed, second = Draws(), trainer()
    second.max_epochs = 4
    second.fit(resumed, ckpt_path=tmp_path / "saved")
    assert is_equal([*resumed.parameters()], [*whole.parameters()])


class Schedules(Net):
    """Has a schedule as long as the run is expected to be by its first loader."""

    def train_dataloader(self) -> Any:
        return some(16 + 8 * self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer, steps = torch.optim.SGD(self.parameters(), lr=0.1), self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.ranks
def test_a_schedule_is_as_long_as_on_the_ranks_of_the_run_that_began(tmp_path: Path) -> None:
    whole = fit(Schedules, devices=2, precision="64-true")
    fit(Schedules, saves=Saves(tmp_path / "saved", step=5), devices=2, precision="64-true")
    assert is_equal(fit(Schedules, tmp_path / "saved", devices=1, precision="64-true"), whole, within=1e-12)


class Level(Enum):
    EASY = 1
    HARD = 2


class Chooses(Net):
    level = Level.EASY

    def on_train_epoch_end(self) -> None:
        self.level = Level.HARD

    def train_dataloader(self) -> Any:
        return some(16 * self.level.value)


class Helper:
    level = 0


class Helps(Net):
    helper: Any = None

    def on_fit_start(self) -> None:
        self.helper = Helper()

    def on_train_epoch_end(self) -> None:
        self.helper.level += 1

    def train_dataloader(self) -> Any:
        return some(16 + 4 * (self.helper.level if self.helper else 0))


class Iterates(Net):
    def train_dataloader(self) -> Any:
        self.others = iter(some(32))
        return some(16)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].add_(next(self.others)[0].mean())


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Chooses, "does not hold .* level;"),
        (Helps, "nothing holds helper.level yet"),
        (Iterates, "does not .* others"),
        (HasPackaged, "its DataModule, of a package, has the state of the save"),
    ],
)
def test_what_a_checkpoint_cannot_hold_for_loader_methods_is_named(
    kind: type[Module], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(kind, saves=Saves(tmp_path / "saved", step=6))
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(kind, tmp_path / "saved")
    assert any(re.search(line, each) for each in caplog.messages), caplog.messages


class Compiles(Net):
    def train_dataloader(self) -> Any:
        @torch.compile(backend="eager", fullgraph=True)
        def scaled(x: Tensor) -> Tensor:
            return x * 2 + 1

        return DataLoader(TensorDataset(scaled(torch.ones(16, 8)), torch.arange(16) % 3), batch_size=4)


def test_loader_methods_may_compile() -> None:
    fit(Compiles)


class Mines(Net):
    """Trains on the samples with the largest losses."""

    def train_dataloader(self) -> Any:
        x, y = data(64).tensors
        with torch.no_grad():
            losses = F.cross_entropy(self(x.to(self.device)), y, reduction="none")
        return DataLoader(Subset(data(64), losses.topk(24).indices.tolist()), batch_size=4)


class Looks(Mines):
    """Reads of its weights only what they are."""

    def train_dataloader(self) -> Any:
        weight = self.net[0].weight
        zeros = weight.new_zeros(2, device=weight.device, dtype=weight.dtype)
        return some(16 + weight.shape[0] % 3 + weight.numel() % 5 + 4 * weight.dim() + weight.stride(1) + len(zeros))


@pytest.mark.parametrize(("kind", "named"), [(Mines, True), (Looks, False)])
def test_loaders_made_of_weights_are_named_within_an_epoch(
    kind: type[Module], named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def is_named(every: int = 1, **when: int) -> bool:
        caplog.clear()
        fit(kind, saves=Saves(tmp_path / "saved", **when), reload_dataloaders_every_n_epochs=every)
        resumed = fit(kind, tmp_path / "saved", reload_dataloaders_every_n_epochs=every)
        has_line = any("loader methods read weights" in line for line in caplog.messages)
        assert has_line or is_equal(resumed, fit(kind, reload_dataloaders_every_n_epochs=every))
        return has_line

    caplog.set_level(logging.WARNING, "lockstep")
    assert not is_named(epoch=2)
    assert is_named(step=8) == named
    assert is_named(every=2, epoch=2) == named
    assert not is_named(every=2, epoch=1)


class Noisy(DataModule):
    """Adds noise to each batch, less and less."""

    def __init__(self) -> None:
        self.noise = 1.0

    def train_dataloader(self) -> Any:
        return loader(16, batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.noise *= 0.9
        return [batch[0] + self.noise * torch.randn_like(batch[0]), batch[1]]


class Remembers(Noisy):
    """Says itself what is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("kind", [Noisy, Remembers])
def test_attributes_of_a_datamodule_are_saved_if_it_saves_nothing(kind: type[Noisy], tmp_path: Path) -> None:
    def noise(*callbacks: Callback, ckpt_path: Path | None = None) -> float:
        datamodule = kind()
        trainer = quiet(max_epochs=2, seed=0, accelerator="cpu", devices=1, callbacks=[*callbacks])
        trainer.fit(Net(), datamodule=datamodule, ckpt_path=ckpt_path)
        return datamodule.noise

    whole = noise()
    noise(Saves(tmp_path / "saved", step=3))
    assert (noise(ckpt_path=tmp_path / "saved") == whole) is (kind is Noisy)


@pytest.mark.parametrize("state", [None, {"made_for": -1}, {"metrics": 3}, {"weights": "no"}])
def test_checkpoints_without_them_load_and_damaged_ones_are_refused(
    state: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Raises, saves=Saves(tmp_path / "saved", step=8))
    path = tmp_path / "saved"
    manifest, rank = (json.loads((path / name).read_text()) for name in ("manifest.json", "rank-00000.json"))
    rank["reload"] = {**rank["reload"], **state} if state else {}
    replace(path, manifest, "rank-00000.json", json.dumps(rank).encode())
    sign(path, manifest)
    if state is None:
        fit(Raises, path)
        assert "its version kept nothing of what loader methods saw" in caplog.text
    else:
        with pytest.raises(CheckpointError, match="no valid reload"):
            fit(Raises, path)
