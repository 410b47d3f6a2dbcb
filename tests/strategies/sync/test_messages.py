"""Sums over learners and gathered rows by messages in chunks: the bits of one rank, and receives before sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.strategies import DDP, Strategy
from lockstep.strategies.methods.averaging import sum_over_learners
from lockstep.strategies.methods.options import assign
from lockstep.strategies.sync import messages

ASSIGNMENTS = [assign(None, None, 3), assign(8, (5, 1, 2), 3), assign(4, (1, 2, 1), 3)]


def values(learners: int, numel: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=made, dtype=torch.float64) for _ in range(learners)]


def by_messages(strategy: Strategy) -> bool:
    rank, found, calls = strategy.setup().rank, [], []
    messages._NUMEL = 3

    def noted(name: str) -> None:
        call = getattr(dist, name)

        def started(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return call(*args, **options)

        setattr(dist, name, started)

    noted("irecv")
    noted("isend")
    try:
        for assignment in ASSIGNMENTS:
            learners = assignment[-1].stop
            for numel in (0, 1, 2, 25, 30):
                calls.clear()
                total = sum_over_learners([values(learners, numel)[i] for i in assignment[rank]], assignment, rank)
                alone = sum_over_learners(values(learners, numel), [range(learners)], 0)
                found += [torch.equal(total, alone), calls == sorted(calls)]
        own = torch.arange(7, dtype=torch.uint8).view(1, 7) + 10 * rank
        everyone = own.new_empty(3, 1, 7)
        messages.gather_rows(own, everyone)
        found.append(torch.equal(everyone[:, 0, 0], torch.tensor([0, 10, 20], dtype=torch.uint8)))
        return bool(strategy.all_gather(torch.tensor(found)).all())
    finally:
        strategy.teardown()


@pytest.mark.ranks
def test_sums_are_those_of_one_rank_to_the_bit() -> None:
    strategy = DDP().configure(devices=3, accelerator="cpu")
    assert strategy.launch(by_messages, strategy)
