"""What a pipeline will do, as text: which layers are on which rank, and who works and waits when."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.strategies.base import Strategy
from lockstep.strategies.pipeline import partition
from lockstep.strategies.pipeline.strategy import Pipeline

LEGEND = (
    "A column is the time of a forward. F3 is the forward of part 3, B its backward, I and W its backward for inputs "
    "and for\n"
    "weights; ~ continues, · waits; small letters are stages of a second round. Sending takes no time in this picture."
)


def plan(strategy: Strategy, model: nn.Module) -> str:
    """Describe the pipeline that `strategy`, configured, makes of `model`. Starts nothing and moves nothing.

    Raises ValueError for a model that it cannot cut.
    """
    if not isinstance(strategy, Pipeline):
        return f"{strategy.name} has no schedule: every rank runs every layer. `strategy=pipeline devices=2` has one."
    num_ranks, num_parts, schedule = strategy.num_stage_ranks, strategy.num_parts, strategy.schedule
    if num_ranks == 1:
        return "A pipeline of one rank is that rank: give devices=2 or more."
    parts = partition.cut(model, strategy.module)
    costs = None if strategy.sample is None else partition.measure(parts, strategy.sample, torch.device("cpu"))
    rank_of = schedule.rank_of(num_ranks)
    stage_of = partition.stages(parts, len(rank_of), strategy.split, costs)
    sizes = [sum(p.numel() for p in layer.module.parameters()) for layer in parts.layers]
    rows, shares = [], []
    for stage, rank in enumerate(rank_of):
        mine = [i for i, s in enumerate(stage_of) if s == stage]
        shares.append(sum((sizes if costs is None else costs)[i] for i in mine))
        first, last = parts.layers[mine[0]].name, parts.layers[mine[-1]].name
        names = first if len(mine) == 1 else f"{first} … {last} ({len(mine)})"
        spent = "" if costs is None else f"  {shares[-1] * 1e3:.2f} ms"
        rows.append((f"stage {stage}", f"rank {rank}", names, f"{sum(sizes[i] for i in mine):,} parameters{spent}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = "\n".join(
        f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in rows
    )
    table += "".join(f"\n  {text}" for text in _shared(parts, stage_of))
    formula = schedule.formula(num_ranks, num_parts)
    equal, real = schedule.bubble(num_ranks, num_parts), schedule.bubble(num_ranks, num_parts, shares)
    return "\n".join(
        [
            f"{parts.name or type(model).__name__} in {len(rank_of)} stages on {num_ranks} ranks, schedule "
            f"{schedule.name}, {num_parts} parts a micro-batch",
            table,
            "",
            schedule.picture(num_ranks, num_parts),
            "",
            LEGEND,
            "",
            f"Bubble: {equal:.1%} of the ranks' time"
            + (f", {formula}" if formula else "")
            + ", where stages cost the same.",
            f"With stages that cost as above: {real:.1%}.",
        ]
    )


def _shared(parts: partition.Cut, stage_of: list[int]) -> list[str]:
    """A line for each parameter that several stages hold."""
    holders = partition.holding_stages(parts, stage_of)
    names: dict[int, list[str]] = {}
    for name, parameter in parts.net.named_parameters(prefix=parts.name, remove_duplicate=False):
        if len(holders[id(parameter)]) > 1:
            names.setdefault(id(parameter), []).append(name)
    return [
        f"{' = '.join(found)} is on stages {' and '.join(map(str, sorted(holders[key])))}, which sum its gradients"
        for key, found in names.items()
    ]
