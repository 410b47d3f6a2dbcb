"""A plan as text: memory of each kind of rank with a bar, collectives, and the time of a step."""

from __future__ import annotations

from lockstep.callbacks._support.tables import columns, count, human_size
from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import Device
from lockstep.strategies.planning.plan import Plan, RankPlan
from lockstep.strategies.planning.timing import Communication, Estimate, RankTime

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "other_state",
    "activations",
    "logits_and_loss",
    "gathered",
    "inputs",
)
LETTERS = {"gathered": "U", "other_state": "S"}
"""Of kinds in a bar that do not go by their first letter; U is unsharded."""
BAR_WIDTH = 60


def text(
    plan: Plan,
    device: Device | None,
    estimate: Estimate | None,
    *,
    steps: int | None = None,
    price: float | None = None,
) -> str:
    """The whole page."""
    tokens = "" if plan.tokens is None else f" ({plan.tokens:,} tokens)"
    parts = [
        f"{plan.strategy} on {count(plan.world_size, _unit(plan))}, {plan.precision}: "
        f"{plan.num_parameters:,} parameters, "
        f"{count(plan.samples, 'sample')}{tokens} a step"
        + (f", a round of {plan.round_steps:,} steps" if plan.round_steps > 1 else ""),
        memory(plan, device),
        "\n".join(line for rank in plan.ranks for line in bar(rank, device)),
        "\n".join(_blocks(rank) for rank in plan.ranks if rank.blocks),
        collectives(plan),
    ]
    if estimate is not None:
        parts.append(time(plan, estimate, steps, price))
    parts.append("\n".join(f"note: {note}" for note in plan.notes))
    return "\n\n".join(part for part in parts if part)


def memory(plan: Plan, device: Device | None) -> str:
    """A row for each kind of rank."""
    kinds = [kind for kind in KINDS if any(getattr(rank, kind) for rank in plan.ranks)]
    offloads = any(rank.host for rank in plan.ranks)
    head = [
        f"memory of a {_unit(plan)}",
        *(kind.replace("_", " ") for kind in kinds),
        *["in the host"] * offloads,
        "peak",
    ]
    head += [] if device is None else ["reserved", f"of {human_size(device.memory)}"]
    rows = [head]
    for rank in plan.ranks:
        row = [_role(rank), *(human_size(getattr(rank, kind)) for kind in kinds)]
        row += [*[human_size(rank.host)] * offloads, human_size(rank.peak)]
        if device is not None:
            needed = timing.reserved(rank)
            row += [human_size(needed), "fits" if needed <= device.memory else "does not fit"]
        rows.append(row)
    lines = columns(rows, right=range(1, len(head)))
    if device is not None:
        lines.append(
            f"reserved: the peak and {timing.ALLOCATOR:.0%} for the allocator, and {human_size(timing.CONTEXT_BYTES)} "
            "for the driver and communication"
        )
    return "\n".join(lines)


def bar(rank: RankPlan, device: Device | None) -> list[str]:
    """What the peak of a rank is made of, to the scale of the device's memory (or of the peak)."""
    whole = max(rank.peak, 1) if device is None else max(device.memory, timing.reserved(rank))
    line, done = "", 0.0
    for kind, value in peak_parts(rank):
        done += value
        line += _letter(kind) * (round(done / whole * BAR_WIDTH) - len(line))
    if device is not None:
        line += "~" * (round(timing.reserved(rank) / whole * BAR_WIDTH) - len(line))
    shown = [f"{_letter(kind)} {kind.replace('_', ' ')} {human_size(value)}" for kind, value in peak_parts(rank)]
    shown += [] if device is None else ["~ allowance"]
    return [
        f"{_role(rank)}: peak in {rank.peak_moment} at {rank.peak_at}",
        f"  |{line:<{BAR_WIDTH}}|",
        f"  {', '.join(shown)}",
    ]


def peak_parts(rank: RankPlan) -> list[tuple[str, int]]:
    """What makes up the peak of a rank, in the same order for all."""
    order = {kind: i for i, kind in enumerate((*KINDS, "temporary"))}
    return sorted(
        ((kind, value) for kind, value in rank.peak_by_kind if value), key=lambda part: order.get(part[0], 99)
    )


def collectives(plan: Plan) -> str:
    """Calls and bytes of one step by axis."""
    rows = [("collectives of a step", "axis", "ranks", "collective", "dtype", "phase", "calls", "bytes")]
    for rank in plan.ranks:
        rows += [
            (
                _role(rank),
                call.axis,
                str(call.num_ranks),
                call.op,
                call.dtype,
                call.phase,
                f"{call.calls:,}",
                f"{call.bytes:,}",
            )
            for call in (*rank.collectives, *rank.transfers)
        ]
    return "\n".join(columns(rows, right=(2, 6, 7))) if len(rows) > 1 else ""


def time(plan: Plan, estimate: Estimate, steps: int | None, price: float | None) -> str:
    """What a step takes, of what, and what a run costs."""
    slowest = max(estimate.ranks, key=lambda rank: rank.seconds)
    single = timing.of_one_process(plan)
    rows = [
        ("a step", seconds(estimate.seconds), f"at {estimate.efficiency:.0%} of every peak of {estimate.device.name}")
    ]
    for rank in estimate.ranks if single else [slowest]:
        rows += [
            ("  forward", seconds(rank.forward), rank.role if single else ""),
            ("  backward", seconds(rank.backward), ""),
            ("  optimizer", seconds(rank.optimizer), ""),
            *_communication(rank),
        ]
    if estimate.bubble:
        rows.append(("  bubble", f"{estimate.bubble:.1%}", "of the time of forward and backward, stages being equal"))
    if plan.world_size > 1 and not single:
        rows.append(("  slowest device", f"{timing.slowest(plan.world_size) - 1:.1%}", "of all this is waited for"))
    rows.append(("samples/s", f"{estimate.samples_per_s:,.1f}", ""))
    if estimate.tokens_per_s is not None:
        rows.append(
            ("tokens/s", f"{estimate.tokens_per_s:,.0f}", f"{estimate.tokens_per_s / plan.world_size:,.0f} a device")
        )
    rows.append(("MFU", f"{estimate.mfu:.1%}", ""))
    if steps is not None:
        hours = estimate.hours(steps)
        cost = "" if price is None else f"{hours * plan.world_size * price:,.2f} at {price:g} a device and hour"
        rows.append((count(steps, "step"), f"{hours:,.2f} h", cost))
    elif price is not None:
        cost_of_thousand = estimate.hours(1000) * plan.world_size * price
        rows.append(("1,000 steps", f"{estimate.hours(1000):,.2f} h", f"{cost_of_thousand:,.2f}; give max_steps"))
    return "\n".join(columns(rows, right=(1,)))


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _communication(rank: RankTime) -> list[tuple[str, str, str]]:
    return [
        (
            f"  {entry.axis} in {entry.phase}",
            seconds(entry.exposed),
            f"waited for, of {seconds(entry.seconds)}, {_where(entry)}",
        )
        for entry in rank.communication
    ]


def _where(entry: Communication) -> str:
    if entry.axis == "host":
        return "to and from the host"
    return "between nodes" if entry.crosses_nodes else "within a node"


def _blocks(rank: RankPlan) -> str:
    """Activations of blocks, neighbors that keep the same in one line."""
    runs: list[list[str]] = []
    sizes: list[int] = []
    for block in rank.blocks:
        if sizes and sizes[-1] == block.activations:
            runs[-1].append(block.name or "outside of blocks")
        else:
            runs.append([block.name or "outside of blocks"])
            sizes.append(block.activations)
    rows = [
        (f"  {names[0]}" + (f" … {names[-1]}" if len(names) > 1 else ""), f"{len(names)} ×", human_size(value))
        for names, value in zip(runs, sizes, strict=True)
        if value
    ]
    return (
        "\n".join([f"{_role(rank)}: activations kept for the backward", *columns(rows, right=(1, 2))]) if rows else ""
    )


def _letter(kind: str) -> str:
    return LETTERS.get(kind, kind[0].upper())


def _unit(plan: Plan) -> str:
    return "device" if timing.of_one_process(plan) else "rank"


def _role(rank: RankPlan) -> str:
    if rank.role.startswith("device"):
        return rank.role
    return f"{rank.role} ({count(rank.num_ranks, 'rank')})"
