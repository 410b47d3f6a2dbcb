"""What layers, installed packages and large attributes hold: exact, or refused by name."""

from __future__ import annotations

import enum
import logging
import sys
from collections import OrderedDict, deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.strategies.pipeline import partition
from lockstep.strategies.pipeline.microbatch_state import StepState
from tests.strategies.pipeline.classifiers import TWO, Base, exact, fit
from tests.strategies.pipeline.test_watch import Anneal, Step

pytestmark = pytest.mark.ranks


class Carrying(nn.Linear):
    """Adds what it has kept of the last batch to the next one."""

    def __init__(self, how: str) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.how, self.state, self.items, self.held = how, None, deque[Tensor](maxlen=1), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if self.how == "tuple":
            h = h if self.state is None else h + 0.5 * self.state[0].mean()
            self.state = (h.detach(),)
        elif self.how == "tensor":
            h = h if self.state is None else h + 0.5 * self.state.mean()
            self.state = h.detach()
        elif self.how == "number":
            h = h if self.state is None else h + self.state[0]
            self.state = (float(h.detach().mean()),)
        elif self.how == "deque":
            h = h + 0.5 * self.items[0].mean() if self.items else h
            self.items.append(h.detach())
        else:
            h = h + 0.5 * self.held["h"].mean() if self.held else h
            self.held["h"] = h.detach()
        return h


def layer_runs(layer: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """What a layer returns for the parts of micro-batches."""
    model = Base()
    model.net[2] = layer
    parts = partition.cut(model)
    state = StepState(model, parts, parts.layers, set())
    found = []
    for batch in batches:
        halves = batch.chunk(2)
        with state.micro_batch([*map(len, halves)]):
            for half in halves:
                with state.run(is_last=True, stage=1):
                    found.append(layer(half))
    return found


@pytest.mark.parametrize(
    ("how", "name"),
    [("tuple", "state"), ("tensor", "state"), ("number", "state"), ("deque", r"items\[0\]"), ("dict", r"held\['h'\]")],
)
def test_what_a_layer_carries_from_batch_to_batch_is_refused_by_name(how: str, name: str) -> None:
    layer, x = Carrying(how), torch.randn(8, 16, dtype=torch.float64)
    first = layer_runs(layer, [x])
    assert torch.equal(torch.cat(first), F.linear(x, layer.weight, layer.bias)), "a part has seen another's"
    with pytest.raises(RuntimeError, match=rf"training_step has set self\.net\.2\.{name}, but a pipeline"):
        layer_runs(Carrying(how), [x, x])


class Caching(nn.Linear):
    """Fills caches: by the width of its input, in an object, and once."""

    def __init__(self) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.table: Any = None
        self.width, self.is_built, self.tables, self.schedule = 0, False, dict[int, tuple[Tensor, int]](), None

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_built:
            self.schedule, self.is_built = (torch.ones(16, dtype=x.dtype), Anneal()), True
        if self.table is None or self.table.numel() != x[0].numel():
            self.table = torch.full(x[0].shape, 0.5, dtype=x.dtype)
        if x[0].numel() not in self.tables:
            self.tables[x[0].numel()] = (torch.ones(16, dtype=x.dtype), 1)
        scale = self.tables[x[0].numel()][0] * self.schedule[0]  # type: ignore[index]
        return super().forward((x + self.table) * scale)


def test_layers_may_fill_caches() -> None:
    layer = Caching()
    shapes: list[tuple[int, ...]] = [(), (), (3,), (), (5,), (), (5,), (5,), (2,)]
    wide = [torch.randn(8, *shape, 16, dtype=torch.float64) for shape in shapes]
    expected = [Caching.forward(layer, x) for x in wide]
    again = Caching()
    again.load_state_dict(layer.state_dict())
    with torch.no_grad():
        found = layer_runs(again, wide)
    for i, whole in enumerate(expected):
        assert torch.allclose(torch.cat(found[2 * i : 2 * i + 2]), whole, atol=1e-14)
    assert again.table.shape == (2, 16) and again.schedule is not None


class Phase(enum.IntEnum):
    WARM, MAIN = 0, 1


class Mode(str, enum.Enum):
    A, B = "a", "b"


class Plain(enum.Enum):
    A, B = 1, 2


class Toggling(Base):
    """Enumerations, fractions and numpy's bools, which each step changes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.mode, self.plain, self.share = Phase.WARM, Mode.A, Plain.A, Fraction(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.phase = Phase.MAIN if self.phase == Phase.WARM else Phase.WARM
        self.mode = Mode.B if self.mode == Mode.A else Mode.A
        self.plain = Plain.B if self.plain is Plain.A else Plain.A
        self.share *= Fraction(9, 10)
        weight = (1 + self.phase) * (0.2 if self.mode == Mode.A else 1.0) * (0.3 if self.plain is Plain.A else 1.0)
        return F.cross_entropy(self.net(batch[0]), batch[1]) * weight * float(self.share)


def test_enumerations_and_fractions_are_followed_as_numbers_are() -> None:
    exact(Toggling, TWO, max_epochs=1)


def test_objects_of_installed_packages_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "installed_meter"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "class Meter:\n    def __init__(self):\n        self.n = 0\n    def step(self):\n        self.n += 1\n"
        "COUNT = 0\ndef count(self, batch, i):\n    global COUNT\n    COUNT += 1\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    import installed_meter  # type: ignore[import-not-found]

    try:
        model = Step(lambda m, i: m.anneal.step())
        model.anneal = installed_meter.Meter()
        with pytest.raises(RuntimeError, match=r"training_step changes anneal\.n, but a pipeline"):
            run_parts(model)
        with pytest.raises(RuntimeError, match="training_step changes the global COUNT, but a pipeline"):
            run_parts(type("Installed", (Step,), {"training_step": installed_meter.count})(None))
    finally:
        del sys.modules["installed_meter"]


class Large(Step):
    """Has an attribute that holds too much, before others."""

    def __init__(self, change: Any) -> None:
        super().__init__(change)
        del self.anneal
        self.neighbors = {i: [*range(10)] for i in range(1000)}
        self.anneal = Anneal()


def test_a_large_attribute_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lockstep")
    with pytest.raises(RuntimeError, match=r"training_step changes anneal\.weight"):
        run_parts(Large(lambda m, i: m.anneal.step()))
    names = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert names == ["neighbors holds too much to be read whole"]


class Vocabulary(Step):
    def __init__(self, change: Any) -> None:
        super().__init__(change)
        self.words = {f"w{i}": i for i in range(5000)}


def test_a_large_dict_is_followed_only_where_steps_store_items() -> None:
    assert len(run_parts(Vocabulary(lambda m, i: m.words["w1"]))._now().numbers) < 100
    counting = CountingWords(None)
    assert len(run_parts(counting)._now().numbers) > 5000 and counting.words["w1"] == 2
    with pytest.raises(RuntimeError, match="training_step (changes|leaves another) words"):
        run_parts(Vocabulary(lambda m, i: dict.__setitem__(vars(m)["words"], "w1", -i)))


def run_parts(model: Step) -> StepState:
    """Of one micro-batch."""
    parts = partition.cut(model)
    state = StepState(model, parts, parts.layers, set())
    with state.micro_batch([4, 4]):
        for part in range(2):
            with state.run(is_last=True, stage=1):
                model.training_step(None, part)
    return state


class CountingWords(Vocabulary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.words["w1"] += 1


class Ordered(Base):
    """A cache in an OrderedDict, of which a step moves items to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: OrderedDict[int, float] = OrderedDict({0: 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.cache.setdefault(8, 0.5)
        self.cache.move_to_end(0)
        assert [*self.cache] == [8, 0] == [*self.cache.keys()]
        return F.cross_entropy(self.net(batch[0]), batch[1]) * self.cache[8]


def test_an_ordered_dict_may_be_a_cache() -> None:
    exact(Ordered, TWO, max_epochs=1)


class Replacing(Base):
    """Keeps its input in a list before it calls the net, and uses what it has kept of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = [torch.ones(8, dtype=torch.float64)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.states[0].mean()
        self.states[0] = batch[0].abs()
        return F.cross_entropy(self.net(batch[0]), batch[1]) * weight


def test_what_a_step_keeps_in_a_list_is_refused_where_it_is_used() -> None:
    with pytest.raises(RuntimeError, match=r"training_step has set self\.states\[0\], but a pipeline"):
        fit(Replacing(), "pipeline", 2, max_epochs=1)


class Home(Base):
    """Keeps what it computes, in an attribute that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None
        self.inputs: Any = torch.zeros(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        self.output, self.inputs = (output.detach(),), batch[0]
        return F.cross_entropy(output, batch[1])


def test_what_holds_a_part_refuses_use_after_the_fit() -> None:
    module = Home()
    fit(module, "pipeline", 2, max_epochs=1)
    for use in (lambda: module.output[0], lambda: module.inputs + 1):
        with pytest.raises(RuntimeError, match=r"training_step has set self\.(output|inputs), but a pipeline"):
            use()
