"""Loaders: of a DataModule, of the module, side by side, and their batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lockstep import DataModule
from lockstep.strategies import DDP
from tests.trainer.module_toys import Both
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights


class Bag:
    """A batch object with its own `to`."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, moved: int = 0) -> None:
        self.x, self.y, self.moved = x, y, moved

    def to(self, device: torch.device) -> Bag:
        return Bag(self.x.to(device), self.y.to(device), self.moved + 1)

    def __len__(self) -> int:
        return len(self.x)


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    label: str = "text"


def stacked(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


COLLATES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "own to": (lambda items: Bag(*stacked(items)), lambda b: (b.x, b.y) if b.moved == 1 else None),
    "dict": (lambda items: dict(zip("xy", stacked(items), strict=True)), lambda b: (b["x"], b["y"])),
    "nested": (lambda items: {"deep": [(stacked(items),)], "name": "n"}, lambda b: b["deep"][0][0]),
    "dataclass": (lambda items: Record(*stacked(items)), lambda b: (b.x, b.y) if b.label == "text" else None),
    "namedtuple": (lambda items: Both(*stacked(items)), lambda b: (b.x, b.y)),
}


@pytest.mark.parametrize(("collate", "xy"), COLLATES.values(), ids=COLLATES)
def test_batches_of_every_kind_have_the_weight_of_their_samples(collate: Any, xy: Any) -> None:
    class Kinds(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = xy(batch)
            loss = F.cross_entropy(self(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        validation_step = training_step  # type: ignore[assignment]

    model, reference = net(), net()
    model.__class__ = Kinds
    trainer, plain = quiet(accumulate_grad_batches=2), quiet(accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(data(20), batch_size=8, collate_fn=collate))
    plain.fit(reference, loader(20))
    assert equal(weights(model), weights(reference))
    assert trainer.callback_metrics["loss"] == plain.callback_metrics["train/loss_epoch"]


def test_transfer_batch_to_device_override() -> None:
    calls = []

    class Transfers(Net):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            calls.append((device, dataloader_idx))
            batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return batch[0] * 0, batch[1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not batch[0].any()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert not batch[0].any()

    quiet().fit(Transfers(), loader(8), [loader(8), loader(8)])
    assert calls == [(torch.device("cpu"), 0), (torch.device("cpu"), 0), (torch.device("cpu"), 1)]


def test_loaders_may_be_methods_of_the_module() -> None:
    class Own(Net):
        def train_dataloader(self) -> Any:
            return loader(16)

        def val_dataloader(self) -> Any:
            return [loader(8), loader(8)]

        def test_dataloader(self) -> Any:
            return loader(8)

        def predict_dataloader(self) -> Any:
            return loader(12)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

        test_step = validation_step

    trainer = quiet()
    trainer.fit(Own())
    assert trainer.global_step == 2 and "val/loss/dataloader_idx_1" in trainer.callback_metrics
    assert len(trainer.num_val_batches) == len(trainer.val_dataloaders) == 2
    assert "val/loss" in quiet().test(Own(), verbose=False)[0]
    assert [len(p) for p in quiet().predict(Own())] == [8, 4]
    trainer = quiet()
    trainer.fit(Own(), loader(24))
    assert trainer.global_step == 3, "what the caller gives comes first"


class Data(DataModule):
    """Writes what is called, and on which rank."""

    def __init__(self, folder: str, size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []

    def note(self, what: str) -> None:
        rank = self.trainer.global_rank if self.trainer is not None else None
        with open(Path(self.hparams.folder) / f"rank{rank}", "a") as file:
            file.write(what + "\n")

    def prepare_data(self) -> None:
        self.note("prepare")

    def setup(self, stage: str) -> None:
        self.note(f"setup {stage}")
        self.data = data(self.hparams.size)

    def teardown(self, stage: str) -> None:
        self.note(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.mark.ranks
def test_data_module_on_two_ranks(tmp_path: Path) -> None:
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.datamodule.hparams.size == 16
            self.log("n", float(len(batch[0])), reduce_fx="sum")

    module = Data(str(tmp_path))
    trainer = quiet(devices=2)
    trainer.fit(Tested(), datamodule=module)
    assert (tmp_path / "rank0").read_text().split("\n")[:-1] == ["prepare", "setup fit", "teardown fit"]
    assert (tmp_path / "rank1").read_text().split("\n")[:-1] == ["setup fit", "teardown fit"], (
        "one rank of a node prepares"
    )
    assert trainer.global_step == 2 and "val/loss" in trainer.callback_metrics
    assert trainer.test(Tested(), datamodule=module, verbose=False) == [{"n": 16.0}]
    assert (tmp_path / "rank1").read_text().endswith("setup test\nteardown test\n")


def test_data_module_may_be_given_in_place_of_loaders(tmp_path: Path) -> None:
    trainer, module = quiet(), Data(str(tmp_path))
    trainer.fit(Net(), module)
    assert trainer.datamodule is module and trainer.global_step == 4
    quiet().validate(Net(), module, verbose=False)
    assert len(quiet().predict(Net(), module)) == 4
    assert [line for line in (tmp_path / "rank0").read_text().split("\n") if "setup" in line] == [
        "setup fit",
        "setup validate",
        "setup predict",
    ]


class Joint(Net):
    """Trains on batches of two loaders at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.zeros(0, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = batch.values() if isinstance(batch, dict) else batch
        self.sizes = torch.cat([self.sizes, torch.tensor([[len(first[0]), len(second[0])]])])
        return super().training_step(first, batch_idx)


@pytest.mark.ranks
def test_training_loaders_side_by_side_cycle_the_shorter_one() -> None:
    for loaders in ({"labeled": loader(24), "more": loader(5, 4)}, [loader(24), loader(5, 4)]):
        trainer, model = quiet(), Joint()
        trainer.fit(model, loaders)
        assert model.sizes.tolist() == [[8, 4], [8, 1], [8, 4]] and trainer.num_training_batches == 3
    trainer, model = quiet(devices=2, strategy=DDP(broadcast_buffers=False)), Joint()
    trainer.fit(model, {"labeled": loader(24), "more": loader(5, 4)})
    assert model.sizes.tolist() == [[8, 4], [8, 4]], "whole batches, in turn"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            DataModule,
            r"datamodule must be a lockstep\.DataModule, but it is the class DataModule; write DataModule\(…\)",
        ),
        (3, r"datamodule must be a lockstep\.DataModule, but it is int"),
    ],
)
def test_a_datamodule_that_is_not_one_is_named(given: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        quiet().fit(net(), datamodule=given)
    with pytest.raises(TypeError, match=expected):
        quiet().validate(net(), datamodule=given)
