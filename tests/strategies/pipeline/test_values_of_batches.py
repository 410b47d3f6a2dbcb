"""What follows from the values of a batch: which layers run and how often, numbers given to the net, changes in
place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.strategies import Pipeline
from tests.strategies.pipeline.classifiers import Base, difference, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Calls layers as a number says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.how = how
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, number: Any) -> Tensor:
        x, (a, b, c, d) = self.first(x), self.blocks
        if self.how == "repeated":
            for _ in range(int(number)):
                x = torch.tanh(a(x))
        elif self.how in ("chosen", "skipped"):
            x = a(x)
            shortcut = b(x) if number > 1 else x
            return self.last(d(c(shortcut if self.how == "chosen" else x)) + (shortcut if self.how == "skipped" else 0))
        elif self.how == "annealed":
            x = x * number
        return self.last(d(c(b(x))))


class Numbered(Base):
    """Batches are dicts with a number that all samples have in common."""

    rate = 1.0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.net = how, Net(how).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how in ("written", "sealed"):
            batch["x"].mul_(2)
        elif self.how == "shared":
            batch["number"].mul_(2)
        number = self.rate if self.how == "annealed" else int(batch["number"]) if batch_idx % 2 else batch["number"]
        return F.cross_entropy(self.net(batch["x"], number), batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rate *= 0.9
        self.seen += batch["x"].sum()


def collated(items: list[Any]) -> dict[str, Tensor]:
    x, y = map(torch.stack, zip(*items, strict=True))
    return {"x": x, "y": y, "number": torch.tensor(int(y.sum()) % 4)}


class Sealed(dict):
    """A batch that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("sealed")


def fit(how: str, strategy: Any, devices: int) -> dict[str, Tensor]:
    module = Numbered(how)
    collate: Any = collated if how != "sealed" else lambda items: Sealed(collated(items))
    loader = DataLoader(samples(), 8, collate_fn=collate)
    quiet(strategy=strategy, devices=devices, seed=0, max_epochs=2, precision="64-true").fit(module, loader)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("how", ["repeated", "chosen", "annealed", "written"])
def test_a_step_may_follow_the_values_of_its_batch(how: str) -> None:
    assert difference(fit(how, "single", 1), fit(how, "pipeline", 2)) < 1e-12


@pytest.mark.parametrize(
    ("how", "strategy", "message"),
    [
        (
            "skipped",
            "pipeline",
            r"net\.blocks\.1 was called for some inputs, but not for others|two batches of one shape",
        ),
        ("shared", "pipeline", "changes a tensor of the batch in place that has no row a sample"),
        ("sealed", "pipeline", "in place, but copy.deepcopy cannot copy the batch"),
        ("written", Pipeline(schedule="zbv"), "runs it for each of its 2 stages of the pipeline; .* schedule='1f1b'"),
    ],
)
def test_what_a_pipeline_cannot_follow_is_refused_by_name(how: str, strategy: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit(how, strategy, 2)


class Scaled(Base):
    """Evaluates at two scales, which inputs of one shape lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Resized()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0], 1.0), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scale = (0.5, 1.0)[batch_idx % 2]
        self.log(f"at {scale}", F.cross_entropy(self.net(batch[0], scale), batch[1]))


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.middle, self.last = (
            nn.Conv1d(a, b, 3, dtype=torch.float64) for a, b in ((1, 4), (4, 4), (4, 4))
        )

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x = F.interpolate(self.first(x[:, None]), scale_factor=scale * 4)
        return self.last(self.middle(x)).mean(-1)


def test_an_evaluation_at_two_scales_has_the_shapes_of_each() -> None:
    found = []
    for strategy, devices in (("single", 1), ("pipeline", 2)):
        trainer = quiet(strategy=strategy, devices=devices, seed=0, max_epochs=1, precision="64-true")
        trainer.fit(Scaled(), DataLoader(samples(), 8), DataLoader(samples(), 8))
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-12)
