"""Around the user's step on a mesh: what ranks must do alike in it, what each loss may move, and what user code
keeps of whole parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.strategies.base import StepFn, StepHooks, Topology
from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.strategies.data.batch_slices import tensors_of
from lockstep.strategies.launch.process_group import backend_of
from lockstep.strategies.losses import has_loss
from lockstep.strategies.mesh.mesh import AXES
from lockstep.strategies.mesh.options import Options
from lockstep.strategies.modules.model_changes import ModelChanges, gradient_marks, own_backward, remarked, shortened
from lockstep.strategies.sync.collective_fingerprint import once_a_sample
from lockstep.strategies.sync.collectives import local, own_group, sum_gradients
from lockstep.strategies.sync.compression.compression import Compression, Layout
from lockstep.strategies.sync.host_all_gather import open_exchange


def engine_group(mesh: DeviceMesh, topology: Topology) -> dist.ProcessGroup | None:
    """The ranks over which torch shards, None for all: those with the same place on other axes, which are outermost.

    Every rank calls it.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if sizes.keys() <= set(AXES):
        return None
    everyone, size = range(mesh.size()), math.prod(sizes[axis] for axis in sizes.keys() & set(AXES))
    return own_group([everyone[first : first + size] for first in everyone[::size]], backend_of(topology.device))


def checked(step_fn: StepFn, changes: ModelChanges | None, topology: Topology) -> StepFn:
    """The user's step. Raises RuntimeError if it changed what only the whole parameters of this step know, or called a
    collective that counts samples once for each of the ranks that share them."""
    step_fn = once_a_sample(step_fn, topology)
    return step_fn if changes is None else functools.partial(_changing_nothing, changes, step_fn)


def _changing_nothing(changes: ModelChanges, step_fn: StepFn, batch: Any, batch_idx: int) -> Any:
    """The whole parameters of a step are torch's, and are given up after it, with their gradients and
    `requires_grad`."""
    before = changes.current()
    parameters = [p for _, p in before]
    marks, flags = gradient_marks(parameters), [p.requires_grad for p in parameters]
    output = step_fn(batch, batch_idx)
    changed = [name for (name, p), flag in zip(before, flags, strict=True) if p.requires_grad != flag]
    if changed:
        raise RuntimeError(
            f"requires_grad was changed within a step ({shortened(changed)}), whose whole parameters are given up "
            "after it; change it in a hook such as on_train_batch_start"
        )
    if marks != gradient_marks(parameters):
        raise own_backward(remarked(before, marks))
    return output


class Steps:
    """Finds a rank whose step returned None while others run backward and wait for it, before it waits for them for
    ever."""

    def __init__(self, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        """Every rank of the group, by default all, calls it."""
        self._rank = dist.get_rank()
        self._losses = open_exchange(dist.get_rank(group), dist.get_world_size(group), 1, timeout_s, group)

    def announcing(self, run: Callable[..., Any], *first: Any) -> StepFn:
        """`run(*first, batch, batch_idx)`, which then tells the other ranks whether it has a loss."""

        def call(batch: Any, batch_idx: int) -> Any:
            output = run(*first, batch, batch_idx)
            self._losses.post(self._rank if has_loss(output) else math.inf)
            if not has_loss(output):  # the others do not wait
                other = self._losses.reduced().lowest[0]
                if other != math.inf:
                    raise RuntimeError(
                        f"training_step returned None on rank {self._rank}, but a loss on rank {other:.0f}; sharded "
                        "parameters need the backward of all, so return None on every rank, or a loss without weight: "
                        "Loss(loss * 0, 0)"
                    )
            return output

        return call

    def close(self) -> None:
        self._losses.close()


def ending_with_loss(wrapped: nn.Module, call: StepFn) -> StepFn:
    """`call`, refusing None in the micro-batch whose backward is to reduce the gradients of those before it."""
    unreduced = False

    def run(batch: Any, batch_idx: int) -> Any:
        nonlocal unreduced
        output = call(batch, batch_idx)
        if not has_loss(output) and wrapped.synchronizes and unreduced:
            raise RuntimeError(
                "training_step returned None for the last micro-batch of an accumulation window, in whose backward the "
                "gradients of the others are reduced where parameters are sharded; return a loss without weight: "
                "Loss(loss * 0, 0)"
            )
        unreduced = not wrapped.synchronizes and (has_loss(output) or unreduced)
        return output

    return run


def compare_writes(named: list[tuple[str, nn.Parameter]], numbers: Tensor, tensor_size: int, strategy: str) -> None:
    """Raise RuntimeError for weights that a step has set to other values than on other ranks.

    `numbers`: of each rank the checksum of what it wrote to each parameter, -1 for nothing.
    """
    for first in range(tensor_size):  # ranks that would have the same values
        same = numbers[first::tensor_size]
        differ = ((same != same.amax(0)) & (same >= 0)).any(0)
        names = [name for (name, _), bad in zip(named, differ.tolist(), strict=True) if bad]
        if names:
            raise RuntimeError(
                f"training_step changed the weights {shortened(names)} to values that are not the same on all "
                f"ranks of {strategy}, which hold parts of one model; make the change depend on what all ranks share "
                "(weights, global_step), or use a registered buffer"
            )


VARYING = ("cuda",)
"""Types of devices with kernels that add in an order that varies."""


def may_differ(mesh: DeviceMesh | None) -> TypeGuard[DeviceMesh]:
    """Whether the ranks of a tensor group, of which there are several, may compute the same to other bits."""
    return mesh is not None and mesh.device_type in VARYING and dict(_sizes_of(mesh)).get("tensor", 1) > 1


def align(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Give the ranks of a tensor group the same gradients of what each holds whole, those of the first of them.

    Each has computed them by itself. Every rank calls it.
    """
    group = mesh.get_group("tensor")
    whole: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None and _is_whole(p) and p.grad.layout == torch.strided:
            whole.setdefault(p.grad.dtype, []).append(local(p.grad).detach())
    for gradients in whole.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.broadcast(flat, group=group, group_src=0)
        for gradient, first in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(first.view_as(gradient))


def _sizes_of(mesh: DeviceMesh) -> Iterator[tuple[str, int]]:
    return zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)


def _is_whole(parameter: Tensor) -> bool:
    """Whether each rank of a tensor group has all of it, as the bias of a layer that sums over them."""
    axes = _axes_of(parameter)
    placements = getattr(parameter, "placements", ())
    return "tensor" not in axes or placements[axes.index("tensor")].is_replicate()


def _axes_of(parameter: Tensor) -> tuple[str, ...]:
    return getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()


def compare_whole_gradients(model: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Raise RuntimeError for parameters that a tensor group has whole, but whose gradients differ on its ranks.

    Such a parameter is used on shards of activations, so that each rank has a part of its gradient. Every rank calls
    it; returns whether there was a gradient to compare.
    """
    own = {name: p for name, p in model.named_parameters() if p.requires_grad and "tensor" not in _axes_of(p)}
    rows = [_summary(p.grad, local(p).device) for p in own.values()]
    if not rows or mesh is None or dist.get_backend() == "fake":
        return True
    group = mesh.get_group("tensor")
    mine = torch.stack(rows)
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, mine, group=group)
    table = torch.stack(everywhere)
    spread = (table.amax(0) - table.amin(0)).amax(1)
    differ = (spread > 1e-3 * table.abs().amax(0).amax(1)).tolist()
    names = [name for name, bad in zip(own, differ, strict=True) if bad]
    if names:
        raise RuntimeError(
            f"the gradient of {shortened(names)} is not the same on the ranks of strategy tensor, which hold it whole: "
            "it is used on activations that are sharded, between the layers of an attention or a perceptron; give "
            "strategy=TensorParallel(plan={...}) that leaves these layers whole"
        )
    return bool(table.any())


def _summary(gradient: Tensor | None, device: torch.device) -> Tensor:
    """Three numbers that tell gradients apart, but not the order in which they were summed."""
    if gradient is None:
        return torch.full((3,), -1.0, dtype=torch.float64, device=device)
    values = local(gradient).detach()
    values = (torch.view_as_real(values) if values.is_complex() else values).double()
    ramp = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device) / max(1, values.numel())
    flat = values.reshape(-1)
    return torch.stack([flat.abs().sum(), flat.square().sum().sqrt(), (flat * ramp).abs().sum()])


def one_optimizer_each(
    wrapped: nn.Module,
    step_fn: StepFn,
    hooks: StepHooks,
) -> tuple[StepFn, StepHooks]:
    """Let each loss of a dict move only its optimizer's parameters: what the backward left elsewhere is taken back.

    Autograd takes the parameters to reach, but the graph holds the gathered ones.
    """
    parameters = hooks.parameters or {}
    own = [set(map(id, group)) for group in parameters.values()]
    everything = list(wrapped.parameters())
    index, each, kept = 0, False, []

    def step(batch: Any, batch_idx: int) -> Any:
        nonlocal index, each
        output = step_fn(batch, batch_idx)
        index, each = 0, isinstance(output, Mapping) and "loss" not in output
        return output

    def before_backward(loss: Tensor) -> None:
        nonlocal kept
        if hooks.before_backward is not None:
            hooks.before_backward(loss)
        kept = [(p, p.grad) for p in everything if each and id(p) not in own[index]]
        for parameter, _ in kept:
            parameter.grad = None

    def after_loss() -> None:
        nonlocal index
        for parameter, gradient in kept:
            parameter.grad = gradient
        index += 1

    everywhere: Any = dict.fromkeys(parameters)  # autograd may go to all of them
    return step, hooks._replace(parameters=everywhere, before_backward=before_backward, after_loss=after_loss)


def check_compressible(axes: Mapping[str, int | None], options: Options) -> None:
    """Raise ValueError for a mesh whose gradients cannot be compressed."""
    if set(axes) != {"ddp", "fsdp"}:
        raise ValueError(
            "compress sends gradients between ranks along the axis ddp of a mesh of ddp and fsdp, but the axes are "
            f"{', '.join(axes)}; give FSDP(replicas=2, …), or DDP(compress=…)"
        )
    if options.cpu_offload:
        raise ValueError("compress sends gradients from the device, so it cannot be used with cpu_offload=True")


def layout_of_replicas(mesh: DeviceMesh, coordinate: Mapping[str, int], along: str = "ddp") -> Layout:
    """For compression: replicas along an axis are shares, of which this rank holds a shard."""
    from lockstep.strategies.mesh import dtensors

    places = {axis: at for axis, at in coordinate.items() if axis != along}
    replica = coordinate.get(along, 0)

    def place(parameter: Tensor, writes: bool) -> TensorShard | None:
        return dtensors.piece(parameter, places if writes else {})

    return Layout(
        (replica,),
        mesh[along].size() if along in coordinate else 1,
        mesh.get_group(along) if along in coordinate else None,
        writes_memory=replica == 0,
        shard="-".join(f"{axis}{at}of{mesh[axis].size()}" for axis, at in places.items()) or "whole",
        place=place,
    )


def reduce_replicas(
    compression: Compression, parameters: Sequence[nn.Parameter], whole: Sequence[nn.Parameter], mesh: DeviceMesh | None
) -> None:
    """Sum the gradients of `whole`, which torch does not, along fsdp; then those of all along ddp, compressed."""
    assert mesh is not None
    sum_gradients(whole, [mesh.get_group("fsdp")] if "fsdp" in (mesh.mesh_dim_names or ()) else [])
    compression.reduce_into(parameters, [[None if p.grad is None else local(p.grad) for p in parameters]], 1.0)


@contextmanager
def losses_by_class(on: bool) -> Iterator[None]:
    """Loss parallelism: cross entropy is computed, forward and backward, on logits that are sharded by classes."""
    if not on:
        yield
        return
    from torch.distributed.tensor.parallel import loss_parallel

    from lockstep.strategies.mesh.tensor_plan.styles import PlainLoss

    with loss_parallel(), PlainLoss():
        yield


def share_rng_state(device: torch.device) -> None:
    """Rank 0's random state everywhere: it alone has drawn initial values, and a tensor group needs one stream."""
    state = torch.get_rng_state()
    dist.broadcast(state, 0)
    torch.set_rng_state(state)
    if device.type == "cuda":
        state = torch.cuda.get_rng_state()
        dist.broadcast(state, 0)
        torch.cuda.set_rng_state(state)


def refuse_kept(model: nn.Module) -> None:
    """Once the units are freed, raise RuntimeError for a tensor in an attribute of a layer of the user's that a step
    has made of the memory of a whole parameter: to read it would end the process."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if type(value) is Tensor and value.numel() and has_no_memory(value):
                raise RuntimeError(
                    f"{name + '.' if name else ''}{key} was given a view (.data, .detach() or a part) of a parameter, "
                    "which FSDP had gathered for the step and has freed since; keep a copy (.clone()), or take it from "
                    "the module where it is used"
                )


def refuse_returned(output: Any) -> None:
    """Raise RuntimeError for a tensor in what a step has returned that is of the memory of a whole parameter, once that
    is freed: to read it would end the process."""
    if any(tensor.numel() and has_no_memory(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors_of(output)):
        raise RuntimeError(
            "a step returned a weight, or a view of one (.data, .detach() or a part), which FSDP had gathered for the "
            "step and has freed since; return a copy (.clone())"
        )


def has_no_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.untyped_storage().nbytes()
