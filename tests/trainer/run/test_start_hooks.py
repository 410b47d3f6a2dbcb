"""What `on_fit_start` and `on_train_start` do in a run that is resumed changes nothing of it."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.trainer.checkpoint.store import CheckpointError
from tests.trainer.checkpoint.damage import replace, sign
from tests.trainer.toy import loader, quiet


class Begins(Module):
    """Sets something as a run starts, and something else in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.register_buffer("average", torch.zeros(()))
        self.factor: Any = 1.0

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output * (self.factor + self.average), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Draws(Begins):
    """Random numbers of which nothing depends, and some on which the loss does, as inputs to generate from do."""

    def on_train_start(self) -> None:
        torch.randn(3)
        self.factor = torch.rand((), device=self.device)


class Counts(Begins):
    def on_train_start(self) -> None:
        self.factor = 0.5

    def on_train_epoch_start(self) -> None:
        self.factor += 0.25


class Collects(Begins):
    def on_fit_start(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)
        self.factor = 1 / len(self.seen)


class Unfreezes(Begins):
    def on_fit_start(self) -> None:
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)


class Decays(Begins):
    def on_train_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.3

    def on_train_epoch_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.7


class SetsAgain(Begins):
    """Sets what it has already, which changes in the second epoch only."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.meter = Meter()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_fit_start(self) -> None:
        self.factor, self.meter, self.last = 1.0, Meter(), torch.tensor(float("nan"))
        self.net[0].requires_grad_(False)
        for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            own.data.copy_(other.data)

    def on_train_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"], group["dampening"] = 0.1, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        weight = self.meter.value + self.last.nan_to_num(0.0)
        return self.loss(output, batch) + weight * F.mse_loss(output, self.teacher(batch[0]))

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.factor, self.meter.value, self.last = 1.5, 0.5, torch.tensor(0.5)
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Meter:
    value = 0.0

    def __init__(self) -> None:
        self.value = 0.1


class Initializes(Begins):
    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.net[0].weight.fill_(0.1)
        self.average.zero_()

    def on_train_epoch_end(self) -> None:
        self.average += 0.1


class Teaches(Begins):
    """A teacher that starts as the student, and follows it from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_fit_start(self) -> None:
        self.teacher.load_state_dict(self.net.state_dict())

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(other, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        return self.loss(output, batch) + F.mse_loss(output, self.teacher(batch[0]))


HABITS = [Draws, Counts, Collects, Unfreezes, Decays, SetsAgain, Initializes, Teaches]


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def fit(kind: type[Begins], folder: Path, strategy: str, resumes: str | None = None, max_steps: int = -1) -> Begins:
    module, devices = kind(), 1 if strategy == "single" else 2
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "accelerator": "cpu", "max_steps": max_steps}
    options |= {"callbacks": [saving(folder)], "enable_checkpointing": True, "max_epochs": 3}
    torch.manual_seed(1 if resumes is None else 2)
    quiet(**options).fit(module, loader(48, 8 // devices), ckpt_path=resumes)
    return module


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        pytest.param("ddp", marks=[pytest.mark.ranks, pytest.mark.slow]),
        pytest.param("fsdp", marks=pytest.mark.ranks),
        pytest.param("tensor", marks=[pytest.mark.ranks, pytest.mark.slow]),
        pytest.param("deepspeed_stage_2", marks=[pytest.mark.ranks, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("kind", HABITS)
@pytest.mark.filterwarnings("ignore:training_step reads factor:UserWarning")  # Draws has a factor of each rank
def test_a_resumed_run_that_calls_them_again_is_the_same(kind: type[Begins], strategy: str, tmp_path: Path) -> None:
    if strategy.startswith("deepspeed") and kind in (Unfreezes, SetsAgain):
        pytest.skip("DeepSpeed refuses layers that are unfrozen during a run")
    whole = fit(kind, tmp_path / "whole", strategy)
    fit(kind, tmp_path / "first", strategy, str(tmp_path / "whole" / "step=4"), max_steps=14)
    second = fit(kind, tmp_path / "second", strategy, str(tmp_path / "first" / "step=13"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


class DecaysLess(Decays):
    def on_train_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.05


class CountsOtherwise(Counts):
    def on_train_start(self) -> None:
        self.factor = 0.125


class Locks(Counts):
    """Sets an object that cannot be copied where a number was."""

    def on_train_start(self) -> None:
        self.factor, self.locks = 1.0, Lock()
        if self.global_step:
            self.seen = Lock()

    def on_train_epoch_start(self) -> None: ...


class CountsBefore(Counts):
    seen: Any = 0

    def on_train_start(self) -> None:
        super().on_train_start()
        self.seen = 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1


class Trains(Unfreezes):
    def on_fit_start(self) -> None:
        self.net[0].requires_grad_(True)


class FreezesAgain(Begins):
    def on_fit_start(self) -> None:
        self.net[0].requires_grad_(False)


def test_what_they_set_otherwise_than_as_the_run_was_new_holds(tmp_path: Path) -> None:
    def state(module: Begins) -> list[Any]:
        options = module.trainer.optimizers[0].param_groups[0]
        return [module.factor, options["lr"], module.net[0].weight.requires_grad]

    def resumed(kind: type[Begins], former: type[Begins]) -> list[Any]:
        fit(former, tmp_path / former.__name__, "single", max_steps=2)
        return state(fit(kind, tmp_path / "b", "single", str(tmp_path / former.__name__ / "step=2"), max_steps=3))

    assert resumed(DecaysLess, Decays)[1] == 0.05
    assert resumed(CountsOtherwise, Counts)[0] == 0.125
    assert resumed(Locks, CountsBefore)[0] == 1.0
    assert resumed(Trains, Unfreezes)[2] is True
    assert resumed(FreezesAgain, Begins)[2] is False


class Shrinks(Begins):
    def on_fit_start(self) -> None:
        if self.global_step:
            with torch.no_grad():
                self.net[2].weight.zero_()


def test_weights_that_they_write_to_are_those_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = fit(Begins, tmp_path / "a", "single", max_steps=2)
    with caplog.at_level(logging.INFO, "lockstep"):
        module = fit(Shrinks, tmp_path / "b", "single", str(tmp_path / "a" / "step=1"), max_steps=2)
    assert "net.2.weight: a hook of the start has written to these weights of a run that is resumed" in caplog.text
    assert torch.equal(module.net[2].weight, whole.net[2].weight)


class SavesAsItStarts(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


class BeginsEverything(Decays):
    """Sets an attribute, weights, layers and the learning rate before a callback saves, and makes an object."""

    def on_fit_start(self) -> None:
        self.factor, self.meter = 0.5, Meter()
        self.net[0].requires_grad_(False)
        with torch.no_grad():
            self.net[2].bias.zero_()
        super().on_train_start()

    def on_train_start(self) -> None: ...

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.factor += self.meter.value
        self.meter.value += 0.1
        self.net[0].requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize("kind", [Begins, Draws, BeginsEverything])
def test_a_save_as_a_resumed_run_starts_is_of_that_run(kind: type[Begins], tmp_path: Path) -> None:
    whole = fit(kind, tmp_path / "a", "single")
    torch.manual_seed(3)
    saver, module = SavesAsItStarts(tmp_path / "start"), kind()
    options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 3}
    quiet(**options, callbacks=[saver]).fit(module, loader(48, 8), ckpt_path=str(tmp_path / "a" / "step=14"))
    again = fit(kind, tmp_path / "b", "single", str(tmp_path / "start"))
    for resumed in (module, again):
        assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))


class Moves(Begins):
    """Changes what it finds, each time that it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_start(self) -> None:
        self.seen.append(1)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(2)
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9


def test_what_they_set_otherwise_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(Moves, tmp_path / "a", "single", max_steps=2)
    with caplog.at_level(logging.INFO, "lockstep"):
        fit(Moves, tmp_path / "b", "single", str(tmp_path / "a" / "step=2"), max_steps=3)
    assert (
        "hooks of the start have set lr of group 0, seen of a run that is resumed otherwise than as it" in caplog.text
    )


class Assigns(Begins):
    """Writes to weights, and then sets other optimizers than it has configured."""

    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.net[0].weight.fill_(0.1)

    def on_train_start(self) -> None:
        parts = self.net[0].parameters(), self.net[2].parameters()
        self.trainer.optimizers = [torch.optim.Adam(part, lr=0.01) for part in parts]


def test_weights_are_loaded_again_where_optimizers_are_set(tmp_path: Path) -> None:
    whole = fit(Assigns, tmp_path / "a", "single")
    resumed = fit(Assigns, tmp_path / "b", "single", str(tmp_path / "a" / "step=8"))
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))


class MakesAMeter(Begins):
    def on_fit_start(self) -> None:
        self.meter = Meter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.meter.value += 0.1


@pytest.mark.parametrize("value", [{"__generator__": 5}, {"__items__": 5}, {"__items__": [1], "kind": "zz"}])
def test_a_damaged_value_of_what_they_make_is_an_error_of_the_checkpoint(value: Any, tmp_path: Path) -> None:
    fit(MakesAMeter, tmp_path / "a", "single", max_steps=2)
    path = tmp_path / "a" / "step=2"
    manifest, state = (json.loads((path / name).read_text()) for name in ("manifest.json", "rank-00000.json"))
    state["attributes"]["values"]["meter"]["value"] = value
    replace(path, manifest, "rank-00000.json", json.dumps(state).encode())
    sign(path, manifest)
    with pytest.raises(CheckpointError, match="step=2"):
        fit(MakesAMeter, tmp_path / "b", "single", str(path))
