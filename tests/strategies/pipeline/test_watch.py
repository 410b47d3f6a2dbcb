"""What steps change in objects, containers, globals and classes is refused by name, or is a cache."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.pipeline import partition
from lockstep.strategies.pipeline.microbatch_state import StepState
from tests.strategies.pipeline.classifiers import TWO, Base, exact, fit, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks

CALLS = 0
LOSSES: list[float] = []


class Anneal:
    def __init__(self) -> None:
        self.weight = 1.0

    def step(self) -> float:
        self.weight *= 0.9
        return self.weight


class Step(Base):
    """Its step changes something in `change`, to which it gives the number of the run."""

    number = 0

    def __init__(self, change: Callable[[Any, int], Any] | None) -> None:
        super().__init__()
        self.change = change
        self.anneal, self.counts, self.nested, self.seen = Anneal(), Counter(n=1), {"a": {"n": 0}}, {0}
        self.items, self.last, self.cycle, self.kept = [0], deque([0.0], maxlen=1), itertools.cycle([1.0, 0.5]), None
        self.tensor, self.array, self.mode, self.pair = torch.ones(2), np.ones(2), "a", (1, 1)
        self.cache: dict[int, Any] = {}
        self.bag, self.schedule, self.random = SimpleNamespace(h=None), closure(), random.Random(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.count() if self.change is None else self.change(self, batch_idx)

    def count(self) -> None:
        global CALLS
        CALLS += 1
        LOSSES.append(0.0)


def closure() -> Callable[[], int]:
    number = 0

    def schedule() -> int:
        nonlocal number
        number += 1
        return number

    return schedule


def runs(change: Callable[[Any, int], Any] | None, micro_batches: int = 1) -> Step:
    """A step that runs for two parts of each micro-batch, on the rank of the last stage."""
    model = Step(change)
    parts = partition.cut(model)
    state = StepState(model, parts, parts.layers, set())
    for i in range(micro_batches):
        with state.micro_batch([4, 4]):
            for part in range(2):
                with state.run(is_last=True, stage=1):
                    model.training_step(None, 2 * i + part)
    return model


def increment(holder: Any, key: Any, by: Any = 1) -> None:
    holder[key] = holder[key] + by


REFUSED: dict[str, tuple[Callable[[Any, int], Any] | None, str]] = {
    "object": (lambda m, i: m.anneal.step(), "changes anneal.weight"),
    "counter": (lambda m, i: m.counts.update(n=1), "changes counts['n']"),
    "nested": (lambda m, i: increment(m.nested["a"], "n"), "changes nested['a']['n']"),
    "list": (lambda m, i: increment(m.items, 0), "changes items[0]"),
    "set": (lambda m, i: m.seen.add(i + 1), "leaves another seen[1] for each part"),
    "deque": (lambda m, i: m.last.append(i + 1.0), "changes last[0]"),
    "iterator": (lambda m, i: next(m.cycle), "takes an item of the iterator cycle"),
    "tensor": (lambda m, i: m.tensor.mul_(0.9), "changes tensor"),
    "past the version": (lambda m, i: m.tensor.data.mul_(0.9), "changes tensor"),
    "array": (lambda m, i: np.multiply(m.array, 0.9, out=m.array), "changes array"),
    "tuple": (lambda m, i: setattr(m, "pair", (1, m.pair[1] + 1)), "has set self.pair, but"),
    "closure": (lambda m, i: m.schedule(), "changes schedule.number"),
    "global": (None, "changes the global CALLS"),
    "class": (lambda m, i: setattr(Step, "number", Step.number + 1), "changes Step.number"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_a_step_changes_in_what_it_holds_is_refused_by_name(how: str) -> None:
    change, message = REFUSED[how]
    with pytest.raises(RuntimeError) as caught:
        runs(change, 2)
    assert f"training_step {message}" in str(caught.value)


def fill(model: Any, index: int) -> None:
    """Caches, and what each part sets again and nobody reads."""
    if model.kept is None:
        model.kept = torch.ones(3), {"a": [1]}
    model.cache.setdefault(8, torch.ones(8))
    model.random.random()
    model.mode = str(index)
    model.bag.h, model.copy = torch.full((2,), float(index)), model.bag
    LOSSES.append(index)


def test_caches_may_be_filled() -> None:
    model = runs(fill, 9)
    assert torch.equal(model.kept[0], torch.ones(3)) and model.cache.keys() == {8}
    for use in (lambda: model.bag.h + 1, lambda: model.mode == "a"):
        with pytest.raises(RuntimeError, match=r"training_step has set self\.(bag\.h|mode), but a pipeline runs it"):
            use()


def note(model: Any, index: int) -> None:
    """Set what follows from the sizes of a micro-batch, the same for each of its parts, in new objects."""
    size = 4 + (index >= 8)
    model.kept, model.anneal, model.nested["a"] = (2, size), Anneal(), {"n": (size,)}
    model.anneal.weight = float(size)


def test_objects_that_each_part_sets_may_have_another_value_in_a_later_micro_batch() -> None:
    model = runs(note, 5)
    uses = [lambda: model.kept[1], lambda: model.anneal.weight + 1, lambda: model.nested["a"]["n"][0]]
    for use, name in zip(uses, ("kept", "anneal.weight", "nested['a']['n']"), strict=True):
        with pytest.raises(RuntimeError) as caught:
            use()
        assert f"training_step has set self.{name}, but a pipeline runs it" in str(caught.value)


def test_what_is_kept_of_the_first_part_is_refused_where_it_is_used() -> None:
    def keep(model: Any, index: int) -> None:
        if model.kept is None:
            model.kept = (float(index),)

    model = runs(keep)
    assert isinstance(model.kept, Refusing)


def test_strings_and_none_are_followed_as_numbers_are() -> None:
    def toggle(model: Any, index: int) -> None:
        model.mode = "b" if model.mode == "a" else "a"
        model.kept = 0.5 if model.kept is None else model.kept * 0.5

    model = runs(toggle, 9)
    assert model.mode == "b" and model.kept == 0.5**9


class Noting(nn.Module):
    """Notes the sizes of what it is given in a string, or takes turns in one."""

    def __init__(self, takes_turns: bool) -> None:
        super().__init__()
        self.takes_turns, self.text = takes_turns, "a"

    def forward(self, x: Tensor) -> Tensor:
        self.text = ("b" if self.text == "a" else "a") if self.takes_turns else f"in {tuple(x.shape)}"
        return x * 2 if self.text == "b" else x


class Texts(Base):
    """A layer notes sizes, and so does the step; a hook may read what it notes late in the run."""

    def __init__(self, takes_turns: bool = False, is_read: bool = False) -> None:
        super().__init__()
        self.net[1], self.info, self.is_read = Noting(takes_turns), "", is_read

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.info = f"in {tuple(batch[0].shape)}"
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_read and self.trainer.current_epoch == 1 and batch_idx == 2:
            self.is_read = self.info == ""


def test_strings_that_note_sizes_may_be_set_by_steps_and_layers() -> None:
    """The last batch is smaller, and cut evenly as well."""
    exact(Texts, TWO)
    with pytest.raises(RuntimeError, match=r"training_step has set self\.info, but a pipeline runs it for each part"):
        fit(Texts(is_read=True), "pipeline", 2)


def test_a_layer_that_takes_turns_in_a_string_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"training_step calls a layer that counts in net\.1\.text"):
        fit(Texts(takes_turns=True), "pipeline", 2, max_epochs=1)


class Hidden(Base):
    """Carries a state from batch to batch, in a tuple, a dict or a list."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.state, self.count = how, None, 0
        self.states: Any = [torch.zeros(1, 4)] if how == "list" else {}
        if how == "first batch":
            self.net[3] = ActNorm()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, weight = batch[0], 1.0
        if self.how == "samples":
            self.count += len(x)
            weight = 2 / self.count
        if self.how == "tuple" and self.state is not None:
            weight = self.state[0].mean()
        if self.how == "dict" and self.states:
            weight = self.states["h"][0].mean()
        output = self.net(x)
        if self.how == "tuple":
            self.state = (output.detach(),)
        elif self.how == "dict":
            self.states["h"] = (output.detach(),)
        elif self.how == "list":
            self.states[0] = output.detach()
        return F.cross_entropy(output, batch[1]) * weight

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.net(batch[0]).mean()
        if self.how == "evaluation":
            self.count += loss.item()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "one rank" and self.trainer.strategy.topology.is_reporting_rank:
            self.count = float(outputs)


class ActNorm(nn.Module):
    """Takes its scale from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.is_set = nn.Parameter(torch.ones(16, dtype=torch.float64)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.data, self.is_set = 1 / (x.detach().abs().mean(0) + 1), True
        return x * self.scale


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("tuple", "training_step has set self.state, but a pipeline runs it for each part"),
        ("dict", "training_step has set self.states['h'], but a pipeline runs it for each part"),
        ("list", "training_step changes states[0] after it has called the pipelined module"),
        ("samples", "training_step counts the samples of a part in count"),
        ("first batch", "training_step changes net.3.scale in place"),
        (
            "evaluation",
            "an evaluation step changes count after it has called the pipelined module, where only the last",
        ),
        ("one rank", "a hook has set self.count on the rank of the last stage of a pipeline alone"),
    ],
)
def test_what_only_some_ranks_or_parts_know_is_refused_by_name(how: str, message: str) -> None:
    trainer = quiet(strategy="pipeline", devices=2, max_epochs=1, precision="64-true")
    loader = DataLoader(samples(8), 2)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(Hidden(how), loader, loader if how == "evaluation" else None)
    assert message in str(caught.value)


class Few(Base):
    """Its step has memory for the samples of a part only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(batch[0]) <= 4
        return super().training_step(batch, batch_idx)


class Flagging(Base):
    """Its step notes whether there are many samples: there are in none of the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_large = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.is_large = len(batch[0]) > 4
        return super().training_step(batch, batch_idx)


def test_a_step_that_sets_no_numbers_runs_for_parts_only() -> None:
    fit(Few(), "pipeline", 2, max_epochs=1)
    with pytest.raises(RuntimeError, match="training_step counts the samples of a part in is_large"):
        fit(Flagging(), "pipeline", 2, max_epochs=1)


class Beside(Base):
    """A metric and statistics beside the layers, which the step updates before it calls the net."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.BatchNorm1d(8, dtype=torch.float64).requires_grad_(False)
        self.total = pytest.importorskip("torchmetrics").SumMetric()
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total.update(batch[1])
        self.teacher(batch[0])
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.sums[0], self.sums[1] = self.total.compute(), self.teacher.num_batches_tracked
        self.total.reset()


def test_what_is_beside_the_layers_counts_each_part_once() -> None:
    module = Beside()
    fit(module, "pipeline", 2, n=16, max_epochs=1)
    assert module.sums.tolist() == [sum(samples(16).tensors[1].tolist()), 4]


class Late(Base):
    """Changes something in one step that is not among the first ones, and uses it from then on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.config = how, SimpleNamespace(scale=1.0)
        self.nested, self.names, self.state = {"a": {"scale": 1.0}}, set[str](), None
        self.register_buffer("number", torch.ones((), dtype=torch.float64))
        self.net[3] = LateLayer(how)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[3].is_due = self.global_step >= 5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            if self.how == "object":
                self.config.scale *= 0.5
            elif self.how == "nested":
                self.nested["a"]["scale"] *= 0.5
            elif self.how == "data":
                self.number.data.mul_(0.5)
            elif self.how == "set":
                self.names.add(f"name {len(self.names)}")
            elif self.how == "tuple":
                self.state = (batch[0].mean(), 1)
        scale = self.config.scale * self.nested["a"]["scale"] * self.number / (1 + len(self.names))
        scale = scale if self.state is None else scale * self.state[1]
        return super().training_step(batch, batch_idx) * scale


class LateLayer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.is_due, self.state = how, False, None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_due and self.how == "layer":
            last, self.state = self.state, (x.detach().mean(0), 1)
            return x if last is None else x + last[0]
        return x


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("object", "training_step changes config.scale, but"),
        ("nested", "training_step changes nested['a']['scale'], but"),
        ("data", "training_step changes number in place, but"),
        ("tuple", "training_step has set self.state, but a pipeline runs it for each part"),
        ("layer", "training_step has set self.net.3.state, but a pipeline runs it for each part"),
    ],
)
def test_what_a_later_step_changes_first_is_refused_by_name(how: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fit(Late(how), "pipeline", 2, n=64, max_epochs=1)


def test_what_a_later_step_fills_alike_is_exact() -> None:
    exact(lambda: Late("set"), {"pipeline": 2}, n=64, max_epochs=1)
