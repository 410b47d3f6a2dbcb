"""The control message of a step: what the ranks must agree on, exchanged beside the last backward.

Fourteen numbers a rank, beside the collectives of the user (`strategies/sync/host_all_gather.py`). They are sent before
the last backward and read after it: a rank that skipped a collective, gave it another tensor or reduction or logged
other names is found while the parameters are still untouched. Five more a rank, once the gradients are final, say
whether those are finite, what was called and what hooks changed since, and before an optimizer steps until then.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.strategies.base import StepResult, StepVote
from lockstep.strategies.launch import fault_injection
from lockstep.strategies.sync.collective_fingerprint import Calls
from lockstep.strategies.sync.host_all_gather import Reduced, open_exchange
from lockstep.strategies.sync.tree import total_of


class Message(NamedTuple):
    """What a rank tells: numbers below 2**53."""

    step: int
    """Optimizer steps agreed on so far."""
    order: int
    """Hash of the indices that the user's sampler has yielded."""
    samples: int
    """In the global batch."""
    collectives: int
    """Calls in the default process group so far."""
    kinds: int
    """Hash of the latest of these."""
    rates: int
    """Hash of the optimizers' learning rates and the like."""
    edits: int
    """Hash of the names of parameters that user code has changed."""
    keys: int
    """Hash of the names logged."""
    stop: int
    finite: bool
    """Whether this rank's losses are."""
    count: float  # type: ignore[assignment]  # hides tuple.count
    """What they counted."""
    total: float
    """Their sum, NaN where it is not known."""
    lacks: bool
    """Whether a micro-batch of this rank has no samples."""
    hooks: int
    """How many hooks users have on parameters."""


_EQUAL = {
    "edits": "changes of weights, gradients, buffers, requires_grad or optimizers in hooks",
    "step": "optimizer step",
    "order": "order of samples",
    "samples": "samples of the global batch",
    "collectives": "collective calls so far",
    "kinds": "latest collective calls (operation, reduction, dtype or size)",
    "rates": "optimizers' learning rates, momentums or weight decays",
    "keys": "logged metric names",
}
_SAMPLES, _KEYS, _STOP, _COUNT, _TOTAL, _LACKS, _HOOKS = map(
    Message._fields.index, ("samples", "keys", "stop", "count", "total", "lacks", "hooks")
)
"""Places in a message; what is before the keys must be equal."""
_RULES = {
    _EQUAL["samples"]: "read the same data, or say shards_itself on the dataset",
    _EQUAL["order"]: "seed it equally, or let it decide from what all ranks know, such as trainer.callback_metrics",
    _EQUAL["edits"]: "change them alike, whatever its number; random numbers are alike in all ranks within "
    "`with trainer.whole(module): ...` and from a generator that is seeded alike (random.Random(step))",
    _EQUAL["rates"]: "set them from values that are equal on all ranks, such as trainer.callback_metrics",
}
_NUMBERS = _EQUAL["step"], _EQUAL["samples"], _EQUAL["collectives"]
"""What is compared as it is, where the others are hashes."""


class StepAgreement:
    """One rank's end of the control messages. All ranks of `group`, by default all there are, construct it, and send
    and receive once a step. `rank` is this one's number among them; messages name it by its number among all."""

    def __init__(self, rank: int, world_size: int, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._ranks = range(world_size) if group is None else dist.get_process_group_ranks(group)
        self._number, self._rank = rank, self._ranks[rank]
        self._step = 0
        self._messages = open_exchange(rank, world_size, len(Message._fields) + 2, timeout_s, group)
        self._answers = open_exchange(rank, world_size, 5, timeout_s, group)
        self._begins = open_exchange(rank, world_size, 1, timeout_s, group)
        self.edits: Callable[[], list[str]] = list
        """Gives the names of parameters that user code has changed since the last call."""
        self.num_hooks: Callable[[], int] = int
        self.hooks_alike = True
        """Whether all ranks have said the same number."""
        self._edited: list[str] = []
        self._calls = Calls()
        self._names: Callable[[], list[str]] | None = None
        self._sampler = ""
        self._sent = self._calls.latest

    def close(self) -> None:
        self._calls.close()
        self._messages.close()
        self._answers.close()
        self._begins.close()

    def send(self, vote: StepVote, samples: int, count: float, finite: bool, total: float = math.nan) -> None:
        """Start the exchange."""
        self.prepare(vote, samples)(count, finite, total)

    def prepare(self, vote: StepVote, samples: int, lacks: bool = False) -> Callable[[float, bool, float], None]:
        """`send` in two: this says what was called until now; what it returns takes the rest, and starts the
        exchange."""
        self._names, (order, self._sampler) = vote.names, vote.order
        said = (
            self._step,
            order,
            samples,
            self.num_calls(),
            self._calls.hash,
            vote.rates,
            self._edits(),
            vote.keys,
            vote.stop,
        )
        self._sent = self._calls.latest
        self._calls.clear()

        def post(count: float, finite: bool, total: float) -> None:
            message = Message(*said, finite, count, total, lacks, self.num_hooks())
            self._messages.post(*message, message.keys or math.inf, math.inf if finite else self._number)

        return post

    def receive(self, in_tree: bool = False) -> StepResult:
        """Wait for the others' messages. Raises RuntimeError where they contradict ours.

        `in_tree`: sum what was counted in the order of virtual ranks.
        """
        if fault_injection.plan is not None:
            fault_injection.fault("collective")
        lowest, highest, total = self._messages.reduced()
        least_keys, first_bad = lowest[-2:]
        # Keys of 0 say nothing: a rank of padding has logged nothing yet, or in hooks only.
        if lowest[:_KEYS] != highest[:_KEYS] or least_keys not in (highest[_KEYS], math.inf):
            rows = [numbers[: len(Message._fields)] for numbers in self._messages.read()]
            self._refuse([Message(*row) for row in rows])  # type: ignore[arg-type]
        self._step += 1
        self.hooks_alike = lowest[_HOOKS] == highest[_HOOKS]
        bad = None if first_bad == math.inf else f"the loss of rank {self._ranks[int(first_bad)]}"
        count, loss = total[_COUNT], total[_TOTAL]
        if in_tree:
            messages = list(self._messages.read())
            count, loss = (total_of([numbers[place] for numbers in messages]) for place in (_COUNT, _TOTAL))
        if dist.get_backend() == "fake":  # of a planned run, in which not every rank counts
            count = lowest[_SAMPLES]
        mean = None if math.isnan(loss) or not count else loss / count
        return StepResult(count, int(highest[_STOP]), bad, mean, some_lack=bool(highest[_LACKS]))

    def begin(self, retrained: list[str]) -> None:
        """Say as a step begins what user code has frozen or unfrozen. Where it has, raises RuntimeError unless all
        ranks did the same, before this one exchanges other things than they. Over several nodes the message tells."""
        if not self._begins.peeks:
            return
        self._begins.post(zlib.crc32(" ".join(retrained).encode()))
        if retrained:
            self._edited = retrained
            self._compare(_EQUAL["edits"], [number for (number,) in self._begins.read()])

    def first_rank(self, says_so: bool) -> int | None:
        """The first rank that says so, or None. Waits for every rank; raises RuntimeError where their collectives
        differ by now."""
        first = self._asked(says_so).lowest[-1]
        return None if first == math.inf else self._ranks[int(first)]

    def is_equal(self, number: int) -> bool:
        """Whether all ranks give the same number. Waits and raises as `first_rank` does."""
        found = self._asked(number)
        return found.lowest[0] == found.highest[0]

    def gather(self, number: float) -> list[float]:
        """What each rank gave, in rank order. Waits and raises as `first_rank` does."""
        self._asked(number)
        return [theirs for theirs, *_ in self._answers.read()]

    def check(self) -> None:
        """Raise RuntimeError where the ranks' collectives differ by now. Waits for every rank."""
        self._asked(0)

    def _asked(self, number: float) -> Reduced:
        first = self._number if number else math.inf
        self._answers.post(number, self.num_calls(), self._calls.hash, self._edits(), first)
        found = self._answers.reduced()
        self._sent = self._calls.latest
        if found.lowest[1:4] != found.highest[1:4]:
            answers = self._answers.read()
            for place, field in enumerate(("collectives", "kinds", "edits"), 1):
                self._compare(_EQUAL[field], [answer[place] for answer in answers])
        return found

    def _edits(self) -> int:
        self._edited = self.edits()
        return zlib.crc32(" ".join(self._edited).encode()) if self._edited else 0

    def _refuse(self, messages: list[Message]) -> None:
        """Raise RuntimeError for the first thing in which the ranks' messages differ. Every rank calls it."""
        for field, what in _EQUAL.items():
            values = [getattr(message, field) for message in messages]
            when = f" in step {self._step}"
            if field == "keys":
                values = [value or max(values) for value in values]
                if values.count(values[0]) < len(values) and self._names is not None:
                    when += self._differing_names(self._names())
            self._compare(what, values, when)

    def _differing_names(self, mine: list[str]) -> str:
        """Which names some ranks have logged and others not. Every rank calls it, where all have made the same
        collective calls."""
        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        world_size = len(self._ranks)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self._group)
        rows = [torch.empty(int(max(sizes)), dtype=torch.uint8) for _ in range(world_size)]
        dist.all_gather(rows, torch.nn.functional.pad(data, (0, rows[0].numel() - data.numel())), group=self._group)
        names = [set(json.loads(bytes(row[: int(size)].tolist()))) for row, size in zip(rows, sizes, strict=True)]
        common = set.intersection(*(group for group in names if group))
        own = [(rank, sorted(group - common)[:8]) for rank, group in zip(self._ranks, names, strict=True)]
        said = [f"rank {rank} logged {', '.join(map(repr, extra))}" for rank, extra in own if extra]
        return f" ({'; '.join(said)}, which not all did)"

    def num_calls(self) -> int:
        """Collectives called in the default process group so far; 0 in a planned run, whose group does not count."""
        if dist.get_backend() == "fake":
            return 0
        return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]

    def _compare(self, what: str, values: list[float], when: str = "") -> None:
        """Raise RuntimeError, with the rank that is odd where there is a majority, unless the values are equal."""
        if values.count(values[0]) == len(values):
            return
        usual = max(set(values), key=values.count)
        clear = values.count(usual) * 2 > len(values)
        odd = [rank for rank, value in zip(self._ranks, values, strict=True) if value != usual or not clear]
        who = (
            f"rank {', '.join(map(str, odd))} did not do what the others did"
            if clear
            else f"ranks {' and '.join(map(str, odd))} did different things"
        )
        rule = _RULES.get(what, "call the same collectives and log the same names in each step")
        each = (
            " (" + ", ".join(f"rank {rank}: {value:.0f}" for rank, value in zip(self._ranks, values, strict=True)) + ")"
            if what in _NUMBERS
            else ""
        )
        here = ""
        if what == _EQUAL["kinds"] and self._sent:
            here = f" (rank {self._rank} called {', '.join(self._sent)} last)"
        if what == _EQUAL["order"]:
            here = f" (as {self._sampler} has yielded other indices on them)"
        if what == _EQUAL["edits"]:
            here = f" (rank {self._rank} changed {', '.join(self._edited[:10]) or 'nothing'})"
        raise RuntimeError(f"the ranks disagree on their {what}{each}: {who}{when}{here}; every rank must {rule}")
