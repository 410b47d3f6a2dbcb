"""From what a trial has noted to the plan of a rank."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.strategies.base import Strategy
from lockstep.strategies.deepspeed.strategy import DeepSpeed
from lockstep.strategies.dp.strategy import DataParallel
from lockstep.strategies.hooks import SPMDHooks
from lockstep.strategies.mesh.mesh import resolve
from lockstep.strategies.methods.parameter_server.strategy import ParameterServer
from lockstep.strategies.methods.rounds import LearnerRounds
from lockstep.strategies.model_parallel import ModelParallel
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.planning.memory import (
    BACKWARD,
    FORWARD,
    HOST,
    ROUND,
    Offload,
    apart,
    find_kept,
    find_peak,
    of_device,
)
from lockstep.strategies.planning.plan import IN_TURN, SERVERS, TOGETHER, Block, Collective, RankPlan, Work
from lockstep.strategies.planning.trial_mode import CollectiveCall, TrialMode

T = TypeVar("T", Collective, Work)


def refuse_unplanned(strategy: Strategy) -> None:
    """Raise ValueError for a strategy whose step on one rank does not say what the others do, or that one process
    cannot try."""
    name, can = strategy.name, strategy.capabilities
    why = can.refuses.get("planning", "")
    if not why and not isinstance(strategy, LearnerRounds | ParameterServer) and not can.synchronous:
        why = "its ranks do not meet in every step, and what they exchange depends on when they come"
    if why:
        raise ValueError(f"{name} cannot be planned: {why}; plan another strategy, or measure the run on its devices")


def offload_of(strategy: Strategy) -> Offload | None:
    """What the strategy keeps in the host's memory."""
    if getattr(getattr(strategy, "options", None), "cpu_offload", False):
        return Offload(frozenset({"parameters", "gradients", "optimizer"}))
    if isinstance(strategy, ParameterServer):
        return Offload(frozenset({HOST, "optimizer"}), beside=True)
    if isinstance(strategy, DeepSpeed) and _offloads(strategy, "optimizer"):
        return Offload(frozenset({HOST, "gradients", "optimizer"}))
    if isinstance(strategy, DeepSpeed) and _offloads(strategy, "param"):
        return Offload(frozenset({HOST}), steps=False)
    return None


def _offloads(strategy: DeepSpeed, what: str) -> bool:
    """Whether DeepSpeed keeps its optimizer or its parameters in the host's memory; `config.py` refuses disks."""
    return bool((strategy.zero.get(f"offload_{what}") or {}).get("device", "none") != "none")


def copied_by(
    strategy: Strategy, model: nn.Module, axes: Mapping[str, int], world_size: int
) -> Callable[[CollectiveCall], torch.dtype | None]:
    """Of a call: the dtype of the parameters that it gathers from hosts, or whose gradients it sends there, if it
    does. DeepSpeed sends gradients itself."""
    dtype = next((p.dtype for p in model.parameters()), None)
    if isinstance(strategy, DeepSpeed):
        return lambda call: dtype if _offloads(strategy, "param") and _gathers_parameters(call) else None

    def offloads(call: CollectiveCall) -> torch.dtype | None:
        if call.phase not in (FORWARD, BACKWARD) or call.kind not in ("all-gather", "reduce-scatter"):
            return None
        return dtype if len(call.ranks) < 2 or "fsdp" in axis_of(call.ranks, axes, world_size) else None

    return offloads


def _gathers_parameters(call: CollectiveCall) -> bool:
    """All that DeepSpeed gathers of floating point numbers in a step."""
    return call.kind == "all-gather" and getattr(torch, call.dtype).is_floating_point


def mark_parameters(mode: TrialMode, strategy: Strategy, model: nn.Module) -> Counter[int]:
    """Say what this rank's shards are, and what else of the parameters is on this rank between two steps; returns
    their bytes by device."""
    here = list(filter(is_here, model.parameters()))
    shards = [parameter.ds_tensor for parameter in here if hasattr(parameter, "ds_tensor")]  # of DeepSpeed
    if isinstance(strategy, DeepSpeed) and _offloads(strategy, "param"):
        return mode.mark("parameters", here) + mode.mark(HOST, shards)
    return mode.mark("parameters", [*here, *shards])


def gradients_of(strategy: Strategy, wrapped: nn.Module) -> list[Tensor]:
    """Those that the optimizer gets on this rank."""
    if isinstance(strategy, SPMDHooks):
        return strategy.local_gradients(wrapped)
    return [p.grad for p in wrapped.parameters() if p.grad is not None]


_HOST_BUFFERS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload",
    "accumulated_grads_in_cpu",
    "grad_partitions_flat_buffer",
)


def host_buffers_of(strategy: Strategy, wrapped: nn.Module) -> list[Tensor]:
    """What DeepSpeed's optimizer, if it offloads, keeps in the host's memory beside its masters and their state."""
    if not isinstance(strategy, DeepSpeed) or not _offloads(strategy, "optimizer"):
        return []
    optimizer = getattr(getattr(wrapped, "engine", None), "optimizer", None)
    found = [getattr(optimizer, name, None) for name in _HOST_BUFFERS]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def axes_of(strategy: Strategy, world_size: int) -> dict[str, int]:
    """The axes of the mesh of `strategy`, outermost first; those that have none hold the same model on all ranks."""
    axes = getattr(strategy, "axes", None)
    if name := axis_of_devices(strategy):
        return {name: world_size}
    if isinstance(axes, Mapping):
        return resolve(axes, world_size)
    if isinstance(strategy, ParameterServer):
        return {SERVERS: world_size}
    if isinstance(strategy, DeepSpeed):
        return {f"zero{strategy.zero['stage']}": world_size}
    return {"ddp": world_size} if world_size > 1 else {}


def axis_of(ranks: Sequence[int], axes: Mapping[str, int], world_size: int) -> str:
    """The axis along which `ranks` lie; several with a plus between if they span more than one."""
    if not ranks or len(ranks) < 2:
        return "world"
    inner = world_size
    coordinates = []
    for name, size in axes.items():
        inner //= size
        coordinates.append((name, {rank // inner % size for rank in ranks}))
    spanned = [name for name, places in coordinates if len(places) > 1]
    return "+".join(spanned) or "world"


def collectives_of(
    noted: Sequence[CollectiveCall], axes: Mapping[str, int], world_size: int, steps: int
) -> tuple[Collective, ...]:
    """What a step of the trial's `steps` has called, by kind, axis, dtype and phase."""
    calls: Counter[tuple[str, str, int, str, str]] = Counter()
    sizes: Counter[tuple[str, str, int, str, str]] = Counter()
    known: dict[tuple[int, ...], str] = {}
    for call in noted:
        if call.ranks not in known:
            known[call.ranks] = axis_of(call.ranks, axes, world_size)
        num_ranks = 2 if call.kind in ("send", "recv") else len(call.ranks) or world_size
        key = call.kind, known[call.ranks], num_ranks, call.dtype, call.phase
        calls[key] += 1
        sizes[key] += call.num_bytes
    found = (Collective(*key, calls[key], sizes[key]) for key in sorted(calls))
    return tuple(_of_a_step(entry, steps) for entry in found)


def _of_a_step(entry: T, steps: int) -> T:
    """An entry of `steps` equal steps as one of a step; what belongs to the round stays whole."""
    if steps == 1 or entry.phase == ROUND:
        return entry
    changed: dict[str, Any] = {"calls": entry.calls // steps, "bytes": entry.bytes // steps}
    if isinstance(entry, Work):
        changed["flops"] = entry.flops / steps
    return replace(entry, **changed)


def _times(entry: Work, times: float) -> Work:
    if times == 1:
        return entry
    return replace(entry, calls=round(entry.calls * times), flops=entry.flops * times, bytes=round(entry.bytes * times))


def rank_plan(
    mode: TrialMode,
    rank: int,
    role: str,
    num_ranks: int,
    held: Mapping[str, Mapping[int, int]],
    axes: Mapping[str, int],
    steps: int,
    offload: Offload | None = None,
    times: float = 1.0,
    device: int = 0,
) -> RankPlan:
    """`held`: bytes by device of parameters, gradients, optimizer, buffers, other state and inputs, as the trial has
    marked them.
    `steps`: how many the trial has recorded; `times`: how often a rank does in a step the work that was tried.
    `device`: of those of the process.
    """
    both, host = find_peak(mode.at_start, mode.events).size, 0
    own = of_device(mode.at_start, mode.events, device)
    peak, kept = find_peak(*own), find_kept(own[1])
    if offload is not None:
        on_device, on_host = apart(mode.at_start, mode.events, offload)
        peak, host = find_peak(*on_device), find_peak(*on_host).size
        both = peak.size + host if offload.beside else both
    names = mode.places.blocks
    order = {name: i for i, name in enumerate(names)}
    blocks = sorted(kept.by_block.items(), key=lambda item: (order.get(item[0], -1), item[0]))
    return RankPlan(
        rank=rank,
        role=role,
        num_ranks=num_ranks,
        parameters=held["parameters"].get(device, 0),
        gradients=held["gradients"].get(device, 0),
        optimizer=held["optimizer"].get(device, 0),
        buffers=held["buffers"].get(device, 0),
        activations=kept.size,
        blocks=tuple(Block(name, size) for name, size in blocks),
        logits_and_loss=kept.tail,
        gathered=peak.by_kind.get("gathered", 0),
        other_state=held["other_state"].get(device, 0),
        inputs=held["inputs"].get(device, 0),
        peak=peak.size,
        peak_by_kind=tuple(peak.by_kind.items()),
        peak_moment=peak.phase,
        peak_at=f"{peak.module or 'the step'}: {peak.op}",
        collectives=collectives_of(mode.calls, axes, math.prod(axes.values()), steps),
        host=host,
        steps_on_host=offload is not None and offload.steps,
        peak_of_both=both,
        transfers=_transfers(mode.transfers, axes, steps, device),
        work=tuple(_times(_of_a_step(entry, steps), times) for entry in mode.work[device].entries()),
    )


def _transfers(
    noted: Sequence[CollectiveCall], axes: Mapping[str, int], steps: int, device: int
) -> tuple[Collective, ...]:
    """Copies from and to the host, and those that a device gets from others of its process."""
    own = [call for call in noted if call.ranks in ((), (device,))]
    return tuple(
        replace(copied, axis=next(iter(axes)) if copied.op == "copy" else "host", num_ranks=1)
        for copied in collectives_of(own, {}, 1, steps)
    )


def axis_of_devices(strategy: Strategy) -> str:
    """The axis of a strategy that runs several devices in one process, else ""."""
    if strategy.num_devices == 1:
        return ""
    return TOGETHER if isinstance(strategy, DataParallel) else IN_TURN if isinstance(strategy, ModelParallel) else ""


def device_plans(make: Callable[[int], RankPlan], axis: str, num_devices: int) -> list[RankPlan]:
    """What each device needs, `make(index)`; neighbors that need the same are one plan."""
    plans = []
    found = [make(index) for index in range(num_devices)]
    if axis == TOGETHER:  # a run has the peaks of all devices at the same time
        found = [replace(plan, peak_of_both=sum(plan.peak for plan in found)) for plan in found]
    for _, same in itertools.groupby(found, lambda plan: replace(plan, rank=0, peak_moment="", peak_at="")):
        alike = list(same)
        first, last = alike[0].rank, alike[-1].rank
        role = f"device {first}" if first == last else f"devices {first} to {last}"
        plans.append(replace(alike[0], role=role, num_ranks=len(alike)))
    return plans
