"""Values that stages need of stages before the last: residual connections, and parameters beside layers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.strategies import Pipeline
from lockstep.strategies.pipeline.partition import cut, stages
from lockstep.strategies.pipeline.staged_module import Staged
from tests.strategies.pipeline.classifiers import Base, exact, fit, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Eight layers, whose order in the forward is that of their definition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.stem = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.body(x)
        return self.head(x)


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mul_(2)
        y = x * 2
        z = self.body(x.clone())
        y += z
        y[:, 1:].mul_(0.5)
        return self.head(y + torch.relu_(x))


class Sums(Net):
    """Adds what layers return to tensors that the forward has made itself."""

    def forward(self, x: Tensor) -> Tensor:
        total, largest = torch.zeros_like(x), torch.zeros_like(x)
        for layer in (self.stem, *self.body[::2]):
            x = torch.tanh(layer(x))
            total += x
            with torch.no_grad():
                torch.maximum(largest, x, out=largest)
        return self.head(total + largest)


class Keeps(Net):
    """Keeps what early layers return, which the step reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.first = self.stem(x)
        self.seen = {"body": torch.tanh(self.body(self.first))}
        return self.head(self.seen["body"])


class Dense(Net):
    """Every block takes what all before it have computed; the output has a view of the first."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.stem(x)]
        for block in (*self.body[::2], *self.blocks):
            outputs.append(torch.tanh(block(torch.stack(outputs).sum(0))))
        return self.head(outputs[-1] + outputs[0].flip(1)) + outputs[1][:, :4]


class Beside(Net):
    """Parameters beside layers are used at the end too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x * self.scale))
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x) / self.scale.norm()


class Branches(Net):
    """No layer of the branches takes what another has computed."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.stem(x).softmax(1)
        return self.head(self.body(x) + sum(weights[:, i : i + 1] * block(x) for i, block in enumerate(self.blocks)))


class TwoOutputs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Pair()

    def forward(self, x: Tensor) -> Tensor:
        found = self.stem(x)
        return self.head(self.body(found["first"]) * found["second"][0])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"first": self.first(x), "second": (torch.sigmoid(self.second(x)), "text")}


class Trained(Base):
    def __init__(self, net: type[Net]) -> None:
        super().__init__()
        self.net = net().double()  # type: ignore[assignment]
        unused = {Dense: ["scale"], Beside: []}.get(net, ["scale", "blocks"])
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not any(name.startswith(each) for each in unused) or net is Branches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if isinstance(self.net, Keeps):
            loss = loss + (self.net.first + self.net.seen["body"]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


SPLITS: dict[str, tuple[Any, int]] = {
    "two": ("pipeline", 2),
    "three": (lambda: Pipeline(split=["net.body.2", "net.head"], schedule="gpipe"), 3),
    "zbv": (lambda: Pipeline(schedule="zbv", split=["net.body.0", "net.body.2", "net.body.4"]), 2),
    "fsdp": ("fsdp=2,pipeline=2", 4),
}
DAILY = {
    ("two", Residual),
    ("two", InPlace),
    ("two", Sums),
    ("two", Keeps),
    ("three", Dense),
    ("zbv", TwoOutputs),
    ("fsdp", Beside),
}
"""Each net under one split; the slow run has all."""
NETS = (Residual, InPlace, Sums, Keeps, Dense, Beside, TwoOutputs)
CASES = [
    pytest.param(
        split,
        net,
        id=f"{split}-{net.__name__}",
        marks=() if (split, net) in DAILY else pytest.mark.slow,
    )
    for split in SPLITS
    for net in NETS
]


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf")  # torch hides it otherwise
@pytest.mark.parametrize(("split", "net"), CASES)
def test_values_of_earlier_stages_are_exact(split: str, net: type[Net]) -> None:
    strategy, devices = SPLITS[split]
    exact(lambda: Trained(net), {strategy: devices}, gradient_clip_val=0.5)


@pytest.mark.long
def test_layers_that_share_only_inputs_are_exact() -> None:
    exact(lambda: Trained(Branches), {"pipeline": 2, lambda: Pipeline(schedule="gpipe"): 3})


@pytest.mark.parametrize("net", [Dense, Beside], ids=lambda net: net.__name__)
def test_evaluation_sends_values_of_earlier_stages(net: type[Net]) -> None:
    found = []
    for strategy, devices in (("single", 1), (Pipeline(split=["net.body.2", "net.head"]), 3)):
        trainer = quiet(strategy=strategy, devices=devices, precision="64-true", seed=0)
        metrics = trainer.validate(Trained(net), DataLoader(samples(), 8))
        found.append(float(metrics[0]["loss"]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_outputs_that_transformers_collects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = SimpleNamespace(get=lambda: {"hidden_states": []})
    module = Trained(Residual)
    parts = cut(module)
    staged = Staged(module, parts, stages(parts, 2), [0, 1], 0, torch.device("cpu"), None)
    batch = list(samples()[:4])
    assert staged.layout_of(lambda: module.training_step(batch, 0)) is not None
    staged.forget_layouts()
    monkeypatch.setitem(
        sys.modules, "transformers.utils.output_capturing", SimpleNamespace(_active_collector=collector)
    )
    with pytest.raises(ValueError, match=r"net is asked for hidden_states \(output_hidden_states, output_attentions\)"):
        staged.layout_of(lambda: module.training_step(batch, 0))


class Noise(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.stem(x), 0.5)
        return self.head(x + self.body(x))


class Overwriting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[0] = Overwrites()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x * 2 + self.body(x) + x)


class Overwrites(nn.Module):
    """A layer that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu_(x))


class AddsTo(Net):
    """Layers change a tensor that the forward has made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body[4] = Adds(), Adds()

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(2, len(x), dtype=x.dtype)
        return self.head(self.body[4]((self.stem((x, total)), total)))


class ChangesInput(AddsTo):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body[2](self.stem((x, x.T))))


class IntoPart(Net):
    def forward(self, x: Tensor) -> Tensor:
        made = x.new_zeros(2, *x.shape)
        made[0] = self.stem(x)
        made[1] = self.body(made[0])
        return self.head(made[1])


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x = torch.tanh(self.linear(given[0]))
        given[1][1] += x.detach().mean(1)
        return x


class OutOfOrder(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(self.body[:3](x)) + 0 * self.body[4](x))


class Reversed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.body[0](self.head(self.stem(x)).repeat(1, 2))


@pytest.mark.parametrize(
    ("net", "split", "message"),
    [
        (
            Noise,
            "net.body.2",
            "net.head takes a value that stage 0 has computed with random numbers between",
        ),
        (
            Overwriting,
            "net.body.2",
            "net.head takes a value that stage 0 has computed .* or changed in place in one",
        ),
        (AddsTo, "net.body.4", "net.body.4 takes a value that stage 0 has computed .* changed in place in one"),
        (ChangesInput, "net.body.2", "changes a tensor in place that net is called with"),
        (IntoPart, "net.body.0", "into a part of a tensor, .* use torch.stack or torch.cat"),
        (
            OutOfOrder,
            "net.body.0",
            "net.stem is called after layers of stage 1, but is on stage 0: stages follow the ord",
        ),
        (Reversed, "net.head", "stages can begin with net.body.0$"),
    ],
)
def test_what_cannot_be_recomputed_is_named(net: type[Net], split: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Trained(net), Pipeline(split=[split]), 2)
