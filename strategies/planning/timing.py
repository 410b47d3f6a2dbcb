"""How long a step takes on devices that are known by their data sheet: the formulas of docs/planning.md.

A roofline with one efficiency: every operator takes as long as its FLOPs or its bytes need at `EFFICIENCY` of the
device's peak, whichever is longer; a collective takes as long as its bytes need on the slowest link that it crosses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from lockstep.strategies.pipeline.schedules import schedule
from lockstep.strategies.planning.devices import Device
from lockstep.strategies.planning.plan import IN_TURN, SERVERS, TOGETHER, Collective, PipelineSchedule, Plan, RankPlan

EFFICIENCY = 0.65
"""Share of every peak (FLOP/s, memory bandwidth, links) that is reached."""
SPREAD = 0.04
"""Standard deviation of the time that equal devices take for equal work; a step waits for the slowest of them."""
LATENCY_S = 20e-6
"""Seconds that a call of a collective takes beside its bytes."""
ALLOCATOR = 0.12
"""What the caching allocator reserves above the bytes that are in use at the peak, as a share of them."""
CONTEXT_BYTES = 1 * 2**30
"""What the driver, kernels and communication buffers hold on a device beside the allocator."""

PHASES = ("forward", "backward", "optimizer", "round")
HIDDEN = {"ddp": ("backward",), "fsdp": ("forward", "backward"), "zero3": ("forward", "backward")}
HIDDEN["host"] = HIDDEN["fsdp"]
"""Axes whose communication runs beside computation, with the phases in which it does. All other is waited for, and all
under a pipeline, which communicates with its data ranks before and after its schedule."""


@dataclass(frozen=True)
class Communication:
    """Collectives of one axis in one phase of a step; those of a round count a step's share of their seconds."""

    axis: str
    phase: str
    calls: int
    bytes: int
    seconds: float
    exposed: float
    """Seconds of `seconds` that computation waits for."""
    crosses_nodes: bool


@dataclass(frozen=True)
class RankTime:
    """Seconds of one optimizer step on one kind of rank."""

    role: str
    forward: float
    backward: float
    optimizer: float
    """With a step's share of what learners do once in a round."""
    communication: tuple[Communication, ...]

    @property
    def exposed(self) -> float:
        return sum(entry.exposed for entry in self.communication)

    @property
    def seconds(self) -> float:
        """Without the bubble of a pipeline."""
        return self.forward + self.backward + self.optimizer + self.exposed


@dataclass(frozen=True)
class Estimate:
    """What a plan takes on a device."""

    device: Device
    efficiency: float
    seconds: float
    """Of one optimizer step."""
    bubble: float
    """Share of a pipeline's time in which ranks wait for each other."""
    ranks: tuple[RankTime, ...]
    """In the order of the plan's ranks."""
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float
    """FLOPs of forward and backward, without recomputation, over what all devices could do at most."""

    def hours(self, steps: int) -> float:
        return self.seconds * steps / 3600


def reserved(rank: RankPlan) -> float:
    """Bytes that a rank's device must have: the peak, the allocator's reserve and the context."""
    return rank.peak * (1 + ALLOCATOR) + CONTEXT_BYTES


def fits(plan: Plan, device: Device) -> bool:
    """Whether every rank fits on its device."""
    return all(reserved(rank) <= device.memory for rank in plan.ranks)


def estimate(plan: Plan, device: Device, *, efficiency: float = EFFICIENCY) -> Estimate:
    """The time of one step of `plan` on `device`s.

    Raises ValueError if the device's numbers lack what the plan needs: FLOP/s, or the network between nodes.
    """
    if not device.flops:
        raise ValueError("a time needs the device's FLOP/s: give flops=, as in --gpu memory=80,flops=989e12")
    axes = dict(plan.axes)
    if plan.world_size > device.node and of_one_process(plan):
        raise ValueError(
            f"one process has at most the {device.node} {device.name} of a node, but the plan is of {plan.world_size} "
            "devices; lower --devices or use strategy=ddp"
        )
    if plan.world_size > device.node and device.network is None:
        raise ValueError(
            f"{plan.world_size} ranks are on several nodes of {device.node} {device.name}, whose data sheet has no "
            f"network: give its bytes/s, as in --gpu {device.name},network=50e9"
        )
    if device.host_memory is None and any(rank.steps_on_host for rank in plan.ranks):
        raise ValueError(
            f"the optimizer steps in the host's memory, of whose speed the data sheet of {device.name} says nothing: "
            f"give a device's share of its bytes/s, as in --gpu {device.name},host_memory=50e9"
        )
    times = tuple(_rank_time(rank, plan, axes, device, efficiency) for rank in plan.ranks)
    bubble = 0.0 if plan.pipeline is None else _bubble(plan.pipeline, axes.get("pipeline", 1))
    seconds = _step_seconds(plan, axes, times, bubble)
    useful = sum(rank.num_ranks * _useful_seconds(rank, plan, device) for rank in plan.ranks)
    return Estimate(
        device=device,
        efficiency=efficiency,
        seconds=seconds,
        bubble=bubble,
        ranks=times,
        samples_per_s=plan.samples / seconds,
        tokens_per_s=None if plan.tokens is None else plan.tokens / seconds,
        mfu=useful / (seconds * plan.world_size),
    )


def of_one_process(plan: Plan) -> bool:
    """Whether one process runs all devices."""
    return any(name in (IN_TURN, TOGETHER) for name, _ in plan.axes)


def _step_seconds(plan: Plan, axes: Mapping[str, int], times: Sequence[RankTime], bubble: float) -> float:
    """Of one optimizer step, of what ranks or devices take."""
    if IN_TURN in axes:
        return sum(rank.num_ranks * time.seconds for rank, time in zip(plan.ranks, times, strict=True))
    if TOGETHER in axes:  # devices wait for each other at the end of each phase
        computing = max(time.forward for time in times) + max(time.backward for time in times)
        waited = [sum(e.exposed for e in time.communication if e.phase == phase) for time in times for phase in PHASES]
        copying = sum(max(waited[i :: len(PHASES)]) for i in range(len(PHASES)))
    else:
        computing, copying = max(time.forward + time.backward + time.exposed for time in times) / (1 - bubble), 0.0
    return (computing + copying + max(time.optimizer for time in times)) * slowest(plan.world_size)


def slowest(num_ranks: int) -> float:
    """Time of the slowest of `num_ranks` equal devices over that of the average one: about the expected largest of so
    many normal draws (Blom's formula)."""
    return 1 + SPREAD * NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def _rank_time(rank: RankPlan, plan: Plan, axes: Mapping[str, int], device: Device, efficiency: float) -> RankTime:
    tf32 = plan.precision.startswith("tf32")
    spent = dict.fromkeys(PHASES, 0.0)
    for work in rank.work:
        flops = work.flops / device.peak(work.dtype, tf32=tf32)
        offloaded = rank.steps_on_host and work.phase == "optimizer"
        bandwidth = device.host_memory if offloaded and device.host_memory else device.bandwidth
        spent[work.phase] += max(flops, work.bytes / bandwidth) / efficiency
    groups: dict[tuple[str, str], list[Collective]] = {}
    for call in (*rank.collectives, *rank.transfers):
        groups.setdefault((call.axis, call.phase), []).append(call)
    found = []
    for (axis, phase), calls in groups.items():
        speed, crosses = (device.host, False) if axis == "host" else _link(axis, axes, plan.world_size, device)
        if axis == SERVERS:  # from and to the hosts' memory
            speed = min(speed, device.host)
        seconds = sum(_seconds(call, speed * efficiency) for call in calls)
        seconds /= plan.round_steps if phase == "round" else 1
        num_calls = sum(call.calls for call in calls)
        exposed = seconds
        if plan.pipeline is None and phase in HIDDEN.get(axis, ()):
            beside = spent[phase] / (plan.accumulate_grad_batches if axis == "ddp" else 1)
            exposed = max(seconds - beside, seconds / num_calls)  # the first or last call has nothing beside it
        elif phase == "round":
            exposed = max(0.0, seconds - plan.round_overlap * sum(spent[name] for name in PHASES[:3]))
        elif axis == "pipeline":
            exposed = max(0.0, seconds - spent[phase])
        found.append(
            Communication(axis, phase, num_calls, sum(call.bytes for call in calls), seconds, exposed, crosses)
        )
    optimizer = spent["optimizer"] + spent["round"] / plan.round_steps
    return RankTime(rank.role, spent["forward"], spent["backward"], optimizer, tuple(found))


def _link(axis: str, axes: Mapping[str, int], world_size: int, device: Device) -> tuple[float, bool]:
    """Bytes/s at which a rank takes part in a ring over `axis`, and whether the ring crosses nodes.

    Ranks are numbered with the last axis fastest and fill node after node. Where a ring has several ranks on a
    node, each of them sends a part over its own network card.
    """
    names = list(axes)
    places = [names.index(name) for name in axis.split("+") if name in axes] or [0, len(names) - 1]
    stride = math.prod(axes[name] for name in names[places[-1] + 1 :])
    span = math.prod(axes[name] for name in names[places[0] :]) if names else world_size
    if span <= device.node or device.network is None:
        return device.link, False
    on_a_node = max(1, device.node // stride)
    return min(device.link, on_a_node * device.network), True


_RING = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


def _seconds(call: Collective, speed: float) -> float:
    """Of all calls together: a ring over n ranks moves (n - 1) / n of the bytes, twice for an all-reduce."""
    share = _RING[call.op] * (call.num_ranks - 1) / call.num_ranks if call.op in _RING else 1.0
    return share * call.bytes / speed + LATENCY_S * call.calls


def _bubble(pipeline: PipelineSchedule, num_ranks: int) -> float:
    """The share of time in which ranks of a pipeline of equal stages wait."""
    return schedule(pipeline.name, pipeline.num_stages // num_ranks).bubble(num_ranks, pipeline.num_microbatches)


def _useful_seconds(rank: RankPlan, plan: Plan, device: Device) -> float:
    """Seconds of a rank's forward and backward at the device's peak, without what is recomputed: a backward has twice
    the FLOPs of its forward."""
    tf32 = plan.precision.startswith("tf32")
    spent = dict.fromkeys(PHASES, 0.0)
    for work in rank.work:
        spent[work.phase] += work.flops / device.peak(work.dtype, tf32=tf32)
    return spent["forward"] + min(spent["backward"], 2 * spent["forward"])
