"""Hooks that came with a pickled module stay: torch numbers them in each process, and later ones begin elsewhere."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.launch.payload import pack, unpack
from lockstep.strategies.modules.parameter_hooks import reserve_hook_ids
from tests.strategies.mesh.perceptrons import Blocks, labeled
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, weights

HOOKS = 100


def grows(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.001


def shifts(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] + 0.01, *args[1:])


def shrinks(gradient: Tensor) -> Tensor:
    return gradient * 0.99


class ManyHooks(Blocks):
    """On a layer each: more hooks than an engine registers, and some in the run."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        for _ in range(HOOKS):
            self.net[0].register_forward_hook(grows)
            self.net[0].register_forward_pre_hook(shifts)
            self.net[1].up.weight.register_hook(shrinks)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_fit_start(self) -> None:
        for _ in range(3):  # one of them would have the number of an earlier one of the same kind
            self.net[0].register_forward_hook(grows)


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of hooks of a process that just began."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)


def trained(strategy: str, devices: int, module: ManyHooks) -> list[Tensor]:
    fit(strategy, devices, module, labeled())
    return weights(module)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_ranks_replace_no_hook_of_the_module_they_are_sent(strategy: str, new_process: None) -> None:
    found = trained(strategy, 2, ManyHooks())
    assert distance(found, trained("single", 1, ManyHooks())) < 1e-12


def test_a_run_replaces_no_hook_of_an_unpickled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    saved = io.BytesIO()
    torch.save(ManyHooks(), saved)
    saved.seek(0)
    expected = trained("single", 1, ManyHooks())
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    module = torch.load(saved, weights_only=False)
    for _ in range(HOOKS):
        module.net[1].up.weight.register_hook(shrinks)  # torch saves no hooks of parameters
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    assert distance(trained("single", 1, module), expected) == 0.0


def test_what_is_unpacked_brings_the_count_of_its_process(new_process: None) -> None:
    layer = nn.Linear(2, 2)
    for _ in range(7):
        layer.register_forward_hook(grows)
    fd = pack([layer])
    RemovableHandle.next_id = 3
    (arrived,) = unpack(fd)
    os.close(fd)
    arrived.register_forward_hook(grows)
    assert len(arrived._forward_hooks) == 8
    assert arrived.register_forward_hook(grows).id == 8


@pytest.mark.parametrize("part", ["layer", "parameter"])
def test_hooks_of_layers_and_parameters_are_reserved(part: str, new_process: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for _ in range(5):
        model[1].register_full_backward_hook(grows) if part == "layer" else model[1].weight.register_hook(shrinks)
    RemovableHandle.next_id = 1
    reserve_hook_ids(model)
    assert RemovableHandle.next_id == 5
    reserve_hook_ids(nn.Linear(2, 2))
    assert RemovableHandle.next_id == 5
