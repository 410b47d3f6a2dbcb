"""What layers hand on to each other beside what they compute: masks, dataclasses, containers that they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from lockstep.strategies import Pipeline
from lockstep.strategies.pipeline.partition import cut, stages
from lockstep.strategies.pipeline.staged_module import Staged
from tests.strategies.pipeline.classifiers import Base, exact, fit, samples


@dataclass(frozen=True)
class Inner:
    mask: Tensor


@dataclass
class Stream:
    x: Tensor
    inner: dict[str, Inner] = field(default_factory=dict)
    number: int = field(default=0, init=False)


class State:
    """An object of a class of the user's, which layers change and do not return."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.seen, self.number = x, [], 0


class Layer(nn.Linear):
    def __init__(self, kind: str) -> None:
        super().__init__(8, 8)
        self.kind = kind

    def forward(self, value: Any, seen: Any = None) -> Any:
        if self.kind in ("pair", "bools"):
            return torch.tanh(super().forward(value[0])) * value[1], value[1]
        if self.kind == "stream":
            mask = value.inner["mask"]
            made = Stream(torch.tanh(super().forward(value.x)) * mask.mask, {"mask": mask})
            made.number = value.number + 1
            return made
        if self.kind == "changed":
            value.x = torch.tanh(super().forward(value.x))
            return value
        if self.kind == "given":
            value.x = torch.tanh(super().forward(value.x))
            value.number += 1
            value.seen.append(value.x.square())
            seen["inner"]["sum"] = seen["inner"]["sum"] + value.x
            seen["state"].mean = value.x.mean(1, keepdim=True)
            return seen
        if self.kind == "set":
            seen.add(id(self))
        elif seen is not None:
            seen.append(value)
        return torch.tanh(super().forward(value))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kind = kind
        self.layers = nn.ModuleList(Layer(kind) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask, seen = (x > 0).to(x.dtype) + 0.5, []
        mask = x > 0 if self.kind == "bools" else mask
        value: Any = (x, mask) if self.kind in ("pair", "bools") else Stream(x, {"mask": Inner(mask)})
        if self.kind == "given":
            value, given = State(x), {"inner": {"sum": 0.0, "mask": mask}, "state": SimpleNamespace()}
            inner = given["inner"]
            for layer in self.layers:
                layer(value, given)
            inner_sum = inner["sum"] * inner["mask"] + given["state"].mean
            return (inner_sum + sum(value.seen) * value.number)[:, :4]
        if self.kind == "set":
            return self.layers[0](x, {1})
        if self.kind == "list":
            for layer in self.layers:
                x = layer(x, seen)
            return sum(seen)[:, :4]
        for layer in self.layers:
            value = layer(value)
        if self.kind in ("pair", "bools"):
            return (value[0] + value[1])[:, :4]
        return (value.x + value.inner["mask"].mask)[:, :4] * (value.number + 1)


def module(kind: str) -> Base:
    made = Base()
    made.net = Net(kind).double()  # type: ignore[assignment]
    return made


SCHEDULES = {"changed": Pipeline(schedule="gpipe"), "given": Pipeline(schedule="zbv", num_micro_batches=2)}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["pair", "stream", "changed", "given", "list"])
def test_what_layers_hand_on_is_that_of_each_microbatch(kind: str) -> None:
    exact(lambda: module(kind), {SCHEDULES.get(kind, "pipeline"): 2})


def learned(module: Base) -> Callable[[], Any]:
    parts, batch = cut(module), list(samples()[:4])
    staged = Staged(module, parts, stages(parts, 2), [0, 1], 0, torch.device("cpu"), None)
    return lambda: staged.layout_of(lambda: module.training_step(batch, 0))


def test_a_set_to_which_layers_add_is_refused() -> None:
    with pytest.raises(ValueError, match=r"net\.layers\.0 changes the set that it is given, .* return what it adds"):
        learned(module("set"))()


def test_a_mask_of_bools_that_layers_hand_on_is_refused_before_torch_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    monkeypatch.setattr("lockstep.strategies.pipeline.shape_inference.SENDS_ALL_GRADIENTS", True)
    with pytest.raises(RuntimeError, match=r"net\.layers\.2 begins stage 1 and .* torch\.bool .* which torch 2\.11\.0"):
        learned(module("bools"))()


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(torch.tanh(super().forward(x))))


class UsesTwice(Base):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(*(Twice(8, 8) for _ in range(4))).double()


@pytest.mark.ranks
def test_a_weight_that_a_layer_uses_twice_has_its_gradient_where_a_schedule_splits_the_backward() -> None:
    exact(UsesTwice, {Pipeline(schedule="zbv", num_micro_batches=2): 2}, max_epochs=1)


class Attributes(Base):
    """Layers or hooks of them leave something in attributes, which the step reads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen, self.kept = how, {}, None
        if how == "layer":
            self.net[0] = Auxiliary(8, 16, dtype=torch.float64)
        if how == "method":
            self.net[0].register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.how == "dict" and batch_idx == 1:
            for index in (0, 4):
                self.net[index].register_forward_hook(lambda *args, index=index: self.seen.update({index: args[2]}))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss = loss + sum(value.square().mean() for value in self.seen.values())
        if self.kept is not None:
            loss = loss + self.kept.square().mean()
        return loss + getattr(self.net[0], "auxiliary", 0)


class Auxiliary(nn.Linear):
    auxiliary: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.auxiliary = output.square().mean()
        return output


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "name"), [("layer", "auxiliary"), ("method", "kept"), ("dict", r"seen\[0\]")])
def test_what_layers_of_other_stages_leave_in_attributes_is_refused(how: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}, which a layer or a hook of it has set on another stage"):
        fit(Attributes(how), "pipeline", 2)
