"""Weights that user code changes while FSDP has them whole: the change is brought to the shards before the whole is
freed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.sync.contents import checksum, same_values


class UnshardedWrites:
    """Looks for changes of unsharded parameters and writes them to the shards.

    On the CPU values are compared, so that changes by way of `.data` are found; on an accelerator, where the host would
    wait for that, version counters are.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._found: dict[int, tuple[Any, int]] = {}
        self._seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Of each parameter the whole, the shard, and the part of the whole that the shard holds: views, made once."""

    def look(self, unit: Any) -> None:
        """The unit was gathered just now."""
        for parameter in _unsharded(unit):
            if parameter.unsharded_param.is_cpu:
                return
            self._versions[id(parameter)] = parameter.unsharded_param._version

    def write_back(self, unit: Any) -> None:
        """The unit is about to be freed. Does nothing where it is not whole."""
        for parameter in _unsharded(unit):
            whole, shard = _held(parameter.unsharded_param), _held(parameter.sharded_param)
            if whole.is_cpu:
                seen = self._seen.get(id(parameter))
                if seen is None or not (whole.is_set_to(seen[0]) and shard.is_set_to(seen[1])):
                    seen = whole.detach(), shard.detach(), _part(whole.detach(), parameter)
                    self._seen[id(parameter)] = seen
                if shard.dtype == whole.dtype and torch.equal(seen[1], seen[2]):
                    continue
            elif self._versions.get(id(parameter)) in (None, whole._version):
                continue
            self._write(parameter, whole.detach(), shard.detach())

    @torch.no_grad()
    def _write(self, parameter: Any, whole: Tensor, shard: Tensor) -> None:
        """Bring what has changed in `whole` to `shard`."""
        part = _part(whole, parameter).to(shard.device)
        was = shard.to(part.dtype)
        if whole.is_cpu and same_values(part, was):
            return
        shard.copy_(torch.where(part == was, shard, part.to(shard.dtype)))  # others keep what a cast would round
        known = self._found.get(id(parameter), (parameter, 0))[1]
        self._found[id(parameter)] = parameter, checksum(whole, known)

    def take(self) -> dict[int, int]:
        """What was changed since the last call: hashes of the new values by the id of the sharded parameter.

        A rank whose own part did not change has none.
        """
        found, self._found = self._found, {}
        return {id(parameter.sharded_param): number for parameter, number in found.values()}


def _unsharded(unit: Any) -> Iterator[Any]:
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        if group.is_unsharded:
            yield from (parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param"))


def _held(tensor: Any) -> Tensor:
    """What this rank holds of a tensor: the tensor itself that is in a DTensor, where `to_local` makes a view."""
    return getattr(tensor, "_local_tensor", tensor)


def _part(whole: Tensor, parameter: Any) -> Tensor:
    """What this rank's shard holds of `whole`."""
    mesh = parameter.mesh_info
    size, rank = getattr(mesh, "shard_mesh_size", 1), getattr(mesh, "shard_mesh_rank", 0)
    dim = parameter.fsdp_placement.dim
    each = -(-whole.size(dim) // size)  # as torch.chunk cuts, without making views of all shards
    start = min(rank * each, whole.size(dim))
    return whole.narrow(dim, start, min(each, whole.size(dim) - start))
