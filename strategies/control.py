"""The control message of a step: what the ranks must agree on, exchanged beside the last backward.

One gloo all_gather of seven float64 numbers a rank, in a process group of its own, so that no user
collective can be mistaken for it. It is sent before the last backward and read after it: a rank that
skipped a collective or logged other names is found while the parameters are still untouched.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from strategies import faults
from strategies.base import Agreement, Note

FIELDS = ("step", "collectives", "keys", "stop", "finite", "count", "total")


class Control:
    """One rank's end of the control messages. All ranks construct it, and send and receive once a step."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._group = dist.new_group(backend="gloo")
        self._step = 0
        self._mine = torch.zeros(len(FIELDS), dtype=torch.float64)
        self._all = [torch.zeros_like(self._mine) for _ in range(world_size)]
        self._work: dist.Work | None = None

    def send(self, note: Note, count: float, finite: bool, total: float = math.nan) -> None:
        """Start the exchange; `count` is what this rank's losses counted, `total` their sum, NaN where it is not known."""
        collectives = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        self._mine.copy_(torch.tensor([self._step, collectives, note.keys, note.stop, finite, count, total], dtype=torch.float64))
        self._work = dist.all_gather(self._all, self._mine, group=self._group, async_op=True)

    def receive(self) -> Agreement:
        """Wait for the others' messages. Raises RuntimeError where they contradict ours."""
        if faults.plan is not None:
            faults.fault("collective")
        self._work.wait()  # type: ignore[union-attr]
        self._work = None
        rows = [tensor.tolist() for tensor in self._all]
        for field, what in ((0, "optimizer step"), (1, "collective calls so far"), (2, "logged metric names")):
            values = [row[field] for row in rows]
            if field == 2:
                values = [value or max(values) for value in values]  # 0: a rank of padding has logged nothing yet
            if values.count(values[0]) != len(values):
                raise RuntimeError(self._disagreement(what, values, named=field == 2))
        self._step += 1
        bad = next((f"the loss of rank {rank}" for rank, row in enumerate(rows) if not row[4]), None)
        count, total = sum(row[5] for row in rows), sum(row[6] for row in rows)
        loss = None if math.isnan(total) or not count else total / count
        return Agreement(count, int(max(row[3] for row in rows)), bad, loss)

    def first_rank(self, says_so: bool) -> int | None:
        """The first rank that says so, or None: one all_reduce of a number."""
        first = torch.tensor(float(self._rank) if says_so else math.inf)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self._group)
        return None if math.isinf(first.item()) else int(first)

    def _disagreement(self, what: str, values: list[float], named: bool) -> str:
        usual = max(set(values), key=values.count)
        clear = values.count(usual) * 2 > len(values)
        odd = [rank for rank, value in enumerate(values) if value != usual] if clear else list(range(len(values)))
        who = f"rank {', '.join(map(str, odd))} did not do what the others did" if clear else f"ranks {' and '.join(map(str, odd))} did different things"
        shown = "" if named else " (" + ", ".join(f"rank {rank}: {value:.0f}" for rank, value in enumerate(values)) + ")"
        return (
            f"the ranks disagree on their {what}{shown}: {who} in step {self._step}; "
            "every rank must call the same collectives and log the same names in each step"
        )
