"""Objects other than data (iterators, subclasses of list and dict, objects of other packages, networks that a hook
makes) are after a run on ranks what they are after one in one process."""

from __future__ import annotations

import array
import io
import itertools
import logging
import random
from collections import Counter, UserDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import MinMaxScaler
from torch import nn
from torchmetrics import SumMetric

from lockstep import Module
from lockstep.callbacks import Callback
from lockstep.trainer.kept.returned import Holders
from tests.trainer.toy import Net, distance, loader, quiet, weights

pytestmark = pytest.mark.ranks

RANKS = {"strategy": "ddp", "devices": 2}
turns = ContextVar("turns", default=0)
ids, table = itertools.count(), UserDict[str, int]()


class Numbers(list[Any]):
    largest = 0

    def append(self, value: Any) -> None:
        super().append(value)
        self.largest = max(self.largest, value)


class Table(dict[str, Any]):
    """Forgets nothing that it is asked to."""

    def clear(self) -> None:
        raise AssertionError("called")


def counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "count": (itertools.count, next, next),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next, next),
    "iterator": (lambda: iter([*range(50)]), next, next),
    "list": (lambda: Numbers([0]), lambda x: x.append(len(x)), lambda x: ([*x], x.largest)),
    "dict": (lambda: Table(a=0), lambda x: x.update(a=x["a"] + 1), dict),
    "user dict": (lambda: UserDict(a=0), lambda x: x.update(a=x["a"] + 1), dict),
    "scaler": (MinMaxScaler, lambda x: x.partial_fit([[1.0], [2.0]]), lambda x: (x.n_samples_seen_, x.scale_.tolist())),
    "array": (lambda: array.array("d"), lambda x: x.append(1.0), list),
    "text": (io.StringIO, lambda x: x.write("a"), io.StringIO.getvalue),
    "masked": (lambda: np.ma.masked_array([0.0, 1.0], [0, 1]), lambda x: x.__iadd__(1), lambda x: x.tolist()),
    "made": (lambda: defaultdict(lambda: 5), lambda x: x.__setitem__("a", x["a"] + 1), lambda x: (dict(x), x["b"])),
    "ring": (lambda: deque([0], maxlen=3), lambda x: x.append(x[-1] + 1), lambda x: ([*x], x.maxlen)),
    "random": (lambda: [random.Random(3)], lambda x: x[0].random(), lambda x: x[0].random()),
    "words": (Counter, lambda x: x.update(["a"]), dict),
    "closure": (counter, lambda x: x(), lambda x: x()),
    "within": (
        lambda: SimpleNamespace(turns=[itertools.count()]),
        lambda x: next(x.turns[0]),
        lambda x: next(x.turns[0]),
    ),
}


class Holds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held = {name: make() for name, (make, _, _) in KINDS.items()}
        self.numbers = self.same = Numbers()
        self.turns, self.parts = itertools.count(), [self.net[0].weight, itertools.count()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name, (_, change, _) in KINDS.items():
            change(self.held[name])
        self.numbers.append(next(self.turns) + next(self.parts[1]))
        turns.set(turns.get() + 1)
        table["a"] = max(table.get("a", 0), next(ids)) + 1
        return super().training_step(batch, batch_idx)


class HoldsToo(Callback):
    def __init__(self, shared: Any) -> None:
        self.held, self.shared = {name: make() for name, (make, _, _) in KINDS.items()}, shared

    def on_train_batch_end(self, *_: Any) -> None:
        for name, (_, change, _) in KINDS.items():
            change(self.held[name])


def shown(options: dict[str, Any]) -> list[Any]:
    global ids
    ids = itertools.count(5)
    table.clear()
    turns.set(0)
    module = Holds()
    callback, numbers = HoldsToo(module.numbers), module.numbers
    for _ in range(2):
        quiet(split_batches=True, seed=0, callbacks=[callback], **options).fit(module, loader(24, 6))
    assert module.numbers is module.same is callback.shared is numbers and module.parts[0] is module.net[0].weight
    found = [{name: show(each[name]) for name, (_, _, show) in KINDS.items()} for each in (module.held, callback.held)]
    return [*found, [*numbers], numbers.largest, next(module.turns), turns.get(), next(ids), table["a"]]


def test_objects_that_hooks_change_in_place_come_back() -> None:
    assert shown(RANKS) == shown({})


class Refused(Exception):
    """Can be pickled, but not made again of that."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")


def test_variables_that_cannot_arrive_are_not_sent_to_ranks() -> None:
    refused, sent = Refused("a", "b"), [itertools.count()]

    class Names(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return refused, sent

    holders = Holders([], Names(), [], {})
    assert {name.rpartition(".")[2] for name in holders.variables} >= {"refused", "sent"}
    assert [name.rpartition(".")[2] for name in holders.given()] == ["sent"]


class MakesNetworks(Net):
    """Makes what it lacks: in an attribute of an object, in a list, in a variable of its file and of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.holder, self.parts = SimpleNamespace(net=None), [None]

    def on_fit_start(self) -> None:
        for made in (self.holder.net, self.parts[0]):
            if made is None:
                self.holder.net, self.parts[0] = nn.Linear(8, 3), nn.Linear(8, 3)  # type: ignore[call-overload]
                for each in (self.holder.net, self.parts[0]):
                    nn.init.constant_(each.weight, 0.1)
                    nn.init.zeros_(each.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        MakesNetworks.steps = getattr(MakesNetworks, "steps", 0) + 1  # type: ignore[attr-defined]
        global made_later
        made_later = globals().get("made_later", 0) + 1
        with torch.no_grad():
            self.holder.net.weight += self.net[3].weight[:, :8]
            taught = self.holder.net(batch[0]) + self.parts[0](batch[0])  # type: ignore[misc]
        factor = MakesNetworks.steps * made_later  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx) + (self(batch[0]) - taught).square().mean() * factor


def test_what_hooks_make_is_there_in_the_next_fit() -> None:
    trained = []
    for options in ({}, RANKS):
        globals().pop("made_later", None)
        if "steps" in vars(MakesNetworks):
            del MakesNetworks.steps  # type: ignore[attr-defined]
        torch.manual_seed(0)
        module = MakesNetworks()
        for _ in range(2):
            quiet(split_batches=True, precision="64-true", seed=0, **options).fit(module, loader(16, 4))
        trained.append([*weights(module), module.holder.net.weight])
    assert distance(trained[1], trained[0]) < 1e-12


class Phase(Enum):
    """Members that have attributes: one that each has from the start, and others that code sets."""

    WARM = 1
    MAIN = 2

    def __init__(self, number: int) -> None:
        self.steps = [number]


class SetsOfMembers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for phase in Phase:
            phase.steps.append(batch_idx)
            phase.weight = getattr(phase, "weight", 0.0) + phase.given  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx) * Phase.MAIN.weight  # type: ignore[attr-defined]


def test_attributes_of_members_of_enums_are_sent_and_come_back() -> None:
    found = []
    for options in ({}, RANKS):
        for phase in Phase:
            phase.steps[:] = [phase.value]
            vars(phase).pop("weight", None)
            phase.given = 0.5 * phase.value  # type: ignore[attr-defined]
        before = [phase.steps for phase in Phase]
        torch.manual_seed(0)
        module = SetsOfMembers()
        for _ in range(2):
            quiet(split_batches=True, precision="64-true", seed=0, **options).fit(module, loader(16, 4))
        assert all(phase.steps is steps for phase, steps in zip(Phase, before, strict=True))
        found.append([[phase.steps.copy(), phase.weight] for phase in Phase])  # type: ignore[attr-defined]
    assert found[1] == found[0] and found[0][1] == [[2, *range(4), *range(4)], 8.0]


class LargeNumbers(list[Any]):
    """A list that only pickle knows."""


class HoldsMuch(Net):
    """What is too large to be read whole: changed in place, and not."""

    def __init__(self) -> None:
        super().__init__()
        self.changed, self.stays = LargeNumbers(range(200_000)), LargeNumbers(range(200_000))
        self.own = SimpleNamespace(table=[0.0] * 200_000)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.changed.reverse()
        self.own.table[:] = [each + 1 for each in self.own.table]
        return super().training_step(batch, batch_idx)


def test_large_objects_that_change_in_place_are_named_or_come_back(caplog: pytest.LogCaptureFixture) -> None:
    module = HoldsMuch()
    with caplog.at_level(logging.WARNING, "lockstep"):
        quiet(**RANKS).fit(module, loader(24, 4))
    assert "HoldsMuch.changed changed on the ranks, which have ended, and cannot be sent back" in caplog.text
    assert "stays" not in caplog.text and module.changed[0] == 0
    assert {*module.own.table} == {3.0}


class Inner(Module):
    """Has no hyperparameters."""


class KeepsGenerator(Net):
    """Holds what cannot be sent: in the place of an object that could, and made by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner = SimpleNamespace(turns=itertools.count()), Inner()

    def on_fit_start(self) -> None:
        self.own.turns = (number for number in range(9))
        self.opened = (number for number in range(9))  # by every run, and so not named

    def on_train_epoch_start(self) -> None:
        self.later = (number for number in range(9))
        assert not self.inner.hparams


def test_what_cannot_be_sent_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = KeepsGenerator()
    with caplog.at_level(logging.WARNING, "lockstep"):
        quiet(**RANKS).fit(module, loader(16, 4))
    assert "SimpleNamespace.turns changed on the ranks, which have ended, and cannot be sent back" in caplog.text
    with caplog.at_level(logging.WARNING, "lockstep"):
        quiet(**RANKS).fit(module, loader(16, 4))
    assert "the last run has made KeepsGenerator.later on its ranks, which" in caplog.text


class Normed(Net):
    """A hook of torch computes `weight` of its layers before each forward, and keeps it in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        for i in (0, 3):
            nn.utils.weight_norm(self.net[i])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_weights_that_layers_compute_are_those_of_the_last_forward(strategy: str) -> None:
    computed = []
    for options in ({}, {"strategy": strategy, "devices": 2}):
        torch.manual_seed(0)
        module = Normed()
        quiet(split_batches=True, precision="64-true", seed=0, **options).fit(module, loader(16, 4))
        computed.append([module.net[i].weight.detach() for i in (0, 3)])
    assert distance(computed[1], computed[0]) < 1e-12


class Sums(Net):
    """Its metrics are never reset."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.listed = SumMetric(), [SumMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.own.update(1.0)
        self.listed[0].update(1.0)
        return super().training_step(batch, batch_idx)


def test_sums_of_metrics_that_end_with_the_ranks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Sums()
    with caplog.at_level(logging.WARNING, "lockstep"):
        quiet(**RANKS).fit(module, loader(16, 4))
    assert "own, listed.0 hold sums of a part of the samples on each rank" in caplog.text
    assert module.listed[0].metric_state["sum_value"] == 0
