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
from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.compression.names import compressor


class LocalSGD(LocalUpdates):
    """Learners train by themselves for `period` steps, each with its own optimizer, and then average their weights.

    Stich, "Local SGD Converges Fast and Communicates Little" (2018); with `start` post-local SGD, of Lin et al., "Don't
    Use Large Mini-batches, Use Local SGD" (2018); with `compress` the error reset of Xie et al., "CSER:
    Communication-efficient SGD with Error Reset" (2020).

    `period`: optimizer steps between averages. With 1 and without `compress` the gradients are averaged in place of the
        weights, as by ddp.
    `start`: optimizer steps at the beginning that are synchronous, as by ddp.
    `compress`: sends what learners have moved in fewer bytes, such as "topk=0.01". What is not sent of a learner stays
        in its own weights, and is added to its next; validation and checkpoints see what was sent. Of "qsgd" and
        "terngrad", which round at random without a bias, nothing is kept.
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
        compress: str | Compressor | None = None,
        learners: int | None = None,
        learners_per_rank: Sequence[int] | None = None,
        inner: str | Strategy | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        synchronous = period == 1 and compress is None
        super().__init__(
            outer=partial(SGD, lr=1.0),
            learners=learners,
            learners_per_rank=learners_per_rank,
            inner=inner,
            rounds=Rounds(
                period,
                start=sys.maxsize if synchronous else start,
                compress=None if compress is None else compressor(compress),
                keeps_unsent=compress is not None,
            ),
            activation_checkpointing=activation_checkpointing,
            timeout_s=timeout_s,
        )
        if synchronous:
            self.capabilities = replace(self.capabilities, synchronous=True)
