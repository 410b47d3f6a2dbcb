"""What an optimizer needs to see at once, found by stepping copies of it on small random tensors.

A strategy that keeps parameters, or pieces of them, on other ranks may step an optimizer on what a rank holds only if
the step is the same there. That depends on the optimizer's code, not on its name, so it is tried: a copy of the
optimizer steps random tensors, then again with some gradients changed, with tensors missing, and with tensors in
pieces. What moves that should not have moved says what the optimizer checks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.launch.rng import has_drawn, kept_streams, seed_streams, stream_states
from lockstep.strategies.modules.optimizer_copy import (
    Contents,
    UnknownOptimizer,
    closure_step,
    duplicate,
    make_it_move,
    plain_step,
)

MAX_DIM = 136
"""Dimensions of the small tensors: above 128, up to which some optimizers take a matrix for a vector."""
KEPT_PER_GROUP = 3
MAX_CHANGED = 4
"""Tensors whose gradients are changed, one at a time."""
SCALES = (1.0, 100.0, 0.01, 1.0, 10.0, 1.0)
"""Factors of the gradient in each step: thresholds (clipping, trust regions) are crossed in both directions."""


class Finding(NamedTuple):
    """What an optimizer needs to see at once."""

    kind: Literal["elementwise", "whole_tensor", "coupled", "unknown"]
    """"elementwise": an element moves by its own gradients alone. "whole_tensor": by those of its tensor (norms, matrix
    products, row statistics). "coupled": by those of other tensors (a global norm, a line search), or by random numbers
    whose order depends on which tensors there are. "unknown": it could not be tried."""
    reason: str
    """Why, as a clause that may follow "because" (empty for "elementwise")."""
    flattens: bool = False
    """Whether tensors flattened to vectors would move alike. Only an elementwise optimizer can."""
    needs_all_groups: str = ""
    """The error that it raises where a parameter group has no parameter; empty if it raises none."""


def probe(optimizer: Optimizer) -> Finding:
    """Find out what `optimizer` needs to see at once.

    Steps copies: parameters, gradients, state and hooks of `optimizer` and all random streams stay as they are. Takes
    some milliseconds to tenths of a second. Raises nothing: an optimizer whose copy cannot be stepped is "unknown".
    """
    with kept_streams(), torch.enable_grad():
        try:
            return _Probe(optimizer).finding()
        except Exception as error:
            return Finding(
                "unknown", f"a copy of it could not be stepped ({type(error).__name__}: {_first_line(error)})"
            )


class _Trial(NamedTuple):
    """Where tensors were after the steps."""

    moved: list[Tensor]
    """What each tensor of each group has moved, flat."""
    numbers: list[Any]
    """What the groups remember besides."""
    drew: bool
    """Whether random numbers were drawn."""


class _Probe:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._call: Callable[[Optimizer, Callable[[], Any]], Any] = plain_step
        self._sparse = False
        walk = Contents(optimizer)
        self._parameters = walk.parameters
        self._trimmed = self._trims(walk)
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._kept = [self._chosen(group) for group in optimizer.param_groups]
        self._draw(MAX_DIM)

    # ---- what is tried ---------------------------------------------------------------------------------

    def finding(self) -> Finding:
        if not any(self._kept):
            return Finding("elementwise", "", flattens=True)
        whole = self._first()
        if whole.drew:
            return Finding("coupled", "it draws random numbers, whose order depends on which parameters it holds")
        if not all(bool(t.isfinite().all()) for t in map(_real, whole.moved)):
            return Finding("unknown", "a copy of it went to NaN or infinity on random gradients")
        if not any(bool(t.any()) for t in whole.moved):
            return Finding("unknown", "a copy of it moved no parameter")
        if not _same(whole, self._trial()):
            return Finding("unknown", "two copies of it moved differently")
        empty = self._fails_on_empty_groups()
        found = self._coupled(whole)
        if found:
            return Finding("coupled", found, needs_all_groups=empty)
        found = self._whole_tensor(whole)
        if found:
            return Finding("whole_tensor", found, needs_all_groups=empty)
        return Finding("elementwise", "", self._like_pieces(whole, _flat) is True, empty)

    def _first(self) -> _Trial:
        """The reference, by the first way of calling `step` that works."""
        errors = []
        for call, sparse in ((plain_step, False), (closure_step, False), (plain_step, True)):
            self._call, self._sparse = call, sparse
            if sparse:  # slow, and no optimizer asks how large a sparse gradient is
                self._draw(8)
            try:
                return self._trial()
            except UnknownOptimizer:
                raise
            except Exception as error:
                errors.append(error)
        raise errors[0]

    def _coupled(self, whole: _Trial) -> str:
        count = len(whole.moved)
        for chosen in dict.fromkeys(round(i * (count - 1) / (MAX_CHANGED - 1)) for i in range(MAX_CHANGED)):

            def all_of_one(i: int, tensor: Tensor, chosen: int = chosen) -> Tensor | None:
                return torch.ones_like(tensor, dtype=torch.bool) if i == chosen else None

            other = self._trial(changed=all_of_one)
            rest = [i for i in range(count) if i != chosen]
            if not all(_close(whole.moved[i], other.moved[i]) for i in rest):
                return "what it does to a parameter depends on the gradients of others"
            if not _equal(whole.numbers, other.numbers):
                return "its parameter groups remember a number that depends on all gradients"
        most = max(len(kept) for kept in self._kept)
        for turn in range(min(most, MAX_CHANGED)) if count > 1 else ():
            alone = [[turn % len(kept)] if kept else [] for kept in self._kept]
            try:
                part = self._trial(alone=alone)
            except Exception as error:
                return (
                    f"it fails on some of its parameters without the others ({type(error).__name__}: "
                    f"{_first_line(error)})"
                )
            starts = [sum(map(len, self._kept[:g])) for g in range(len(self._kept))]
            held = [start + i for start, group in zip(starts, alone, strict=True) for i in group]
            if not all(_close(whole.moved[i], t) for i, t in zip(held, part.moved, strict=True)):
                return "what it does to a parameter depends on which others it holds"
        return ""

    def _whole_tensor(self, whole: _Trial) -> str:
        masks: dict[int, Tensor] = {}

        def some(i: int, tensor: Tensor) -> Tensor:
            masks[i] = (torch.arange(tensor.numel()) % 3 == 1).to(tensor.device).view_as(tensor)
            return masks[i]

        other = self._trial(changed=some)
        for i, (a, b) in enumerate(zip(whole.moved, other.moved, strict=True)):
            rest = ~masks[i].flatten()
            if not _close(a[rest], b[rest]):
                return "what it does to an element depends on the gradients of other elements of its tensor"
        if self._like_pieces(whole, _halves) is False:
            return "what it does to a tensor is not what it does to its halves"
        return ""

    def _like_pieces(self, whole: _Trial, pieces: Callable[[Tensor], list[Tensor]]) -> bool | None:
        """Whether tensors in pieces move as they do whole; None where that cannot be tried."""
        if not self._trimmed:  # attributes hold the whole tensors
            return None
        try:
            found = self._trial(pieces=pieces)
        except Exception:
            return None
        return _close(torch.cat(whole.moved).cpu(), torch.cat(found.moved).cpu())

    def _fails_on_empty_groups(self) -> str:
        full = [i for i, kept in enumerate(self._kept) if kept]
        for emptied in full:
            try:
                self._trial(alone=[[] if i == emptied else list(range(len(kept))) for i, kept in enumerate(self._kept)])
            except Exception as error:
                return f"{type(error).__name__}: {_first_line(error)}"
        return ""

    # ---- one trial -------------------------------------------------------------------------------------

    def _trial(
        self,
        changed: Callable[[int, Tensor], Tensor | None] | None = None,
        alone: list[list[int]] | None = None,
        pieces: Callable[[Tensor], list[Tensor]] | None = None,
    ) -> _Trial:
        """Step a copy.

        `changed` gives, by the index of a tensor, the elements whose gradients are others. `alone` says which of the
        tensors of each group stay. `pieces` cuts tensors.
        """
        trial = duplicate(self._optimizer, self._memo())
        gradients: dict[int, list[Tensor]] = {}
        tensors: list[Tensor] = []
        index = 0
        for g, (group, kept) in enumerate(zip(trial.param_groups, self._kept, strict=True)):
            chosen = [group["params"][i] for i in kept]
            stays: list[Tensor] = []
            for i, tensor in enumerate(chosen):
                signal = self._signals[index]
                elements = None if changed is None else changed(index, tensor.detach())
                if elements is not None:
                    signal = [torch.where(elements, -37.0 * s, s) for s in signal]
                if alone is None or i in alone[g]:
                    cut = [tensor] if pieces is None or not tensor.dim() else self._cut(trial, tensor, pieces)
                    stays += cut
                    for j, piece in enumerate(cut):
                        own = signal if piece is tensor else [pieces(s)[j] for s in signal]  # type: ignore[misc]
                        gradients[id(piece)] = own
                index += 1
            group["params"][:] = stays
            if "param_names" in group:
                group["param_names"] = [f"{g}.{i}" for i in range(len(stays))]
            tensors += stays
            make_it_move(group)
        if callable(train := getattr(trial, "train", None)):
            train()  # schedule-free optimizers
        return self._steps(trial, tensors, gradients)

    def _steps(self, duplicate: Optimizer, tensors: list[Tensor], gradients: dict[int, list[Tensor]]) -> _Trial:
        before = [t.detach().clone() for t in tensors]
        seed_streams(7)
        states = stream_states()
        for k, scale in enumerate(SCALES):

            def closure(k: int = k, scale: float = scale) -> Tensor:
                loss = torch.zeros((), dtype=torch.float64)
                for t in tensors:
                    with torch.no_grad():
                        gradient = scale * (gradients[id(t)][k] + 0.1 * t.tanh())
                        loss += _real(gradient * t).sum().cpu()
                        t.grad = gradient.to_sparse(1) if self._sparse else gradient
                return loss.requires_grad_()

            closure()
            self._call(duplicate, closure)
        drew = has_drawn(states) or any(not torch.equal(g.get_state(), s) for g, s in self._generators)
        moved = [(t.detach() - b).flatten() for t, b in zip(tensors, before, strict=True)]
        skipped = ("params", "param_names")
        numbers = [{k: v for k, v in group.items() if k not in skipped} for group in duplicate.param_groups]
        return _Trial(moved, numbers, drew)

    def _cut(self, duplicate: Optimizer, tensor: Tensor, pieces: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """The pieces of a tensor as parameters, with their pieces of its state."""
        cut: list[Tensor] = [nn.Parameter(piece.clone()) for piece in pieces(tensor.detach())]
        entry = duplicate.state.pop(tensor, {})
        for j, piece in enumerate(cut) if entry else ():
            duplicate.state[piece] = {
                key: pieces(value)[j].clone()
                if isinstance(value, Tensor) and value.shape == tensor.shape
                else copy.deepcopy(value)
                for key, value in entry.items()
            }
        return cut

    # ---- the copy --------------------------------------------------------------------------------------

    def _trims(self, walk: Contents) -> bool:
        """Whether a few parameters of each group can stand for all: nothing but the groups lists them."""
        if walk.elsewhere:
            return False
        return not any(
            key not in ("params", "param_names")
            and isinstance(value, list | tuple)
            and len(value) == len(group["params"]) > 2
            for group in self._optimizer.param_groups
            for key, value in group.items()
        )

    def _chosen(self, group: dict[str, Any]) -> list[int]:
        """Which parameters of a group are tried: the largest and the smallest, and one of each number of dimensions."""
        params = group["params"]
        if not self._trimmed:
            return list(range(len(params)))
        order = sorted(range(len(params)), key=lambda i: -params[i].numel())
        chosen: list[int] = []
        for dim in dict.fromkeys(params[i].dim() for i in order):
            chosen += [i for i in order if params[i].dim() == dim][:2]
        return sorted(chosen[:KEPT_PER_GROUP] + [i for i in order[-1:] if i not in chosen[:KEPT_PER_GROUP]])

    def _draw(self, largest: int) -> None:
        """Draw the small tensors and their gradients, once for all trials."""
        generator = torch.Generator().manual_seed(20)
        self._largest = largest if self._trimmed else 8
        self._values: dict[int, Tensor] = {}
        self._signals: list[list[Tensor]] = []
        for group, kept in zip(self._optimizer.param_groups, self._kept, strict=True):
            for parameter in (group["params"][i] for i in kept):
                shape, dtype, device = self._like(parameter)

                def draw() -> Tensor:
                    value = torch.randn(shape, dtype=dtype, generator=generator)  # noqa: B023 - called at once
                    return value.to(device)  # noqa: B023

                self._values[id(parameter)], mean = draw(), draw()
                self._signals.append([mean + 0.3 * draw() for _ in SCALES])  # noise around a mean, as in training

    def _like(self, parameter: Tensor) -> tuple[list[int], torch.dtype, Any]:
        """Shape, dtype and device of what stands for a parameter."""
        dtype = torch.complex128 if parameter.is_complex() else torch.float64
        return (
            [min(size, self._largest) for size in parameter.shape],
            dtype,
            "cpu" if parameter.is_meta else parameter.device,
        )

    def _memo(self) -> dict[int, Any]:
        """For `deepcopy`: what each parameter becomes, and what is not copied."""
        largest = self._largest
        memo: dict[int, Any] = {}
        for parameter in self._parameters:
            value = self._values.get(id(parameter))
            if value is None:
                shape, dtype, device = self._like(parameter)
                value = torch.zeros((), dtype=dtype, device=device).expand(shape)
            else:
                value = value.clone()
            memo[id(parameter)] = nn.Parameter(value)
        walk = Contents(self._optimizer)
        self._generators = [(each.clone_state(), each.get_state()) for each in walk.generators]
        memo.update({id(each): clone for each, (clone, _) in zip(walk.generators, self._generators, strict=True)})
        shapes = {tuple(parameter.shape) for parameter in self._parameters}
        for tensor in walk.tensors:
            if id(tensor) in memo or tensor.numel() <= 1:
                continue
            if any(size > largest for size in tensor.shape) or tuple(tensor.shape) in shapes:
                small = tensor.detach()[tuple(slice(0, largest) for _ in tensor.shape)]
                small = small.full_tensor() if hasattr(small, "full_tensor") else small.clone()
                memo[id(tensor)] = small.double() if small.is_floating_point() else small
        return memo


def _halves(tensor: Tensor) -> list[Tensor]:
    return list(tensor.tensor_split(2)) if tensor.dim() and len(tensor) > 1 else [tensor]


def _flat(tensor: Tensor) -> list[Tensor]:
    return [tensor.reshape(-1)]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two movements are the same up to the order of operations."""
    if a.numel() == 0:
        return True
    a, b = _real(a), _real(b)
    return float((a - b).abs().max()) <= 1e-9 * float(a.abs().max()) + 1e-14


def _same(a: _Trial, b: _Trial) -> bool:
    return all(map(_close, a.moved, b.moved))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=1e-9, equal_nan=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return not isinstance(a, bool | int | str) or a == b


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
