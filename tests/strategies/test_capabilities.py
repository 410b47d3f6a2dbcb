"""What a strategy says of itself before anything starts, and where its ranks are once they run."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.strategies import (
    DDP,
    FSDP,
    DataParallel,
    DeepSpeed,
    MeshParallel,
    Pipeline,
    SingleDevice,
    SPMDStrategy,
    Strategy,
    TensorParallel,
    build,
)
from lockstep.strategies.base import Capabilities, Topology
from lockstep.trainer.testing.compare import layouts
from tests.conftest import REPO_ROOT
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


COLUMNS = {
    "exact": lambda can: can.exact,
    "bitwise": lambda can: can.bitwise,
    "manual": lambda can: "manual_optimization" not in can.refuses,
    "several": lambda can: "several_optimizers" not in can.refuses,
    "`16-mixed`": lambda can: "16-mixed" not in can.refuses,
    "`64-true`": lambda can: "64-true" not in can.refuses,
    "dynamic shapes": lambda can: can.dynamic_shapes,
    "memory format": lambda can: can.preserves_memory_format,
    "step once": lambda can: can.runs_step_once,
    "meta": lambda can: can.builds_on_meta,
}
ROWS = ["single", "dp", "ddp", "fsdp", "deepspeed", "tensor", "pipeline", "model", "fsdp=2,tensor=2"]
ROWS += ["local_sgd", "diloco", "federated", "parameter_server"]


def test_the_docs_have_the_table_of_capabilities() -> None:
    lines = [f"| `strategy=` | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in ROWS:
        devices = 1 if name == "single" else 4 if "=" in name else 2
        can = build(name, devices=devices, accelerator="cpu")[0].capabilities
        lines.append(f'| `"{name}"` | {" | ".join("yes" if can_it(can) else "" for can_it in COLUMNS.values())} |')
    assert "\n".join(lines) in (REPO_ROOT / "docs" / "strategies" / "index.md").read_text(), "\n".join(lines)


@pytest.mark.parametrize(
    ("make", "precision"), [(Pipeline, "16-mixed"), (DeepSpeed, "16-mixed"), (DeepSpeed, "64-true")]
)
def test_a_precision_is_refused_before_anything_starts(make: Any, precision: str) -> None:
    with pytest.raises(ValueError, match=f"precision='{precision}'"):
        make().configure(devices=2, accelerator="cpu", precision=precision)


def test_a_strategy_that_changes_the_numbers_is_not_compared_with() -> None:
    strategy = SingleDevice()
    strategy.capabilities = Capabilities(exact=False)
    with pytest.raises(ValueError, match="SingleDevice changes the numbers; name an exact one first"):
        layouts([strategy, "ddp"], 1, "64-true", "cpu")


def test_what_a_strategy_refuses_is_raised_where_it_is_asked_for() -> None:
    class Plain(SPMDStrategy):
        single_process = True
        capabilities = Capabilities(refuses={"several_optimizers": "one only", "closures": "none here"})

        def wrap(self, model: nn.Module) -> nn.Module:
            return model

    strategy = configured(Plain(), 1)
    strategy.setup()
    try:
        model = strategy.setup_module(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(ValueError, match="one only"):
            strategy.setup_optimizers(model, {"0": optimizer, "1": torch.optim.SGD(model.parameters(), 0.1)})
        with pytest.raises(ValueError, match="none here"):
            strategy.optimizer_step(model, optimizer, lambda: None)
    finally:
        strategy.teardown()


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


# Options by what they do on one rank: kept, refused, or without anything to act on.
KEPT = {"compress": "sign", "activation_checkpointing": True, "cpu_offload": True}
REFUSED = {"replicas": 2, "axes": "fsdp=2", "mesh": "ddp=2,pipeline=1"}
EXCHANGES = {
    "find_unused_parameters": True,
    "static_graph": True,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 1.0,
    "broadcast_buffers": False,
    "sync_batchnorm": True,
    "timeout_s": 60.0,
    "all_reduce": "ring",
    "wrap": None,
    "reshard_after_forward": False,
    "sync_every_micro_batch": True,
    "low_precision_gather": False,
    "plan": {},
    "sequence_parallel": True,
    "loss_parallel": True,
    "schedule": "gpipe",
    "num_micro_batches": 2,
    "stages_per_rank": 1,
    "module": "net",
    "split": ["net.0"],
    "sample": torch.ones(1),
}


@pytest.mark.parametrize("make", [DDP, FSDP, TensorParallel, Pipeline, MeshParallel])
def test_on_one_rank_an_option_is_kept_or_refused_or_has_nothing_to_act_on(make: Any) -> None:
    for name in set(inspect.signature(make.__init__).parameters) - {"self"}:
        given = {"axes": "fsdp"} if make is MeshParallel else {}
        if name in REFUSED or (name == "compress" and make is not DDP):
            with pytest.raises(ValueError, match="ranks"):
                configured(make(**given | {name: (KEPT | REFUSED)[name]}), 1)
        else:
            strategy = make(**given | {name: (KEPT | EXCHANGES)[name]})
            chosen: Any = configured(strategy, 1)
            assert (chosen is strategy) == (name in ("cpu_offload", "compress")), name
            assert bool(chosen.activation_checkpointing) == (name == "activation_checkpointing")


def test_a_precision_is_kept_on_one_rank() -> None:
    alone: Any = FSDP().configure(devices=1, accelerator="cpu", precision="bf16-mixed")
    assert alone.precision.name == "bf16-mixed"


def test_fsdp_offloads_on_one_rank_too() -> None:
    module = net()
    quiet(strategy=FSDP(cpu_offload=True), devices=1, accelerator="cpu").fit(module, loader())
    alone = net()
    quiet(strategy="single", devices=1, accelerator="cpu").fit(alone, loader())
    assert torch.allclose(module.net[0].weight, alone.net[0].weight)


def test_deepspeed_runs_its_engine_on_one_rank_too() -> None:
    strategy = DeepSpeed(offload_optimizer=True)
    assert configured(strategy, 1) is strategy
