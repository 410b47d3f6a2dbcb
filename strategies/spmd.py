"""What the strategies share in which every rank runs the user's step itself and autograd walks back through it.

A strategy of this kind says how it places a model (`setup_module`) and, where ranks see different samples, how
their gradients meet; the weights of the mean, clipping, stepping, collectives and state are here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import (
    NO_HOOKS,
    Loss,
    StepHooks,
    StepResult,
    StepVote,
    Strategy,
    Topology,
    split_loss,
)
from lockstep.strategies.checkpoint_state import Reader, State, TensorShard, gather_state, restore_state
from lockstep.strategies.data.sharded_loader import MicroBatch, ShardedLoader, Window
from lockstep.strategies.launch import environment, watchdog
from lockstep.strategies.launch import fault_injection as faults
from lockstep.strategies.launch import launcher as processes
from lockstep.strategies.modules import finite
from lockstep.strategies.modules.activation_checkpointing import is_recomputed, keep, recompute
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.fused import allow_sparse, fuse, leaves_out
from lockstep.strategies.modules.model_changes import (
    ModelChanges,
    gradient_marks,
    own_backward,
    refuse_max_norm,
    remarked,
)
from lockstep.strategies.modules.parameter_hooks import ParameterHooks
from lockstep.strategies.precision import Precision, dtype_of
from lockstep.strategies.sync.step_agreement import StepAgreement

T = TypeVar("T")

_GRADIENT, _EXISTS = operator.attrgetter("grad"), functools.partial(operator.is_not, None)


class SPMDStrategy(Strategy):
    """Base of the strategies whose ranks run the user's step in eager mode.

    `activation_checkpointing`: True computes what lies within a block again in the backward, in place of keeping it,
        for the blocks that `find_blocks` takes by itself; a class, a name, a list of them or a function says which.
    """

    single_process = False
    """True where one process is all there ever is."""
    needs_group = False
    """True where even one rank needs a process group, as the engine asks for one."""
    max_devices: int | None = None
    """The most devices that the strategy can use on a node, or None for all."""
    cuts_gradients = False
    """True where ranks hold different parts of the gradient, so that one cannot see whether all of it is finite."""
    sees_whole_gradients = False
    """True where each backward leaves the whole gradient of its loss in whole parameters, as a plain loop does."""
    timeout_s = 1800.0
    """How long a collective may wait for the other ranks, in seconds."""

    def __init__(self, *, activation_checkpointing: bool | Rule = False) -> None:
        if isinstance(activation_checkpointing, (int, float)) and not isinstance(activation_checkpointing, bool):
            raise ValueError(
                f"activation_checkpointing must be True, False or say which blocks, but activation_checkpointing={activation_checkpointing!r}"
            )
        self.activation_checkpointing: bool | Rule = (
            "auto" if activation_checkpointing is True else activation_checkpointing
        )
        self.precision = Precision()
        self._num_devices = 1
        self._num_nodes = 1
        self._keeps_mesh = False
        self._accelerator = "cpu"
        self._ready = self._in_group = False
        self._copies: torch.cuda.Stream | None = (
            None  # on which batches come to a GPU, beside what that still computes of the step before
        )
        self._agreement: StepAgreement | None = None
        self._parameter_hooks = ParameterHooks()
        self._changes: ModelChanges | None = None
        self._trained: set[str] = set()
        self._local: set[int] = set()
        self._reduced: set[int] = set()
        self._scaler_used = False
        self._skipped: Callable[[], str | None] | None = None
        self._unscaled: set[int] = set()
        self._steps_on_host = False
        self._looks = False
        self._left_out: Tensor | None = None
        self._watched: list[nn.Parameter] = []
        self._end_watchdog: Callable[[], None] = _nothing

    # ---- 1. processes and devices ----------------------------------------------------------------

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> None:
        self.precision = Precision(precision)
        self._accelerator = resolve_accelerator(accelerator)
        self._num_nodes = num_nodes
        self._num_devices = resolve_devices(devices, self._accelerator, self.max_devices)
        faults.parse(os.environ)
        watchdog.limit_s()
        self._keeps_mesh = not self.single_process and environment.forces_mesh()
        world = environment.detect()
        name = type(self).__name__
        if world is None:
            if num_nodes != 1:
                raise ValueError(
                    f"num_nodes={num_nodes} needs a launcher that starts the ranks on every node, such as torchrun --nnodes={num_nodes}; none was found"
                )
            return
        if self.single_process and world.world_size > 1:
            raise ValueError(
                f"strategy {name} runs on one process, but {world.launcher} started {world.world_size}; use strategy='ddp' or start one process"
            )
        if not self.single_process and devices != "auto" and self._num_devices != world.local_world_size:
            raise ValueError(
                f"devices={devices} contradicts {world.launcher}, which started {world.local_world_size} ranks on this node; "
                "give the same number or devices='auto'"
            )
        if num_nodes not in (1, world.num_nodes):
            raise ValueError(
                f"num_nodes={num_nodes} contradicts {world.launcher}, which runs on {world.num_nodes} nodes; give the same number or leave it out"
            )

    @property
    def starts_ranks(self) -> bool:  # type: ignore[override]
        return not self.single_process and self._num_devices > 1 and environment.detect() is None

    def launch(self, fn: Callable[..., T], *args: Any) -> T:
        if not self.starts_ranks:
            return fn(*args)
        return processes.launch(fn, args, self._num_devices)

    def setup(self) -> Topology:
        world = None if self.single_process else environment.detect()
        device = torch.device(self._accelerator)
        if self._accelerator == "cuda":
            device = torch.device("cuda", device_index(world, torch.cuda.device_count()))
        self.topology = Topology(device=device)
        if world is not None:
            self.topology = Topology(
                rank=world.rank,
                local_rank=world.local_rank,
                world_size=world.world_size,
                node_rank=world.node_rank,
                num_nodes=world.num_nodes,
                device=device,
                data_rank=world.rank,
                data_size=world.world_size,
            )
        self._ready = True
        faults.load(self.topology.rank)
        if self.topology.device.type == "cuda":
            torch.cuda.set_device(self.topology.device)
            self._copies = torch.cuda.Stream()
        self._on_cpu = self.topology.device.type == "cpu"
        self._found, self._one = (
            make((), dtype=torch.float32, device=self.topology.device) for make in (torch.zeros, torch.ones)
        )
        self.precision.setup(self.topology.device)
        self._in_group = self.topology.world_size > 1 or self._keeps_mesh or self.needs_group
        if self._in_group:
            if self.topology.world_size == 1:
                world = None  # a group of one meets nobody
            elif world is not None and world.launcher != "lockstep":
                self._end_watchdog = processes.guard(self.topology.rank)
            backend = "cpu:gloo,cuda:nccl" if self.topology.device.type == "cuda" else "gloo"
            processes.init_process_group(world, backend, self.timeout_s, self.topology.device)
            self._agreement = StepAgreement(self.topology.rank, self.topology.world_size, self.timeout_s)
        return self.topology

    def teardown(self) -> None:
        if not self._ready:
            return
        faults.fault("teardown")
        faults.unload()
        self._end_watchdog()
        self._end_watchdog = _nothing
        self._ready = self._in_group = False
        if self._agreement is not None:
            self._agreement.close()
        self._agreement = None
        self._scaler_used = self._looks = self._steps_on_host = False
        self._unscaled.clear()
        self._local, self._reduced = set(), set()
        self._left_out, self._watched, self._copies = None, [], None
        if self._changes is not None:
            self._changes.close()
            self._changes = None
        self.precision.teardown()
        processes.destroy_process_group()

    @abstractmethod
    def setup_module(self, model: nn.Module) -> nn.Module:
        """What all strategies do to a model: its dtype and its recomputed blocks. One of them calls this and places what it returns."""
        keep(model)  # a run that failed may have left some
        refuse_max_norm(model, self.topology.data_size, type(self).__name__)
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._parameter_hooks = ParameterHooks()
        self._parameter_hooks.take(model.named_parameters())
        if self.activation_checkpointing is not False:
            recompute(model, self.activation_checkpointing)  # type: ignore[arg-type]
        return self.precision.convert(model)

    def teardown_module(self, wrapped: nn.Module) -> None:
        model = self._user_model(wrapped)
        keep(model)
        self._parameter_hooks.put_back(model.named_parameters())

    def setup_optimizers(self, wrapped: nn.Module, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        if self.activation_checkpointing is not False and not any(map(is_recomputed, wrapped.modules())):
            raise RuntimeError(
                f"activation_checkpointing has no effect, as {type(self).__name__}.setup_module does not place what super().setup_module(model) returns"
            )
        if self.precision.scaler is not None:
            for optimizer in optimizers.values():
                optimizer.register_step_pre_hook(self._mark_step)
        if self.topology.device.type == "cuda":
            for optimizer in optimizers.values():
                fuse(optimizer)
                parameters = (p for group in optimizer.param_groups for p in group["params"])
                self._steps_on_host |= any(p.device.type == "cpu" for p in parameters)
        # Walking through the modules in each step would cost more than the check of the gradients.
        self._watched = list(wrapped.parameters())
        self._watch_changes(wrapped)
        return optimizers

    def _watch_changes(self, wrapped: nn.Module) -> None:
        """From here on `adopt_changes` takes over what user code changes."""
        if self._changes is not None:
            self._changes.close()
        self._changes = ModelChanges(self._user_model(wrapped), self._trained)
        self.adopt_changes(wrapped)

    def adopt_changes(self, wrapped: nn.Module) -> None:
        if self._changes is None:
            return
        self._refuse_added(self._changes.added())
        self._parameter_hooks.take(self._changes.parameters.items())
        changed = self._changes.trainability()
        if changed:
            self._trainability_changed(wrapped, changed)

    def to_device(self, batch: Any) -> Any:
        dtype = self.precision.dtype
        moved = move(batch, self.topology.device, None if dtype == torch.float32 else dtype, self._copies)
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)
        return moved

    # ---- 2. gradient sync ------------------------------------------------------------------------

    def forward_backward(
        self,
        wrapped: nn.Module,
        step_fn: Callable[[Any, int], Any],
        window: Window,
        hooks: StepHooks = NO_HOOKS,
    ) -> StepResult:
        if self._scaler_used:
            self._update_scaler()
        automatic, before_backward, after_backward = hooks.automatic, hooks.before_backward, hooks.after_backward
        self._looks = not automatic
        if not automatic and self.sees_whole_gradients and self._changes is not None:
            self._parameter_hooks.put_back(self._changes.parameters.items())  # each backward is a plain one
        last = len(window.micro_batches) - 1
        alone = last == 0 and self.topology.data_size == 1
        scale = 1 / window.num_samples  # summed over data ranks, so that hooks see the gradients of one process
        autocast, on_cpu = self.precision.autocast_dtype, self._on_cpu
        run = self._runner(wrapped, step_fn) if automatic else step_fn
        exchanges, scaler = self._in_group, self.precision.scaler
        count: Any = 0.0  # a tensor if losses count on an accelerator
        weighted, vote, counting, send = 0.0, StepVote(), None, None
        for i, micro_batch in enumerate(window.micro_batches if hooks.prepare is None else hooks.prepare(window)):
            if exchanges:
                self._sync_gradients(wrapped, i == last)
            call = run if micro_batch.num_samples or not automatic else self._padding(wrapped, step_fn)
            marks = gradient_marks(self._watched) if automatic and not alone else None
            if autocast is None:
                output = call(micro_batch.batch, micro_batch.batch_idx)
            else:
                with torch.autocast(self.topology.device.type, dtype=autocast):
                    output = call(micro_batch.batch, micro_batch.batch_idx)
            if marks is not None and marks != gradient_marks(self._watched):
                raise own_backward(remarked(self._user_model(wrapped).named_parameters(), marks))
            losses, counted = (
                weighted_losses(output, micro_batch.num_samples, None if alone else scale, hooks.parameters, on_cpu)
                if automatic
                else ([], micro_batch.num_samples)
            )
            count += counted
            for value, *_ in losses:
                weighted += value.item() if on_cpu else math.nan  # no host sync on an accelerator
            micro_batch.output = output.detach() if isinstance(output, Tensor) else detach(output)
            if i == last:
                vote = hooks.vote()
                if self._agreement is not None:
                    send = self._agreement.prepare(vote, window.num_samples)
                if isinstance(count, Tensor):
                    counting = finite.to_host(count)
                elif send is not None:
                    self._send(send, count, weighted * count if alone else weighted / scale)
            if faults.plan is not None:
                faults.fault("backward")
            for j, (value, inputs, returned) in enumerate(losses):
                if before_backward is not None:
                    before_backward(returned)
                (value if scaler is None else scaler.scale(value)).backward(
                    retain_graph=j < len(losses) - 1, inputs=inputs
                )
                if after_backward is not None and (i < last or j < len(losses) - 1):
                    after_backward()
        if counting is not None:  # the host waits for the forward, while the device has the backward to do
            count = counting()
            if send is not None:
                self._send(send, count, math.nan)
        if automatic and exchanges:
            if self._changes is not None and self._changes.pending:
                self._refuse_added(self._changes.added())
            self._after_backwards(wrapped)
        if self._agreement is None:
            bad = on_cpu and not math.isfinite(weighted)
            loss = weighted if alone else weighted / scale / count if count else None
            result = StepResult(count, vote.stop, "the loss of rank 0" if bad else None, loss if on_cpu else None)
        else:
            result = self._agreement.receive()
        if automatic and not alone and result.count and result.count != window.num_samples:
            torch._foreach_mul_(self._gradients(wrapped), window.num_samples / result.count)
        if scaler is not None:
            result = result._replace(non_finite=None)  # the scaler skips such a step
        return self._concluded(wrapped, result, after_backward) if automatic and result.count else result

    def evaluate(
        self,
        wrapped: nn.Module,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        hooks: StepHooks = NO_HOOKS,
    ) -> Any:
        if not micro_batch.num_samples:
            return None
        if self.precision.autocast_dtype is None:
            return step_fn(micro_batch.batch, *args)
        with self.precision.autocast(self.topology.device):
            return step_fn(micro_batch.batch, *args)

    def backward(self, wrapped: nn.Module, loss: Tensor, weight: float = 1.0) -> None:
        if self._scaler_used:
            self._update_scaler()
        loss = loss if weight == 1.0 else loss * weight
        self._begin_local_gradients()
        (loss if self.precision.scaler is None else self.precision.scaler.scale(loss)).backward()

    def clip_gradients(
        self, wrapped: nn.Module, optimizer: Optimizer, value: float, algorithm: str = "norm"
    ) -> Tensor | None:
        self._complete_local_gradients(wrapped, optimizer)
        if self.precision.scaler is not None:
            self._unscale(optimizer)
        parameters = self._in_model_order(optimizer)
        if algorithm == "norm":
            return torch.nn.utils.clip_grad_norm_(parameters, value)
        torch.nn.utils.clip_grad_value_(parameters, value)
        return None

    def optimizer_step(
        self, wrapped: nn.Module, optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> bool:
        if self._local:
            self._complete_local_gradients(wrapped, optimizer)
        if self._looks:
            self._look_at(optimizer)
        elif self._agreement is not None and self._on_cpu:
            self._agreement.check()  # what hooks have called since the gradients were final
        if not self._on_cpu:
            allow_sparse(optimizer)
        if self._left_out is not None and not self._may_step(optimizer):
            return False
        if self.precision.scaler is None:
            optimizer.step() if closure is None else optimizer.step(
                functools.partial(self._completed, wrapped, optimizer, closure)
            )
            return True
        if closure is not None:
            raise ValueError(
                "precision='16-mixed' scales gradients, and an optimizer that takes a closure would step with scaled ones; use 'bf16-mixed'"
            )
        self._unscale(optimizer)
        self._skipped = None
        self.precision.scaler.step(optimizer)
        self._scaler_used = True
        return self._skipped is not None and self._skipped() is None

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        tensor = tensor.detach().clone()
        if self._in_group:
            dist.all_reduce(
                tensor,
                {
                    "sum": dist.ReduceOp.SUM,
                    "mean": dist.ReduceOp.SUM,
                    "max": dist.ReduceOp.MAX,
                    "min": dist.ReduceOp.MIN,
                }[op],
            )
        return tensor / self.topology.world_size if op == "mean" else tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        if not self._in_group:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.topology.world_size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        if not self._in_group:
            return value
        if isinstance(value, Tensor):
            value = value.detach().clone()
            dist.broadcast(value, src)
            return value
        data = torch.frombuffer(
            bytearray(json.dumps(value).encode() if self.topology.rank == src else b"?"), dtype=torch.uint8
        )
        size = torch.tensor(data.numel())
        dist.broadcast(size, src)
        data = data if self.topology.rank == src else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src)
        return json.loads(bytes(data.tolist()))

    def barrier(self) -> None:
        if self._in_group:
            dist.barrier()

    # ---- 3. sampler seeding ----------------------------------------------------------------------

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False
    ) -> ShardedLoader:
        return ShardedLoader(
            loader,
            rank=self.topology.data_rank,
            size=self.topology.data_size,
            seed=seed,
            shuffle=shuffle,
            accumulate=accumulate,
            split=split,
            sum_over_ranks=lambda n: (
                int(self.all_reduce(torch.tensor(n))) * self.topology.data_size // self.topology.world_size
            ),
        )

    # ---- 4. checkpointing ------------------------------------------------------------------------

    def state_dict(self, wrapped: nn.Module, optimizers: dict[str, Optimizer]) -> State:
        state = gather_state(self._user_model(wrapped), optimizers, self._piece)
        if self.precision.scaler is not None:
            if self._scaler_used:
                self._update_scaler()
            state.meta["scaler"] = self.precision.scaler.state_dict()
        return state

    def load_state_dict(self, wrapped: nn.Module, optimizers: dict[str, Optimizer], state: Reader) -> None:
        restore_state(self._user_model(wrapped), optimizers, state, self._take)
        if self.precision.scaler is not None and "scaler" in state.meta:
            self.precision.scaler.load_state_dict(state.meta["scaler"])

    # ---- what a strategy of this kind may say differently ------------------------------------------

    def _runner(self, wrapped: nn.Module, step_fn: Callable[[Any, int], Any] | None) -> Callable[[Any, int], Any]:
        """What to call for a forward; `step_fn` None stands for a micro-batch of padding."""
        return step_fn or _no_output

    def _padding(self, wrapped: nn.Module, step_fn: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """What to call for a micro-batch of padding: it must return no loss, or one that counts nothing."""
        return self._runner(wrapped, None)

    def _gradients(self, wrapped: nn.Module) -> list[Tensor]:
        """What a window has left for the optimizer on this rank, to be scaled in place."""
        return [p.grad for p in wrapped.parameters() if p.grad is not None]

    def _drop_gradients(self, wrapped: nn.Module) -> None:
        """Leave the optimizer nothing of this window."""
        for parameter in wrapped.parameters():
            parameter.grad = None

    def _concluded(
        self, wrapped: nn.Module, result: StepResult, after_backward: Callable[[], None] | None = None
    ) -> StepResult:
        """What `forward_backward` returns once gradients are reduced: runs users' hooks and checks that all is finite.

        `after_backward` is called here for the last backward, with the gradient that the optimizer gets. On an
        accelerator the answer is left on the device, where a step can be skipped without the host waiting for it.
        """
        if self._changes is not None and self._changes.pending:
            self._refuse_added(self._changes.added())
        if self._parameter_hooks.taken:
            self._run_parameter_hooks(wrapped)
        if after_backward is not None:
            after_backward()
        if self.precision.scaler is not None:
            return result
        if result.non_finite is None:
            gradients = (
                self._gradients(wrapped)
                if self.cuts_gradients
                else [*filter(_EXISTS, map(_GRADIENT, self._watched or wrapped.parameters()))]
            )
            found = self._found
            try:  # GradScaler's pass with a scale of one: changes no bit of what is finite
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self._one)
            except RuntimeError:  # none, or such as that pass does not take
                found = finite.found(gradients, self.topology.device)
            if not self._on_cpu:
                if self.cuts_gradients and self._in_group:
                    dist.all_reduce(found, dist.ReduceOp.MAX)
                self._left_out, self._found = (
                    found,
                    torch.zeros_like(found),
                )  # the copy to the host and the optimizer read it later
                return result._replace(later=finite.later(found))
            bad = bool(found)
            first = self._agreement.first_rank(bad) if self._agreement is not None else 0 if bad else None
            return result if first is None else self._left(wrapped, result, first)
        self._drop_gradients(wrapped)
        return result

    def _left(self, wrapped: nn.Module, result: StepResult, first: int) -> StepResult:
        """`result` on a window whose gradient is not finite, on rank `first` before others. Every rank calls it."""
        self._found.zero_()
        name = finite.name(self._user_model(wrapped)) if self.topology.rank == first else None
        self._drop_gradients(wrapped)
        return result._replace(non_finite=self.broadcast(name, first))

    def _sync_gradients(self, wrapped: nn.Module, on: bool) -> None:
        """Whether the next forward and backward exchange gradients."""

    def _after_backwards(self, wrapped: nn.Module) -> None:
        """Called after the last backward of a window, before this rank waits for others."""

    def _user_model(self, wrapped: nn.Module) -> nn.Module:
        """The module that `setup_module` was given."""
        return wrapped

    def _piece(self, tensor: Tensor) -> TensorShard | None:
        """What this rank writes of a tensor of the state, None where another rank writes it."""
        return TensorShard.whole(tensor) if self.topology.rank == 0 else None

    def _take(self, reader: Reader, name: str, like: Tensor | None) -> Tensor:
        """Read a saved tensor, laid out as `like` is here."""
        return reader.read(name)

    # ---- helpers -----------------------------------------------------------------------------------

    def _send(self, send: Callable[[float, bool, float], None], count: float, total: float) -> None:
        """Tell the other ranks what this one has computed; the sum of its losses is not known on accelerators."""
        finite = not self._on_cpu or math.isfinite(total)
        send(*((count, finite, total) if self.topology.is_reporting_rank else (0.0, finite, 0.0)))

    def _look_at(self, optimizer: Optimizer) -> None:
        """Manual optimization: raise FloatingPointError, on all ranks alike, for a gradient that is not finite."""
        if self.precision.scaler is not None:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        bad = bool(finite.found(gradients, self.topology.device))  # a host synchronisation on accelerators
        if self._agreement is not None:
            bad = self._agreement.first_rank(bad) is not None
        if bad:
            raise FloatingPointError(
                f"a gradient that {type(optimizer).__name__} is to apply is NaN or infinite; no parameter was changed by it. "
                "Look for the first operation that gives such a value with torch.autograd.set_detect_anomaly(True)"
            )

    def _may_step(self, optimizer: Optimizer) -> bool:
        """Whether to call `optimizer`: one that can leaves out a step with bad gradients on the device, else the host waits."""
        if leaves_out(optimizer) and not self._steps_on_host:
            optimizer.found_inf = self._left_out  # type: ignore[attr-defined]
            return True
        return not bool(self._left_out)

    def _completed(self, wrapped: nn.Module, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call `closure`, which may have run a backward on this rank only."""
        loss = closure()
        self._complete_local_gradients(wrapped, optimizer)
        return loss

    def _begin_local_gradients(self) -> None:
        """Manual optimization: what the next backward adds is this rank's part of the gradient."""
        if self.sees_whole_gradients:
            return
        for parameter in self._watched:
            if id(parameter) in self._reduced and parameter.grad is not None and self.topology.data_size > 1:
                self._share_again(parameter)  # so that the next sum over ranks counts it once
        self._reduced.clear()
        self._local.update(map(id, self._watched))

    def _complete_local_gradients(self, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """Manual optimization: sum over data ranks what backwards have added since the last time, and run users' hooks."""
        if not self._local:
            return
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._local]
        if not mine:
            return
        self._local.difference_update(map(id, mine))
        self._reduced.update(map(id, mine))
        if self._in_group:
            self._sum_gradients(wrapped, [p for p in mine if p.requires_grad])
        if self._parameter_hooks.taken:
            self._run_parameter_hooks(wrapped, set(map(id, mine)))

    def _share_again(self, parameter: nn.Parameter) -> None:
        """Make of a gradient that is equal on all data ranks parts that add up to it."""
        parameter.grad.div_(self.topology.data_size)  # type: ignore[union-attr]

    @torch.no_grad()
    def _sum_gradients(self, wrapped: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of these parameters over data ranks; one that no rank has stays None."""
        sum_gradients(parameters)

    def _run_parameter_hooks(self, wrapped: nn.Module, only: set[int] | None = None) -> None:
        known = (
            self._changes.parameters
            if self._changes is not None
            else dict(self._user_model(wrapped).named_parameters())
        )
        self._parameter_hooks.run(
            [(name, p) for name, p in known.items() if only is None or id(p) in only],
            functools.partial(self._gradient_of, wrapped),
            functools.partial(self._put_gradient, wrapped),
        )

    def _gradient_of(self, wrapped: nn.Module, parameter: nn.Parameter) -> Tensor | None:
        """The whole gradient of a parameter, a plain tensor; ranks that share the parameter call it in the same order."""
        return parameter.grad

    def _put_gradient(self, wrapped: nn.Module, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Let `gradient`, whole and equal on the ranks that share the parameter, be what the optimizer gets."""
        parameter.grad = gradient

    def _trainability_changed(self, wrapped: nn.Module, names: list[str]) -> None:
        """`requires_grad` of these parameters has changed since the last call, or since they were wrapped."""

    def _refuse_added(self, names: list[str]) -> None:
        """Raise RuntimeError for parameters that came during the run and would not be trained as on one process."""
        if names and not self.sees_whole_gradients:
            raise RuntimeError(
                f"parameters were added or replaced during the run ({shortened(names)}), which {type(self).__name__} cannot "
                "take over; create them in __init__, setup or configure_model, or copy values into the existing ones"
            )

    def _in_model_order(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """What `optimizer` steps and has a gradient, in the order of the model's parameters: a norm depends on it in its last bits."""
        own = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        ordered = [parameter for p in self._watched if (parameter := own.pop(id(p), None)) is not None]
        return ordered + list(own.values())

    def _update_scaler(self) -> None:
        self.precision.scaler.update()  # type: ignore[union-attr]
        self._unscaled.clear()
        self._scaler_used = False

    def _unscale(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._unscaled:
            self.precision.scaler.unscale_(optimizer)  # type: ignore[union-attr]
            self._unscaled.add(id(optimizer))

    def _mark_step(self, optimizer: Any, *_: Any) -> None:
        """Loss scaling steps `optimizer`. One that is told what was found may skip the step by itself, on the device."""
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            self._skipped = _nothing
            return
        if self._steps_on_host:  # torch would copy it beside the host, which reads it at once
            found = optimizer.found_inf = found.cpu()
        self._skipped = finite.later(found)


def presence(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """For each parameter 1 if it has a gradient, else 0, in `like`'s dtype on its device; made there if all have one."""
    if all(p.grad is not None for p in parameters):
        return like.new_ones(len(parameters))
    return torch.tensor([float(p.grad is not None) for p in parameters]).to(like)


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum the plain gradients of these parameters over the ranks of `group`, in one all-reduce for each dtype and device.

    A gradient that some rank lacks counts as zeros there; one that no rank has stays None.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in by_kind.values():
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        has = presence(members, parts[0])
        flat = torch.cat([has, *(part.reshape(-1) for part in parts)])
        dist.all_reduce(flat, group=group)
        sums = flat[len(members) :].split([part.numel() for part in parts])
        missing = any(p.grad is None for p in members)
        found = flat[: len(members)].tolist() if missing else None  # a host synchronisation, only where one is missing
        for i, (parameter, part, total) in enumerate(zip(members, parts, sums, strict=True)):
            if parameter.grad is None:
                if not abs(found[i]):  # type: ignore[index]
                    continue
                parameter.grad = part
            parameter.grad.copy_(total.view_as(part))


def shortened(names: Sequence[str], most: int = 10) -> str:
    """The first names of a list, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _nothing() -> None: ...


def device_index(world: environment.World | None, visible: int, environ: Mapping[str, str] = os.environ) -> int:
    """Which of the `visible` CUDA devices is this rank's: by its place on the node, or the only one that its launcher shows it.

    Raises ValueError if there are fewer than ranks.
    """
    if world is None or world.local_rank < visible >= world.local_world_size:
        return 0 if world is None else world.local_rank
    if visible == 1 and environ.get("CUDA_VISIBLE_DEVICES"):  # as with one GPU a task under Slurm
        return 0
    raise ValueError(
        f"each rank needs a CUDA device of its own, but {world.launcher} started {world.local_world_size} ranks on this node and "
        f"rank {world.rank} sees {visible} (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r}); start as many ranks as "
        "devices, or show each rank one device"
    )


def resolve_accelerator(accelerator: str) -> str:
    """The torch device type for "auto", "cpu", "gpu" or "cuda"; raises ValueError where the machine has none."""
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator not in ("cpu", "gpu", "cuda"):
        raise ValueError(f"accelerator must be 'auto', 'cpu', 'gpu' or 'cuda', but accelerator={accelerator!r}")
    if accelerator != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"accelerator={accelerator!r} needs a CUDA device, and torch sees none; use accelerator='cpu' or 'auto'"
        )
    return "cpu" if accelerator == "cpu" else "cuda"


def resolve_devices(devices: int | str, accelerator: str, most: int | None = None) -> int:
    """The number of devices on this node; "auto" is every GPU, or the ranks of the launcher, or one CPU process."""
    have = torch.cuda.device_count() if accelerator == "cuda" else (os.cpu_count() or 1)
    if devices == "auto":
        world = environment.detect()
        if most == 1:
            return 1
        return world.local_world_size if world else have if accelerator == "cuda" else 1
    try:
        count = int(devices)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or isinstance(devices, bool):
        raise ValueError(f"devices must be 'auto' or a whole number of at least 1, but devices={devices!r}")
    if most is not None and count > most:
        raise ValueError(f"strategy='single' runs on one device, but devices={count}; use strategy='ddp' for {count}")
    world = environment.detect() if accelerator == "cuda" and count > have else None
    if world is not None:
        device_index(world, have)
    elif accelerator == "cuda" and count > have:
        raise ValueError(
            f"devices={count}, but this machine has {have} CUDA devices; lower devices or use accelerator='cpu'"
        )
    return count


def weighted_losses(
    output: Any,
    num_samples: int,
    scale: float | None,
    parameters: Mapping[str, Sequence[nn.Parameter]] | None,
    reads_counts: bool = True,
) -> tuple[list[tuple[Tensor, Sequence[nn.Parameter] | None, Tensor]], Any]:
    """What to run backward from, as (loss times its weight, parameters that it moves or None for all, the loss that the
    step returned), and what it counts.

    `scale` turns a sum into this rank's part of the global mean; None means that the micro-batch is the
    whole of it. Without `reads_counts` a count that is a tensor stays one, on its device, in float64.
    """
    losses: list[tuple[Tensor, Sequence[nn.Parameter] | None, Tensor]]
    count: Any
    weight: Any
    if parameters and isinstance(output, Mapping) and "loss" not in output:
        wrong = sorted(set(map(str, output)) ^ set(parameters)) + [
            name for name, value in output.items() if not isinstance(value, Tensor)
        ]
        if wrong:
            raise ValueError(
                f"training_step must return one mean loss (a tensor) for each optimizer ({', '.join(parameters)}), or None, but {', '.join(wrong)} is none; "
                "name the losses after the optimizers"
            )
        losses = [(output[name], parameters[name], output[name]) for name in parameters]
        numerator, count = float(num_samples), num_samples
    else:
        value, numerator, count = (
            (output, num_samples, num_samples) if isinstance(output, Tensor) else split_loss(output, num_samples)
        )
        losses = [] if value is None else [(value, None, value)]
    if reads_counts or not isinstance(count, Tensor):
        count = float(count)
        weight = numerator * scale if scale is not None else numerator / count if count else 0.0
    else:
        count = count.detach().double().reshape(())
        weight = numerator * scale if scale is not None else torch.where(count != 0, numerator / count, 0.0)
    for i, (value, inputs, returned) in enumerate(losses):
        if faults.plan is not None:
            value = faults.plan.poison(value)
            losses[i] = value, inputs, returned
        if value.numel() != 1:
            raise ValueError(
                f"training_step must return a scalar loss, but its loss has shape {list(value.shape)}; return its mean or Loss(total, count)"
            )
        if not value.requires_grad:
            raise ValueError(
                "training_step returned a loss without gradient: it does not depend on a trainable parameter, or was detached or computed under no_grad"
            )
        if isinstance(weight, Tensor):
            losses[i] = value * weight.to(value.dtype), inputs, returned
        elif weight != 1.0:
            losses[i] = value * weight, inputs, returned
    return losses, count


def detach(output: Any) -> Any:
    """`output` without the graph of its tensors, so that keeping it keeps no memory alive."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Loss):
        return Loss(output.total.detach(), output.count)
    if isinstance(output, Mapping):
        return {key: detach(value) for key, value in output.items()}
    return output


def move(
    batch: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    copies: torch.cuda.Stream | None = None,
    kept: str | None = None,
) -> Any:
    """`batch` with its tensors on `device`, floating point ones cast to `dtype` where it is given.

    What comes from the host is copied on the stream `copies`, for which the caller then lets the current stream wait.
    Tensors on a device of the type `kept` stay there.
    """
    if isinstance(batch, Tensor):
        to = None if dtype is None else dtype_of(batch, dtype)
        if batch.device.type == kept:
            return batch
        if batch.device == device and (to is None or batch.dtype == to):
            return batch
        if copies is None or batch.device.type != "cpu" or type(batch) is not Tensor or batch.layout != torch.strided:
            return batch.to(device, to, non_blocking=True)
        with torch.cuda.stream(copies):
            moved = batch.to(device, to, non_blocking=True)
        moved.record_stream(torch.cuda.current_stream())
        return moved
    if isinstance(batch, list):
        return [move(item, device, dtype, copies, kept) for item in batch]
    if isinstance(batch, (str, bytes, int, float, type(None))):
        return batch
    if isinstance(batch, Mapping):
        items = {key: move(value, device, dtype, copies, kept) for key, value in batch.items()}
        if type(batch) is dict:
            return items
        if isinstance(batch, MutableMapping):  # with the attributes that it has beside its items
            whole = copy.copy(batch)
            whole.update(items)
            return whole
        try:
            return type(batch)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(batch, tuple):
        parts = [move(item, device, dtype, copies, kept) for item in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if hasattr(batch, "to") and callable(batch.to):
        moved = batch.to(device)
        return batch if moved is None else moved
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {
            f.name: move(getattr(batch, f.name), device, dtype, copies, kept)
            for f in dataclasses.fields(batch)
            if f.init
        }
        return dataclasses.replace(batch, **fields)
    return batch


def _no_output(batch: Any, batch_idx: int) -> None:
    return None
