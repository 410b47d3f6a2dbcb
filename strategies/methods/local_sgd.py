"""Local SGD: learners train by themselves for a number of steps, and then average their weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch.optim import SGD

from lockstep.strategies.base import Strategy
from lockstep.strategies.methods.local_updates import LocalUpdates
from lockstep.strategies.methods.options import Rounds
from lockstep.strategies.modules.blocks import Rule


class LocalSGD(LocalUpdates):
    """Learners train by themselves for `period` steps, each with its own optimizer, and then average their weights.

    Stich, "Local SGD Converges Fast and Communicates Little" (2018); with `start` post-local SGD, of Lin et al., "Don't
    Use Large Mini-batches, Use Local SGD" (2018).

    `period`: optimizer steps between averages. With 1 the gradients are averaged in place of the weights, as by ddp.
    `start`: optimizer steps at the beginning that are synchronous, as by ddp.
    `learners`: how many there are; by default one a rank. Learner l sees share l of each global batch. Which rank runs
        which changes no bit.
    `learners_per_rank`: how many each rank runs, for ranks of different speed; by default equally many.
    `inner`: what a learner is if it is sharded over several ranks: a mesh such as "fsdp=2", or FSDP(…),
        TensorParallel(…) or MeshParallel(…) with their options. Each rank then exchanges its own shards.
    `activation_checkpointing`: recompute the blocks' activations in the backward; True, or which blocks.
    `timeout_s`: seconds that a collective waits for the other ranks; longer than a round takes.
    """

    axis = "local_sgd"

    def __init__(
        self,
        *,
        period: int = 8,
        start: int = 0,
        learners: int | None = None,
        learners_per_rank: Sequence[int] | None = None,
        inner: str | Strategy | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(
            outer=partial(SGD, lr=1.0),
            learners=learners,
            learners_per_rank=learners_per_rank,
            inner=inner,
            rounds=Rounds(period, start=sys.maxsize if period == 1 else start),
            activation_checkpointing=activation_checkpointing,
            timeout_s=timeout_s,
        )
        if period == 1:
            self.capabilities = replace(self.capabilities, synchronous=True)
