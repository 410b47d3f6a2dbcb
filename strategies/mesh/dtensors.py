"""What differs where parameters are DTensors of one or several meshes beside plain tensors: pieces of state, norms,
steps, loss scaling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Adam, AdamW, Optimizer

from lockstep.strategies.checkpoint_state import Reader, TensorShard, Whole
from lockstep.strategies.optimizers.copies import names_of_kept
from lockstep.strategies.optimizers.probe import is_plain
from lockstep.strategies.precision import LossScaler
from lockstep.strategies.sync.collectives import local


def piece(tensor: Tensor, coordinate: Mapping[str, int]) -> TensorShard | None:
    """What this rank writes of a tensor, or None where another rank writes it.

    `coordinate` is this rank's place on every axis. Of the ranks that hold the same elements, the one at
    place 0 of the axes over which they are repeated writes them.
    """
    if not isinstance(tensor, DTensor):
        return None if any(coordinate.values()) else TensorShard.whole(tensor)
    mesh = tensor.device_mesh
    split = {
        name
        for name, placement in zip(mesh.mesh_dim_names or (), tensor.placements, strict=True)
        if not isinstance(placement, Replicate)
    }
    if any(place for axis, place in coordinate.items() if axis not in split):
        return None
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    mine = tensor.to_local().detach()
    if tuple(mine.shape) != tuple(shape):
        raise RuntimeError(
            f"a shard has the shape {list(mine.shape)}, but its placement {tensor.placements} says {list(shape)}"
        )
    return TensorShard(mine, tuple(tensor.shape), tuple(offsets)) if mine.numel() or not tensor.numel() else None


def take(reader: Reader, name: str, like: Tensor | None) -> Tensor:
    """Read a saved tensor, laid out as `like` is: of a DTensor of the same shape only what this rank holds."""
    if not isinstance(like, DTensor) or tuple(reader.shape(name)) != tuple(like.shape):
        return reader.read(name)
    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    mine = like.to_local()
    read = (
        reader.read(name, tuple(offsets), tuple(shape)) if mine.numel() else torch.empty(tuple(shape), dtype=mine.dtype)
    )
    return _of_shard(read.to(mine.device), like, like.shape, like.stride())


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` as this rank holds `like`, a parameter: all of it, or where parameters are sharded over ranks its part, a
    DTensor."""
    return take(Whole({"": whole}, {}), "", like) if isinstance(like, DTensor) else whole.to(like.device)


def shard_as(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, a tensor of any shape, sharded as `like` is; a copy where `like` is
    plain."""
    if not isinstance(like, DTensor):
        return whole.clone()
    shape, offsets = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    mine = whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]
    return _of_shard(mine.to(local(like).device), like, whole.shape, whole.stride())


def _of_shard(mine: Tensor, like: DTensor, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """A copy of this rank's shard as a DTensor sharded as `like` is, on the device of the shard: that of an offloaded
    parameter is not the mesh's, to which `from_local` moves what is not on the meta device."""
    empty = DTensor.from_local(
        mine.to("meta"), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    made: DTensor = torch.empty_like(empty, device=mine.device)  # type: ignore[assignment]
    local(made).copy_(mine)
    return made


def settle(parameters: Iterable[Tensor]) -> None:
    """Sum gradients that are still spread over the ranks of a tensor group, as those of layers on shares of the
    sequence are."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        if not isinstance(parameter, DTensor):  # the plan leaves it whole
            parameter.grad = gradient.full_tensor()
        elif gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in groups that one foreach or fused kernel takes: plain tensors, and the DTensors of each mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def by_groups(parameters: Sequence[nn.Parameter]) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
    """What this rank holds of the gradients, by the process groups over which their elements are sharded."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        split: list[int] = []
        if isinstance(gradient, DTensor):
            split = [i for i, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)]
        mesh = gradient.device_mesh if split else None  # type: ignore[attr-defined]
        kinds.setdefault((mesh, *split), []).append(local(gradient))
    found: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for (mesh, *split), parts in kinds.items():  # several meshes may share a group
        found.setdefault(tuple(mesh.get_group(i) for i in split), []).extend(parts)
    return found


@contextmanager
def groups_by_mesh(optimizer: Optimizer) -> Iterator[None]:
    """Within it, no param group mixes what one foreach or fused kernel does not take together.

    What the optimizer writes into a group is kept. Raises RuntimeError where it writes different values for the parts
    of one.
    """
    groups = optimizer.param_groups
    if not any((group.get("foreach") or group.get("fused")) and len(by_mesh(group["params"])) > 1 for group in groups):
        yield
        return
    split = [
        [
            {
                **group,
                **names_of_kept(group, [any(p is mine for mine in part) for p in group["params"]]),
                "params": part,
            }
            for part in by_mesh(group["params"])
        ]
        for group in groups
    ]
    whole = list(groups)
    groups[:] = [part for parts in split for part in parts]
    try:
        yield
    finally:
        groups[:] = whole
    for group, parts in zip(groups, split, strict=True):
        for key in {key for part in parts for key in part} - {"params", "param_names"}:
            values = [part.get(key) for part in parts]
            if any(not _same(value, values[0]) for value in values):
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps {key!r} in its param_groups by all parameters of a group, but "
                    "those of a "
                    "sharded model are stepped in parts under foreach=True or fused=True; leave these options out"
                )
            group[key] = values[0]


@contextmanager
def computes_with_shards(optimizer: Optimizer) -> Iterator[None]:
    """Within it torch's Adam and AdamW compute with the plain tensors that this rank holds of DTensors, which takes a
    fraction of the time: DTensor's dispatch takes longer than an operation with a small shard.

    What user code sees stays as it is: parameters, gradients and state are DTensors, and count writes. Other optimizers
    are left alone; SGD asks for its state by what it has stepped.
    """
    kind: Any = type(optimizer)
    if kind not in (Adam, AdamW) or not is_plain(optimizer):
        yield
        return

    def init_group(group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = kind._init_group(optimizer, group, *lists)
        of_parameters = [tensors for tensors in lists[:-1] if tensors]  # the last are the numbers of steps
        for i, row in enumerate(zip(*of_parameters, strict=True)):
            if _placed_alike(row):
                increment_version((row[0], *row[2:]))  # not the gradient, which it reads
                for tensors, tensor in zip(of_parameters, row, strict=True):
                    tensors[i] = tensor.to_local()
        return has_complex

    vars(optimizer)["_init_group"] = init_group
    try:
        yield
    finally:
        vars(optimizer).pop("_init_group", None)  # a closure may have stepped it once more


def _placed_alike(tensors: Sequence[Any]) -> bool:
    """Whether all are DTensors of which each rank holds the same elements, so that these can be computed alone."""
    first = tensors[0]
    return isinstance(first, DTensor) and all(
        isinstance(each, DTensor)
        and each.shape == first.shape
        and each.device_mesh is first.device_mesh
        and each.placements == first.placements
        for each in tensors
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)


class ShardedScaler(LossScaler):
    """Loss scaling by which all ranks skip the same steps, each having checked its own shards."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and local(parameter.grad).numel():
                    gradient = local(parameter.grad)
                    by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), gradients in by_kind.items():
            found = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(device))
            found_inf = torch.maximum(found_inf, found.to(found_inf.device))
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
