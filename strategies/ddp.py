"""A replica of the model on every rank, gradients averaged: torch.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.strategies.base import NO_HOOKS, Capabilities, Loss, StepFn, StepHooks, StepResult
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch.process_group import plain_group
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.side_effect_free import numbers, refuse_changed_numbers, side_effect_free
from lockstep.strategies.modules.unused_parameters import drop_unused, refuse_unused
from lockstep.strategies.single import SingleDevice
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.sync import batch_norm
from lockstep.strategies.sync.buffers import share_buffers


class DDP(SPMDStrategy):
    """Data parallelism: each rank holds the whole model and sees its share of the global batch.

    Gradients are averaged by torch's DDP while the last backward of a window runs; the backwards before
    it exchange nothing.

    `find_unused_parameters`: allow steps in which some parameters get no gradient (walks the graph every step).
    `static_graph`: promise that every step uses the same parameters in the same way. On three and more ranks a resumed
        run then sums its first two gradients in another order than the run that was not stopped.
    `gradient_as_bucket_view`: gradients live in the communication buckets (saves one copy of them).
    `broadcast_buffers`: rank 0's buffers (BatchNorm statistics) overwrite the others' at each forward.
    `sync_batchnorm`: BatchNorm layers compute their statistics over the samples of all ranks, as one process does.
    `bucket_cap_mb`: size of a communication bucket in MiB; None takes torch's default.
    `activation_checkpointing`: compute what lies within blocks again in the backward; True, or which blocks.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    one_rank = SingleDevice
    capabilities = Capabilities(bitwise=True)

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        sync_batchnorm: bool = False,
        bucket_cap_mb: float | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        if find_unused_parameters and static_graph:
            raise ValueError("find_unused_parameters=True contradicts static_graph=True; give one of them")
        self.sync_batchnorm = sync_batchnorm
        self.timeout_s = timeout_s
        self._options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        if not broadcast_buffers:  # renamed in torch 2.13
            renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
            self._options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
        self._first_window = True
        self.shares_buffers, self._stale_buffers = broadcast_buffers, False
        self._synced: list[nn.Module] = []

    def setup_module(self, model: nn.Module) -> nn.Module:
        self._first_window = True
        if self.sync_batchnorm:
            self._synced = batch_norm.synchronize(model)
        return super().setup_module(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.topology.device)
        return Replica(model, self._options)

    def teardown_module(self, wrapped: nn.Module) -> None:
        super().teardown_module(wrapped)
        assert isinstance(wrapped, Replica)
        wrapped.unwrap()
        batch_norm.restore(self._synced)
        self._synced = []

    def forward_backward(
        self, wrapped: nn.Module, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        assert isinstance(wrapped, Replica)
        wrapped.begin_window()
        self._stale_buffers = self.shares_buffers
        result = super().forward_backward(wrapped, step_fn, window, hooks)
        self._first_window = False
        return result

    def evaluate(
        self, wrapped: nn.Module, step_fn: Callable[..., Any], micro_batch: MicroBatch, *args: Any, **options: Any
    ) -> Any:
        if not micro_batch.num_samples and any(layer.training for layer in self._synced):
            raise RuntimeError(
                "a BatchNorm layer is in training mode in an evaluation, and sync_batchnorm=True has it wait for "
                "a rank without samples; call eval() on it"
            )
        if self._stale_buffers:  # DDP shares them at the beginning of a step, so the last step left each rank its own
            share_buffers(wrapped.modules())
            self._stale_buffers = False
        return super().evaluate(wrapped, step_fn, micro_batch, *args, **options)

    def extra_state(self, wrapped: nn.Module) -> dict[str, Any]:
        assert isinstance(wrapped, Replica)
        return {"bucket_order": wrapped.bucket_order()}

    def load_extra_state(self, wrapped: nn.Module, saved: dict[str, Any]) -> None:
        assert isinstance(wrapped, Replica)
        if isinstance(order := saved.get("bucket_order"), list):
            wrapped.lay_out(order)

    def run_step(self, wrapped: nn.Module, step_fn: StepFn) -> StepFn:
        return functools.partial(wrapped, step_fn)

    def run_padding(self, wrapped: nn.Module, step_fn: StepFn) -> StepFn:
        """The step without effect, for the collectives that it calls, and a loss of zero."""
        assert isinstance(wrapped, Replica)
        if self._synced:
            return self._run_synced_padding(wrapped, step_fn)
        model, stand_in = wrapped.model, functools.partial(wrapped, None)

        def without_weight(batch: Any, batch_idx: int) -> Any:
            if batch is None:  # a dataset that shards itself had nothing for this rank
                return stand_in(batch, batch_idx)
            before = numbers(model)
            with side_effect_free(model), self._step_hooks.log_scope(0):
                step_fn(batch, batch_idx)
                refuse_changed_numbers(model, before)
            return stand_in(batch, batch_idx)

        return without_weight

    def _run_synced_padding(self, wrapped: Replica, step_fn: StepFn) -> StepFn:
        """The step without effect, with its backward: BatchNorm layers exchange sums there too."""
        statistics: list[tuple[torch.Tensor, torch.Tensor]] = []

        def step(batch: Any, batch_idx: int) -> Any:
            output = step_fn(batch, batch_idx)
            statistics[:] = batch_norm.statistics(self._synced)
            return output

        run = super().run_padding(wrapped, step)

        def without_weight(batch: Any, batch_idx: int) -> Any:
            if batch is None:
                raise RuntimeError(
                    "a rank has no batch in a step, as the dataset shards itself, and sync_batchnorm=True needs one on "
                    "every rank; give every rank as many batches, or sync_batchnorm=False"
                )
            with batch_norm.without_samples(self._synced):
                output = run(batch, batch_idx)
            for buffer, value in statistics:
                buffer.data.copy_(value)
            wrapped.stand_in()
            return output

        return without_weight

    def set_gradient_sync(self, wrapped: nn.Module, on: bool) -> None:
        assert isinstance(wrapped, Replica)
        if wrapped.ddp is not None:
            # What DDP.no_sync does. With static_graph the whole first window must be exchanged: torch records
            # the graph in it and asserts otherwise.
            wrapped.ddp.require_backward_grad_sync = on or (self._first_window and self._options["static_graph"])

    def end_backward(self, wrapped: nn.Module) -> None:
        assert isinstance(wrapped, Replica)
        wrapped.check_reduced()

    def finish_gradients(self, wrapped: nn.Module) -> None:
        changed = self._changes.trainability() if self._changes is not None else []
        if changed:
            raise RuntimeError(
                f"requires_grad was changed within a step ({shortened(changed)}), after DDP had begun to reduce the "
                "gradients of "
                "the others; change it in a hook such as on_train_batch_start"
            )
        control = self._agreement
        assert isinstance(wrapped, Replica)
        asks = wrapped.used is not None
        if asks and control is not None and control.first_rank(wrapped.stood_in) is not None:
            wrapped.drop_unused()

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        assert isinstance(wrapped, Replica)
        return wrapped.model

    def trainability_changed(self, wrapped: nn.Module, names: list[str]) -> None:
        assert isinstance(wrapped, Replica)
        wrapped.wrap(init_sync=False)
        self._first_window = True


class Replica(nn.Module):
    """The user's model with torch's DDP around its step, which is built again when other parameters are to be
    trained."""

    ddp: DistributedDataParallel | None = None
    """None if no parameter is trained: DDP refuses such a model, and nothing is to be reduced."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.used: set[int] | None = set() if options["find_unused_parameters"] or options["static_graph"] else None
        """Which parameters the backwards of this window reached on this rank, if a step may leave some out."""
        self.stood_in = False
        """Whether this rank ran a backward of zeros through every parameter in this window."""
        self._ddp_options = options
        self._trained: dict[str, nn.Parameter] = {}
        self._watches: list[Any] = []
        self._reduced = True
        self._stands_in = False
        self._order: list[int] = []
        """Ids of the parameters as they are in DDP's buckets, as far as they have been seen."""
        self._order_is_known = False
        self.wrap()

    def wrap(self, **options: Any) -> None:
        """Build DDP for the parameters that are trained now. Every rank calls it."""
        self.unwrap()
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._order, self._order_is_known = [], False
        if not self._trained:
            return
        group = plain_group() if dist.get_debug_level() == dist.DebugLevel.DETAIL else None
        ddp = DistributedDataParallel(_Step(self), process_group=group, **self._ddp_options, **options)
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
        sparse = {
            id(layer.weight) for layer in self.model.modules() if isinstance(layer, nn.Embedding) and layer.sparse
        }
        sums = []
        with torch.enable_grad():
            for name in reversed(order):  # autograd works on what was computed last first
                used: torch.Tensor = self._trained[name]
                if id(used) in sparse:
                    used = F.embedding(torch.zeros(1, dtype=torch.int64, device=used.device), used, sparse=True)
                sums.append((torch.view_as_real(used) if used.is_complex() else used).sum().float())
            zero = torch.stack(sums).sum() * 0
            self.ddp.require_backward_grad_sync = True
            self.ddp(lambda *_: zero, None, 0).backward()
        for parameter in self._trained.values():
            parameter.grad = None
        self.bucket_order()

    def begin_window(self) -> None:
        self._reduced, self.stood_in = False, False
        if self.used is not None:
            self.used.clear()

    def loss(self, output: Any) -> Any:
        """What the step returned; in place of None zero through every parameter, as DDP reduces in the backward."""
        self._stands_in = output is None
        if output is not None:
            return output
        self.stood_in = True
        sums = [torch.view_as_real(p).sum() if p.is_complex() else p.sum() for p in self._trained.values()]
        return Loss(torch.stack(sums).sum() * 0, 0)

    def stand_in(self) -> None:
        """The backward that follows is of zeros."""
        self.stood_in = self._stands_in = True

    def check_reduced(self) -> None:
        """Raise RuntimeError if the last backward left parameters without a gradient, for which the others may wait."""
        if self._reduced or self.ddp is None:
            return
        unused = [name for name, p in self._trained.items() if p.grad is None]
        try:
            # says which parameters are missing, also if an earlier backward had them
            self.ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            unused = [list(self._trained)[int(i)] for i in found.group(1).split()] if found else unused
        refuse_unused(unused, "DDP")

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
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

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
