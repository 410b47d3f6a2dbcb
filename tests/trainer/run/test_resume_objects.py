"""Objects of the user's classes that a module holds, of whatever shape, are saved with it, or named, and end no run."""

from __future__ import annotations

import logging
import tracemalloc
import warnings
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import MinMaxScaler
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lockstep.trainer.kept.opaque import fingerprint
from tests.trainer.run.test_resume_attributes import Save, fit
from tests.trainer.toy import Net, equal, weights


@dataclass(slots=True)
class InSlots:
    sum: float = 0.0


@dataclass(frozen=True)
class Frozen:
    sum: float = 0.0


class Computed:
    """Has a property that holds its value under its own name, and one that is computed once."""

    def __init__(self) -> None:
        self.start = 1.0
        vars(self)["sum"] = 0.0

    @property
    def sum(self) -> float:
        return float(vars(self)["sum"])

    @sum.setter
    def sum(self, value: float) -> None:
        vars(self)["sum"] = value

    @cached_property
    def first(self) -> float:
        return self.start


class Delegates:
    """Takes whatever it is asked for from a dict, and has no attributes of its own."""

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content = {"sum": 0.0}

    def __getattr__(self, name: str) -> Any:
        return self.content[name]


class Answers:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class HoldsShapes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.slots, self.frozen, self.computed, self.bare = InSlots(), Frozen(), Computed(), SimpleNamespace(sum=0.0)
        self.meters = {"train/loss": InSlots(), 3: InSlots()}
        self.delegates, self.answers = Delegates(), Answers()
        self.counter, self.ordered, self.default = Counter(a=1), OrderedDict(a=1), defaultdict[str, list[int]](list)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        holders = (self.slots, self.computed, self.bare, *self.meters.values())
        for holder in holders:
            holder.sum += 0.1
        self.computed.start += 1
        object.__setattr__(self.frozen, "sum", self.frozen.sum + 0.1)
        self.delegates.content["sum"] += 0.1
        self.counter["a"] += 1
        self.ordered["a"] += 1
        self.default["a"].append(1)
        factor = sum(holder.sum for holder in (*holders, self.frozen, self.delegates)) + self.computed.first
        return super().training_step(batch, batch_idx) * (
            factor + self.counter["a"] + self.ordered["a"] + len(self.default["a"])
        )


class ChangesHyperparameters(Net):
    """One of them cannot be saved, one has a dot in its name, and one a hook deletes."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"alpha": 1.0, "loss": {"scale": 1.0}, "a.b": 1.0, "other": nn.Identity(), "gone": 1})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hparams.alpha *= 0.9
        self.hparams["loss"]["scale"] *= 0.8
        self.hparams["a.b"] += 0.1
        self.hparams.pop("gone", None)
        factor = self.hparams.alpha * self.hparams["loss"]["scale"] * self.hparams["a.b"] + ("gone" in self.hparams)
        return super().training_step(batch, batch_idx) * factor


class Lookahead(torch.optim.Optimizer):
    """Wraps another, and has not begun its own base class."""

    def __init__(self, base: Any) -> None:
        self.base, self.param_groups, self.state, self.steps = base, base.param_groups, base.state, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1


class HoldsOptimizers(Net):
    """Has one with more parameters than the containers of attributes may have items, lists of those that it returns,
    and a wrapper."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.full((8,), 0.1)) for _ in range(300)])
        self.own = torch.optim.Adam(self.many.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + torch.stack([*self.many]).mean(0))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in (self.own, *self.given):
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in (self.own, *self.optimizers(), self.look):
            optimizer.step()

    def configure_optimizers(self) -> Any:
        self.given = [torch.optim.Adam(self.net[i].parameters(), lr=0.01) for i in (0, 3)]
        self.named, self.look = {"a": self.given[0]}, Lookahead(self.given[0])
        return self.given


class HoldsNetworks(Net):
    """A teacher in a list, and one that a hook of the start makes, which follow the weights and make the loss; with a
    layer of the model, which is not saved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers: list[Any] = [nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)), self.net]
        self.holder = SimpleNamespace(made=None)

    def on_fit_start(self) -> None:
        self.holder.made = nn.Linear(8, 3, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            taught = self.teachers[0](batch[0]) + self.holder.made(batch[0])
        return super().training_step(batch, batch_idx) + (self(batch[0]) - taught).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for layer in (self.teachers[0][0], self.holder.made):
                layer.weight.lerp_(self.net[3].weight[:, :8], 0.1)


class ConvertsNetworks(HoldsNetworks):
    """The step gives the teacher other tensors, as a move to a GPU does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.teachers[0].double()
        with torch.no_grad():
            taught = self.teachers[0](batch[0].double()).to(batch[0].dtype)
        return Net.training_step(self, batch, batch_idx) + (self(batch[0]) - taught).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.teachers[0][0].weight.lerp_(self.net[3].weight[:, :8].double(), 0.1)


class HoldsMetrics(Net):
    """Counts in metrics that it holds in a list and a dict, and never resets them."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics, self.named = [SumMetric()], {"mean": MeanMetric(), "both": MetricCollection([SumMetric()])}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.metrics[0].update(batch_idx + 1)
        self.named["mean"].update(batch_idx)
        self.named["both"].update(0.1)
        total = self.metrics[0].compute() + self.named["mean"].compute() + self.named["both"].compute()["SumMetric"]
        return super().training_step(batch, batch_idx) * total


@pytest.mark.parametrize(
    "kind", [HoldsShapes, HoldsOptimizers, HoldsNetworks, ConvertsNetworks, ChangesHyperparameters, HoldsMetrics]
)
def test_objects_continue(tmp_path: Path, kind: type[Net], caplog: pytest.LogCaptureFixture) -> None:
    whole = fit(callbacks=[Save(tmp_path)], kind=kind)
    with caplog.at_level(logging.WARNING, "lockstep"):
        for path in sorted(tmp_path.iterdir()):
            assert equal(weights(fit(path, kind)), weights(whole)), path.name
    assert "does not hold" not in caplog.text


counted = {"steps": 0}


class Part(dict[str, float]):
    """A dict of a class of its own, which checkpoints do not hold."""


class Warns:
    """Says something when it is pickled."""

    def __getstate__(self) -> Any:
        warnings.warn("pickled", UserWarning, stacklevel=1)
        return {"a": 1}


class Array(np.ndarray[Any, Any]):
    """Another."""


class ChangesInPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.averaged = SimpleNamespace(net=None)
        self.part, self.array = Part(a=0.0), np.zeros(3).view(Array)
        self.lists = [torch.optim.Adam(self.net[0].parameters(), lr=0.0)]
        self.scaler, self.turns, self.letters = MinMaxScaler(), [count()], bytearray()
        self.stays = MinMaxScaler()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.part["a"] += 1
        self.array += 1
        self.scaler.partial_fit([[1.0], [2.0]])
        next(self.turns[0])
        self.letters.append(1)
        counted["steps"] += 1
        self.averaged.net = self.averaged.net or nn.Linear(8, 3)
        self.lists[0].param_groups[0]["lr"] += 0.1
        return super().training_step(batch, batch_idx)


def test_what_a_step_has_changed_in_place_and_is_not_saved_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(callbacks=[Save(tmp_path)], kind=ChangesInPlace)
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(tmp_path / "2", ChangesInPlace)
    names = f"array, averaged.net, letters, lists, part, scaler, {__name__}.counted, turns"
    assert f": {names}; they begin" in caplog.text


def test_what_was_changed_in_place_is_named_after_an_epoch_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(callbacks=[Save(tmp_path)], kind=ChangesInPlace)
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(tmp_path / "end 0", ChangesInPlace)
    names = f"array, letters, part, scaler, {__name__}.counted, turns"
    assert f": {names}; they begin" in caplog.text


class Phase(Enum):
    WARM = 1

    def __init__(self, number: int) -> None:
        self.weight = number

    @cached_property
    def double(self) -> int:
        return 2 * int(self.value)


class Numbers(list[Any]):
    """A list that checkpoints do not hold."""


class ChangesElsewhere(Net):
    """In members of enums, in classes, and in what is too large to be read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.same, self.own = [0] * 2**15, [0] * 2**17, Numbers([0] * 2**17)
        self.array, self.objects = np.zeros(2**24), {i: [0] for i in range(2**15)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Phase.WARM.weight += Phase.WARM.double
        Phase.WARM.given = 1  # type: ignore[attr-defined]
        ChangesElsewhere.given = 1  # type: ignore[attr-defined]
        for held in (self.numbers, self.own, self.array):
            for i in range(0, len(held), 50):
                held[i] += 1
        for held in self.objects.values():
            held[0] += 1
        self.same = [*self.same]
        return super().training_step(batch, batch_idx)


def test_what_changes_in_members_of_enums_and_in_large_objects_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(callbacks=[Save(tmp_path)], kind=ChangesElsewhere)
    with caplog.at_level(logging.WARNING, "lockstep"):
        fit(tmp_path / "2", ChangesElsewhere)
    place = f"{__name__}.{{}}".format
    names = ["array", "numbers", "objects", "own", *map(place, ("ChangesElsewhere.given", "Phase.WARM.given"))]
    assert f": {', '.join(names)}, {place('Phase.WARM.weight')}; they begin" in caplog.text


class Table:
    """Keeps what is read of it, and says so to pickle."""

    def __init__(self) -> None:
        self.rows, self.cache = [*map(str, range(100_000))], dict[int, str]()

    def __getitem__(self, row: int) -> str:
        return self.cache.setdefault(row, self.rows[row])

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}


def test_a_large_object_that_was_only_read_has_not_changed() -> None:
    table = Table()
    before = fingerprint(table, {}, samples=True)
    assert table[3] == "3" and before is not None
    assert fingerprint(table, {}, samples=True) == before


def test_what_classes_warn_of_as_they_are_pickled_is_not_shown() -> None:
    assert fingerprint([Warns()], {}) is not None


def test_of_large_objects_nothing_is_read(tmp_path: Path) -> None:
    with (tmp_path / "samples").open("wb") as file:
        file.truncate(2**28)
    mapped = np.memmap(tmp_path / "samples", np.uint8, "r")
    tracemalloc.start()
    try:
        for large in (mapped, [mapped], torch.from_numpy(np.zeros(2**25))[:2], [*range(2**17)]):
            assert fingerprint(large, {}) is None
        assert tracemalloc.get_traced_memory()[1] < 2**28 + 2**27  # of which the zeros are the most
    finally:
        tracemalloc.stop()
