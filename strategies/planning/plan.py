"""What a run will need: the record that a trial of one optimizer step on fake tensors leaves.

Bytes are integers, counted as torch allocates them: of storages, not of views. Everything that is counted of a step is
of one optimizer step, all micro-batches of an accumulation window included, in the steady state (not the first step).
"""

from __future__ import annotations

from dataclasses import dataclass

TOGETHER, IN_TURN = "dp", "model"
"""Axes of devices of one process: those that meet after each phase of a step; those of which one works at a time."""
SERVERS = "servers"
"""Axis of a parameter server's workers and servers, whose messages start and end in the hosts' memory."""


@dataclass(frozen=True)
class Collective:
    """Calls of one collective in one optimizer step on one rank, counted as `CommunicationLedger` counts a real run."""

    op: str
    """As the ledger names it: all-reduce, all-gather, reduce-scatter, broadcast, send, recv, …"""
    axis: str
    """Axis of the mesh over which the ranks communicate; "world" if all ranks of a run without axes do."""
    num_ranks: int
    """Ranks that take part in one call."""
    dtype: str
    """As torch names it, such as bfloat16."""
    phase: str
    """Phase of the step in which it is issued: forward, backward, optimizer (all that follows the last backward), or
    round: calls and bytes are of a round of `Plan.round_steps` steps."""
    calls: int
    bytes: int
    """Sum over the calls: of the tensor for all-reduce, broadcast, send and recv, of the whole for all-gather and
    reduce-scatter."""


@dataclass(frozen=True)
class Work:
    """Operators of one kind, and of one size if they compute, in one optimizer step on one rank, for a roofline."""

    op: str
    """Name of the operator of torch, such as aten.mm."""
    dtype: str
    """Dtype in which it computes."""
    phase: str
    """As of `Collective`; what activation checkpointing recomputes is in the backward."""
    calls: int
    flops: float
    """Floating point operations, two for a multiply-add; 0 for operators that only move or transform elements."""
    bytes: int
    """Bytes read and written, each operand once per call, views none."""


@dataclass(frozen=True)
class Block:
    """What one block of the model keeps for the backward."""

    name: str
    """Qualified name of the block's module; "" for what is outside of blocks."""
    activations: int


@dataclass(frozen=True)
class RankPlan:
    """What one kind of rank needs; `role` says which ranks are of this kind. All memory is in bytes."""

    rank: int
    """The rank that was tried, or the device of its process."""
    role: str
    """Which ranks it stands for, such as "all ranks" or "stage 0", or which devices of a process, such as
    "device 0"."""
    num_ranks: int
    """How many ranks or devices of the run are of this kind."""
    parameters: int
    """This rank's shards."""
    gradients: int
    """Of this rank's shards, as they are when the optimizer steps."""
    optimizer: int
    buffers: int
    activations: int
    """Kept for the backward at the end of the forward, logits and loss not included; of all micro-batches in flight."""
    blocks: tuple[Block, ...]
    """`activations` by block, in the order of the model."""
    logits_and_loss: int
    """Kept for the backward outside of the model's blocks, behind the last of them: logits, their log-softmax, loss."""
    gathered: int
    """Whole parameters and unreduced gradients of sharded units at the peak."""
    inputs: int
    """The batch on the device."""
    peak: int
    """The most bytes at one moment of the step, of all kinds together."""
    peak_by_kind: tuple[tuple[str, int], ...]
    """What makes up `peak`: parameters, gradients, optimizer, buffers, other_state, activations, gathered,
    inputs, temporary."""
    peak_moment: str
    """forward, backward, optimizer or round."""
    peak_at: str
    """Qualified name of the module that ran at the peak, and the operator."""
    collectives: tuple[Collective, ...]
    work: tuple[Work, ...]
    host: int = 0
    """The most bytes at one moment in the host's memory, where the strategy offloads; `peak` has none of them."""
    steps_on_host: bool = False
    """Whether the optimizer steps in the host's memory."""
    peak_of_both: int = 0
    """The most bytes at one moment in the device's and the host's memory together, or in all devices of a process: what
    a run on CPU ranks holds."""
    transfers: tuple[Collective, ...] = ()
    """Copies over the host link: op is "to device" or "to host", axis is host. Those that a device gets from others of
    its process: op is copy, axis dp or model."""
    other_state: int = 0
    """What else stays from step to step: residuals of compression, the weights that learners have in common, the
    state of an outer optimizer, buffers of engines."""

    @property
    def flops(self) -> float:
        """Floating point operations of one optimizer step."""
        return sum(entry.flops for entry in self.work if entry.phase != "round")


@dataclass(frozen=True)
class PipelineSchedule:
    """How a pipeline runs one micro-batch of the trainer."""

    name: str
    num_stages: int
    """Stages in all, several a rank in interleaved schedules."""
    num_microbatches: int
    """Into which the schedule splits each micro-batch of the trainer."""


@dataclass(frozen=True)
class Plan:
    """What a run will need."""

    strategy: str
    """As given, such as "fsdp=32,tensor=8"."""
    world_size: int
    axes: tuple[tuple[str, int], ...]
    """Axes of the mesh with their sizes, outermost first."""
    precision: str
    samples: int
    """In the global batch of one optimizer step."""
    tokens: int | None
    """The same in tokens, where samples are sequences of integers."""
    num_parameters: int
    """Of the whole model."""
    ranks: tuple[RankPlan, ...]
    """One of each kind, the one with the highest peak first."""
    accumulate_grad_batches: int = 1
    round_steps: int = 1
    """Optimizer steps between two exchanges of learners that train by themselves."""
    round_overlap: float = 0.0
    """Share of these steps beside which the exchange may run."""
    pipeline: PipelineSchedule | None = None
    notes: tuple[str, ...] = ()
    """What the figures do not hold, one sentence each."""
