"""The control message of a step: what the ranks must agree on, exchanged beside the last backward.

Nine numbers a rank, apart from the collectives of the user (`strategies/exchange.py`). They are sent before the
last backward and read after it: a rank that skipped a collective, gave it another tensor or logged other names is
found while the parameters are still untouched. Two more a rank, once the gradients are final, say whether the
parts that each holds are finite. Whether all reduced by the same operation (SUM, MAX) torch does not tell.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from strategies import faults
from strategies.base import Agreement, Note
from strategies.exchange import open_exchange


class Message(NamedTuple):
    """What a rank tells: numbers below 2**53."""

    step: int
    """Optimizer steps agreed on so far."""
    samples: int
    """In the global batch."""
    collectives: int
    """Calls in the default process group so far."""
    kinds: int
    """Hash of the latest of these."""
    keys: int
    """Hash of the names logged."""
    stop: int
    finite: bool
    """Whether this rank's losses are."""
    count: float  # type: ignore[assignment]  # hides tuple.count
    """What they counted."""
    total: float
    """Their sum, NaN where it is not known."""


_EQUAL = {
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

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._step = 0
        self._messages = open_exchange(rank, world_size, len(Message._fields), timeout_s)
        self._answers = open_exchange(rank, world_size, 2, timeout_s)
        self._num_known = self._num_calls()

    def send(self, note: Note, samples: int, count: float, finite: bool, total: float = math.nan) -> None:
        """Start the exchange."""
        calls = self._num_calls()
        kinds = latest_calls(calls - self._num_known) if calls > self._num_known else 0  # engines call nothing in most forwards: it costs 0.1 ms
        self._messages.post(*Message(self._step, samples, calls, kinds, note.keys, note.stop, finite, count, total))

    def receive(self) -> Agreement:
        """Wait for the others' messages. Raises RuntimeError where they contradict ours."""
        if faults.plan is not None:
            faults.fault("collective")
        messages = [Message(*numbers) for numbers in self._messages.read()]  # type: ignore[arg-type]
        self._num_known = self._num_calls()
        for field, what in _EQUAL.items():
            values = [getattr(message, field) for message in messages]
            if field in _HASHES:
                values = [value or max(values) for value in values]  # 0 says nothing: a rank of padding has logged nothing yet
            self._compare(what, values, shown=field not in _HASHES)
        self._step += 1
        bad = next((f"the loss of rank {rank}" for rank, message in enumerate(messages) if not message.finite), None)
        count, total = sum(message.count for message in messages), sum(message.total for message in messages)
        loss = None if math.isnan(total) or not count else total / count
        return Agreement(count, int(max(message.stop for message in messages)), bad, loss)

    def first_rank(self, says_so: bool) -> int | None:
        """The first rank that says so, or None. Waits for every rank; raises RuntimeError where their collectives differ by now."""
        return next((rank for rank, number in enumerate(self._numbers(says_so)) if number), None)

    def is_equal(self, number: int) -> bool:
        """Whether all ranks give the same number. Waits and raises as `first_rank` does."""
        return all(theirs == number for theirs in self._numbers(number))

    def _numbers(self, number: float) -> list[float]:
        self._answers.post(number, self._num_calls())
        answers = self._answers.read()
        self._compare(_EQUAL["collectives"], [calls for _, calls in answers])
        return [theirs for theirs, _ in answers]

    def _num_calls(self) -> int:
        return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]

    def _compare(self, what: str, values: list[float], shown: bool = True) -> None:
        """Raise RuntimeError, with the rank that is odd where there is a majority, unless the values are equal."""
        if values.count(values[0]) == len(values):
            return
        usual = max(set(values), key=values.count)
        clear = values.count(usual) * 2 > len(values)
        odd = [rank for rank, value in enumerate(values) if value != usual] if clear else list(range(len(values)))
        who = f"rank {', '.join(map(str, odd))} did not do what the others did" if clear else f"ranks {' and '.join(map(str, odd))} did different things"
        rule = (
            "read the same data, or say shards_itself on the dataset"
            if what == _EQUAL["samples"]
            else "call the same collectives and log the same names in each step"
        )
        each = " (" + ", ".join(f"rank {rank}: {value:.0f}" for rank, value in enumerate(values)) + ")" if shown else ""
        raise RuntimeError(f"the ranks disagree on their {what}{each}: {who} in step {self._step}; every rank must {rule}")


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
