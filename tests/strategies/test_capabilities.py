"""What a strategy says of itself before anything starts, and where its ranks are once they run."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from lockstep.strategies import (
    DDP,
    FSDP,
    DataParallel,
    DeepSpeed,
    MeshParallel,
    Pipeline,
    SingleDevice,
    Strategy,
    TensorParallel,
)
from lockstep.strategies.base import Topology
from tests.trainer.toy import loader, net, quiet


def configured(strategy: Strategy, devices: int = 2) -> Strategy:
    return strategy.configure(devices=devices, accelerator="cpu")


def test_capabilities_are_known_before_anything_starts() -> None:
    assert configured(DDP()).capabilities.preserves_memory_format
    assert not configured(FSDP()).capabilities.preserves_memory_format
    assert configured(FSDP()).capabilities.builds_on_meta
    assert configured(FSDP()).capabilities.dynamic_shapes
    assert not configured(MeshParallel("tensor=2")).capabilities.dynamic_shapes
    assert not configured(Pipeline()).capabilities.runs_step_once
    assert not configured(DataParallel()).capabilities.runs_step_once
    assert configured(DataParallel(), 1).capabilities.runs_step_once
    with pytest.raises(FrozenInstanceError):
        configured(DDP()).capabilities.exact = False  # type: ignore[misc]


@pytest.mark.parametrize("make", [Pipeline, DeepSpeed, DataParallel])
def test_manual_optimization_is_refused_before_anything_starts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, module = make(), net()
    module.automatic_optimization = False
    monkeypatch.setattr(strategy, "launch", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ValueError, match=r"automatic.optimization"):
        quiet(strategy=strategy, devices=2, accelerator="cpu").fit(module, loader())


def test_setup_returns_where_this_rank_is() -> None:
    strategy = configured(SingleDevice(), 1)
    assert strategy.topology == Topology()
    topology = strategy.setup()
    try:
        assert topology == strategy.topology == Topology(device=torch.device("cpu"))
        with pytest.raises(FrozenInstanceError):
            topology.rank = 1  # type: ignore[misc]
    finally:
        strategy.teardown()


def on_rank(strategy: Strategy) -> list[list[int]]:
    topology = strategy.setup()
    try:
        own = [topology.rank, topology.data_rank, topology.data_size, topology.is_reporting_rank]
        return strategy.all_gather(torch.tensor(own)).tolist()
    finally:
        strategy.teardown()


@pytest.mark.ranks
@pytest.mark.ranks
def test_ranks_that_share_samples_share_a_data_rank() -> None:
    strategy = configured(Pipeline())
    assert strategy.launch(on_rank, strategy) == [[0, 0, 1, 0], [1, 0, 1, 1]]


@pytest.mark.parametrize("make", [DDP, FSDP, TensorParallel, Pipeline, lambda: MeshParallel("fsdp=1,tensor=1")])
def test_one_rank_is_a_single_device_unless_a_mesh_is_forced(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_FORCE_MESH", raising=False)
    assert type(configured(make(), 1)) is SingleDevice
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    strategy = make()
    assert configured(strategy, 1) is strategy


def test_one_rank_keeps_the_blocks_to_recompute() -> None:
    alone: Any = configured(FSDP(activation_checkpointing="net.*"), 1)
    assert alone.activation_checkpointing == "net.*"


def test_deepspeed_runs_its_engine_on_one_rank_too() -> None:
    strategy = DeepSpeed(offload_optimizer=True)
    assert configured(strategy, 1) is strategy
