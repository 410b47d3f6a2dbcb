"""Attributes that user code sets on started ranks come back to the caller."""

from __future__ import annotations

import datetime
from collections import Counter, deque
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import DataModule, Module, Trainer
from lockstep.callbacks import Callback, CSVLogger, TensorBoardLogger
from lockstep.trainer.kept.values import own_data, take_data
from tests.trainer.toy import Net, loader, net, quiet


@dataclass
class Record:
    step: int
    values: list[float]


class Point(NamedTuple):
    x: float


@dataclass(slots=True)
class InSlots:
    count: int


class Owner:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize(
    "value",
    [
        3,
        None,
        "a",
        [1, (2, "b")],
        {"a": {1}},
        deque([1]),
        Counter("ab"),
        Record(1, [0.5]),
        InSlots(1),
        Point(1.0),
        Path("a"),
        Decimal("0.1"),
        datetime.date(2000, 1, 1),
        datetime.timedelta(1),
        range(3),
        torch.float64,
        torch.Size([2]),
        torch.device("cpu"),
        bytearray(b"a"),
        SimpleNamespace(best=0.5),
    ],
)
def test_data_is_brought_back(value: Any) -> None:
    assert own_data(Owner(value=value)) == {"value": value}


def test_tensors_and_arrays_are_brought_back() -> None:
    assert set(own_data(Owner(t=torch.ones(2), a=np.ones(2), n=np.float32(1)))) == {"t", "a", "n"}


@pytest.mark.parametrize("value", [nn.Linear(1, 1), [nn.Linear(1, 1)], len, Owner(), nn.Parameter(torch.ones(1))])
def test_objects_stay_where_they_are(value: Any) -> None:
    assert own_data(Owner(value=value)) == {}


def test_what_a_module_keeps_for_torch_is_left_alone() -> None:
    module = net()
    module.seen = [1]  # type: ignore[assignment]
    found = own_data(module)
    assert found["seen"] == [1] and found["training"] and not {"_parameters", "_modules", "_trainer"} & set(found)


def test_containers_stay_the_same_objects() -> None:
    seen: list[int] = []
    names: dict[str, int] = {"old": 1}
    owner = Owner(seen=seen, names=names, count=0)
    take_data(owner, {"seen": [1, 2], "names": {"new": 2}, "count": 3, "more": "x"})
    assert (seen, names, vars(owner)["count"], vars(owner)["more"]) == ([1, 2], {"new": 2}, 3, "x")


def test_tensors_and_arrays_stay_the_same_objects_unless_they_were_replaced() -> None:
    tensor, array, buffer, other = torch.zeros(2), np.zeros(2), bytearray(b"a"), torch.zeros(2)
    owner = Owner(tensor=tensor, array=array, buffer=buffer, other=other)
    new = {"tensor": torch.ones(2), "array": np.ones(2), "buffer": bytearray(b"bc"), "other": torch.ones(2)}
    take_data(owner, new, replaced=["other"])
    assert (tensor.tolist(), array.tolist(), buffer) == ([1, 1], [1, 1], bytearray(b"bc"))
    assert owner.tensor is tensor and owner.array is array
    assert owner.other is new["other"] and other.tolist() == [0, 0]


def test_what_holds_itself_stays_where_it_is() -> None:
    inner = SimpleNamespace()
    inner.parent = SimpleNamespace(child=inner)
    assert own_data(Owner(inner=inner)) == {}


def test_a_list_that_came_home_as_state_too_keeps_its_items() -> None:
    shared = [1, 2]
    owner = Owner(steps=shared)
    take_data(owner, {"steps": shared})
    assert owner.steps == [1, 2]


class Collects(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs))


class CollectsToo(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        return super().training_step(batch, batch_idx)


class Data(DataModule):
    classes = 0

    def setup(self, stage: str) -> None:
        self.classes = 3

    def train_dataloader(self) -> Any:
        return loader(32)


@pytest.mark.ranks
def test_lists_that_hooks_fill_on_ranks_are_the_callers() -> None:
    callback, module, data = Collects(), CollectsToo(), Data()
    losses = callback.losses
    quiet(devices=2, accelerator="cpu", callbacks=[callback]).fit(module, datamodule=data)
    assert len(losses) == 2 and losses is callback.losses
    assert (module.batches, data.classes) == (2, 3)


class FailsToValidate(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise ValueError("no step")


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_a_validation_that_fails_leaves_no_folder(devices: int, tmp_path: Path) -> None:
    trainer = Trainer(
        logger=TensorBoardLogger(tmp_path), devices=devices, accelerator="cpu", enable_progress_bar=False, max_epochs=1
    )
    with pytest.raises(ValueError, match="no step"):
        trainer.validate(FailsToValidate(), loader(8))
    assert list(tmp_path.rglob("version_*")) == []
    trainer.validate(net(), loader(8), verbose=False)
    assert [path.name for path in tmp_path.rglob("version_*")] == ["version_0"]


class FailsToConfigure(Net):
    def configure_optimizers(self) -> Any:
        raise ValueError("no optimizer")


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_fails_before_it_writes_anything_leaves_no_folder(devices: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"devices": devices, "accelerator": "cpu", "default_root_dir": tmp_path}
    for fails in (
        lambda trainer: trainer.fit(FailsToConfigure(), loader(8)),
        lambda trainer: trainer.validate(FailsToValidate(), loader(8)),
    ):
        with pytest.raises(ValueError, match="no "):
            fails(quiet(**options, enable_checkpointing=True))
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "FailsToConfigure" / "version_0").mkdir(parents=True)
    (tmp_path / "FailsToConfigure" / "version_0" / "run.lock").touch()  # of another run, which has not written yet
    with pytest.raises(ValueError, match="no optimizer"):
        quiet(**options, enable_checkpointing=True).fit(FailsToConfigure(), loader(8))
    assert [path.name for path in tmp_path.rglob("*")] == ["FailsToConfigure", "version_0", "run.lock"]


class FailsLater(Net):
    fails = False

    def configure_optimizers(self) -> Any:
        if self.fails:
            raise ValueError("no optimizer")
        return super().configure_optimizers()


class WritesNothing(CSVLogger):
    def log_metrics(self, *args: Any, **options: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **options: Any) -> None: ...

    def finalize(self, status: str) -> None: ...


def test_a_run_that_fails_leaves_the_folders_of_others(tmp_path: Path) -> None:
    other = tmp_path / "b" / "n" / "version_0" / "run.lock"
    other.parent.mkdir(parents=True)
    other.touch()  # of another run, which has not written yet
    loggers = [CSVLogger(tmp_path / name, name="n", version=0) for name in ("a", "b")]
    with pytest.raises(ValueError, match="no optimizer"):
        quiet(logger=loggers, accelerator="cpu", devices=1).fit(FailsToConfigure(), loader(8))
    assert list(tmp_path.rglob("version_0/*")) == [other] and not list(tmp_path.glob("a/n/*"))


def test_a_trainer_that_fails_keeps_the_folder_that_it_has_written(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path / "a", name="n"), WritesNothing(tmp_path / "b", name="n")]
    trainer, module = quiet(logger=loggers, accelerator="cpu", devices=1), FailsLater()
    trainer.fit(module, loader(8))
    (tmp_path / "b" / "n" / "version_0").mkdir(parents=True, exist_ok=True)
    trainer.max_epochs, module.fails = 2, True
    with pytest.raises(ValueError, match="no optimizer"):
        trainer.fit(module, loader(8))
    assert trainer.log_dir == str(tmp_path / "a" / "n" / "version_0")


def test_what_another_run_writes_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmdir = Path.rmdir

    def late(path: Path) -> None:
        if path.name == "version_0":
            (path / "metrics.csv").write_text("1")
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", late)
    logger = CSVLogger(tmp_path, name="n", version=0)
    with pytest.raises(ValueError, match="no optimizer"):
        quiet(logger=logger, accelerator="cpu", devices=1).fit(FailsToConfigure(), loader(8))
    assert (tmp_path / "n" / "version_0" / "metrics.csv").exists()
