"""From what a trial has noted to the plan of a rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lockstep.strategies.base import Strategy
from lockstep.strategies.mesh.mesh import resolve
from lockstep.strategies.planning.memory import find_kept, find_peak
from lockstep.strategies.planning.plan import Block, Collective, RankPlan
from lockstep.strategies.planning.trial_mode import TrialMode


def refuse_unplanned(strategy: Strategy) -> None:
    """Raise ValueError for a strategy whose step on one rank does not say what the others do, or that one process
    cannot try."""
    name, can = type(strategy).__name__, strategy.capabilities
    why = can.refuses.get("planning", "")
    if not why and (not can.exact or not can.synchronous):
        why = "it changes the method, and what its ranks exchange depends on values"
    if not why and strategy.virtual_ranks:
        why = "with virtual_ranks the shares of a rank exchange gradients in a tree of their own"
    if not why and getattr(strategy, "single_process", False) and strategy.num_devices > 1:
        why = "it runs several devices in one process, and a plan is of a process with one"
    if why:
        raise ValueError(
            f"{name} cannot be planned: {why}; plan strategy='ddp', 'fsdp', 'tensor', 'pipeline' or a mesh of them"
        )


def axes_of(strategy: Strategy, world_size: int) -> dict[str, int]:
    """The axes of the mesh of `strategy`, outermost first; those that have none hold the same model on all ranks."""
    axes = getattr(strategy, "axes", None)
    if isinstance(axes, Mapping):
        return resolve(axes, world_size)
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


def collectives_of(mode: TrialMode, axes: Mapping[str, int], world_size: int) -> tuple[Collective, ...]:
    """What the trial's step has called, by kind, axis, dtype and phase."""
    calls: Counter[tuple[str, str, int, str, str]] = Counter()
    sizes: Counter[tuple[str, str, int, str, str]] = Counter()
    known: dict[tuple[int, ...], str] = {}
    for call in mode.calls:
        if call.ranks not in known:
            known[call.ranks] = axis_of(call.ranks, axes, world_size)
        num_ranks = 2 if call.kind in ("send", "recv") else len(call.ranks) or world_size
        key = call.kind, known[call.ranks], num_ranks, call.dtype, call.phase
        calls[key] += 1
        sizes[key] += call.num_bytes
    return tuple(Collective(*key, calls[key], sizes[key]) for key in sorted(calls))


def rank_plan(
    mode: TrialMode, rank: int, role: str, num_ranks: int, held: Mapping[str, int], axes: Mapping[str, int]
) -> RankPlan:
    """`held`: bytes of parameters, gradients, optimizer, buffers and inputs, as the trial has marked them."""
    peak, kept = find_peak(mode.at_start, mode.events), find_kept(mode.events)
    names = mode.places.blocks
    order = {name: i for i, name in enumerate(names)}
    blocks = sorted(kept.by_block.items(), key=lambda item: (order.get(item[0], -1), item[0]))
    return RankPlan(
        rank=rank,
        role=role,
        num_ranks=num_ranks,
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=held["optimizer"],
        buffers=held["buffers"],
        activations=kept.size,
        blocks=tuple(Block(name, size) for name, size in blocks),
        logits_and_loss=kept.tail,
        gathered=peak.by_kind.get("gathered", 0),
        inputs=held["inputs"],
        peak=peak.size,
        peak_by_kind=tuple(peak.by_kind.items()),
        peak_moment=peak.phase,
        peak_at=f"{peak.module or 'the step'}: {peak.op}",
        collectives=collectives_of(mode, axes, math.prod(axes.values())),
        work=mode.work.entries(),
    )
