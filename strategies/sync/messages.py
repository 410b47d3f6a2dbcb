"""Large tensors between ranks on CPU, by messages that fill a link in both directions.

gloo announces to the sender that a tensor can be received, by a message of its own. That message must not queue behind
data, or the two directions of a link are used one after the other: so receives are started before sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

_NUMEL = 2**18
"""Elements of a message, so that the first ones are worked on while others are on their way."""


def chunks(flat: Tensor) -> Sequence[Tensor]:
    """What is sent one by one of a flat tensor; nothing if it is empty."""
    return flat.split(_NUMEL) if flat.numel() else ()


class RingGather:
    """The rows of all ranks on all ranks: each sends its own to the next one, and what arrives on, but for the last.

    `rows`: flat and contiguous, one a rank, of any sizes. Those of other ranks are filled. Every rank of the group
    constructs it, sends the `chunks` of its own row in order, and then calls `finish`.
    """

    def __init__(self, rows: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        rank, self._group = dist.get_rank(group), group
        self._next, previous = (rank + 1) % len(rows), (rank - 1) % len(rows)
        others = [rows[rank - i] for i in range(1, len(rows))]
        self._arriving = [
            [(dist.irecv(chunk, group=group, group_src=previous), chunk) for chunk in chunks(row)] for row in others
        ]
        self._sent: list[dist.Work | None] = []

    def send(self, chunk: Tensor) -> None:
        self._sent.append(dist.isend(chunk, group=self._group, group_dst=self._next))

    def finish(self) -> None:
        """Wait until all rows are there, and until what was sent may be changed."""
        for i, row in enumerate(self._arriving, start=1):
            for work, chunk in row:
                wait(work)
                if i < len(self._arriving):
                    self.send(chunk)
        for work in self._sent:
            wait(work)


def gather_rows(own: Tensor, everyone: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `everyone`, `[ranks, *own.shape]`, contiguous. Every rank of the group calls it."""
    rows = everyone.view(len(everyone), -1).unbind()
    gather, mine = RingGather(rows, group), rows[dist.get_rank(group)]
    mine.copy_(own.reshape(-1))
    for chunk in chunks(mine):
        gather.send(chunk)
    gather.finish()


def wait(work: dist.Work | None) -> None:
    assert work is not None  # None only on ranks outside of the group
    work.wait()
