"""Layers that the automatic plan of tensor parallelism finds at several places, or with a forward of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module
from lockstep.strategies import TensorParallel
from tests.strategies.mesh.perceptrons import Perceptron, exact

pytestmark = pytest.mark.ranks


def widened(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), *between, nn.Linear(32, 8))


class Layers(Perceptron):
    """Trains the layers of `make`, in the order of `body`, in front of a pair that is sharded in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.make()

    def make(self) -> None:
        self.wide = widened(nn.ReLU(), nn.Dropout())

    def body(self, x: Tensor) -> Tensor:
        return self.wide(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(self.body(batch[0])), batch[1])


class AroundToo(Layers):
    """One Dropout within a sequence and around it."""

    def make(self) -> None:
        self.drop = nn.Dropout()
        self.wide = widened(nn.ReLU(), self.drop)

    def body(self, x: Tensor) -> Tensor:
        return x + self.drop(self.wide(x))


class AtTheEndToo(Layers):
    def make(self) -> None:
        drop = nn.Dropout()
        self.wide = nn.Sequential(*widened(nn.ReLU(), drop), drop)


class CalledFromOutside(Layers):
    """The Dropout within a sequence is also called on tensors of other widths, one of them that of a shard."""

    def body(self, x: Tensor) -> Tensor:
        x = self.wide[2](self.wide(x))
        return self.wide[2](x.repeat(1, 2)).unflatten(1, (2, 8)).sum(1)


class InAttributesToo(Layers):
    def make(self) -> None:
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 8)
        self.wide = nn.Sequential(self.fc1, nn.Tanh(), self.fc2)

    def body(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(self.wide(x))))


class InTwoSequences(Layers):
    def make(self) -> None:
        layer = nn.Linear(16, 16)
        self.wide = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), layer)
        self.narrow = nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 8))

    def body(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x))


class Pair(nn.Module):
    def __init__(self, fc2: nn.Linear) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), fc2

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class InTwoPerceptrons(Layers):
    def make(self) -> None:
        fc2 = nn.Linear(16, 8)
        self.wide = nn.Sequential(Pair(fc2), Pair(fc2))


class Normalizes(nn.Identity):
    """A layer of a subclass that is not elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class Subclass(Layers):
    def make(self) -> None:
        self.wide = widened(Normalizes())


class HalvesInTraining(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2 if self.training else x


class SubclassOfDropout(Layers):
    def make(self) -> None:
        self.wide = widened(HalvesInTraining())


class SetForward(Layers):
    def make(self) -> None:
        self.wide = widened(nn.ReLU())
        vars(self.wide[1])["forward"] = functional_normalize


class SetForwardOfLinear(Layers):
    """With numbers beside the weight, which torch does not multiply sharded ones by."""

    def make(self) -> None:
        self.wide = widened(nn.ReLU())
        last, ramp = self.wide[2], torch.linspace(0, 1, 32)
        vars(last)["forward"] = lambda x: F.linear(x * ramp.to(x), last.weight, last.bias)


def functional_normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


SEVERAL_PLACES = [AroundToo, AtTheEndToo, CalledFromOutside, InAttributesToo, InTwoSequences, InTwoPerceptrons]
OWN_FORWARDS = [Subclass, SubclassOfDropout, SetForward, SetForwardOfLinear]


@pytest.mark.parametrize("makes", [SEVERAL_PLACES, OWN_FORWARDS], ids=["several places", "own forwards"])
def test_layers_that_a_plan_could_mistake_compute_as_on_one_process(makes: list[Callable[[], Module]]) -> None:
    exact("tensor", 2, *makes)


class InADict(Layers):
    """A perceptron in a ModuleDict, as that of minGPT, of which the module around it calls the layers."""

    def make(self) -> None:
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 32), "act": nn.GELU(), "c_proj": nn.Linear(32, 8)})

    def body(self, x: Tensor) -> Tensor:
        return self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](x)))


class InTheStep(Layers):
    """A perceptron in attributes of the module itself, which has no forward."""

    def make(self) -> None:
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def body(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def test_layers_of_what_has_no_forward_are_not_sharded_as_a_perceptron() -> None:
    exact("tensor", 2, InADict, InTheStep)


class Gate(Pair):
    """Calls its layers with one tensor without a graph, and then with one."""

    def __init__(self, inference: bool = False) -> None:
        super().__init__(nn.Linear(16, 8))
        self.inference = inference

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode() if self.inference else torch.no_grad():
            gate = torch.sigmoid(super().forward(x.clone() if self.inference else x) + super().forward(x))
        return gate.clone() * super().forward(x)


class Gated(Layers):
    def make(self) -> None:
        self.wide = nn.Sequential(nn.Linear(8, 8), Gate(), Gate(inference=True))


def test_what_was_gathered_without_a_graph_is_gathered_again_for_one() -> None:
    exact("tensor", 2, Gated)


class KeepsNothing(Layers):
    """Calls sharded layers in no forward of a module, in whose end what they have gathered would be dropped."""

    def make(self) -> None:
        self.wide = Pair(nn.Linear(16, 8))
        self.seen: Any = None

    def body(self, x: Tensor) -> Tensor:
        x = x * 2
        self.seen = weakref.ref(x)
        return self.wide.fc2(torch.tanh(self.wide.fc1(x)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.seen() is None


def test_what_was_gathered_is_dropped_after_the_step() -> None:
    exact(TensorParallel(plan={"wide.fc1": "column", "wide.fc2": "row"}), 2, KeepsNothing)
