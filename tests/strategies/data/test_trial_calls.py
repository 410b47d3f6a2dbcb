"""A collate function is called twice more to see where samples are in its batches: nothing may remember that."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep import Trainer
from lockstep.strategies.data.sample_axis import ROWS, Shown

Numbered = Callable[[list[Tensor]], tuple[Tensor, int]]
LOG = logging.getLogger("lockstep.tests")
CALLS, TABLE, SUM, ARRAY = 0, {"calls": 0}, torch.zeros(()), np.zeros(1)


def agreed(counts: set[int]) -> int:
    return counts.pop() if len(counts) == 1 else -1


class Collate:
    """Counts its calls in attributes of several kinds, one of which comes with the first call."""

    calls = 0

    def __init__(self) -> None:
        self.number, self.table, self.order = 0, {"calls": 0}, OrderedDict[int, int]()
        self.list, self.set, self.sum, self.array = list[int](), set[int](), torch.zeros(()), np.zeros(1)

    def __call__(self, samples: list[Tensor]) -> tuple[Tensor, int]:
        self.number += 1
        self.table["calls"] += 1
        self.order[self.number] = self.number
        self.list.append(self.number)
        self.set.add(self.number)
        self.sum += 1
        self.array += 1
        self.later = getattr(self, "later", 0) + 1
        Collate.calls += 1
        counts = {self.number, self.table["calls"], len(self.order), len(self.list), len(self.set)}
        counts |= {int(self.sum), int(self.array[0]), self.later, Collate.calls}
        return torch.stack(samples), agreed(counts)


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, int]:
        self.calls += 1
        return torch.stack(samples), self.calls


def of_globals(samples: list[Tensor]) -> tuple[Tensor, int]:
    global CALLS
    CALLS += 1
    TABLE["calls"] += 1
    SUM.add_(1)
    ARRAY[:] += 1
    return torch.stack(samples), agreed({CALLS, TABLE["calls"], int(SUM), int(ARRAY[0])})


def of_a_helper(samples: list[Tensor]) -> tuple[Tensor, int]:
    assert samples
    return of_globals(samples)


def closure() -> Numbered:
    calls = 0

    def collate(samples: list[Tensor]) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        return torch.stack(samples), calls

    return collate


def default() -> Numbered:
    def collate(samples: list[Tensor], calls: list[int] = [0]) -> tuple[Tensor, int]:  # noqa: B006
        calls[0] += 1
        return torch.stack(samples), calls[0]

    return collate


class OfRun:
    """Holds a Trainer, whose parts lead to iterators, as a module in a run does; a parameter; and a logger."""

    def __init__(self) -> None:
        self.trainer = Trainer(logger=False, enable_checkpointing=False)
        self.trainer._run.extra = itertools.count()  # type: ignore[attr-defined]
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.calls = 0

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, int]:
        LOG.debug("%d samples, as %s sees", len(samples), sys.stderr)
        self.calls += 1
        return torch.stack(samples), self.calls


def iterator() -> Numbered:
    calls = itertools.count(1)
    return lambda samples: (torch.stack(samples), next(calls))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "is_tried"),
    [
        (Collate, True),
        (lambda: Slots().collate, True),
        (lambda: of_globals, True),
        (lambda: of_a_helper, True),
        (closure, True),
        (default, True),
        (lambda: OfRun().collate, True),
        (iterator, False),
    ],
    ids=["object", "slots", "globals", "helper", "closure", "default", "run", "iterator"],
)
def test_a_collate_function_remembers_the_calls_of_the_loop_alone(make: Callable[[], Any], is_tried: bool) -> None:
    shown, function = Shown(), make()
    first = function([torch.zeros(2)] * 2)[1]
    collate = shown.collating(function)
    batches = [collate([torch.zeros(2)] * 3) for _ in range(4)]
    assert [number - first for _, number in batches] == [1, 2, 3, 4]
    assert shown.of("batch[0]", batches[0][0]) == (ROWS if is_tried else None)


@pytest.mark.unit
def test_what_a_failed_trial_has_changed_is_put_back() -> None:
    table = {"calls": 0}

    def collate(samples: list[Tensor]) -> Tensor:
        table["calls"] += 1
        if len(samples) < 2:
            raise ValueError("too few")
        return torch.stack(samples)

    Shown().collating(collate)([torch.zeros(2)] * 2)
    assert table == {"calls": 1}
