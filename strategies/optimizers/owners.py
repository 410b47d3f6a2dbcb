"""Optimizers that need whole parameters, where ranks hold shards of them: each parameter has an owner that steps it.

For a step the owner gets value and gradient of its parameters from the ranks that hold them, the user's optimizer steps
these as on one process, and new values go back. The owner alone keeps their optimizer state.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import State, names_of, parameter_names
from lockstep.strategies.launch import environment
from lockstep.strategies.modules.absent import Absent, is_here
from lockstep.strategies.modules.parameter_hooks import share_attributes
from lockstep.strategies.optimizers.copies import INSTEAD, names_of_kept, steps_with
from lockstep.strategies.optimizers.exchange import Exchange, Owned, Piece
from lockstep.strategies.optimizers.hidden_state import HiddenState
from lockstep.strategies.optimizers.modes import has_modes
from lockstep.strategies.optimizers.numbers import changes, numbers_of, put
from lockstep.strategies.optimizers.probe import Finding
from lockstep.strategies.sync.collectives import all_gather, broadcast, local

_EDITS = ("", "dropped", "changed")
_SPREAD = "the state of {} is spread over the ranks, and each has only that of the parameters that it steps"


class Owners:
    """The owners of the parameters of one optimizer, among the ranks of `group` (None: all); each rank of it makes
    one, and calls each of its methods.

    `finding` is what the optimizer needs: one that couples parameters has one owner for all, rank 0 of the group.
    `model` has its parameters under their canonical names. What no rank of the group holds is left alone.
    """

    def __init__(
        self,
        key: str,
        optimizer: Optimizer,
        finding: Finding,
        model: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.optimizer, self._key, self._finding, self._model = optimizer, key, finding, model
        self._device, self._group = device, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._load = [0] * (1 if finding.kind == "coupled" else self._size)
        self._owned: dict[int, Owned] = {}
        self._exchange = Exchange(group)
        self._held: list[tuple[dict[str, Any], list[nn.Parameter], dict[str, Any]]] = []
        """The optimizer's groups while it steps, with their parameters as user code sees them, and their names."""
        self._shares_numbers = finding.keeps_numbers or finding.kind == "coupled" or has_modes(optimizer)
        self._before: list[dict[str, Any]] = []
        self._gradients: dict[int, tuple[Tensor, int]] = {}
        """Those that the optimizer was given, with their version, by the `id` of what owns them."""
        self._show()
        self._hide()

    # ---- what a step sees ------------------------------------------------------------------------------

    @contextmanager
    def whole(self, closure: Callable[[], Any] | None = None) -> Iterator[tuple[Any, Callable[[], Any] | None]]:
        """While it lasts the optimizer holds whole parameters, each on its owner; yields what to step, and with which
        closure: all ranks call `closure` together, as often as the owner's optimizer calls what it gets.

        Raises as `check_closure` does.
        """
        self.check_closure(closure)
        if hooked := steps_with(self.optimizer):
            raise RuntimeError(
                f"optimizer {self._key!r} ({type(self.optimizer).__name__}) has got {hooked} during the run, which "
                f"would see one rank's parameters only; {INSTEAD}"
            )
        self._before = [numbers_of(group) for group in self.optimizer.param_groups] if self._shares_numbers else []
        self._show()
        self._open()
        try:
            if self._steps_here():
                yield self.optimizer, closure and functools.partial(self._lead, closure)
            else:
                step = functools.partial(self._follow, closure)
                yield SimpleNamespace(step=step, param_groups=[]), closure
        except BaseException:
            self._close()
            self._hide()
            raise
        if closure is not None and self._steps_here():
            self._exchange.scatter_gradients(self._of_groups(), self._broadcast([False, self._edits()])[1])
        if closure is None:
            self._share_edits()
        self._close(scatters=True)
        self._hide()
        self._share_numbers()

    def check_closure(self, closure: Callable[[], Any] | None) -> None:
        """Raise ValueError for a closure where there are several owners."""
        if closure is not None and len(self._load) > 1:
            raise ValueError(
                f"optimizer {self._key!r} ({type(self.optimizer).__name__}) steps each parameter on another rank, so "
                "no rank knows when all are to call the closure; step without one, or use strategy='ddp'"
            )

    def _steps_here(self) -> bool:
        """Whether to call the optimizer on this rank: one that couples parameters does nothing good without them, and
        some fail where a group has none."""
        if self._finding.kind == "coupled":
            return self._rank == 0
        return not self._finding.needs_all_groups or bool(self.optimizer.param_groups)

    def _lead(self, closure: Callable[[], Any]) -> Any:
        edits = self._edits()
        self._broadcast([True, edits])
        return self._evaluate(closure, edits)

    def _follow(self, closure: Callable[[], Any] | None, _: Any = None) -> None:
        """Stands for the step on a rank that has nothing to step."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn
        while closure is not None:
            again, edits = self._broadcast(None)
            if not again:
                return self._exchange.scatter_gradients(self._of_groups(), edits)
            self._evaluate(closure, edits)

    def _edits(self) -> list[str]:
        """What the optimizer has done to each gradient since this rank gave it the parameters. One that edits them may
        do so by `.data`, unseen."""
        found = []
        for each in self._of_groups():
            gradient = each.stepped.grad if is_here(each.stepped) else None
            before, version = self._gradients.get(id(each), (None, 0))
            same = gradient is before and (gradient is None or gradient._version == version)
            same &= gradient is None or not self._finding.edits_gradients
            found.append("" if same else "dropped" if gradient is None else "changed")
        return found

    def _share_edits(self) -> None:
        """Let the gradients of what each rank holds be as the optimizer has left its own."""
        edits = self._edits()
        if self._finding.edits_gradients:
            codes = all_gather(torch.tensor([_EDITS.index(edit) for edit in edits], dtype=torch.int8), self._group)
            self._exchange.scatter_gradients(self._of_groups(), [_EDITS[code] for code in codes.amax(0).tolist()])
        elif any(edits):
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has changed or dropped gradients in its step, which a copy of it did "
                "not when the run began, so other ranks do not know of it; leave .grad as it is, or use strategy='ddp'"
            )

    def _evaluate(self, closure: Callable[[], Any], edits: list[str]) -> Any:
        self._exchange.scatter_gradients(self._of_groups(), edits)
        self._close(scatters=True)
        self._hide()
        self._share_numbers()
        loss = closure()
        self._show()
        self._open()
        return loss

    # ---- what a checkpoint sees ------------------------------------------------------------------------

    @contextmanager
    def described(self) -> Iterator[dict[int, str]]:
        """While it lasts the optimizer has the state of what is stepped here, by parameters whose names are yielded by
        `id`; those that others step are `Absent`."""
        self._show()
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._owned[id(p)].stepped if is_here(p) else p for p in group["params"]]
        try:
            yield {id(each.stepped): each.name for each in self._owned.values()}
        finally:
            sharded: dict[int, Any] = {id(each.stepped): each.sharded for each in self._owned.values()}
            for group in self.optimizer.param_groups:
                group["params"][:] = [sharded.get(id(p), p) for p in group["params"]]
            self._hide()

    def merge(self, state: State) -> None:
        """Put the JSON part of all ranks' optimizer states into that of `state`."""
        saved = state.meta["optimizers"][self._key]
        parts = [self._broadcast(saved["state"], rank) for rank in range(self._size)]
        saved["state"] = {name: entry for part in parts for name, entry in part.items()}

    def close(self) -> None:
        """Give the optimizer the state that this rank has of it."""
        if isinstance(self.optimizer.state, HiddenState):
            self.optimizer.state = self.optimizer.state.held

    # ---- where state and parameters are ----------------------------------------------------------------

    def _show(self) -> None:
        self._take_new()
        state = self.optimizer.state
        if isinstance(state, HiddenState):
            self.optimizer.state = state.held
            return
        adopted = defaultdict(dict, {key: value for key, value in state.items() if not isinstance(key, Tensor)})
        for each in self._owned.values():  # what the constructor, or user code, has made for sharded parameters
            if each.sharded in state:
                entry = _whole_tensors(state[each.sharded])
                if each.owner == self._rank:
                    adopted[each.stepped] = entry
        self.optimizer.state = adopted

    def _hide(self) -> None:
        self.optimizer.state = HiddenState(self.optimizer, _SPREAD)

    def _take_new(self) -> None:
        """Choose owners for parameters that have none: by the cost of a product of the matrix with itself, largest
        first."""
        held = [p for group in self.optimizer.param_groups for p in group["params"] if is_here(p)]
        new = {id(p): p for p in held if id(p) not in self._owned}
        if not new:
            return
        names, pieces = parameter_names(self._model), self._pieces(list(new.values()))
        for i, parameter in sorted(new.items(), key=lambda item: -_cost(item[1])):
            owner = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[owner] += _cost(parameter)
            name = names_of(parameter, names, self._key)
            if owner == self._rank:
                stepped: Any = nn.Parameter(_without_memory(parameter), requires_grad=parameter.requires_grad)
            else:
                stepped = Absent(parameter, name, owner, self._device, is_parameter=True)
            share_attributes(parameter, stepped)
            self._owned[i] = Owned(parameter, name, pieces[i], owner, stepped)

    def _pieces(self, parameters: Sequence[nn.Parameter]) -> dict[int, list[Piece]]:
        """What each rank holds of each of them."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mine: list[int] = []
        for p in parameters:
            shape, offsets = tuple(p.shape), (0,) * p.dim()
            if isinstance(p, DTensor):
                shape, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
            mine += [*offsets, *shape]
        table = _rows_in_plan(parameters, mine, self._group) if environment.in_plan() else None
        if table is None:
            table = all_gather(torch.tensor(mine, dtype=torch.int64), self._group).tolist()
        found: dict[int, list[Piece]] = {}
        start = 0
        for p in parameters:
            middle, end = start + p.dim(), start + 2 * p.dim()
            held = [Piece(rank, tuple(row[start:middle]), tuple(row[middle:end])) for rank, row in enumerate(table)]
            found[id(p)] = [piece for piece in held if 0 not in piece.shape]
            start = end
        return found

    @torch.no_grad()
    def _open(self) -> None:
        """Bring values and gradients to the owners, and give the optimizer what this rank steps."""
        groups = self.optimizer.param_groups
        self._held = [
            (group, list(group["params"]), {"param_names": group["param_names"]} if "param_names" in group else {})
            for group in groups
        ]
        self._exchange.gather(self._of_groups())
        self._gradients = {
            id(each): (each.stepped.grad, each.stepped.grad._version)
            for each in self._of_groups()
            if is_here(each.stepped) and each.stepped.grad is not None
        }
        for group, params, _ in self._held:
            stepped = [self._owned[id(p)].stepped if is_here(p) else p for p in params]
            group.update(names_of_kept(group, map(is_here, stepped)))
            group["params"][:] = filter(is_here, stepped)
        if self._finding.needs_all_groups:
            groups[:] = [group for group in groups if group["params"]]

    @torch.no_grad()
    def _close(self, scatters: bool = False) -> None:
        """Give the optimizer its sharded parameters back; with `scatters` their new values too."""
        self.optimizer.param_groups[:] = [group for group, _, _ in self._held]
        for group, params, names in self._held:
            group["params"][:] = params
            group.update(names)
        all_held = self._of_groups()
        if scatters:
            self._exchange.scatter(all_held)
        else:
            self._exchange.forget()
        for each in all_held:
            if is_here(each.stepped):
                each.stepped.data, each.stepped.grad = _without_memory(each.sharded), None

    def _of_groups(self) -> list[Owned]:
        return [self._owned[id(p)] for _, params, _ in self._held for p in params if is_here(p)]

    def _broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source` of the group."""
        return broadcast(
            value, source if self._group is None else dist.get_global_rank(self._group, source), self._group
        )

    def _share_numbers(self) -> None:
        """Give all ranks what the step has changed in the groups besides parameters."""
        if self._shares_numbers:
            share_numbers(self.optimizer.param_groups, self._before, self._group)
            self._before = [numbers_of(group) for group in self.optimizer.param_groups]


def share_numbers(
    groups: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], ranks: dist.ProcessGroup | None
) -> None:
    """Give all `ranks` what a step has changed in parameter groups besides parameters, each from the first rank that
    has changed some of it: others had nothing to step there. Every rank calls it."""
    found = [changes(numbers_of(group), held) for group, held in zip(groups, before, strict=True)]
    changed = all_gather(torch.tensor([bool(each) for each in found], dtype=torch.int8), ranks)
    sources = changed.argmax(0).tolist()
    for source in sorted({rank for rank, row in zip(sources, changed.T.tolist(), strict=True) if any(row)}):
        mine = {str(i): found[i] for i, rank in enumerate(sources) if rank == source}
        rank = source if ranks is None else dist.get_global_rank(ranks, source)
        for i, numbers in broadcast(mine, rank, ranks).items():
            if rank != dist.get_rank():
                put(groups[int(i)], numbers)


@contextmanager
def described(owners: Mapping[int, Owners], optimizers: Mapping[str, Optimizer]) -> Iterator[dict[int, str]]:
    """`Owners.described` of those optimizers that have owners, which are given by the `id` of the optimizer."""
    with ExitStack() as stack:
        found = [owners[id(optimizer)] for optimizer in optimizers.values() if id(optimizer) in owners]
        yield {i: name for each in found for i, name in stack.enter_context(each.described()).items()}


def _rows_in_plan(
    parameters: Sequence[nn.Parameter], mine: list[int], group: dist.ProcessGroup | None
) -> list[list[int]] | None:
    """The rows that ranks would say, in a process that stands for all of them; None where they do not follow from how
    torch divides a dimension into chunks."""
    rows = []
    for rank in dist.get_process_group_ranks(group):
        row: list[int] = []
        for p in parameters:
            offsets, shape = [0] * p.dim(), list(p.shape)
            placements: Any = getattr(p, "placements", ())
            ranks = p.device_mesh.mesh.numpy() if placements else np.zeros(())  # type: ignore[attr-defined]
            # What tensor has sharded fsdp shards again, if both do it along one dimension.
            for axis in sorted(range(len(placements)), key=lambda axis: hasattr(placements[axis], "split_factor")):
                if placements[axis].is_replicate() or ranks.shape[axis] == 1:
                    continue
                stride = int(np.diff(ranks, axis=axis).flat[0])  # of this rank's mesh and of those beside it
                dim, size = placements[axis].dim, shape[placements[axis].dim]
                chunk = -(-size // ranks.shape[axis])
                start = min(rank // stride % ranks.shape[axis] * chunk, size)
                offsets[dim], shape[dim] = offsets[dim] + start, min(chunk, size - start)
            row += [*offsets, *shape]
        rows.append(row)
    return rows if rows[dist.get_rank(group)] == mine else None


def _cost(parameter: Tensor) -> int:
    """Of a product of a matrix with itself, the most that optimizers compute; that of a vector is its length."""
    rows = len(parameter) if parameter.dim() > 1 else 1
    return parameter.numel() * max(1, min(rows, parameter.numel() // max(1, rows)))


def _whole_tensors(value: Any) -> Any:
    """`value` with its sharded tensors made whole. Every rank calls it."""
    if isinstance(value, Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value
    if isinstance(value, dict):
        return {key: _whole_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_whole_tensors(item) for item in value)
    return value


def _without_memory(like: Tensor) -> Tensor:
    """A tensor of the shape of `like` that holds one number."""
    return local(like).detach().new_zeros(()).expand(like.shape)
