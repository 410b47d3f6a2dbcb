"""What a share takes along from stage to stage of a pipeline, beside the tensors: random streams and strides.

The numbers of a layer may depend on the strides of what it gets, and pipelines send tensors without gaps. So strides
of activations travel forward and those of their gradients back, and each stage lays them out again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.pipeline.stage_run import Links, Message, Run
from lockstep.strategies.virtual.streams import Streams

_SIZE, _STATE, _GRADIENT = 1, 2, 3
"""Tags of what is sent; those of the schedule have none."""

Strides = list[tuple[int, ...]]


@dataclass(slots=True)
class Crossing:
    """Where one micro-batch comes into this stage and leaves it."""

    drawn: Tensor | None = None
    """The random streams at the first call of a layer of an earlier stage."""
    received: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Strides of the gradients of what was received, by place."""
    sent: Strides = field(default_factory=list)
    """Strides of the gradients of what was sent, once they are known."""


class StageLinks(Links):
    """The links of a pipeline with virtual ranks, of one stage a rank: the rank of a stage is its number."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, streams: Streams) -> None:
        super().__init__(group, device)
        self.streams = streams
        self.crossing = Crossing()
        """That of the micro-batch whose forward runs."""
        self.tied: Sequence[nn.Parameter] = ()
        """Parameters that a later stage holds too."""
        self.tied_here: Sequence[nn.Parameter] = ()
        """Parameters that any other stage holds too."""
        self.in_step = False
        self._works: list[tuple[dist.Work | None, Tensor]] = []

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._works:
            work.wait()  # type: ignore[union-attr]
        self._works = []

    def begin(self) -> None:
        """Before a forward without a backward."""
        self.settle()
        self.crossing = Crossing()

    def outside(self) -> None:
        if self.in_step:
            raise RuntimeError(
                "the pipelined module was called in a hook between the shares of a step, which the ranks of a pipeline "
                "do not reach together; call it in a hook between steps"
            )
        self.begin()

    def finished(self, rank: int) -> None:
        state = self.streams.state()
        size = torch.tensor([state.numel()])
        dist.broadcast(size, group=self._group, group_src=rank)
        state = state if dist.get_rank(self._group) == rank else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(state, group=self._group, group_src=rank)
        self.streams.restore(state)

    def passing(self, run: Run) -> None:
        if self.crossing.drawn is None:
            self.crossing.drawn = self.streams.state()

    def starting(self, run: Run) -> None:
        assert run.layout is not None
        message, crossing = run.layout.messages[run.stage - 1], self.crossing
        _refuse_skips(message)
        if crossing.drawn is not None and not torch.equal(crossing.drawn, self.streams.state()):
            raise RuntimeError(
                "the pipelined module draws random numbers between layers of a stage, which with virtual_ranks later "
                "stages cannot repeat; draw them within a layer, or before the first one"
            )
        state = self.receive_state(message, run.stage - 1)
        length = int.from_bytes(state[:8].numpy().tobytes(), "little")
        strides = json.loads(state[8 : 8 + length].numpy().tobytes())
        self.streams.restore(state[8 + length :].clone())
        run.received = tuple(_laid_out(t, tuple(s)) for t, s in zip(run.received, strides, strict=True))
        for i, tensor in enumerate(run.received):
            if tensor.requires_grad:
                tensor.register_hook(partial(_note_strides, crossing.received, i))

    def receive_state(self, message: Message, stage: int) -> Tensor:
        """What `facts` has put together on `stage`, beside a `message`."""
        size = self.receive_into(torch.empty(1, dtype=torch.int64), stage, _SIZE)
        return self.receive_into(torch.empty(int(size), dtype=torch.uint8), stage, _STATE)

    def receive_numbers(self, message: Message, stage: int) -> list[int]:
        """Of the gradients of a `message` that come from `stage`: whether they are of a loss, and their strides."""
        numbers = torch.empty(1 + sum(t.dim() for t in message.tensors), dtype=torch.int64)
        return self.receive_into(numbers, stage, _GRADIENT).tolist()

    def receive_into(self, into: Tensor, stage: int, tag: int) -> Tensor:
        dist.recv(into, group=self._group, group_src=stage, tag=tag)
        return into

    def facts(self, tensors: Sequence[Tensor]) -> Tensor:
        """Strides of `tensors` and this rank's random streams: uint8."""
        facts = json.dumps([tensor.stride() for tensor in tensors]).encode()
        head = torch.frombuffer(bytearray(len(facts).to_bytes(8, "little") + facts), dtype=torch.uint8)
        return torch.cat([head, self.streams.state()])

    def leaving(self, run: Run, tensors: Sequence[Tensor], sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert run.layout is not None
        _refuse_skips(run.layout.messages[run.stage])
        for tensor in tensors:
            _refuse_overlap(tensor)
        state = self.facts(tensors)
        self._send(torch.tensor([state.numel()]), run.stage + 1, _SIZE)
        self._send(state, run.stage + 1, _STATE)
        if not torch.is_grad_enabled():
            return sent
        if self.tied:
            _refuse_used_twice(sent, self.tied)
        crossing = self.crossing
        found = []
        for i, tensor in enumerate(sent):
            if tensor.requires_grad:  # an alias: the hook is to see what comes from the next stage alone
                tensor = torch.ops.aten.alias.default(tensor)
                tensor.register_hook(partial(_lay_out_gradient, crossing, i))
            found.append(tensor)
        return tuple(found)

    def send_gradient(self, message: Message, crossing: Crossing, has_loss: bool, stage: int) -> None:
        """Say of the gradients that `stage` gets whether they are of a loss, and their strides."""
        needed = {i for i, tensor in enumerate(message.tensors) if tensor.requires_grad}
        missing = needed - crossing.received.keys()
        if has_loss and missing and missing < needed:
            raise RuntimeError(
                "a share's loss depends on some of the tensors that a stage of the pipeline got and not on others, "
                "whose layers virtual_ranks cannot give zeros in place of no gradient; use strategy='ddp' or 'fsdp'"
            )
        numbers = [int(has_loss and not missing)]
        for i, tensor in enumerate(message.tensors):
            numbers += crossing.received.get(i, tensor.stride())
        self._send(torch.tensor(numbers), stage, _GRADIENT)

    def receive_gradient(self, message: Message, crossing: Crossing, stage: int) -> bool:
        """Whether the gradients that come from `stage` are of a loss; notes their strides in `crossing`."""
        has_loss, *rest = self.receive_numbers(message, stage)
        for tensor in message.tensors:
            crossing.sent.append(tuple(rest[: tensor.dim()]))
            rest = rest[tensor.dim() :]
        return bool(has_loss)

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        self._works.append((dist.isend(tensor, group=self._group, group_dst=stage, tag=tag), tensor))


# ---- helpers -------------------------------------------------------------------------------------------


class _LaidOut(torch.autograd.Function):
    """A tensor with other strides; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        return _copied(tensor, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return tensor if tensor.stride() == strides else _LaidOut.apply(tensor, strides)


def _copied(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides, of which those that are 0 repeat one element."""
    if tensor.stride() == strides:
        return tensor
    shape = tensor.shape
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return made.as_strided(shape, strides)


def _note_strides(noted: dict[int, tuple[int, ...]], place: int, gradient: Tensor) -> None:
    _refuse_overlap(gradient)
    noted[place] = gradient.stride()


def _lay_out_gradient(crossing: Crossing, place: int, gradient: Tensor) -> Tensor:
    return _copied(gradient, crossing.sent[place])


def _refuse_overlap(tensor: Tensor) -> None:
    """Raise RuntimeError for a tensor of which elements share memory otherwise than by being repeated."""
    end = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride <= end:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that travels between stages of a pipeline overlaps itself "
                    f"(strides {list(tensor.stride())}), which virtual_ranks cannot send as it is; call .contiguous()"
                )
            end += stride * (size - 1)


def _refuse_skips(message: Message) -> None:
    """Raise RuntimeError where a value skips a stage: its gradients would be added in another order."""
    if any(t.is_floating_point() or t.is_complex() for t in message.tensors[len(message.leaves) :]):
        raise RuntimeError(
            "a value that layers of one stage compute, or a parameter beside the layers, is used on a later stage than "
            "the next layer's, where with virtual_ranks its gradients would be added in another order than on one "
            "process; choose split so that all who use it are on one stage, or use strategy='ddp' or 'fsdp'"
        )


def _refuse_used_twice(roots: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Raise RuntimeError where the graph of `roots` uses one of `parameters` several times."""
    wanted, uses = {id(p) for p in parameters}, Counter[int]()
    seen = {t.grad_fn for t in roots if t.grad_fn is not None}
    waiting = list(seen)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in wanted:
                uses[id(variable)] += 1
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    if any(number > 1 for number in uses.values()):
        raise RuntimeError(
            "a parameter that stages of a pipeline share is used several times on one of them, where with "
            "virtual_ranks its gradients would be added in another order than on one process; choose split so that "
            "all who use it are on one stage, or use strategy='ddp' or 'fsdp'"
        )
