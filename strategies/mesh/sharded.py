"""What the strategies share whose parameters are sharded over a mesh of ranks."""

from __future__ import annotations

import functools
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Capabilities, StepFn, StepHooks, StepResult, Strategy, Topology
from lockstep.strategies.checkpoint_state import Reader, State, TensorShard, gather_whole
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.process_group import new_mesh
from lockstep.strategies.mesh import mixed_tensors, steps
from lockstep.strategies.mesh.mesh import devices_of, resolve
from lockstep.strategies.mesh.options import UNRULED, Options
from lockstep.strategies.mesh.unsharded_writes import followed
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.model_changes import changed_within_window, partial_gradient, refuse_sparse, shortened
from lockstep.strategies.modules.sharded_errors import explained, within_step
from lockstep.strategies.modules.side_effect_free import side_effect_free
from lockstep.strategies.modules.unused_parameters import drop_unused, refuse_unequal
from lockstep.strategies.optimizers.sharded import ShardedOptimizers
from lockstep.strategies.single import SingleDevice
from lockstep.strategies.sync.buffers import SharedBuffers, shared
from lockstep.strategies.sync.call_order import END_BACKWARD, CallOrder
from lockstep.strategies.sync.collectives import all_gather, local, sum_gradients
from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.compression.names import REFUSES, compressor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.strategies.mesh.mesh_model import MeshModel

# torch.distributed.tensor and fsdp take a second to import, so the modules that use them
# (strategies/mesh/axes.py, tensor_plan, dtensors.py) are imported where ranks are set up.


class ShardedStrategy(ShardedOptimizers):
    """Base of FSDP, TensorParallel and MeshParallel: ranks in a mesh with some of the axes ddp, fsdp and tensor.

    Each forward is a collective, so ranks without samples run the step too, on a batch of padding with weight
    zero, and what it leaves in the module is undone. Outside of steps a parameter is this rank's shard, a DTensor.
    """

    cuts_gradients = True
    capabilities = Capabilities(bitwise=True)

    def __init__(
        self,
        options: Options,
        timeout_s: float,
        activation_checkpointing: bool | Rule = False,
        compress: str | Compressor | None = None,
    ) -> None:
        super().__init__(
            activation_checkpointing=options.wrap if activation_checkpointing is True else activation_checkpointing
        )
        self.options = options
        self.one_rank = None if options.cpu_offload else SingleDevice
        self.timeout_s = timeout_s
        self._sizes: dict[str, int] = {}
        if compress is not None:
            self.compressor = compressor(compress)
            self.capabilities = Capabilities(exact=False, refuses=REFUSES)
        self._mesh: DeviceMesh | None = None
        self._engine: dist.ProcessGroup | None = None
        self._sync_each = self._in_step = self._is_whole = False
        self._micro_batches = 0
        self._steps: steps.Steps | None = None
        self._order: CallOrder | None = None
        self._named: list[tuple[str, nn.Parameter]] | None = None
        self.broadcast_buffers = self.options.broadcast_buffers

    # ---- 1. processes and devices ----------------------------------------------------------------

    @property
    @abstractmethod
    def axes(self) -> Mapping[str, int | None]:
        """The axes of the mesh, outermost first; None for the one that takes the ranks that are left."""

    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        if self.compressor is not None:
            steps.check_compressible(self.axes, self.options)
        devices = devices_of(self.axes, devices, num_nodes)
        chosen = super().configure(devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision)
        sizes = resolve(self.axes, environment.num_ranks(self.num_devices))
        self._sizes = {name: size for name, size in sizes.items() if size > 1 or max(sizes.values()) == 1}
        whole = "tensor" not in self._sizes  # else, on torch 2.13, a symbolic size of a DTensor refers to itself
        refuses = {} if whole else UNRULED
        self.capabilities = Capabilities(
            bitwise=whole, dynamic_shapes=whole, preserves_memory_format=False, builds_on_meta=True, refuses=refuses
        )
        if self.compressor is not None:
            self.capabilities = replace(self.capabilities, bitwise=False, exact=False, refuses={**refuses, **REFUSES})
        return chosen

    def data_size_of(self, num_ranks: int) -> int:
        return num_ranks // self._sizes.get("tensor", 1)

    def check(self, model: nn.Module) -> None:
        refuse_sparse(model, self.name)
        self.options.applied_to(model, self._sizes.get("tensor"))
        super().check(model)

    def setup(self) -> Topology:
        super().setup()
        from lockstep.strategies.mesh import dtensors

        self._mesh = new_mesh(self.topology.device.type, self._sizes)
        self._engine = steps.engine_group(self._mesh, self.topology)
        if "ddp" in self._sizes or "fsdp" in self._sizes:
            self._steps = steps.Steps(self.timeout_s, self._engine)
        tensor = self._sizes.get("tensor", 1)
        self.topology = replace(
            self.topology,
            data_rank=self.topology.rank // tensor,
            data_size=self.topology.world_size // tensor,
            is_reporting_rank=self.topology.rank % tensor == 0,
        )
        if self._compression is not None:
            self._compression.layout = steps.layout_of_replicas(self._mesh, self._coordinate())
        if self.precision.scaler is not None:
            self.precision.scaler = dtensors.ShardedScaler(self.topology.device.type)
        return self.topology

    def teardown(self) -> None:
        super().teardown()
        for exchange in (self._steps, self._order):
            if exchange is not None:
                exchange.close()
        self._mesh = self._steps = self._order = self._engine = self._named = self._buffers = None

    def wrap(self, model: nn.Module) -> MeshModel:
        gathers_low = self.options.low_precision_gather and "fsdp" in self._sizes
        compute_dtype = self.precision.autocast_dtype if gathers_low else None
        from lockstep.strategies.mesh.axes import apply_axes

        assert self._mesh is not None
        apart = (in_tree := bool(self.virtual_ranks)) or self.compressor is not None
        wrapped = apply_axes(model, self._mesh, self.options, compute_dtype, in_tree=in_tree, replicas_apart=apart)
        self._compared = "tensor" not in self._sizes
        if wrapped.units:
            self._order = wrapped.order = CallOrder(
                self.timeout_s,
                wrapped.names.__getitem__,
                self.name,
                "give find_unused_parameters=True and leave wrap='auto', which exchanges all of the model at once",
                self._engine,
            )
        steps.share_rng_state(self.topology.device)
        return wrapped

    def teardown_module(self, wrapped: MeshModel) -> None:
        wrapped.close()
        mixed_tensors.refuse_assigned(self.unwrap(wrapped), self.name, self.unwrap(wrapped).parameters())
        keeps = environment.outlives_run(self.topology.rank)
        held = {name: self.local_shard(p) for name, p in self.unwrap(wrapped).named_parameters()}
        whole = gather_whole(self, State({n: piece for n, piece in held.items() if piece is not None}), keep=keeps)
        if keeps:
            wrapped.restore(whole.tensors)
        super().teardown_module(wrapped)

    def setup_optimizers(self, wrapped: MeshModel, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        attached = super().setup_optimizers(wrapped, optimizers)
        self._named = self._sharded_by_name(wrapped)
        self._buffers = SharedBuffers(self.unwrap(wrapped), self.options.broadcast_buffers)
        return attached

    @contextmanager
    def whole(self, wrapped: MeshModel) -> Iterator[None]:
        if self._is_whole:
            yield
            return
        by_hand = bool(wrapped.manual) and wrapped.depth == 1  # each backward leaves the gradient of all ranks
        if (self._in_step or wrapped.depth) and not by_hand:
            raise within_step(self.name)
        from lockstep.strategies.mesh.whole_model import whole_model

        wrapped.close()
        self._is_whole = True
        try:
            with self._edits.paused(), whole_model(self.unwrap(wrapped), self.name, self._trained_by):
                yield
        finally:
            self._is_whole = False
            if by_hand:
                wrapped.gather()

    # ---- 2. gradient sync ------------------------------------------------------------------------

    def forward_backward(
        self, wrapped: MeshModel, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        whole = hooks.whole_gradients and len(window.micro_batches) > max(1, window.num_shares)
        apart: list[nn.Parameter] = wrapped.unsharded
        if whole and self.topology.data_size > 1 and any(p.requires_grad for p in apart):
            raise partial_gradient("the gradients of parameters that are not sharded are summed once a step")
        self._sync_each = self.options.sync_every_micro_batch or bool(hooks.parameters) or whole
        hooks = followed(hooks, wrapped.write_back)
        if hooks.parameters:
            step_fn, hooks = steps.one_optimizer_each(wrapped, step_fn, hooks)
        self._in_step, self._micro_batches = True, 0
        wrapped.used.clear()  # a window that counts nothing leaves some
        try:
            bracket = nullcontext() if hooks.automatic else wrapped.open()
            by_class = steps.losses_by_class(self.options.loss_parallel and "tensor" in self._sizes)
            share = shared(self._buffers, window, self.name, self._peers)
            with explained("training_step"), by_class, bracket, share, self._edits.window():
                result = super().forward_backward(wrapped, step_fn, window, hooks)
        finally:
            self._in_step = False
            wrapped.close()
        mixed_tensors.refuse_kept_copies(self.unwrap(wrapped), self.name)
        return result

    def evaluate(
        self,
        wrapped: MeshModel,
        step_fn: Callable[..., Any],
        micro_batch: MicroBatch,
        *args: Any,
        hooks: StepHooks = NO_HOOKS,
    ) -> Any:
        padding, model = not micro_batch.num_samples, self.unwrap(wrapped)
        if padding and micro_batch.batch is None:  # no rank has one
            return None
        undone, uncounted = (side_effect_free(model), hooks.log_scope(0)) if padding else (nullcontext(), nullcontext())
        try:
            with self.precision.autocast(self.topology.device), undone, uncounted:
                output = wrapped.run(step_fn, micro_batch.batch, *args)
        finally:
            wrapped.close()
        steps.refuse_returned(output)
        return None if padding else output

    def backward(self, wrapped: MeshModel, loss: Tensor, weight: float = 1.0, retain_graph: bool = False) -> None:
        if retain_graph:
            raise RuntimeError("retain_graph=True: sharded parameters are freed after backward; add the losses up")
        loss = loss if weight == 1.0 else loss * weight
        loss = loss if self.precision.scaler is None else self.precision.scaler.scale(loss)
        wrapped.synchronize(True)
        wrapped.begin_own_backward()
        with self._one_backward(wrapped):
            wrapped(lambda: loss).backward()  # through the root, which frees and exchanges once the walk is over
            self.end_backward(wrapped)
            self._check_used(wrapped)
        wrapped.end_own_backward()

    # ---- 4. checkpointing ------------------------------------------------------------------------

    def state_dict(self, wrapped: MeshModel, optimizers: dict[str, Optimizer]) -> State:
        wrapped.close()
        return super().state_dict(wrapped, optimizers)

    def load_state_dict(self, wrapped: MeshModel, optimizers: dict[str, Optimizer], state: Reader) -> None:
        wrapped.close()
        super().load_state_dict(wrapped, optimizers, state)

    # ---- what SPMDStrategy asks -------------------------------------------------------------------

    def end_backward(self, wrapped: MeshModel) -> None:
        if self._order is not None:
            self._order.note(END_BACKWARD)

    def finish_gradients(self, wrapped: MeshModel) -> None:
        from lockstep.strategies.mesh import dtensors

        wrapped.close()
        self._check_used(wrapped)
        dtensors.settle(self._watched or wrapped.parameters())
        whole = [p for p in wrapped.unsharded if p.requires_grad]
        if self._compression is None:
            self._sum(whole)
        else:
            steps.reduce_replicas(self._compression, self._watched, whole, self._mesh)
        self._align(wrapped, self._watched or wrapped.parameters())
        self._in_step = False

    def run_step(self, wrapped: MeshModel, step_fn: StepFn) -> StepFn:
        run: Callable[..., Any] = wrapped.run
        step = steps.checked(step_fn, self._changes, self.topology)
        call = functools.partial(run, step) if self._steps is None else self._steps.announcing(run, step)
        return steps.ending_with_loss(wrapped, call) if self._sizes.keys() & {"ddp", "fsdp"} else call

    def local_gradients(self, wrapped: MeshModel) -> list[Tensor]:
        parameters = self._watched or wrapped.parameters()
        with torch.no_grad():  # else torch makes a view that gradients flow through
            return [local(gradient) for p in parameters if (gradient := p.grad) is not None]

    def set_gradient_sync(self, wrapped: MeshModel, on: bool) -> None:
        self._micro_batches += 1
        wrapped.synchronizes = on or self._sync_each

    def sum_gradients(self, wrapped: MeshModel, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        from lockstep.strategies.mesh import dtensors

        dtensors.settle(parameters)
        apart = [p for p in parameters if not self._is_sharded(p)]
        self._sum(apart)
        self._align(wrapped, parameters)
        return apart

    def read_gradient(self, wrapped: MeshModel, parameter: nn.Parameter) -> Tensor | None:
        from lockstep.strategies.mesh import whole_model

        return whole_model.gradient_of(parameter)

    def write_gradient(self, wrapped: MeshModel, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        from lockstep.strategies.mesh.whole_model import put_gradient

        put_gradient(parameter, gradient)

    def trainability_changed(self, wrapped: MeshModel, names: list[str]) -> None:
        if self._in_step and self._micro_batches and wrapped.units and not wrapped.manual:
            raise changed_within_window(names, self.name)
        if wrapped.trains_several_dtypes():
            raise RuntimeError(
                f"{shortened(names)} changed requires_grad or dtype, and another dtype is trained in the same block, "
                f"which {self.name} reduces at once; convert both to one dtype, or set that before fit"
            )

    def unwrap(self, wrapped: MeshModel) -> nn.Module:
        return wrapped.model

    def local_shard(self, tensor: Tensor) -> TensorShard | None:
        from lockstep.strategies.mesh import dtensors

        return dtensors.piece(tensor, self._coordinate())

    def read_shard(self, reader: Reader, name: str, like: Tensor | None) -> Tensor:
        from lockstep.strategies.mesh import dtensors

        return dtensors.take(reader, name, like)

    # ---- helpers -----------------------------------------------------------------------------------

    def _coordinate(self) -> dict[str, int]:
        return dict(zip(self._sizes, self._mesh.get_coordinate() or (), strict=True))  # type: ignore[union-attr]

    def _is_sharded(self, parameter: Tensor) -> bool:
        """Whether torch brings the gradients of the data ranks together."""
        names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()
        return "ddp" in names or "fsdp" in names

    def _check_used(self, wrapped: MeshModel) -> None:
        """Raise RuntimeError where the ranks gave gradients to different parameters: torch has added one to another."""
        if self._steps is None:
            return
        cut = self._sharded_by_name(wrapped) if self._named is None else self._named
        allowed, order = self.options.find_unused_parameters, 0 if self._order is None else self._order.take()
        used: set[int] = wrapped.used
        mask = bytes(id(p) in used if allowed else p.grad is not None for _, p in cut)
        used.clear()
        changed: dict[int, int] = wrapped.writes.take()
        number = zlib.crc32(mask, order) + (1 << 32 if changed else 0)
        if self._agreement.is_equal(number):  # type: ignore[union-attr]
            if changed:
                self._compare_writes(cut, changed)
            if allowed:
                drop_unused([p for _, p in cut], mask)
            return
        self._compare_writes(cut, changed)
        if not self._agreement.is_equal(zlib.crc32(mask)):  # type: ignore[union-attr]
            masks = all_gather(torch.tensor([*mask]), self._engine)
            if not allowed:
                refuse_unequal([name for name, _ in cut], masks)
            mask = bytes(masks.amax(0).tolist())
        if allowed:
            drop_unused([p for _, p in cut], mask)
        if self._order is not None:
            self._order.check(self._agreement.gather(order))  # type: ignore[union-attr]

    def _compare_writes(self, cut: list[tuple[str, nn.Parameter]], changed: dict[int, int]) -> None:
        numbers = all_gather(torch.tensor([changed.get(id(p), -1) for _, p in cut]), self._engine)
        steps.compare_writes(cut, numbers, self._sizes.get("tensor", 1), self.name)

    def _sharded_by_name(self, wrapped: MeshModel) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose gradients torch brings together."""
        whole = set(map(id, getattr(wrapped, "unsharded", ())))
        return [(name, p) for name, p in self.unwrap(wrapped).named_parameters() if id(p) not in whole]

    def _sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of what torch does not, over the data ranks; one that no rank has stays None."""
        assert self._mesh is not None
        if groups := [self._mesh.get_group(axis) for axis in ("ddp", "fsdp") if axis in self._sizes]:
            sum_gradients(parameters, groups)
