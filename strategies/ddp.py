"""A replica of the model on every rank, gradients summed: torch.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Capabilities, StepFn, StepHooks, StepResult
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch.rng import OptimizerDraws
from lockstep.strategies.losses import counting_nothing, reached_by
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.model_changes import changed_within_window, partial_gradient, prepared, shortened
from lockstep.strategies.modules.side_effect_free import numbers, refuse_changed_numbers, side_effect_free
from lockstep.strategies.modules.unused_parameters import refuse_unstepped
from lockstep.strategies.optimizers.probe import is_plain
from lockstep.strategies.replica import Replica
from lockstep.strategies.single import SingleDevice
from lockstep.strategies.spmd import SPMDStrategy
from lockstep.strategies.sync import batch_norm
from lockstep.strategies.sync.all_reduce import ALGORITHMS, AllReduce
from lockstep.strategies.sync.buffers import SharedBuffers, share_buffers, share_model, shared
from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.compression.names import REFUSES, compressor
from lockstep.strategies.sync.step_agreement import StepAgreement


class DDP(SPMDStrategy[Replica]):
    """Data parallelism: each rank holds the whole model and sees its share of the global batch.

    Gradients are summed by torch's DDP while the last backward of a window runs; the backwards before
    it exchange nothing.

    `find_unused_parameters`: allow steps in which some parameters get no gradient (walks the graph every step).
    `static_graph`: promise that every step uses the same parameters in the same way. On three and more ranks a resumed
        run then sums its first two gradients in another order than the run that was not stopped.
    `gradient_as_bucket_view`: True: gradients live in the communication buckets, which saves the memory of one copy of
        them; the next backward overwrites a gradient that an optimizer or a hook has kept.
    `broadcast_buffers`: True: rank 0's buffers overwrite the others' after each step; None: the same, but buffers that
        differ between ranks are refused, apart from statistics of BatchNorm and InstanceNorm; False: each rank keeps
        its own.
    `sync_batchnorm`: BatchNorm layers compute their statistics over the samples of all ranks, as one process does.
    `bucket_cap_mb`: size of a communication bucket in MiB; None takes torch's default.
    `activation_checkpointing`: recompute the blocks' activations in the backward; True, or which blocks.
    `compress`: send gradients in fewer bytes, which changes the method: "fp16", "bf16", "int8", "powersgd=4" (its
        rank), "topk=0.01" and "randomk=0.01" (the share of elements), "topk=0.01,warmup=100" (more in the first
        steps), "topk=0.01,momentum=0.9" (momentum correction), "powersgd=4,start=100" (all in the first steps),
        "qsgd=4" (bits), "terngrad", "sign", or a Compressor. What is not sent is added to the next gradient.
        See docs/methods/compression.md.
    `all_reduce`: how gradients are summed: "auto", by the engine (gloo, NCCL); or by messages between two ranks,
        "ring", "halving_doubling", "tree" or "hierarchical" (within nodes first). See docs/methods/all-reduce.md.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    capabilities = Capabilities(bitwise=True)
    meets_to_retrain = True

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool | None = None,
        sync_batchnorm: bool = False,
        bucket_cap_mb: float | None = None,
        activation_checkpointing: bool | Rule = False,
        compress: str | Compressor | None = None,
        all_reduce: Literal["auto", "ring", "halving_doubling", "tree", "hierarchical"] = "auto",
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        if find_unused_parameters and static_graph:
            raise ValueError("find_unused_parameters=True contradicts static_graph=True; give one of them")
        self.one_rank = SingleDevice if compress is None else None
        self.sync_batchnorm = sync_batchnorm
        self.timeout_s = timeout_s
        self._options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        # The engine would broadcast them before the step, and a rank without samples after it. Renamed in torch 2.13.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
        self._options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
        self._first_window = True
        self._optimizers: Collection[Optimizer] = ()
        self.broadcast_buffers = broadcast_buffers
        self._synced: list[nn.Module] = []
        self._draws: list[OptimizerDraws] = []
        if all_reduce != "auto" and (all_reduce not in ALGORITHMS or compress is not None):
            raise ValueError(
                f"all_reduce={all_reduce!r} contradicts compress, which exchanges gradients itself; give one of them"
                if all_reduce in ALGORITHMS
                else f"all_reduce must be one of auto, {', '.join(ALGORITHMS)}, but all_reduce={all_reduce!r}"
            )
        self.all_reduce_by: str = all_reduce
        self._all_reduce: AllReduce | None = None
        if compress is not None:
            self.compressor = compressor(compress)
            if static_graph:
                raise ValueError("static_graph=True concerns torch's reduction, which compress replaces; remove it")
            self.capabilities = Capabilities(bitwise=True, exact=False, refuses=REFUSES)

    def setup_module(self, model: nn.Module) -> Replica:
        self._first_window = True
        if self.sync_batchnorm:
            self._synced = batch_norm.synchronize(model)
        return super().setup_module(model)

    def wrap(self, model: nn.Module) -> Replica:
        model = model.to(self.topology.device)
        share_buffers(model.modules(), caches=True)
        if self.compressor is None:
            if self.all_reduce_by != "auto":
                _refuse_sparse(model, f"all_reduce={self.all_reduce_by!r}")
                self._all_reduce = AllReduce(self.all_reduce_by, self.topology.node_rank, self.topology.device)
            return Replica(model, self._options, all_reduce=self._all_reduce)
        _refuse_sparse(model, "compress")
        share_model(model)
        return Replica(model, self._options, reduces=False)

    def setup_optimizers(self, wrapped: Replica, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        self._optimizers = optimizers.values()
        self._buffers = SharedBuffers(wrapped.model, self.broadcast_buffers)
        if optimizers:
            self._wrap_stepped(wrapped)
        optimizers = super().setup_optimizers(wrapped, optimizers)
        if self.topology.world_size > 1 and not self.virtual_ranks:  # whose steps draw alike
            tried = [optimizer for optimizer in optimizers.values() if not is_plain(optimizer)]
            self._draws = [OptimizerDraws(each, self.broadcast, self.topology.rank == 0) for each in tried]
        return optimizers

    def _wrap_stepped(self, wrapped: Replica) -> None:
        """Let DDP wait for the gradients of what the optimizers step now."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        if wrapped.wrap_stepped({id(p) for group in groups for p in group["params"]}):
            self._first_window = True

    def teardown(self) -> None:
        self._optimizers, self._buffers = (), None
        while self._draws:
            self._draws.pop().close()
        if self._all_reduce is not None:
            self._all_reduce.close()
            self._all_reduce = None
        super().teardown()

    def teardown_module(self, wrapped: Replica) -> None:
        super().teardown_module(wrapped)
        wrapped.unwrap()
        batch_norm.restore(self._synced)
        self._synced = []

    def forward_backward(
        self, wrapped: Replica, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        if wrapped.unstepped:
            self._wrap_stepped(wrapped)
        wrapped.begin_window()
        for draws in self._draws:
            draws.leave()
        if hooks.whole_gradients and self.topology.data_size > 1:
            if len(window.micro_batches) > 1 and self.compressor is not None:
                raise partial_gradient("compress sends the gradient of a whole step")
            hooks = wrapped.sum_each(hooks, len(window.micro_batches))
        elif self._first_window and self._options["static_graph"] and hooks.automatic:
            hooks = wrapped.sum_each(hooks, len(window.micro_batches))  # which is what DDP does in it
        hooks = hooks._replace(prepare=functools.partial(prepared, hooks=hooks, changes=self._changes))
        with shared(self._buffers, window, self.name):
            result = super().forward_backward(wrapped, step_fn, window, hooks)
        self._first_window, wrapped.micro_batches = False, 0
        return result

    def evaluate(
        self, wrapped: Replica, step_fn: Callable[..., Any], micro_batch: MicroBatch, *args: Any, **options: Any
    ) -> Any:
        if not micro_batch.num_samples and any(layer.training for layer in self._synced):
            raise RuntimeError(
                "a BatchNorm layer is in training mode in an evaluation, and sync_batchnorm=True has it wait for "
                "a rank without samples; call eval() on it"
            )
        return super().evaluate(wrapped, step_fn, micro_batch, *args, **options)

    def extra_state(self, wrapped: Replica) -> dict[str, Any]:
        return {"bucket_order": wrapped.bucket_order()}

    def load_extra_state(self, wrapped: Replica, saved: dict[str, Any]) -> None:
        if wrapped.unstepped:  # groups that the saved run added
            self._wrap_stepped(wrapped)
        if isinstance(order := saved.get("bucket_order"), list):
            wrapped.lay_out(order)

    def run_step(self, wrapped: Replica, step_fn: StepFn) -> StepFn:
        return functools.partial(wrapped, batch_norm.with_loss(step_fn, self._synced) if self._synced else step_fn)

    def run_padding(self, wrapped: Replica, step_fn: StepFn) -> StepFn:
        """The step without effect, for the collectives that it calls, and a loss of zero."""
        if self._synced:
            return self._run_synced_padding(wrapped, step_fn)
        model, stand_in = wrapped.model, functools.partial(wrapped, None)
        # torch compares the graph of a step with that of the first, which zero through every parameter is not
        in_full = super().run_padding(wrapped, step_fn) if self._options["static_graph"] else None

        def without_weight(batch: Any, batch_idx: int) -> Any:
            if batch is None:  # no rank has one
                return stand_in(batch, batch_idx)
            if in_full is not None:
                return in_full(batch, batch_idx)
            wrapped.bucket_order()  # which DDP settles on the others before code of the user calls a collective
            before = numbers(model)
            with side_effect_free(model), self._step_hooks.log_scope(0):
                output = step_fn(batch, batch_idx)
                if self._step_hooks.backward is not None:
                    reached_by(self._step_hooks.backward, output, model)
                refuse_changed_numbers(model, before)
            loss = stand_in(batch, batch_idx)
            return counting_nothing(output, None if loss is None else loss.total)

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
            if batch is None:  # no rank has one
                return wrapped(None, batch, batch_idx)
            with batch_norm.without_samples(self._synced):
                output = run(batch, batch_idx)
            for buffer, value in statistics:
                buffer.data.copy_(value)
            wrapped.stand_in()
            return output

        return without_weight

    def set_gradient_sync(self, wrapped: Replica, on: bool) -> None:
        wrapped.begin_micro_batch()
        if wrapped.ddp is not None:
            # What DDP.no_sync does. With static_graph the whole first window must be exchanged: torch records
            # the graph in it and asserts otherwise, and makes its buckets again in a forward.
            self._forward_writes = self._first_window and self._options["static_graph"]
            wrapped.ddp.require_backward_grad_sync = on or self._forward_writes

    def end_backward(self, wrapped: Replica) -> None:
        wrapped.check_reduced()

    def finish_gradients(self, wrapped: Replica) -> None:
        changed = self._changes.trainability() if self._changes is not None else []
        if changed:
            raise RuntimeError(
                f"requires_grad was changed within a step ({shortened(changed)}), after DDP had begun to reduce the "
                "gradients of "
                "the others; change it in a hook such as on_train_batch_start"
            )
        control = self._agreement
        if wrapped.unstepped and control is not None:
            self._refuse_unstepped(wrapped, control)
        asks = wrapped.used is not None
        if asks and control is not None and control.first_rank(wrapped.stood_in) is not None:
            wrapped.drop_unused()
        if self._compression is not None:
            self._compression.reduce_into(self._watched, [[p.grad for p in self._watched]], 1.0)

    def _refuse_unstepped(self, wrapped: Replica, agreement: StepAgreement) -> None:
        """Raise ValueError, on all ranks, if one has a gradient of a parameter that no optimizer steps, which DDP has
        not reduced."""
        reached = wrapped.reached()
        first = agreement.first_rank(bool(reached))
        if first is not None:
            refuse_unstepped(self.broadcast(reached, first))

    def unwrap(self, wrapped: Replica) -> nn.Module:
        return wrapped.model

    def trainability_changed(self, wrapped: Replica, names: list[str]) -> None:
        if not self._step_hooks.automatic:  # each backward of the user's own is summed by itself
            return
        if wrapped.micro_batches:
            raise changed_within_window(names, "DDP")
        wrapped.wrap(init_sync=False)
        self._first_window = True


def _refuse_sparse(model: nn.Module, option: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{name or type(model).__name__} has sparse=True, and {option} sends dense gradients; give it "
                f"sparse=False and an optimizer of dense gradients, or remove {option}"
            )
