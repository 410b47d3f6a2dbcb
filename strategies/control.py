"""The control message of a step: what the ranks must agree on, exchanged beside the last backward.

One gloo all_gather of nine float64 numbers a rank, in a process group of its own, so that no user
collective can be mistaken for it. It is sent before the last backward and read after it: a rank that
skipped a collective, gave it another tensor or logged other names is found while the parameters are
still untouched. Whether all reduced by the same operation (SUM, MAX) torch does not tell.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from typing import Any

import torch
import torch.distributed as dist

from strategies import faults
from strategies.base import Agreement, Note

FIELDS = ("step", "samples", "collectives", "kinds", "keys", "stop", "finite", "count", "total")

_COMPARED_FIELDS = {
    "step": "optimizer step",
    "samples": "samples of the global batch",
    "collectives": "collective calls so far",
    "kinds": "latest collective calls (operation, dtype or size)",
    "keys": "logged metric names",
}
_HASHES = ("kinds", "keys")
_COMPARED = 8
"""The collective calls before a message whose operations, types and sizes are compared."""
_SAME_SIZE = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce")
"""Operations that need tensors of one size on all ranks."""


class Control:
    """One rank's end of the control messages. All ranks construct it, and send and receive once a step."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._group = dist.new_group(backend="gloo")
        self._step = 0
        self._mine = torch.zeros(len(FIELDS), dtype=torch.float64)
        self._all = [torch.zeros_like(self._mine) for _ in range(world_size)]
        self._work: dist.Work | None = None
        self._num_known = self._num_calls()

    def send(self, note: Note, samples: int, count: float, finite: bool, total: float = math.nan) -> None:
        """Start the exchange.

        `samples` are in the global batch, `count` is what this rank's losses counted, `total` their sum, NaN where it is not known.
        """
        calls = self._num_calls()
        kinds = latest_calls(calls - self._num_known) if calls > self._num_known else 0  # engines call nothing in most forwards: it costs 0.1 ms
        self._mine.copy_(torch.tensor([self._step, samples, calls, kinds, note.keys, note.stop, finite, count, total], dtype=torch.float64))
        self._work = dist.all_gather(self._all, self._mine, group=self._group, async_op=True)

    def receive(self) -> Agreement:
        """Wait for the others' messages. Raises RuntimeError where they contradict ours."""
        if faults.plan is not None:
            faults.fault("collective")
        self._work.wait()  # type: ignore[union-attr]
        self._work = None
        self._num_known = self._num_calls()
        rows = [dict(zip(FIELDS, tensor.tolist(), strict=True)) for tensor in self._all]
        for field, what in _COMPARED_FIELDS.items():
            values = [row[field] for row in rows]
            if field in _HASHES:
                values = [value or max(values) for value in values]  # 0 says nothing: a rank of padding has logged nothing yet
            if values.count(values[0]) != len(values):
                raise RuntimeError(self._disagreement(what, values, named=field in _HASHES))
        self._step += 1
        bad = next((f"the loss of rank {rank}" for rank, row in enumerate(rows) if not row["finite"]), None)
        count, total = sum(row["count"] for row in rows), sum(row["total"] for row in rows)
        loss = None if math.isnan(total) or not count else total / count
        return Agreement(count, int(max(row["stop"] for row in rows)), bad, loss)

    def first_rank(self, says_so: bool) -> int | None:
        """The first rank that says so, or None: one all_reduce of a number."""
        first = torch.tensor(float(self._rank) if says_so else math.inf)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self._group)
        return None if math.isinf(first.item()) else int(first)

    def _num_calls(self) -> int:
        return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]

    def _disagreement(self, what: str, values: list[float], named: bool) -> str:
        usual = max(set(values), key=values.count)
        clear = values.count(usual) * 2 > len(values)
        odd = [rank for rank, value in enumerate(values) if value != usual] if clear else list(range(len(values)))
        who = f"rank {', '.join(map(str, odd))} did not do what the others did" if clear else f"ranks {' and '.join(map(str, odd))} did different things"
        rule = (
            "read the same data, or say shards_itself on the dataset"
            if what == _COMPARED_FIELDS["samples"]
            else "call the same collectives and log the same names in each step"
        )
        shown = "" if named else " (" + ", ".join(f"rank {rank}: {value:.0f}" for rank, value in enumerate(values)) + ")"
        return f"the ranks disagree on their {what}{shown}: {who} in step {self._step}; every rank must {rule}"


def latest_calls(num_calls: int) -> int:
    """A hash of the last of `num_calls` collective calls in the default group, from what torch's flight recorder noted of gloo; 0: not known."""
    if int(os.environ.get("TORCH_FR_BUFFER_SIZE", "2000")) > 100:  # somebody wants to read it afterwards: too long for each step
        return 0
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)).get("entries", [])  # type: ignore[attr-defined]
    calls = [_kind(entry) for entry in entries if entry["process_group"][1] == "default_pg" and not entry["is_p2p"]]
    compared = min(num_calls, _COMPARED)
    return zlib.crc32(";".join(calls[-compared:]).encode()) if len(calls) >= compared else 0


def _kind(entry: dict[str, Any]) -> str:
    operation = entry["profiling_name"].rpartition(":")[2]
    sizes = [math.prod(size) for size in entry["input_sizes"]] if operation in _SAME_SIZE else ()
    return f"{operation} {entry['input_dtypes'] or entry['output_dtypes']} {sizes}"
