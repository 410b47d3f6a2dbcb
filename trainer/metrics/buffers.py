"""Buffers that the steps of an evaluation change: what ranks hold afterwards must be what one process would."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.sync.buffers import kept_buffers, refusing_counts
from lockstep.strategies.sync.collectives import local
from lockstep.strategies.sync.contents import checksum
from lockstep.trainer.checkpoint.rank_state import torchmetrics_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.strategies import Strategy
    from lockstep.strategies.data.sharded_loader import MicroBatch

_LOOKS = 2
"""Batches of an evaluation in which the host reads the numbers."""


class EvaluatedBuffers:
    """Watches the buffers of the state dict during an evaluation, but for statistics of normalizing layers and the sums
    of torchmetrics. Every rank has one and calls it alike."""

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._model = strategy, model
        self._metrics = {id(b) for metric in torchmetrics_of(model).values() for b in metric.buffers()}
        """By id: buffers of torchmetrics, which their own syncs add up."""
        self._watches = strategy.topology.data_size > 1 and getattr(strategy, "broadcast_buffers", None) is None
        # A rank of a stage without buffers watches as well: the others would wait for it.
        self._watches = self._watches and any(id(b) not in self._metrics for b in kept_buffers(model).values())
        self._first = self._last = self._marks()
        self._contents: list[int] = []
        """After each batch of which this rank had samples, until the first of which it had none."""
        self._lacked = False
        self._looks = 0
        self._suspects: dict[str, float] = {}

    def _held(self) -> dict[str, Tensor]:
        kept = kept_buffers(self._model).items()
        return {name: b for name, b in kept if id(b) not in self._metrics and is_here(b) and not b.is_meta}

    def _marks(self) -> dict[str, tuple[int, int]]:
        """What tells whether code has changed or replaced a buffer."""
        return {name: (id(b), b._version) for name, b in self._held().items()} if self._watches else {}

    @contextmanager
    def batch(self, micro_batch: MicroBatch, total: int) -> Iterator[None]:
        """Around the step of a batch of `total` samples. Raises RuntimeError for a buffer in which it counts those of
        this rank."""
        if not self._watches:
            yield
            return
        self._looks += 1
        own = micro_batch.num_samples
        looked = own if self._looks <= _LOOKS else 0
        with refusing_counts(self._held, looked, total, self._strategy.name, [micro_batch.batch], self._suspects):
            yield
        self._after_batch(own > 0)

    def _after_batch(self, had_samples: bool) -> None:
        self._lacked = self._lacked or not had_samples
        if not self._lacked:
            marks = self._marks()
            unchanged = marks == self._last and bool(self._contents)
            self._contents.append(self._contents[-1] if unchanged else self._content())
            self._last = marks

    def _content(self) -> int:
        found = 0
        for buffer in self._held().values():
            found = checksum(local(buffer), found)
        return found

    def check(self, step: str) -> None:
        """Raise RuntimeError if a step has left different values on the ranks that had samples; the others get theirs.
        Every rank calls it."""
        if not self._watches:
            return
        strategy, place, marks = self._strategy, self._strategy.topology, self._marks()
        changed = [name for name, mark in marks.items() if self._first.get(name) != mark]
        layout = hashlib.blake2b(repr([(n, b.shape) for n, b in self._held().items()]).encode(), digest_size=7).digest()
        facts = [bool(changed), len(self._contents), self._lacked, place.data_rank, int.from_bytes(layout, "big")]
        ranks = strategy.all_gather(torch.tensor(facts)).tolist()
        if not any(row[0] for row in ranks):
            return
        common = min((num for _, num, *_ in ranks if num), default=0)
        early = self._contents[common - 1] if self._contents else 0
        contents = strategy.all_gather(torch.tensor([early, self._content()])).tolist()
        seen: dict[tuple[int, int], int] = {}
        differs = False
        for (_, num, lacked, _, key), (first, last) in zip(ranks, contents, strict=True):
            differs |= bool(num) and seen.setdefault((key, 0), first) != first
            differs |= not lacked and seen.setdefault((key, 1), last) != last
        if differs:
            raise RuntimeError(
                f"{step} has left other values of a buffer on one rank than on another ({shortened(changed)}), each "
                "from the samples of its own; sum what goes into it over the ranks (self.sum_over_ranks), log a "
                "torchmetrics Metric in its place, or give the strategy broadcast_buffers=True to take rank 0's"
            )
        if any(lacked for _, _, lacked, *_ in ranks):
            self._take([rank for rank, row in enumerate(ranks) if row[3] == 0])

    def _take(self, senders: list[int]) -> None:
        """On a rank that lacked samples, take the values of those ranks, which had some of each batch."""
        strategy, place, mine = self._strategy, self._strategy.topology, self._held()
        for rank in senders:
            sizes = [(name, [*local(b).shape], str(b.dtype).removeprefix("torch.")) for name, b in mine.items()]
            for name, shape, dtype in strategy.broadcast(sizes, rank):
                own = local(mine[name]) if name in mine else None
                if own is None or rank != place.rank:
                    value = torch.empty(shape, dtype=getattr(torch, dtype), device=place.device)
                else:
                    value = own
                value = strategy.broadcast(value, rank)
                if own is not None and self._lacked and own.shape == value.shape:
                    own.copy_(value)
                elif own is not None and self._lacked:
                    own.set_(value)
