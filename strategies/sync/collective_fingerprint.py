"""What collectives a rank calls, as a number that ranks can compare.

Of a call torch remembers its kind and sizes at most, in a recorder that is read in a tenth of a millisecond, and not
whether it sums or takes the maximum. So the methods of its process group, through which every call from Python goes,
note here what they are given.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from lockstep.strategies.base import Topology

_EQUAL_SIZES = (
    "allreduce allreduce_coalesced broadcast reduce "
    "allgather _allgather_base all_gather_single allgather_coalesced reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single"
).split()
"""Calls whose tensors have the same numbers of elements on all ranks."""
_STACK = ("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced")
_OTHERS = ["gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single", "barrier"]


_Refused: TypeAlias = tuple[str, bool] | None
_refused: _Refused = None
"""Why calls are refused now, and whether all of them are."""


@contextmanager
def refusing(why: str, every: bool = False) -> Iterator[_Refused]:
    """While it lasts RuntimeError(`why`) is raised for calls in the default process group that add or stack what all
    ranks have, or for `every` one. Where every one is refused already, that stays."""
    yield from _while(_refused if _refused is not None and _refused[1] else (why, every))


def once_a_sample(step: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    """A user's step, in which calls are refused that would count samples once for each of the ranks that share them."""
    shared = topology.world_size // topology.data_size
    if shared == 1:
        return step
    why = (
        f"{shared} ranks each share samples, so it counts these as often; use self.sum_over_ranks or self.all_gather, "
        "which count them once"
    )

    def call(*args: Any) -> Any:
        with refusing(why):
            return step(*args)

    return call


@contextmanager
def counting_once() -> Iterator[_Refused]:
    """While it lasts calls that stack and add are not refused, as their caller counts what ranks share once. Gives what
    `restored` takes around code of the user that is called meanwhile."""
    yield from _while(_refused if _refused is not None and _refused[1] else None)


@contextmanager
def restored(refused: _Refused) -> Iterator[_Refused]:
    """While it lasts calls are refused that were before `counting_once`."""
    yield from _while(refused)


def _while(refused: _Refused) -> Iterator[_Refused]:
    global _refused
    before, _refused = _refused, refused
    try:
        yield before
    finally:
        _refused = before


class Calls:
    """The collective calls in the default process group since the last `clear`, but for those between two ranks."""

    def __init__(self) -> None:
        self.clear()
        self._group = dist.group.WORLD
        self._methods = {
            name: vars(dist.ProcessGroup)[name] for name in (*_EQUAL_SIZES, *_OTHERS) if name in vars(dist.ProcessGroup)
        }
        for name in self._methods:
            setattr(dist.ProcessGroup, name, _noting(self, name, getattr(dist.ProcessGroup, name)))

    def close(self) -> None:
        """Note no more."""
        for name, method in self._methods.items():
            setattr(dist.ProcessGroup, name, method)
        self._group = None

    def clear(self) -> None:
        self.hash = 0
        """Of the calls in their order; 0 without any."""
        self.latest: deque[str] = deque(maxlen=3)
        """The last of them, in words."""

    def note(self, name: str, arguments: tuple[Any, ...], options: Any) -> None:
        parts = [name.strip("_")]
        reduction = getattr(options, "reduceOp", None)
        if reduction is not None:
            parts.append(reduction.op.name)
        if _refused is not None and (_refused[1] or name in _STACK or parts[1:] == ["SUM"]):
            raise RuntimeError(f"{parts[0]} of torch.distributed was called here, but {_refused[0]}")
        if name in _EQUAL_SIZES:
            given = arguments[-1]
            for tensor in [given] if isinstance(given, Tensor) else tree_leaves(given):
                parts.append(f"{str(tensor.dtype)[len('torch.') :]}[{tensor.numel()}]")
        if hasattr(options, "rootRank"):
            parts.append(f"root {options.rootRank}")
        call = " ".join(parts)
        self.latest.append(call)
        self.hash = zlib.crc32(call.encode(), self.hash) or 1


def _noting(calls: Calls, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noting(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
        if group is calls._group:
            *tensors, options = arguments if arguments else (named.get("opts"),)
            calls.note(name, tuple(tensors), options)
        return method(group, *arguments, **named)

    return noting
