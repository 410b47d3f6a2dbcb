"""What a step under 'dp' changes in objects of the module and of its batch: once, as on one device, or a sentence."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lockstep.strategies.data.sample_axis import SampleCutter
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.sync.contents import sum_of_bits
from tests.strategies.test_dp_user_code import Plain, both, train
from tests.trainer.toy import data


class Meter:
    """Knows the module, and itself."""

    def __init__(self, owner: Counts) -> None:
        self.n, self.total, self.owner, self.me = 0, torch.zeros(()), owner, self

    def add(self) -> None:
        self.n += 1
        self.total += 1
        self.owner.own += 1


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor


class Pair(NamedTuple):
    value: Tensor
    calls: list[int]


class Named(dict[str, int]):
    calls = 0


class Counts(Plain):
    """Whatever a step may count its calls in."""

    def __init__(self) -> None:
        super().__init__()
        self.own = 0
        self.number, self.array = torch.zeros(()), np.array([np.nan, 0])
        self.kinds, self.table, self.named = Counter[str](), defaultdict[str, int](int), Named(calls=0)
        self.meter, self.space, self.frozen = Meter(self), SimpleNamespace(n=0), Frozen(torch.zeros(()))
        self.add, self.again = self.meter.add, functools.partial(Meter.add, self.meter)
        self.pair, self.last = Pair(torch.zeros(()), [0]), deque([torch.zeros(())], maxlen=2)
        self.base = torch.zeros(3)
        self.row, self.missing = self.base[1], torch.tensor(float("nan"))
        self.register_buffer("steps", torch.zeros(2))
        self.views = [self.steps[0], self.steps]
        self.weights_too = [self.net[0].weight]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.number += 1
        self.array[1] += 1
        self.kinds["a"] += 1
        self.table["a"] += 1
        self.named["calls"] += 1
        self.named.calls += 1
        self.meter.add()
        self.add()
        self.again()
        self.again()
        self.space.n += 1
        self.frozen.value.add_(1)
        self.pair.value.add_(1)
        self.pair.calls[0] += 1
        self.last[0] += 1
        self.base += 1
        self.views[0].add_(1)
        self.views[1].add_(1)
        with torch.no_grad():
            self.weights_too[0].mul_(0.99)
        return super().training_step(batch, batch_idx) * (1 / (1 + sum(self.counted())))

    def counted(self) -> list[float]:
        counts = [self.number, self.array[1], self.kinds["a"], self.table["a"], self.named["calls"], self.named.calls]
        counts += [self.meter.n, self.meter.total, self.own, self.space.n, self.frozen.value, self.pair.value]
        return [float(count) for count in (*counts, self.pair.calls[0], self.last[0], self.row, *self.views[1])]


def test_what_a_step_changes_in_place_in_objects_changes_once() -> None:
    one, other = both(Counts)
    assert other.counted() == one.counted() and one.counted()[0] > 2
    assert other.meter.me is other.meter and other.row._base is other.base


class Keeps(Plain):
    """Objects of the user's in which a step keeps what follows from the samples, beside what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(n=0, last=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.state.n += 1
        self.state.last = batch[0].mean()
        return super().training_step(batch, batch_idx) * self.state.n


def test_what_an_object_holds_of_a_slice_is_nobodys_after_the_step() -> None:
    one, other = both(Keeps)
    assert other.state.n == one.state.n > 2 and isinstance(other.state.last, Refusing)
    with pytest.raises(RuntimeError, match=r"state\.last was set by training_step, which strategy 'dp' runs on slices"):
        other.state.last.item()


class Closes:
    """What it holds cannot be used after one of its copies is gone."""

    closed = False

    def __del__(self) -> None:
        type(self).closed = True


def test_objects_that_close_something_are_not_copied() -> None:
    class Opens(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.file = Closes()

    module = train(Opens, "dp")
    assert not Closes.closed and isinstance(module.file, Closes)


class Normalizes(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.center = torch.nn.Parameter(torch.zeros(8), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.center.data.lerp_(batch[0].mean(0), 0.1)
        return super().training_step((batch[0] - self.center, batch[1]), batch_idx)


def test_a_parameter_that_follows_the_samples_of_a_slice_is_refused() -> None:
    with pytest.raises(RuntimeError, match="training_step changed the parameter center by the samples of a slice"):
        train(Normalizes, "dp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("numel", [1, 7, 8])
def test_the_sum_of_bits_tells_of_a_change_wherever_values_lie(dtype: torch.dtype, numel: int) -> None:
    values = torch.arange(numel + 1).to(dtype)[1:]  # which begins within a word
    assert sum_of_bits(values) == sum_of_bits(values.clone())
    changed = values.clone()
    changed[-1] = 0
    assert sum_of_bits(values) != sum_of_bits(changed)


def filtered(items: list[Any]) -> Any:
    kept = [item for item in items if item[0][0] < 10]
    return default_collate(kept) if kept else None


def test_a_batch_without_samples_runs_no_step() -> None:
    samples = [(x + 100 * (8 <= i < 16), y) for i, (x, y) in enumerate(data(32))]
    one, other = both(Counts, train_loader=DataLoader(samples, batch_size=8, collate_fn=filtered))
    assert other.counted() == one.counted() and one.counted()[0] == 6


def with_scale(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return {"x": x, "y": y, "scale": torch.tensor(1.0), "weight": torch.tensor([1.0, 2.0, 3.0])}


class Writes(Plain):
    """Changes tensors of the batch in place, those of all samples too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name in ("x", "scale", "weight"):
            batch[name].mul_(2)
        hidden = self.net(batch["x"]) * batch["scale"]
        return F.cross_entropy(hidden, batch["y"], weight=batch["weight"].to(hidden), reduction="none").mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [float(batch["scale"]), float(batch["weight"][2])]


def test_each_slice_has_the_tensors_of_all_samples_to_itself() -> None:
    one, other = both(Writes, train_loader=DataLoader(data(24), batch_size=8, collate_fn=with_scale))
    assert other.seen == one.seen == [2.0, 6.0] * 6
    array = np.array(1.0)
    (first, _), (second, _) = SampleCutter().cut({"x": torch.zeros(4, 2), "a": array}, 4, 2)
    assert first["a"] is array and second["a"] is not array


class Task:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Hashed:
    """Is a key of what it holds."""

    def __init__(self) -> None:
        self.table: dict[Hashed, float] = {}
        self.number = 2.0
        self.table[self] = self.number

    def __hash__(self) -> int:
        return hash(self.number)


class Cell:
    """One of a grid, which knows those around it."""

    def __init__(self) -> None:
        self.near: list[Cell] = []


class Marker:
    pass


UNSET, NONE = object(), Marker()


class Asks(Plain):
    """Whose step asks by identity, in keys, items and globals."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = [Task(1.0), Task(2.0)]
        self.weights, self.active = {task: task.scale for task in self.tasks}, {self.tasks[0]}
        self.frozen, self.edges = frozenset(self.tasks[:1]), {(self.tasks[0], self.tasks[1])}
        self.of_layer = {self.net[0]: 3.0}
        self.first, self.second, self.hashed = UNSET, NONE, Hashed()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = self.weights[self.tasks[1]] * self.of_layer[self.net[0]]
        asked = [self.tasks[0] in self.active, self.tasks[0] in self.frozen, tuple(self.tasks) in self.edges]
        asked += [self.tasks[1] not in self.active, self.first is UNSET, self.second is NONE]
        return super().training_step(batch, batch_idx) * factor * sum(asked) * self.hashed.table[self.hashed]


def test_what_a_step_asks_by_identity_is_found_in_each_replica() -> None:
    _, other = both(Asks)
    assert not any(isinstance(value, Refusing) for value in vars(other).values())


class Knows(Plain):
    def __init__(self) -> None:
        super().__init__()
        cells = [[Cell() for _ in range(8)] for _ in range(8)]
        for i in range(7):
            for j in range(7):
                for one, other in ((cells[i][j], cells[i + 1][j]), (cells[i][j], cells[i][j + 1])):
                    one.near.append(other)
                    other.near.append(one)
        self.root = cells[0][0]


def test_objects_that_know_each_other_are_each_compared_once() -> None:
    _, other = both(Knows)
    assert isinstance(other.root, Cell)


class Gives(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.marker = Marker()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        held = vars(self.marker)
        held["n"] = held.get("n", 0) + 1
        held["last"] = batch[0].mean()
        return super().training_step(batch, batch_idx) * held["n"]


def test_an_object_without_attributes_keeps_what_a_step_gives_it() -> None:
    _, other = both(Gives)
    assert vars(other.marker)["n"] > 2 and isinstance(vars(other.marker)["last"], Refusing)


class Large(Plain):
    """Reads large data, and changes what `changes` names."""

    changes = ""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.table = np.zeros(200_000), torch.zeros(200_000, dtype=torch.float64)
        self.words = {f"w{i}": i for i in range(2000)}
        self.rows, self.boxes = self.table[:2], [[0] for _ in range(2000)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.changes == "bank":
            self.bank[3] += 1
        elif self.changes == "table":
            self.table[3] += 1
        elif self.changes == "words":
            self.words["w3"] += 1
        self.boxes[3][0] += 1
        known = self.words["w3"] + self.bank[3] + float(self.table[3]) + self.boxes[3][0]
        return super().training_step(batch, batch_idx) * known


def test_what_is_large_is_shared_and_not_copied() -> None:
    seen: list[Large] = []
    places = set()

    class Looks(Large):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self)
            places.add((self.bank.ctypes.data, self.table.data_ptr(), self.rows.data_ptr(), id(self.words)))
            return super().training_step(batch, batch_idx)

    both(Looks)
    assert len(places) == len({*map(id, seen)}) == 2  # one on each of the two runs


@pytest.mark.parametrize("changes", ["bank", "table"])
def test_a_step_that_changes_what_is_large_is_refused(changes: str) -> None:
    made = []

    class Changes(Large):
        def __init__(self) -> None:
            super().__init__()
            self.changes = changes
            made.append(self)

    with pytest.raises(RuntimeError, match=f"training_step changed what {changes} holds, which is large"):
        train(Changes, "dp")
    assert made[0].bank.flags.writeable


def test_what_a_step_changes_in_a_large_container_changes_once() -> None:
    class Changes(Large):
        changes = "words"

    one, other = both(Changes)
    assert one.words == other.words and one.words["w3"] > 3
