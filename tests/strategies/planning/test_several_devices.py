"""Plans of strategies that run several devices in one process: what each device has, gets from others and waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Module, Trainer
from lockstep.strategies import ModelParallel
from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import find_device
from lockstep.strategies.planning.plan import Plan
from lockstep.trainer.planning import plan
from tests.trainer.toy import Net, loader

pytestmark = pytest.mark.unit

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_steps": 1}


class Deep(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        self.register_buffer("scale", torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def of(strategy: Any, devices: int, module: Module | None = None, n: int = 16, **options: Any) -> Plan:
    trainer = Trainer(strategy=strategy, devices=devices, gradient_clip_val=1.0, **QUIET, **options)
    return plan(trainer, module or Deep(), loader(n, 16))


def by_device(found: Plan) -> dict[str, Any]:
    return {rank.role: rank for rank in found.ranks}


NUMEL = sum(p.numel() for p in Deep().parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_devices_of_model_share_the_model(precision: str) -> None:
    found = of("model", 3, precision=precision)
    assert found.world_size == 3
    assert dict(found.axes) == {"model": 3}
    devices = by_device(found)
    assert sorted(devices) == ["device 0", "device 1", "device 2"]
    for kind, a_number in (("parameters", 4), ("gradients", 4)):
        assert sum(getattr(rank, kind) for rank in found.ranks) == a_number * NUMEL, kind
    assert all(rank.optimizer >= 2 * rank.parameters for rank in found.ranks)
    assert [devices[f"device {i}"].parameters for i in range(3)] == [4 * (8 * 64 + 64), 4 * (64 * 64 + 64), 4 * 195]
    got = {name: {(call.op, call.phase): call.bytes for call in rank.transfers} for name, rank in devices.items()}
    size = 2 if precision == "bf16-mixed" else 4
    assert got["device 1"] == {("copy", "forward"): size * 16 * 64, ("copy", "backward"): size * 16 * 64}
    assert got["device 2"] == {("copy", "forward"): size * 16 * 64, ("copy", "backward"): size * 16 * 3}
    assert got["device 0"][("copy", "backward")] == size * 16 * 64
    assert not any(rank.collectives for rank in found.ranks)


def test_all_of_a_device_map_on_one_device_is_single() -> None:
    (single,) = of("single", 1).ranks
    mapped = by_device(of(ModelParallel(device_map={"net": 1}), 2))["device 1"]
    assert mapped.parameters == single.parameters
    assert mapped.optimizer == 2 * mapped.parameters, "steps are counted on the first"
    assert mapped.activations + mapped.logits_and_loss >= single.activations
    assert mapped.flops == single.flops


@pytest.mark.long
def test_devices_of_dp_hold_copies_and_slices() -> None:
    (single,) = of("single", 1).ranks
    found = of("dp", 4)
    devices = by_device(found)
    first, others = devices["device 0"], devices["devices 1 to 3"]
    assert others.num_ranks == 3
    assert first.parameters == single.parameters
    assert first.gradients == single.gradients
    assert first.optimizer == single.optimizer
    assert (others.parameters, others.gradients, others.optimizer) == (0, 0, 0)
    assert others.gathered == 4 * NUMEL
    assert first.flops == others.flops == single.flops / 4
    got = {(call.op, call.phase, call.dtype): call.bytes for call in others.transfers}
    assert got[("copy", "forward", "float32")] == 4 * (NUMEL + 3) + 4 * 4 * 8
    back = {(call.op, call.phase): call.bytes for call in first.transfers}
    assert back[("copy", "optimizer")] == 3 * 4 * NUMEL
    assert first.peak_of_both == first.peak + 3 * others.peak


def test_slices_that_are_uneven_are_planned_one_by_one() -> None:
    devices = by_device(of("dp", 3))
    assert {name: rank.num_ranks for name, rank in devices.items()} == {"device 0": 1, "devices 1 to 2": 2}
    assert devices["device 0"].flops > devices["devices 1 to 2"].flops  # 6, 5 and 5 samples


@pytest.mark.long
def test_devices_of_model_take_turns_and_those_of_dp_wait_for_each_other() -> None:
    device = find_device("h100-80")
    model = of("model", 3)
    found = timing.estimate(model, device)
    assert found.seconds == pytest.approx(sum(time.seconds for time in found.ranks))
    found = timing.estimate(of("dp", 2), device)
    assert found.seconds > max(time.seconds for time in found.ranks)
    with pytest.raises(ValueError, match="one process has at most the 8 h100-80 of a node"):
        timing.estimate(of("dp", 16), device)


def test_accumulation_copies_parameters_for_each_micro_batch_and_the_gradients_before_it() -> None:
    once, twice = (
        sum(call.bytes for call in by_device(of("dp", 2, n=32, accumulate_grad_batches=k))["device 1"].transfers)
        for k in (1, 2)
    )
    assert twice == 2 * once + 4 * NUMEL


class Joins(Module):
    """Adds what two layers give, which may be on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
        self.inner = Sum(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.inner(batch[0]), batch[1])

    configure_optimizers = Net.configure_optimizers
    hparams = Net().hparams  # type: ignore[assignment]


class Sum(nn.Module):
    def __init__(self, net: nn.ModuleDict) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net["a"](x) + self.net["b"](x)


def test_what_joins_tensors_of_two_devices_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match=r"test_several_devices.py:\d+ gives add.Tensor tensors of several devices"):
        of(ModelParallel(device_map={"net.a": 0, "net.b": 1}), 2, Joins())
