"""DiLoCo: learners train by themselves for a round, and an outer optimizer steps by the mean of how far they moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from lockstep.strategies.base import Strategy
from lockstep.strategies.methods.local_updates import LocalUpdates
from lockstep.strategies.methods.options import Rounds
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.compression.names import compressor

NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(LocalUpdates):
    """Learners train by themselves for `period` steps, each with its own optimizer; an outer optimizer then steps the
    common weights by the mean of how far the learners have moved.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023); with `fragments` and
    `delay` "Streaming DiLoCo with Overlapping Communication" (2025).

    `period`: optimizer steps of a round.
    `start`: optimizer steps at the beginning that are synchronous, as by ddp. The paper starts from a trained model;
        with few rounds, DiLoCo needs a start.
    `outer`: makes the outer optimizer of a list of parameters; by default SGD with a learning rate of 0.7 and Nesterov
        momentum of 0.9. Its parameters are whole on every rank, or its shards with `inner`; all learners step it alike.
    `fragments`: parts of the model that are sent in turn within a round, each once.
    `delay`: steps for which learners train on while a fragment is sent.
    `mixing`: with `delay`, how much of its own weights a learner keeps when it takes the common ones over; by default
        half.
    `compress`: sends what learners have moved in fewer bytes, such as "int8" or "topk=0.01"; what is not sent is added
        to the learner's next (error feedback).
    `learners`: how many there are; by default one a rank. Learner l sees share l of each global batch. Which rank runs
        which changes no bit.
    `learners_per_rank`: how many each rank runs, for ranks of different speed; by default equally many.
    `inner`: what a learner is if it is sharded over several ranks: a mesh such as "fsdp=2", or FSDP(…),
        TensorParallel(…) or MeshParallel(…) with their options. Each rank then exchanges its own shards.
    `activation_checkpointing`: recompute the blocks' activations in the backward; True, or which blocks.
    `timeout_s`: seconds that a collective waits for the other ranks; longer than a round takes.
    """

    axis = "diloco"

    def __init__(
        self,
        *,
        period: int = 100,
        start: int = 0,
        outer: Callable[[list[nn.Parameter]], Optimizer] = NESTEROV,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        compress: str | Compressor | None = None,
        learners: int | None = None,
        learners_per_rank: Sequence[int] | None = None,
        inner: str | Strategy | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        if not callable(outer):
            given: Any = outer
            raise TypeError(
                f"outer makes an optimizer of a list of parameters, such as functools.partial(SGD, lr=0.7), but it is "
                f"{type(given).__name__}"
            )
        if mixing and not delay:
            raise ValueError(
                f"mixing={mixing!r} is what a learner keeps after a delay, but delay=0; give delay, or remove mixing"
            )
        super().__init__(
            outer=outer,
            learners=learners,
            learners_per_rank=learners_per_rank,
            inner=inner,
            rounds=Rounds(
                period,
                start=start,
                fragments=fragments,
                delay=delay,
                mixing=0.5 if mixing is None else mixing,
                compress=None if compress is None else compressor(compress),
            ),
            activation_checkpointing=activation_checkpointing,
            timeout_s=timeout_s,
        )
