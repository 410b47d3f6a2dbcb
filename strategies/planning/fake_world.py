"""One process in place of all ranks of a run: a process group that communicates nothing, of any size.

Every other rank is taken to do and say what this one does, so that what ranks agree on is agreed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lockstep.strategies.launch import environment
from lockstep.strategies.launch.environment import World
from lockstep.strategies.launch.rng import seed_streams
from lockstep.strategies.pipeline.stage_run import Message
from lockstep.strategies.virtual.stage_links import StageLinks

VARIABLE = "LOCKSTEP_PLANNED_RANK"


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """While it lasts strategies that are configured and set up here are rank `rank` of `world_size` on one node.

    Raises RuntimeError within a process group of the caller's.
    """
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "a run is planned in a process of its own, but this process is in a process group; call "
            "torch.distributed.destroy_process_group() before"
        )
    environment._READERS["plan"] = _planned
    ours = {"LOCKSTEP_LAUNCHER": "plan", VARIABLE: f"{rank}/{world_size}"}
    try:
        with environment.variables(ours):
            yield
    finally:
        del environment._READERS["plan"]


@contextmanager
def answering_stages() -> Iterator[None]:
    """While it lasts what a stage of a pipeline with virtual ranks receives beside tensors is what this stage would
    have sent: seeded random streams, the strides of the tensors that come, and that gradients are of a loss."""

    def state(links: StageLinks, message: Message, stage: int) -> Tensor:
        with links.streams.kept():  # as an earlier stage has them, which has drawn nothing
            seed_streams(0)
            found = links.facts(message.tensors)
        links.receive_into(torch.empty(1, dtype=torch.int64), stage, 1)
        links.receive_into(torch.empty_like(found), stage, 2)
        return found

    def numbers(links: StageLinks, message: Message, stage: int) -> list[int]:
        found = [1, *(stride for tensor in message.tensors for stride in tensor.stride())]
        links.receive_into(torch.tensor(found), stage, 3)
        return found

    originals = StageLinks.receive_state, StageLinks.receive_numbers
    StageLinks.receive_state, StageLinks.receive_numbers = state, numbers  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        StageLinks.receive_state, StageLinks.receive_numbers = originals  # type: ignore[method-assign]


def _planned(environ: Mapping[str, str]) -> World | None:
    if VARIABLE not in environ:
        return None
    rank, world_size = map(int, environ[VARIABLE].split("/"))
    return World(rank, rank, world_size, world_size, 0, 1, "plan", None)


def ranks_of(args: Sequence[Any]) -> tuple[int, ...]:
    """Of the group with which a collective was called."""
    for value in args:
        group = None
        if isinstance(value, torch.ScriptObject):
            try:
                group = torch._C._distributed_c10d.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):  # a reduction
                continue
        elif isinstance(value, str) and value in _group_names():
            group = c10d._resolve_process_group(value)  # type: ignore[arg-type]
        if group is not None:
            return tuple(c10d.get_process_group_ranks(group))
    return ()


def _group_names() -> Any:
    return set(c10d._world.pg_names.values())
