"""Optimizers and gradients in a pipeline, where each rank has those of its own stages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import names_of, parameter_names
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.optimizers.copies import INSTEAD, names_of_kept, steps_with
from lockstep.strategies.optimizers.hidden_state import HiddenState
from lockstep.strategies.optimizers.numbers import numbers_of
from lockstep.strategies.optimizers.owners import Owners, share_numbers
from lockstep.strategies.optimizers.probe import Finding, needs_whole, probe
from lockstep.strategies.pipeline.staged_module import Staged
from lockstep.strategies.sync.collectives import clip_by_norm, clip_by_value, local, sum_gradients

if TYPE_CHECKING:
    from lockstep.strategies.spmd import SPMDStrategy

_SPREAD = "in a pipeline the state of {} is spread over the ranks, and each has only that of its own stages"


def hide(optimizer: Optimizer) -> None:
    """Put a `HiddenState` in the place of the optimizer's state."""
    if not isinstance(optimizer.state, HiddenState):
        optimizer.state = HiddenState(optimizer, _SPREAD)


def show(optimizer: Optimizer) -> None:
    """Undo `hide`, and drop what user code has put there meanwhile for parameters of other ranks."""
    if isinstance(optimizer.state, HiddenState):
        optimizer.state = optimizer.state.held
        return
    for parameter in [p for p in optimizer.state if not is_here(p)]:
        del optimizer.state[parameter]


@contextmanager
def shown(optimizers: Iterable[Optimizer], owners: Container[int] = ()) -> Iterator[None]:
    """While it lasts the optimizers have the state of this rank's parameters, besides those, by `id`, that have
    owners."""
    optimizers = [optimizer for optimizer in optimizers if id(optimizer) not in owners]
    for optimizer in optimizers:
        show(optimizer)
    try:
        yield
    finally:
        for optimizer in optimizers:
            hide(optimizer)


def find_needs(
    wrapped: Staged, optimizers: Mapping[str, Optimizer], ranks: SPMDStrategy, num_stage_ranks: int
) -> tuple[dict[str, Finding], set[int]]:
    """What those optimizers need that cannot step this rank's shards; empty if stages are whole. And the ids of those
    whose steps change numbers in their groups. Raises ValueError, on all ranks alike, for an optimizer that would step
    other numbers."""
    needs: dict[str, Finding] = {}
    keeps_numbers: set[int] = set()
    for key, optimizer in optimizers.items():
        found = probe(optimizer)
        check_optimizer(wrapped, key, optimizer, found, num_stage_ranks)
        if found.keeps_numbers:
            keeps_numbers.add(id(optimizer))
        if wrapped.shards is None:
            continue
        from lockstep.strategies.mesh import dtensors

        needed = needs_whole(key, optimizer, found, ranks, dtensors.shard_as, dtensors.groups_by_mesh)
        if needed is not None:
            needs[key] = needed
    return needs, keeps_numbers


def make_owners(
    wrapped: Staged, optimizers: Mapping[str, Optimizer], needs: Mapping[str, Finding], group: dist.ProcessGroup | None
) -> dict[int, Owners]:
    """The owners, by `id` of the optimizer, of what `find_needs` has found, among the ranks of `group`, which hold the
    same stages."""
    return {
        id(optimizers[key]): Owners(key, optimizers[key], found, wrapped.model, wrapped.device, group)
        for key, found in needs.items()
    }


def check_optimizer(wrapped: Staged, key: str, optimizer: Optimizer, found: Finding, num_stage_ranks: int) -> None:
    """Raise ValueError, on all ranks alike, for an optimizer that would step other numbers on the parameters of one
    rank's stages."""
    called = f"optimizer {key!r} ({type(optimizer).__name__})"
    if found.kind in ("coupled", "unknown"):
        raise ValueError(
            f"{called} cannot be stepped in a pipeline, where each rank holds the parameters of its stages, because "
            f"{found.reason}; use an optimizer that treats parameters one by one, or strategy='ddp'"
        )
    if hooked := steps_with(optimizer):
        raise ValueError(f"{called} has {hooked}, which would see one rank's parameters only; {INSTEAD}")
    names = parameter_names(wrapped.model)
    for i, group in enumerate(optimizer.param_groups if found.needs_all_groups else ()):
        ranks = {rank for p in group["params"] for rank in wrapped.tensors.ranks_of_name(names_of(p, names, key))}
        if len(ranks) < num_stage_ranks:
            raise ValueError(
                f"{called} fails on a parameter group without parameters ({found.needs_all_groups}), "
                f"but no stage of some rank has one of group {i}; let its step skip empty groups, or join the groups"
            )


@contextmanager
def own_parameters(optimizer: Optimizer) -> Iterator[None]:
    """While it lasts the groups of `optimizer` hold what this rank does."""
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (group, {key: group[key] for key in ("params", "param_names") if key in group})
        for group in optimizer.param_groups
    ]
    for group, held in groups:
        group.update(names_of_kept(group, map(is_here, held["params"])))
        group["params"] = [p for p in held["params"] if is_here(p)]
    try:
        yield
    finally:
        for group, held in groups:
            group.update(held)


@contextmanager
def numbers_alike(optimizer: Optimizer, keeps_numbers: bool, pipeline: dist.ProcessGroup | None) -> Iterator[None]:
    """Around a step: with `keeps_numbers` the groups of `optimizer` hold afterwards on all ranks what one has changed
    besides parameters, as those without parameters of a group may not. Raises RuntimeError for what has come around
    its step since set-up."""
    if hooked := steps_with(optimizer):
        raise RuntimeError(
            f"{type(optimizer).__name__} has got {hooked} during the run, which would see one rank's parameters only; "
            f"{INSTEAD}"
        )
    if not keeps_numbers:
        yield
        return
    before = [numbers_of(group) for group in optimizer.param_groups]
    yield
    share_numbers(optimizer.param_groups, before, pipeline)


@contextmanager
def held_here(optimizer: Optimizer, sharded: bool, owners: Owners | None) -> Iterator[Any]:
    """While it lasts `optimizer` has the parameters and the state of this rank; `sharded`: stages are. Yields what to
    step: with `owners` those decide."""
    if owners is not None:
        with owners.whole() as (held, _):
            yield held
        return
    with shown([optimizer]), own_parameters(optimizer), ExitStack() as kernels:
        if sharded:
            from lockstep.strategies.mesh import dtensors

            kernels.enter_context(dtensors.groups_by_mesh(optimizer))
        yield optimizer


def clip(
    wrapped: Staged,
    optimizer: Optimizer,
    value: float,
    algorithm: str,
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
) -> Tensor | None:
    """Clip what `optimizer` applies; the norm of the global gradient, or None for "value".

    `groups`: the pipeline's ranks, and those over which stages are sharded, None if they are not. A gradient that
    several ranks hold counts once.
    """
    pipeline, shards = groups
    found = [p for params in optimizer.param_groups for p in params["params"] if is_here(p) and p.grad is not None]
    copies = {id(p) for p in wrapped.tied.copies}
    counted: dict[Any, list[Tensor]] = {
        (pipeline,): [p.grad for p in found if not hasattr(p.grad, "device_mesh") and id(p) not in copies]
    }
    if shards is not None:
        counted[shards, pipeline] = [local(p.grad) for p in found if hasattr(p.grad, "device_mesh")]
    others = [p.grad for p in found if id(p) in copies]
    if algorithm != "norm":
        clip_by_value({**counted, None: others}, value)
        return None
    return clip_by_norm(counted, value, wrapped.device, others)


def sum_ranks(wrapped: Staged, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the pipelines, and give the statistics of the first to the others. What none of them has
    stays None."""
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    if wrapped.shards is not None:
        wrapped.shards.exchange(wrapped, group)
        apart = {id(p) for p in wrapped.shards.whole}
        trained = [p for p in trained if id(p) in apart]
    sum_gradients(trained, [group])
    for buffer in wrapped.statistics:
        dist.broadcast(buffer, group=group, group_src=0)
