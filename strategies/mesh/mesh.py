"""Meshes of ranks: from "ddp=2,tensor=2" to axes whose product is the number of ranks.

Axes in the order in which ranks are numbered, outermost first: pipeline, ddp, fsdp, tensor. So the ranks
of one tensor group are neighbors, which on GPUs have the fastest links between them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from lockstep.strategies.base import Topology
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.process_group import backend_of, new_mesh
from lockstep.strategies.sync.collectives import own_group

AXES = ("pipeline", "ddp", "fsdp", "tensor")
"""Outermost first: rank = ((pipeline * ddp_size + ddp) * fsdp_size + fsdp) * tensor_size + tensor."""


def parse(text: str) -> dict[str, int | None]:
    """The axes of a mesh in the order of `AXES`; None for the one that takes the ranks that are left.

    Raises ValueError for an invalid mesh, naming the part that is wrong.
    """
    found: dict[str, int | None] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1)
            raise ValueError(
                f"a mesh has the axes {', '.join(AXES)}, but strategy={text!r} names {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if name in found:
            raise ValueError(
                f"a mesh has each axis once, but strategy={text!r} names {name!r} twice; multiply the sizes into one"
            )
        if equals and not (size.isdecimal() and int(size) >= 1):
            raise ValueError(
                f"the size of a mesh axis is a whole number of at least 1, but strategy={text!r} has "
                f"{name}={size or 'nothing'}"
            )
        found[name] = int(size) if equals else None
    free = [name for name, size in found.items() if size is None]
    if len(free) > 1:
        raise ValueError(
            f"one axis of a mesh may go without a size and take the ranks that are left, but strategy={text!r} has "
            f"{' and '.join(free)}; "
            "give all but one a size"
        )
    return {name: found[name] for name in AXES if name in found}


def resolve(axes: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    """The size of every axis on `world_size` ranks. Raises ValueError with the arithmetic and the nearest mesh that
    fits."""
    product = math.prod(size for size in axes.values() if size is not None)
    free = [name for name, size in axes.items() if size is None]
    if world_size % product or (not free and product != world_size):
        shown = " × ".join(f"{name}={size}" for name, size in axes.items() if size is not None)
        fits = "does not divide" if free else "is not"
        raise ValueError(
            f"the mesh {shown} = {product} ranks {fits} the number of ranks, {world_size}; "
            f"the nearest mesh that fits is strategy={_nearest(axes, world_size)!r}"
        )
    return {name: world_size // product if size is None else size for name, size in axes.items()}


def devices_of(axes: Mapping[str, int | None], devices: int | str, num_nodes: int) -> int | str:
    """The number of devices on a node: what was given, else what the sizes multiply to where no launcher has started
    ranks."""
    sizes = list(axes.values())
    if devices != "auto" or None in sizes or environment.detect() is not None:
        return devices
    product = math.prod(size for size in sizes if size is not None)
    return product // num_nodes if product % num_nodes == 0 else devices


class PipelineRanks(NamedTuple):
    """Which ranks form one pipeline, and which hold the same stages of several pipelines."""

    num_stage_ranks: int = 1
    stage_rank: int = 0
    """This rank's place in its pipeline."""
    data_rank: int = 0
    """The pipeline that this rank is in."""
    data_size: int = 1
    group: dist.ProcessGroup | None = None
    """The ranks of this pipeline."""
    data_group: dist.ProcessGroup | None = None
    """The ranks with the same stages, if there are several pipelines."""
    mesh: Any = None
    """All axes, if stages are sharded: a `DeviceMesh`."""

    def coordinate(self) -> dict[str, int]:
        """This rank's place along the axes of `mesh` that shard a stage."""
        place = dict(zip(self.mesh.mesh_dim_names, self.mesh.get_coordinate(), strict=True))
        return {name: i for name, i in place.items() if name != "pipeline"}


def pipeline_ranks(axes: Mapping[str, int | None], topology: Topology) -> PipelineRanks:
    """Make the process groups of a mesh with a pipeline axis. Every rank calls it."""
    ranks = range(topology.world_size)
    sizes = {
        name: size
        for name, size in resolve(axes, topology.world_size).items()
        if size > 1 or name == "pipeline" or topology.world_size == 1
    }
    data_size = topology.world_size // sizes["pipeline"]
    stage_rank, data_rank = divmod(topology.rank, data_size)  # neighbors share layers, not samples
    backend = backend_of(topology.device)
    group = own_group([ranks[first::data_size] for first in range(data_size)], backend)
    mesh = data_group = None
    if "fsdp" in sizes:
        mesh = new_mesh(topology.device.type, sizes)
    if len(sizes) > 1:
        data_group = own_group([ranks[first : first + data_size] for first in ranks[::data_size]], backend)
    return PipelineRanks(sizes["pipeline"], stage_rank, data_rank, data_size, group, data_group, mesh)


def _nearest(axes: Mapping[str, int | None], world_size: int) -> str:
    """The mesh of the same axes whose sizes are off by the smallest factors."""

    def distance(sizes: tuple[int, ...]) -> float:
        return sum(
            abs(math.log(size / wanted))
            for size, wanted in zip(sizes, axes.values(), strict=True)
            if wanted is not None
        )

    best = min(_factorizations(world_size, len(axes)), key=distance)
    return ",".join(f"{name}={size}" for name, size in zip(axes, best, strict=True))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `number` as a product of `count` whole numbers, in order."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)
