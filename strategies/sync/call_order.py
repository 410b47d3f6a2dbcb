"""The order in which ranks exchange the parameters and gradients of their blocks, compared before each exchange begins.

An engine that gathers a block when it is called exchanges whatever the ranks call at that time: the parameters of
different blocks with each other if their sizes agree, and otherwise nothing, forever.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lockstep.strategies.sync.host_all_gather import open_exchange

GATHER, REDUCE, END_FORWARD, END_BACKWARD, GATHER_FOR_BACKWARD = range(5)
_DOES = (
    "uses {}",
    "reduces gradients of {}",
    "is done with its forward",
    "is done with its backward",
    "runs the backward of {}",
)
_EVENT = struct.Struct("<ddd")


class CallOrder:
    """One rank's end. All ranks of `group`, by default all, construct it, and note the same events in the same order.

    The rank that comes last to an event finds a difference, before it takes part in what the others wait for. Ranks on
    several nodes do not see each other's events; they compare `take()` after the step.
    """

    def __init__(
        self,
        timeout_s: float,
        name: Callable[[int], str],
        engine: str,
        instead: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._ranks, self._rank = dist.get_process_group_ranks(group), dist.get_rank()
        self._exchange = open_exchange(dist.get_rank(group), len(self._ranks), 4, timeout_s, group)
        self._name, self.engine, self._instead = name, engine, instead
        self._hash = 0

    def note(self, kind: int, index: int = -1, size: int = 0) -> None:
        """What this rank does next: `index` says with which block, or with all that no block holds (-1).

        Raises RuntimeError for a rank that does something else.
        """
        mine = float(kind), float(index), float(size)
        self._hash = zlib.crc32(_EVENT.pack(*mine), self._hash)
        if not self._exchange.peeks:
            return
        self._exchange.post(*mine, self._hash)  # the hash shows a difference whose own message is overwritten by now
        for rank, message in zip(self._ranks, self._exchange.peek(), strict=False):
            if message is not None and message != (*mine, self._hash):
                theirs = message[:3]
                where = f": {self._words(mine)} on rank {self._rank}, {self._words(theirs)} on rank {rank}"
                raise self._error("" if theirs == mine else where)

    def take(self) -> int:
        """A number of what was noted since the last call, equal on ranks that did the same."""
        number, self._hash = self._hash, 0
        return number

    def check(self, numbers: Sequence[float]) -> None:
        """Raise RuntimeError if the ranks' numbers differ."""
        if len(set(numbers)) > 1:
            raise self._error("")

    def close(self) -> None:
        self._exchange.close()

    def _words(self, event: tuple[float, ...]) -> str:
        kind, index, size = map(int, event)
        name = self._name(index) if index >= 0 else "what no block holds"
        return _DOES[kind].format(name) + (f" ({size} elements)" if kind == REDUCE and size else "")

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"the ranks use different layers, or use them in different orders, in a step{what}; {self.engine} "
            "exchanges them in the order of their use: use the same layers in the same order on every rank (those "
            f"without samples on a batch of none), or {self._instead}"
        )
