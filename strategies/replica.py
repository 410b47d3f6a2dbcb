"""A rank's replica of the model, with torch's DDP around its step."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.strategies.base import StepFn, StepHooks
from lockstep.strategies.launch.process_group import plain_group
from lockstep.strategies.losses import StandIn, detach, has_loss
from lockstep.strategies.modules.model_changes import gradient_marks, partial_gradient, remarked
from lockstep.strategies.modules.unused_parameters import drop_unused, refuse_unstepped, refuse_unused
from lockstep.strategies.sync.all_reduce import AllReduce
from lockstep.strategies.sync.collectives import sum_gradients


class Replica(nn.Module):
    """The user's model with torch's DDP around its step, which is built again when other parameters are to be
    trained."""

    ddp: DistributedDataParallel | None = None
    """None if it is not to reduce anything: no parameter is trained, which DDP refuses, or gradients are compressed."""

    def __init__(
        self, model: nn.Module, options: Mapping[str, Any], reduces: bool = True, all_reduce: AllReduce | None = None
    ) -> None:
        super().__init__()
        self.model = model
        watches = options["find_unused_parameters"] or options["static_graph"]
        self.used: set[int] | None = set() if watches and reduces else None
        """Which parameters the backwards of this window reached on this rank, if a step may leave some out."""
        self.stood_in = False
        """Whether this rank ran a backward of zeros through every parameter in this window."""
        self._ddp_options = options
        self._reduces = reduces
        self._all_reduce = all_reduce
        self._trained: dict[str, nn.Parameter] = {}
        self.unstepped: dict[str, nn.Parameter] = {}
        """The trainable parameters that no optimizer steps, such as those of a target network: DDP does not wait for
        their gradients."""
        self._marks: list[int | None] = []
        self._watches: list[Any] = []
        self._reduced = True
        self._stands_in = False
        self._sums_each = self._has_run = False
        self.micro_batches = 0
        """Micro-batches of the running window that have begun."""
        self._aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._order: list[int] = []
        """Ids of the parameters as they are in DDP's buckets, as far as they have been seen."""
        self._order_is_known = False
        self.wrap()

    def wrap(self, **options: Any) -> None:
        """Build DDP for the parameters that are trained now. Every rank calls it."""
        self.unwrap()
        self.unstepped = {name: p for name, p in self.unstepped.items() if p.requires_grad}
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._trained = {name: p for name, p in trained.items() if name not in self.unstepped}
        self._order, self._order_is_known = [], False
        if not self._trained or not self._reduces:
            return
        group = plain_group() if dist.get_debug_level() == dist.DebugLevel.DETAIL else None
        try:
            for parameter in self.unstepped.values():  # DDP reduces what requires a gradient now
                parameter.requires_grad_(False)
            ddp = DistributedDataParallel(_Step(self), process_group=group, **self._ddp_options, **options)
        finally:
            for parameter in self.unstepped.values():
                parameter.requires_grad_(True)
        ddp.register_comm_hook(group, lambda state, bucket: self._sum(state, bucket))  # torch compares annotations
        self.__dict__["ddp"] = ddp  # no submodule: its parameters are the model's
        if self.used is not None:
            self._watches = [p.register_post_accumulate_grad_hook(self._mark) for p in self._trained.values()]

    def unwrap(self) -> None:
        """Take DDP off the model."""
        self.__dict__.pop("ddp", None)
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def forward(self, step_fn: StepFn | None, batch: Any, batch_idx: int) -> Any:
        """The user's step, through DDP; None stands for a step without a loss."""
        if self.ddp is not None:
            return self.ddp(step_fn, batch, batch_idx)
        return None if step_fn is None else step_fn(batch, batch_idx)

    def wrap_stepped(self, stepped: Collection[int]) -> bool:
        """Let DDP wait for the gradients of parameters with these ids only; whether that changed anything. Every rank
        calls it."""
        unstepped = {name: p for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in stepped}
        changed = unstepped.keys() != self.unstepped.keys()
        if changed:
            self.unstepped = unstepped
            self.wrap(init_sync=False)
        return changed

    def bucket_order(self) -> list[str] | None:
        """The trained parameters in the order in which they are in DDP's buckets; None before a step has settled it.

        DDP lays its buckets out again after the first step, by the order in which gradients came, and sums of more than
        two ranks depend in their last bit on where in a bucket a gradient lies. Every rank calls it.
        """
        if self.ddp is None:
            return None
        if not self._order_is_known and self.ddp.reducer._rebuild_buckets():  # else the next forward would
            self.ddp._has_rebuilt_buckets = True
            self._order = [
                id(p) for bucket in self.ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()
            ]
            self._order_is_known = True
        names = {id(p): name for name, p in self._trained.items()}
        return [names[key] for key in self._order] if self._order_is_known else None

    def lay_out(self, order: list[str]) -> None:
        """Give DDP the buckets of a run that is resumed, by a backward of zeros in which gradients come in this order.

        Every rank calls it, before the first step. Does nothing if other parameters are trained now, and with
        find_unused_parameters (DDP keeps its buckets) or static_graph (the backward would be taken for the graph).
        """
        if self.ddp is None or self.used is not None or self._order_is_known or set(order) != set(self._trained):
            return
        with torch.enable_grad():
            zero = self._zero_of([self._trained[name] for name in reversed(order)])  # autograd begins with the last
            self.ddp.require_backward_grad_sync = True
            self.ddp(lambda *_: zero, None, 0).backward()
        for parameter in self._trained.values():
            parameter.grad = None
        self.bucket_order()

    def begin_window(self) -> None:
        self._reduced, self.stood_in, self._sums_each, self.micro_batches = False, False, False, 0
        self._marks = gradient_marks(self.unstepped.values())
        if self.used is not None:
            self.used.clear()

    def reached(self) -> list[str]:
        """The names of parameters that got a gradient in this window on this rank, though no optimizer steps them."""
        return remarked(self.unstepped.items(), self._marks)

    def sum_each(self, hooks: StepHooks, number: int) -> StepHooks:
        """Let a hook see after each of `number` micro-batches the gradient of all ranks so far, not of this one only.

        What micro-batches before have left is put aside, so that DDP reduces the last one's only.
        """
        self._sums_each = number > 1
        return hooks._replace(before_backward=functools.partial(self._begin_loss, hooks), after_loss=self._end_loss)

    def begin_micro_batch(self) -> None:
        self._has_run, self.micro_batches = False, self.micro_batches + 1
        if self._sums_each:
            in_buckets = self.ddp is not None and self.ddp.require_backward_grad_sync  # which DDP writes to again
            gradients = ((p, p.grad) for p in self._trained.values())
            self._aside = [(p, g.clone() if in_buckets and g is not None else g) for p, g in gradients]
            for parameter in self._trained.values():
                parameter.grad = None

    def _begin_loss(self, hooks: StepHooks, loss: torch.Tensor) -> None:
        if self._has_run and not hooks.whole_gradients:
            raise RuntimeError(
                "training_step returns several losses, and static_graph=True takes the graph of the first for that of "
                "the step; add the losses, or remove static_graph"
            )
        if self._has_run:
            raise partial_gradient("DDP reduces the gradients of several losses together")
        self._has_run = True
        if hooks.before_backward is not None:
            hooks.before_backward(loss)

    @torch.no_grad()
    def _end_loss(self) -> None:
        if not self._sums_each:
            return
        if self.ddp is not None and not self.ddp.require_backward_grad_sync:  # else DDP has summed them
            sum_gradients(list(self._trained.values()))
        for parameter, gradient in self._aside:
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)
        self._aside = []

    def loss(self, output: Any) -> Any:
        """What the step returned; in place of no loss zero through every parameter, as DDP reduces in the backward."""
        self._stands_in = not has_loss(output)
        if not self._stands_in:
            return output
        self.stood_in = True
        standing = StandIn(self._zero_of(self._trained.values()), 0)
        standing.returned = detach(output)
        return standing

    def _zero_of(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """Zero, with a gradient of each parameter of the kind that its layer gives."""
        sparse = {
            id(layer.weight)
            for layer in self.model.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        }
        sums = []
        for parameter in parameters:
            used: torch.Tensor = parameter
            if id(used) in sparse:
                rows = torch.zeros(0, dtype=torch.int64, device=used.device)  # of none: SparseAdam steps rows of zeros
                used = F.embedding(rows, used, sparse=True)
            sums.append((torch.view_as_real(used) if used.is_complex() else used).sum().float())
        return torch.stack(sums).sum() * 0

    def stand_in(self) -> None:
        """The backward that follows is of zeros."""
        self.stood_in = self._stands_in = True

    def check_reduced(self) -> None:
        """Raise RuntimeError if the last backward left parameters without a gradient, for which the others may wait."""
        if self._reduced or self.ddp is None:
            return
        if reached := self.reached():
            refuse_unstepped(reached)
        unused = [name for name, p in self._trained.items() if p.grad is None]
        try:
            # says which parameters are missing, also if an earlier backward had them
            self.ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            unused = [list(self._trained)[int(i)] for i in found.group(1).split()] if found else unused
        refuse_unused(unused)

    @torch.no_grad()
    def drop_unused(self) -> None:
        """Leave no gradient, in place of zeros, to parameters that no rank has used. Every rank calls it."""
        assert self.used is not None
        used = torch.tensor([id(p) in self.used for p in self._trained.values()], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        drop_unused(self._trained.values(), used.tolist())

    def _sum(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: the sum over ranks, where DDP by itself takes the mean."""
        self._reduced = self._reduced or bucket.is_last()
        if not self._order_is_known and self.ddp is not None and self.ddp._has_rebuilt_buckets:
            self._order += map(id, bucket.parameters())
            self._order_is_known = bucket.is_last()
        if self._all_reduce is not None:
            return self._all_reduce(bucket.buffer())
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer, group=group, async_op=True)  # the group of a planned run returns None
        return work.get_future().then(lambda future: buffer if future.value() is None else future.value()[0])

    def _mark(self, parameter: torch.Tensor) -> None:
        if not self._stands_in:
            self.used.add(id(parameter))  # type: ignore[union-attr]


class _Step(nn.Module):
    """What DDP wraps: a module whose forward is a training step, so that DDP brackets the step and nothing is
    patched."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.model = replica.model
        self._loss = replica.loss

    def forward(self, step_fn: StepFn | None, batch: Any, batch_idx: int) -> Any:
        output = None if step_fn is None else step_fn(batch, batch_idx)
        return self._loss(output)
