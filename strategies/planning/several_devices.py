"""Strategies that run several devices in one process: the CPU's, by number, stand for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from lockstep.strategies.base import Strategy
from lockstep.strategies.dp.strategy import DataParallel
from lockstep.strategies.model_parallel import ModelParallel
from lockstep.strategies.planning.plan import RankPlan

TOGETHER, IN_TURN = "dp", "model"
"""Axes of devices of one process: those that meet after each phase of a step; those of which one works at a time."""


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
