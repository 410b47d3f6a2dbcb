"""Buffers such as BatchNorm's statistics: rank 0's are everybody's after a step, unless each rank is to keep its
own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.strategies import DDP, FSDP, DeepSpeed, MeshParallel, Strategy
from tests.strategies.contract import dataset


class Measures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def differ(strategy: Strategy) -> bool:
    """Whether the ranks' statistics differ after a step on different samples."""
    torch.manual_seed(0)
    model = Measures()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    try:
        wrapped = strategy.setup_module(model)
        optimizers = strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), lr=0.1)})
        window = next(iter(strategy.shard_loader(DataLoader(dataset(16), 8), seed=0).windows(0)))
        strategy.forward_backward(wrapped, model.step, window)
        strategy.optimizer_step(wrapped, optimizers["main"])
        seen = strategy.all_gather(model.net[1].running_mean)
        return not torch.equal(seen[0], seen[1])
    finally:
        strategy.teardown()


def found() -> dict[str, tuple[bool, bool]]:
    kinds: dict[str, Callable[..., Strategy]] = {
        "fsdp": FSDP,
        "ddp=2": lambda **options: MeshParallel("ddp=2", **options),
        "deepspeed": lambda **options: DeepSpeed(stage=1, **options),
    }
    return {name: (differ(make()), differ(make(broadcast_buffers=False))) for name, make in kinds.items()}


@pytest.mark.ranks
def test_ranks_share_buffers_unless_they_are_to_keep_their_own(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(found, 2) == dict.fromkeys(("fsdp", "ddp=2", "deepspeed"), (False, True))


class Centered(nn.Module):
    """Keeps the mean of the first batch that it sees in a buffer, as `prepare` makes room for it."""

    def __init__(self, prepare: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 4)
        prepare(self.layer)

    def step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = self.norm(batch[0]), batch[1]
        if getattr(self.layer, "center", None) is None:
            self.layer.register_buffer("center", x.detach().mean(0))
        return nn.functional.cross_entropy(self.layer(x - self.layer.center), y)


def run_centered(kind: str, prepare: Callable[[nn.Module], Any], before: bool) -> str:
    model = Centered(prepare)
    strategy: Strategy = {"ddp": DDP, "fsdp": FSDP}[kind]()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    try:
        wrapped = strategy.setup_module(model)
        optimizers = strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), lr=0.1)})
        if before:  # as a hook may, on all ranks alike
            strategy.adopt_changes(wrapped, after=False)
            model.layer.register_buffer("center", torch.zeros(6))
            strategy.adopt_changes(wrapped)
        for window in strategy.shard_loader(DataLoader(dataset(16), 8), seed=0).windows(0):
            strategy.forward_backward(wrapped, model.step, window)
            strategy.optimizer_step(wrapped, optimizers["main"])
    except RuntimeError as error:
        return str(error)
    finally:
        strategy.teardown()
    return "trained"


PREPARED: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda layer: layer.register_buffer("center", None),
    "not at all": lambda layer: None,
}


@pytest.mark.ranks
@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_buffer_that_only_a_step_sets_is_refused_in_that_step(
    kind: str, prepared: str, run_ranks: Callable[..., Any]
) -> None:
    found = run_ranks(run_centered, 2, kind, PREPARED[prepared], False)
    assert found.startswith("the shape of a buffer changed in a step (layer.center), so ranks cannot share it")


@pytest.mark.ranks
def test_a_buffer_that_a_hook_sets_in_place_of_none_is_shared(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(run_centered, 2, "ddp", PREPARED["none"], True) == "trained"


def test_a_model_without_buffers_broadcasts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.strategies.sync import buffers

    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    shared = []
    monkeypatch.setattr(buffers, "share_buffers", lambda modules, *_, **__: shared.append([*modules]))
    model = nn.Linear(6, 4)
    strategy = FSDP()
    strategy.configure(devices=1, accelerator="cpu")
    strategy.setup()
    try:
        wrapped = strategy.setup_module(model)
        strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), lr=0.1)})
        window = next(iter(strategy.shard_loader(DataLoader(dataset(8), 8), seed=0).windows(0)))
        strategy.forward_backward(wrapped, lambda batch, batch_idx: model(batch[0]).square().mean(), window)
    finally:
        strategy.teardown()
    assert not shared
