"""The formulas of docs/planning.md, on plans with round numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import Device
from lockstep.strategies.planning.plan import Collective, PipelineSchedule, Plan, RankPlan, Work
from lockstep.strategies.planning.timing import ALLOCATOR, CONTEXT_BYTES, LATENCY_S, estimate, fits, reserved

pytestmark = pytest.mark.unit

DEVICE = Device("unit", 2.0**34, {"float32": 1e12, "bfloat16": 1e13}, 1e11, link=1e10, network=1e9, node=4)
WORK = (
    Work("aten.mm", "bfloat16", "forward", 1, 1e13, 8),  # 1 s of products
    Work("aten.mm", "bfloat16", "backward", 1, 3e13, 8),  # 3 s, of which 1 s is recomputed
    Work("aten.add", "bfloat16", "forward", 1, 0, 10**11),  # 1 s of memory
    Work("aten.add", "float32", "optimizer", 1, 0, 5 * 10**10),
)


@pytest.fixture(autouse=True)
def equal_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SPREAD", 0.0)


def rank(*collectives: Collective, peak: int = 2**30) -> RankPlan:
    return RankPlan(0, "all ranks", 4, 1, 1, 1, 0, 1, (), 0, 0, 0, peak, (), "backward", "", collectives, WORK)


def plan(found: RankPlan, **axes: int) -> Plan:
    size = 1
    for each in axes.values():
        size *= each
    return Plan("x", size, tuple(axes.items()), "bf16-mixed", 8, 800, 10, (replace(found, num_ranks=size),))


def collective(op: str, axis: str, ranks: int, phase: str, size: int = 10**10, calls: int = 10) -> Collective:
    return Collective(op, axis, ranks, "float32", phase, calls, size)


def test_a_step_is_its_products_and_its_memory_traffic() -> None:
    found = estimate(plan(rank(), ddp=1), DEVICE, efficiency=1.0)
    assert found.seconds == pytest.approx(2 + 3 + 0.5) and found.bubble == 0
    assert found.samples_per_s == pytest.approx(8 / 5.5) and found.tokens_per_s == pytest.approx(800 / 5.5)
    assert found.mfu == pytest.approx(3 / 5.5)  # recomputation does not count
    assert found.hours(3600) == pytest.approx(5.5)
    assert estimate(plan(rank(), ddp=1), DEVICE, efficiency=0.5).seconds == pytest.approx(11)


def test_a_round_that_is_sent_beside_steps_waits_for_what_is_longer() -> None:
    """30 s of a link in a round of 4 steps of 5.5 s, beside half of them or none."""
    sent = rank(collective("send", "ddp", 2, "round", 3 * 10**11, calls=0))
    for overlap, waited in ((0.0, 7.5), (0.5, 7.5 - 2.75), (1.0, 2.0)):
        found = replace(plan(sent, ddp=2), round_steps=4, round_overlap=overlap)
        assert estimate(found, DEVICE, efficiency=1.0).seconds == pytest.approx(5.5 + waited)


def test_a_step_that_offloads_waits_for_the_host() -> None:
    """Copies run beside forward and backward; the optimizer reads and writes the host's memory."""
    copies = (
        Collective("to device", "host", 1, "float32", "forward", 10, 3 * 10**10),  # 3 s, of which 2 s are hidden
        Collective("to host", "host", 1, "float32", "backward", 10, 10**10),
    )
    offloaded = plan(replace(rank(), host=1, steps_on_host=True, transfers=copies), ddp=1)
    device = replace(DEVICE, host=1e10, host_memory=1e10)
    found = estimate(offloaded, device, efficiency=1.0)
    waited = [entry.exposed for entry in found.ranks[0].communication]
    assert waited == pytest.approx([1, 0.1], rel=1e-2) and found.ranks[0].optimizer == pytest.approx(5)
    assert found.seconds == pytest.approx(2 + 3 + 5 + sum(waited))
    only_copied = plan(replace(offloaded.ranks[0], steps_on_host=False), ddp=1)
    assert estimate(only_copied, device, efficiency=1.0).ranks[0].optimizer == pytest.approx(0.5)
    with pytest.raises(ValueError, match="give a device's share of its bytes/s, as in --gpu unit,host_memory=50e9"):
        estimate(offloaded, replace(device, host_memory=None))


def test_a_step_waits_for_the_slowest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SPREAD", 0.1)
    assert estimate(plan(rank(), ddp=1), DEVICE, efficiency=1.0).seconds == pytest.approx(5.5)
    assert timing.slowest(2) == pytest.approx(1 + 0.1 / math.pi**0.5, abs=5e-3)  # the expected larger of two draws
    assert estimate(plan(rank(), ddp=4), DEVICE, efficiency=1.0).seconds == pytest.approx(5.5 * timing.slowest(4))
    assert timing.slowest(1024) > timing.slowest(64) > timing.slowest(4)


def test_what_hides_behind_what() -> None:
    ring = 1.5 * 10**10 / 1e10 + 10 * LATENCY_S  # all-reduce over 4 ranks within a node

    def seconds(*collectives: Collective, accumulate: int = 1, steps: int = 1, **axes: int) -> float:
        made = replace(plan(rank(*collectives), **axes), accumulate_grad_batches=accumulate, round_steps=steps)
        return estimate(made, DEVICE, efficiency=1.0).seconds - 5.5

    hidden = collective("all-reduce", "ddp", 4, "backward")
    assert seconds(hidden, ddp=4) == pytest.approx(ring / 10)  # the last bucket has nothing beside it
    assert seconds(replace(hidden, bytes=10**11), ddp=4) == pytest.approx(15 + 10 * LATENCY_S - 3)
    assert seconds(replace(hidden, bytes=2 * 10**10), accumulate=2, ddp=4) == pytest.approx(3 + 10 * LATENCY_S - 1.5)
    assert seconds(collective("all-gather", "fsdp", 4, "forward"), fsdp=4) == pytest.approx(0.075 + LATENCY_S)
    assert seconds(collective("all-reduce", "tensor", 4, "forward"), tensor=4) == pytest.approx(ring)
    assert seconds(collective("all-reduce", "fsdp", 4, "optimizer"), fsdp=4) == pytest.approx(ring)
    assert seconds(collective("all-reduce", "ddp", 4, "round"), steps=50, ddp=4) == pytest.approx(ring / 50)


def test_links_of_axes_within_and_between_nodes() -> None:
    def communication(axis: str, ranks: int, **axes: int) -> tuple[float, bool]:
        made = plan(rank(collective("all-gather", axis, ranks, "optimizer", calls=1)), **axes)
        (found,) = estimate(made, DEVICE, efficiency=1.0).ranks[0].communication
        share = (ranks - 1) / ranks * 10**10
        return share / (found.seconds - LATENCY_S), found.crosses_nodes

    assert communication("tensor", 4, fsdp=8, tensor=4) == (pytest.approx(1e10), False)
    assert communication("fsdp", 8, fsdp=8, tensor=4) == (pytest.approx(1e9), True)  # one rank of a ring on each node
    assert communication("fsdp", 8, fsdp=8) == (pytest.approx(4e9), True)  # four, each with its own card
    assert communication("fsdp", 16, fsdp=16, tensor=2) == (pytest.approx(2e9), True)
    assert communication("fsdp+tensor", 8, ddp=2, fsdp=4, tensor=2) == (pytest.approx(4e9), True)
    with pytest.raises(ValueError, match="on several nodes of 4 unit, whose data sheet has no network"):
        estimate(plan(rank(), ddp=8), replace(DEVICE, network=None))
    with pytest.raises(ValueError, match="needs the device's FLOP/s"):
        estimate(plan(rank(), ddp=2), replace(DEVICE, flops={}))


def test_a_pipeline_waits_as_its_schedule_says() -> None:
    made = replace(plan(rank(), pipeline=2), pipeline=PipelineSchedule("1f1b", 2, 4))
    found = estimate(made, DEVICE, efficiency=1.0)
    assert found.bubble == pytest.approx(1 / 5) and found.seconds == pytest.approx(5 / (1 - 1 / 5) + 0.5)
    interleaved = replace(made, pipeline=PipelineSchedule("interleaved_1f1b", 4, 4))
    assert estimate(interleaved, DEVICE).bubble < found.bubble


def test_what_fits_has_room_for_the_allocator() -> None:
    most = int((DEVICE.memory - CONTEXT_BYTES) / (1 + ALLOCATOR))
    assert reserved(rank(peak=most)) == pytest.approx(DEVICE.memory)
    assert fits(plan(rank(peak=most - 1), ddp=2), DEVICE) and not fits(plan(rank(peak=most + 9), ddp=2), DEVICE)
