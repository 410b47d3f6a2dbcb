"""Blocks that write to the lists, dicts and objects that they are given, or to tensors in place."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.strategies import FSDP
from tests.strategies.mesh.perceptrons import Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, weights

pytestmark = pytest.mark.ranks


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)


class Appending(Gated):
    def forward(self, x: Tensor, penalties: list[Tensor]) -> Tensor:
        penalties.append(self.gate(x).square().mean())
        return x + self.up(x).tanh()


class Net(nn.Module):
    """Two blocks between two layers; gives an output and a penalty."""

    block: type[Gated] = Appending

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([self.block(), self.block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalties: list[Tensor] = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, penalties)
        return self.head(x), torch.stack(penalties).sum()


class Counting(Gated):
    def forward(self, x: Tensor, *, cache: dict[str, Any]) -> Tensor:
        cache["calls"] = cache.get("calls", 0) + 1
        cache.setdefault("penalties", {})[cache["calls"]] = self.gate(x).square().mean()
        return x + self.up(x).tanh() * cache["calls"]


class Cached(Net):
    block = Counting

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cache: dict[str, Any] = {}
        x = self.first(x)
        for block in self.blocks:
            x = block(x, cache=cache)
        return self.head(x), torch.stack([*cache["penalties"].values()]).sum()


@dataclass
class Context:
    hidden: Tensor
    penalty: Tensor | float = 0.0
    calls: int = 0

    def __post_init__(self) -> None:
        self.hidden = self.hidden * 2  # once, as the caller makes it


class Updating(Gated):
    def forward(self, context: Any) -> None:
        context.calls += 1
        context.penalty = context.penalty + self.gate(context.hidden).square().mean()
        context.hidden = context.hidden + self.up(context.hidden).tanh() * context.calls


class InContext(Net):
    block = Updating

    def context(self, x: Tensor) -> Any:
        return Context(self.first(x))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        context = self.context(x)
        for block in self.blocks:
            block(context)
        return self.head(context.hidden), context.penalty


class Writing(Perceptron):
    def __init__(self, net: type[Net] = Net) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output, penalty = self.net(batch[0])
        return F.cross_entropy(output, batch[1]) + 0.1 * penalty


class PenaltiesAlone(Writing):
    """Nothing runs backward through what the last block returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])[1]


def of_cache() -> Writing:
    return Writing(Cached)


def of_context() -> Writing:
    return Writing(InContext)


@pytest.mark.parametrize(
    ("strategy", "devices", "makes"),
    [
        ("fsdp", 2, [Writing, of_cache, of_context]),
        (FSDP(activation_checkpointing=Gated), 2, [Writing, of_context]),
        ("ddp=2", 2, [Writing, of_context]),
    ],
)
def test_what_blocks_write_to_their_arguments_reaches_the_step(strategy: Any, devices: int, makes: Any) -> None:
    exact(strategy, devices, *makes, accumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("model", 2), ("pipeline", 2), pytest.param("fsdp=2,pipeline=2", 4, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("make", [Writing, of_cache, of_context])
def test_what_layers_of_devices_and_stages_write_reaches_the_step(strategy: str, devices: int, make: Any) -> None:
    one, several = make(), make()
    fit("single", 1, one, labeled())
    fit(strategy, devices, several, labeled())
    assert distance(weights(several), weights(one)) < 1e-12


def test_backward_may_begin_with_what_a_block_has_written() -> None:
    exact("fsdp", 2, PenaltiesAlone)


class Reading(Gated):
    """Reads some of the tensors of a dict, and replaces another."""

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        given["calls"] = given["calls"] + 1
        return x + self.up(x * given["scale"]).tanh()


class Kept(Writing):
    """Looks after each backward at a dict that is the same in all steps."""

    def __init__(self) -> None:
        super().__init__(Net)
        self.net.blocks = nn.ModuleList([Reading(), Reading()])
        self.given = {"scale": torch.ones(8, dtype=torch.float64).requires_grad_(), "calls": torch.zeros(())}
        self.own = self.given["scale"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net.first(batch[0])
        for block in self.net.blocks:
            x = block(x, self.given)
        assert self.given["scale"] is self.own
        return F.cross_entropy(self.net.head(x), batch[1])

    def on_after_backward(self) -> None:
        assert self.own.grad is not None and self.given["calls"] == 2 * (self.trainer.global_step + 1)


@pytest.mark.parametrize("strategy", ["fsdp", FSDP(activation_checkpointing=Gated)])
def test_what_blocks_only_read_is_the_callers_after_the_call(strategy: Any) -> None:
    exact(strategy, 2, Kept)


class Spaced(InContext):
    def context(self, x: Tensor) -> Any:
        return SimpleNamespace(hidden=self.first(x), penalty=0.0, calls=0)


class Residual(Gated):
    def forward(self, x: Tensor, penalties: list[Tensor]) -> Tensor:
        penalties.append(x.square().mean())
        x += self.up(x.tanh())
        return x


class InPlace(Net):
    block = Residual


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Spaced, "training_step runs backward through a tensor .* the block has written it to an object"),
        (InPlace, r"training_step calls Residual, which changes in place .* as in x = x \+ y"),
    ],
)
def test_what_fsdp_cannot_follow_is_explained(net: type[Net], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit("fsdp", 2, Writing(net), labeled())
