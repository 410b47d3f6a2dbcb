"""Bytes that are alive, moment by moment: what was allocated and freed in a step, and where the most was alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FORWARD, BACKWARD, OPTIMIZER, ROUND = "forward", "backward", "optimizer", "round"
REDUCTION = "reduction"
"""After the last backward and before the optimizer steps; shown as a part of the optimizer's phase."""
ACTIVATIONS, TEMPORARY, GATHERED, OTHER = "activations", "temporary", "gathered", "other_state"
HOST = "host"
"""Buffers and shards of an engine that offloads."""


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage."""

    size: int
    """Bytes now; sharded engines resize storages."""
    kind: str = ""
    """Parameters, gradients, optimizer, buffers, inputs or gathered; empty where only its life tells."""
    made_in: str = ""
    """Phase of the step, empty before the step that is measured."""
    freed_in: str = ""
    block: str = ""
    """Name of the block that computed it; empty outside of blocks."""
    is_tail: bool = False
    """Whether it was computed behind the last block."""
    device: int = 0
    """Of those of the process."""

    @property
    def final_kind(self) -> str:
        """To be asked once the step is over."""
        if self.kind:
            return self.kind
        kept = self.made_in == FORWARD and self.freed_in in (BACKWARD, OPTIMIZER)
        return ACTIVATIONS if kept else TEMPORARY


class Event(NamedTuple):
    """An allocation that grew (`change` above zero) or shrank."""

    allocation: Allocation
    change: int
    phase: str
    module: str
    op: str


class Peak(NamedTuple):
    """The moment with the most bytes."""

    size: int
    by_kind: dict[str, int]
    phase: str
    module: str
    op: str


class Kept(NamedTuple):
    """The most that was kept for the backward at one time."""

    size: int
    by_block: dict[str, int]
    tail: int
    """What of it was computed behind the last block; not in `by_block`."""


class Offload(NamedTuple):
    """What of a step is in the host's memory: `kinds` of allocations, and if the optimizer `steps` there all that its
    phase makes but what ranks gather."""

    kinds: frozenset[str]
    steps: bool = True
    beside: bool = False
    """Whether the host works while the device does, so that both may have their most at once."""

    def holds(self, allocation: Allocation) -> bool:
        """What is alive when this is asked is of no phase's kind yet."""
        if allocation.final_kind in self.kinds:
            return True
        return self.steps and allocation.made_in in (REDUCTION, OPTIMIZER) and allocation.kind != GATHERED


def apart(
    at_start: Iterable[tuple[Allocation, int]], events: Sequence[Event], offload: Offload
) -> tuple[tuple[list[tuple[Allocation, int]], list[Event]], tuple[list[tuple[Allocation, int]], list[Event]]]:
    """The same of the device, and of the host. Gradients that go to the host are computed on the device."""
    starts: tuple[list[tuple[Allocation, int]], ...] = ([], [])
    found: tuple[list[Event], list[Event]] = ([], [])
    for each in at_start:
        starts[offload.holds(each[0])].append(each)
    for event in events:
        on_host = offload.holds(event.allocation)
        found[on_host].append(event)
        if on_host and event.phase == BACKWARD and event.change > 0:
            staged = Allocation(event.change, GATHERED)
            found[0].extend(
                (event._replace(allocation=staged), event._replace(allocation=staged, change=-event.change))
            )
    return (starts[0], found[0]), (starts[1], found[1])


def of_device(
    at_start: Iterable[tuple[Allocation, int]], events: Sequence[Event], device: int
) -> tuple[list[tuple[Allocation, int]], list[Event]]:
    """The same of one of the process's devices."""
    start = [each for each in at_start if each[0].device == device]
    return start, [event for event in events if event.allocation.device == device]


def find_peak(at_start: Iterable[tuple[Allocation, int]], events: Sequence[Event]) -> Peak:
    """Where the sum of what is alive is highest. `at_start`: what was alive before the first event, with its size."""
    by_kind: Counter[str] = Counter()
    for allocation, size in at_start:
        by_kind[allocation.final_kind] += size
    now = highest = sum(by_kind.values())
    place = -1
    for i, event in enumerate(events):
        now += event.change
        if now > highest:
            highest, place = now, i
    for event in events[: place + 1]:
        by_kind[event.allocation.final_kind] += event.change
    found = {kind: size for kind, size in sorted(by_kind.items()) if size}
    return Peak(highest, found, *((FORWARD, "", "") if place < 0 else events[place][2:]))


def find_kept(events: Sequence[Event]) -> Kept:
    """What the forward keeps for the backward where that is most: with several micro-batches in flight, of all."""
    now = highest = 0
    place = -1
    kept = [(i, event) for i, event in enumerate(events) if event.allocation.final_kind == ACTIVATIONS]
    for i, event in kept:
        now += event.change
        if now > highest:
            highest, place = now, i
    by_block: Counter[str] = Counter()
    tail = 0
    for i, event in kept:
        if i > place:
            break
        if event.allocation.is_tail:
            tail += event.change
        else:
            by_block[event.allocation.block] += event.change
    return Kept(highest - tail, {name: size for name, size in by_block.items() if size}, tail)


def has_bytes(tensor: Tensor) -> bool:
    """Whether it takes memory of a device."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def device_of(tensor: Tensor) -> int:
    """Which of the process's devices a tensor is on: numbered ones of the CPU."""
    return tensor.device.index or 0
