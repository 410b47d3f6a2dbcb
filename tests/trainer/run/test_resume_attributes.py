"""Attributes that hooks and steps set on the module are as they were when its run is resumed, within an epoch too."""

from __future__ import annotations

import logging
import random
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from lockstep import Module
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import FSDP
from lockstep.trainer.kept.changes import Changes
from tests.trainer.toy import Net, equal, loader, quiet, weights

OF_EACH_RANK = pytest.mark.filterwarnings("ignore:training_step reads best, hidden:UserWarning")


class Scaled(nn.Linear):
    """A layer of the user's that counts its calls, and scales by what it has seen."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.seen += x.detach().mean(0)
        return super().forward(x * (1 + 0.01 * self.calls) + self.seen)


class Names(list[str]):
    """Of a class that checkpoints do not hold."""


class Queue(deque[float]):
    """Another."""


class Remembers(Net):
    """Derives of the epoch what its steps use, and carries from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, Scaled())
        self.names, self.metric = Names(), SumMetric()  # a metric says that it is equal to any layer
        self.by_hook, self.hidden, self.best = 0, None, float("inf")

    def on_fit_start(self) -> None:
        self.started = id(self)  # of each run its own

    def on_train_epoch_start(self) -> None:
        self.beta, self.mode = 0.5 ** (1 + self.current_epoch), f"epoch {self.current_epoch}"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.started == id(self) and self.mode == f"epoch {self.current_epoch}"
        loss = super().training_step(batch, batch_idx) * self.beta
        hidden = loss
        loss = loss if self.hidden is None else loss + 0.1 * (self.hidden - hidden).square()
        self.hidden, self.best = hidden.detach(), min(self.best, loss.item())
        self.names.append("step")
        self.by_hook += 1
        return loss * (1 + self.best) * (1 + 0.01 * self.by_hook)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.by_hook * 2

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.by_hook = checkpoint["mine"] // 2


class Save(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / str(trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"end {trainer.current_epoch}")


def fit(path: Path | None = None, kind: type[Module] = Remembers, **options: Any) -> Any:
    torch.manual_seed(0)
    module = kind()
    quiet(**{"max_epochs": 3, "accelerator": "cpu"} | options).fit(module, loader(24), ckpt_path=path)
    return module


LAYOUTS = [
    pytest.param({}, id="single"),
    *(
        pytest.param({"strategy": strategy, "devices": 2}, id=name, marks=(pytest.mark.ranks, pytest.mark.slow))
        for name, strategy in (("ddp", "ddp"), ("fsdp", FSDP(wrap=Scaled)), ("tensor", "tensor"))
    ),  # pipeline refuses such steps
]


@OF_EACH_RANK
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attributes_continue(tmp_path: Path, layout: dict[str, Any], caplog: Any) -> None:
    whole = fit(callbacks=[Save(tmp_path)], **layout)
    for step in ("1", "3", "end 0", "5"):
        resumed = fit(tmp_path / step, **layout)
        assert equal(weights(resumed), weights(whole)), step
        assert (resumed.by_hook, resumed.best, resumed.beta) == (whole.by_hook, whole.best, whole.beta)
        layers = [module.net[0] for module in (resumed, whole)]
        assert layers[0].calls == layers[1].calls and torch.equal(layers[0].seen, layers[1].seen)


class Anchored(Net):
    """Keeps on its parameters what penalties use, as elastic weight consolidation does, under names like those of an
    engine."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for p in self.parameters():
            if hasattr(p, "anchor"):
                loss = loss + 0.1 * p.ds_weight * (p - p.anchor).square().sum()
        return loss

    def on_train_epoch_end(self) -> None:
        for p in self.parameters():
            p.anchor, p.ds_weight = p.detach().clone(), getattr(p, "ds_weight", 0) + 1


def test_attributes_of_parameters_continue(tmp_path: Path) -> None:
    whole = fit(kind=Anchored, callbacks=[Save(tmp_path)])
    for step in ("1", "end 0", "5"):
        resumed = fit(tmp_path / step, Anchored)
        assert equal(weights(resumed), weights(whole)), step
        assert {p.ds_weight for p in resumed.parameters()} == {3}, step


class OnTrainer(Net):
    """Keeps on the Trainer what its steps use."""

    def on_train_start(self) -> None:
        self.trainer.history = [1.0]  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        history = self.trainer.history  # type: ignore[union-attr]
        history.append(history[-1] * 0.9)
        return super().training_step(batch, batch_idx) * history[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attributes_of_the_trainer_continue(tmp_path: Path, layout: dict[str, Any]) -> None:
    layout = {**layout, "strategy": "fsdp"} if isinstance(layout.get("strategy"), FSDP) else layout  # no layer to wrap
    whole = fit(kind=OnTrainer, callbacks=[Save(tmp_path)], **layout)
    for step in ("1", "end 0", "5"):
        resumed = fit(tmp_path / step, OnTrainer, **layout)
        assert equal(weights(resumed), weights(whole)), step
        assert (
            resumed.trainer.history == whole.trainer.history
            and len(whole.trainer.history) == 1 + whole.trainer.global_step
        )


@pytest.mark.ranks
@OF_EACH_RANK
def test_attributes_of_a_module_with_metrics_come_back_from_ranks() -> None:
    assert fit(strategy="ddp", devices=2, max_epochs=1).by_hook == 2


class MakesNames(Net):
    """Makes what is not saved in each epoch, by a hook that a run which is resumed at its end calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Names()

    def on_train_epoch_start(self) -> None:
        self.names = Names()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.names.append("step")
        return super().training_step(batch, batch_idx) * len(self.names)


def test_what_is_not_saved_is_named_where_a_hook_may_be_missing(tmp_path: Path, caplog: Any) -> None:
    fit(callbacks=[Save(tmp_path)], kind=MakesNames)
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(tmp_path / "end 0", MakesNames)
    assert "names" not in caplog.text
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(tmp_path / "4", MakesNames)
    assert "does not hold these attributes" in caplog.text and ": names; they begin as they are built" in caplog.text


@pytest.mark.ranks
@OF_EACH_RANK
def test_on_other_ranks_what_all_had_alike_continues(tmp_path: Path, caplog: Any) -> None:
    fit(callbacks=[Save(tmp_path)], strategy="ddp", devices=2)
    with caplog.at_level(logging.WARNING, "lockstep"):
        resumed = fit(tmp_path / "1")
    assert resumed.net[0].calls == 10 + 1 and "best, hidden, names, net.0.seen" in caplog.text


class WithoutHyperParameters(Module):
    """Has nothing that a save would read the first time."""

    beta = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def on_train_epoch_start(self) -> None:
        self.beta = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) * self.beta

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.ranks
def test_attributes_of_a_module_without_hyperparameters_continue_on_each_rank(tmp_path: Path, caplog: Any) -> None:
    """The first save reads the hyperparameters, which makes an attribute of Lockstep's own."""
    for layout in ({}, {"strategy": "ddp", "devices": 2}):
        whole = fit(kind=WithoutHyperParameters, callbacks=[Save(tmp_path)], **layout)
        with caplog.at_level(logging.WARNING, "lockstep"):
            resumed = fit(tmp_path / "1", WithoutHyperParameters, **layout)
        assert equal(weights(resumed), weights(whole))
        assert "does not hold these attributes" not in caplog.text


def test_what_a_layer_counts_is_saved_where_fsdp_has_changed_its_class() -> None:
    module = Remembers()
    changes, layer = Changes(module), module.net[0]
    changes.begin([])
    layer.__class__ = type("FSDPScaled", (Scaled,), {"__module__": "torch.distributed.fsdp"})
    layer(torch.ones(1, 8))
    assert changes.state_dict()["values"]["net.0"]["calls"] == 1


class KeepsMuch(Net):
    """Carries containers and what numpy makes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.sums, self.pair, self.array = {"a": 0.0}, (0, [1]), np.zeros(2)
        self.single, self.count = np.float32(1), np.int64(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        self.sums["a"] += 0.1
        self.pair = (self.pair[0] + 1, [*self.pair[1], 1][-3:])
        self.array += 0.5
        self.single, self.count = np.float32(self.single * np.float32(1.1)), self.count + 1
        assert type(self.single) is np.float32 and type(self.count) is np.int64
        weight = self.sums["a"] + sum(self.pair[1]) + self.array[1] + float(self.single) + int(self.count)
        return loss * weight + loss * torch.stack(self.losses).mean()


class DrawsByItself(Net):
    """Draws from generators of its own, of which some are made again in each run, and some in a step."""

    late: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python = torch.Generator().manual_seed(3), random.Random(3)
        self.old, self.numpy = np.random.RandomState(3), np.random.default_rng(3)
        self.twister = np.random.Generator(np.random.MT19937(3))

    def on_train_start(self) -> None:
        self.each, self.latest = torch.Generator().manual_seed(4), deque[float](maxlen=2)
        self.chosen = set[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.late is None:
            self.late = random.Random(5)
        drawn = [torch.rand((), generator=generator).item() for generator in (self.torch, self.each)]
        drawn += [self.python.random(), self.old.rand(), self.numpy.random(), self.twister.random(), self.late.random()]
        self.latest.append(sum(drawn))
        self.chosen.add(self.numpy.integers(9).item())
        return super().training_step(batch, batch_idx) * (sum(self.latest) + len(self.chosen))


class Cycles(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turns = count()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * next(self.turns)


def test_an_iterator_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(callbacks=[Save(tmp_path)], kind=Cycles)
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(tmp_path / "2", Cycles)
    assert "does not hold these attributes" in caplog.text and ": turns; they begin" in caplog.text


class Meter:
    """An object of the user's, which compares as no other does and, by that, has no hash."""

    def __init__(self, parts: bool = True) -> None:
        self.sum, self.last = 0.0, torch.zeros(())
        self.part = Meter(parts=False) if parts else None

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def add(self, value: float) -> float:
        self.sum += value
        self.last = torch.tensor(value)
        return self.sum + self.last.item() + (0 if self.part is None else self.part.add(value / 2))


class HoldsObjects(Net):
    """Counts in objects of its own, of which one is made as each run starts."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.meters, self.several = Meter(), {"a": Meter()}, [Meter(), Meter()]

    def on_fit_start(self) -> None:
        self.each = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = sum(m.add(0.1 * batch_idx) for m in (self.meter, self.meters["a"], self.several[1], self.each))
        return super().training_step(batch, batch_idx) * factor


class StepsByItself(Net):
    """Has an optimizer and a scheduler that it has not returned, beside one that it has."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.optim.Adam(self.net[0].parameters(), lr=0.1)
        self.rates = torch.optim.lr_scheduler.StepLR(self.own, 1, 0.9)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        given = self.optimizers()
        for optimizer in (given, self.own):
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in (given, self.own):
            optimizer.step()
        self.rates.step()

    def configure_optimizers(self) -> Any:
        self.returned = torch.optim.SGD(self.net[3].parameters(), lr=0.1, momentum=0.9)
        return self.returned


class MakesOnce(Net):
    """Has a flag that says whether an object is there that no checkpoint holds."""

    is_ready = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.is_ready:
            self.queue, self.is_ready = Queue([1.0]), True
        return super().training_step(batch, batch_idx) * self.queue[0]


class HoldsOdd(Net):
    """Holds what the files of a checkpoint cannot."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode():
            self.inferred = torch.ones(3) * batch_idx
        self.most = 10**5000
        vars(self).update({"$x": 3, "a b/../c": torch.ones(3)})
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [KeepsMuch, DrawsByItself, HoldsObjects, StepsByItself, MakesOnce, HoldsOdd])
def test_whatever_a_step_keeps_the_run_is_saved_and_continues(tmp_path: Path, kind: type[Net]) -> None:
    whole = fit(callbacks=[Save(tmp_path)], kind=kind)
    for step in ("2", "4"):
        assert equal(weights(fit(tmp_path / step, kind)), weights(whole)), step


class Plateau(Callback):
    """Lowers the learning rate by what it counts, of which the start of a run begins a part."""

    def __init__(self, factor: float = 0.9) -> None:
        self.factor, self.calls, self.meter = factor, 0, Meter()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.level = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls, self.level = self.calls + 1, self.level + self.meter.add(0.01)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * self.factor**self.calls + 0.01 * self.level


class PlateauWithState(Plateau):
    """Says itself what is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}


def test_attributes_of_a_callback_continue_unless_it_saves_its_state(tmp_path: Path) -> None:
    whole = fit(callbacks=[Plateau(0.5), Plateau(), Save(tmp_path)])
    for step in ("2", "4"):
        first = Plateau(0.5)
        assert equal(weights(fit(tmp_path / step, callbacks=[first, Plateau()])), weights(whole)), step
        assert first.calls == 9
    fit(callbacks=[PlateauWithState(), Save(tmp_path)])
    callback = PlateauWithState()
    fit(tmp_path / "4", callbacks=[callback])
    assert callback.calls == 9 - 4


class ChangesOnce(Net):
    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 0:
            self.scale = 0.5
        return super().training_step(batch, batch_idx) * self.scale


def test_an_attribute_that_a_resumed_module_begins_with_is_saved_again(tmp_path: Path) -> None:
    module = fit(callbacks=[Save(tmp_path)], kind=ChangesOnce, max_epochs=1)
    quiet(max_epochs=2, accelerator="cpu", callbacks=[Save(tmp_path)]).fit(module, loader(24), ckpt_path=tmp_path / "3")
    assert equal(weights(fit(tmp_path / "4", ChangesOnce, max_epochs=2)), weights(module))


class Measures(Net):
    def configure_optimizers(self) -> Any:
        self.world, self.total = self.trainer.world_size, self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_what_configure_optimizers_derives_from_the_run_is_that_of_the_resumed_run(tmp_path: Path) -> None:
    fit(callbacks=[Save(tmp_path)], kind=Measures)
    assert fit(tmp_path / "4", Measures, max_epochs=4).total == 12


class Bare(Module):
    """Has no hyperparameters, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Linear(8, 1), 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def on_train_end(self) -> None:
        assert self.seen == self.trainer.global_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_a_module_without_hyperparameters_saves_its_attributes_on_each_rank(
    devices: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"accelerator": "cpu", "devices": devices}
    quiet(callbacks=[Save(tmp_path)], **options).fit(Bare(), loader())
    with caplog.at_level(logging.INFO):
        quiet(**options).fit(Bare(), loader(), ckpt_path=tmp_path / "2")
    assert "_hparams" not in caplog.text


class WritesPast(Net):
    """Moves tensors in attributes without a trace in their version."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.shared = torch.zeros(1), torch.from_numpy(np.zeros(1))
        self.lookup = {"a": torch.zeros(1)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * (1 + self.center + self.shared + self.lookup["a"]).float()
        self.center.data.mul_(0.5).add_(loss.detach())
        self.shared.numpy()[:] += 0.1
        self.lookup["a"].data += 0.2
        return loss.sum()


def test_writes_past_the_version_of_a_tensor_are_saved(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    torch.manual_seed(0)
    whole = WritesPast()
    quiet(max_steps=6, max_epochs=2, callbacks=[saved], enable_checkpointing=True).fit(whole, loader(16, 4))
    torch.manual_seed(0)
    resumed = WritesPast()
    quiet(max_steps=6, max_epochs=2).fit(resumed, loader(16, 4), ckpt_path=tmp_path / "step=3")
    assert equal(weights(resumed), weights(whole))
    assert [resumed.center, resumed.shared, resumed.lookup["a"]] == [whole.center, whole.shared, whole.lookup["a"]]
