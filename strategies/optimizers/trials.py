"""Trials of an optimizer: copies of it step small random tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.launch.rng import has_drawn, seed_streams, stream_states
from lockstep.strategies.modules.parameter_hooks import attributes, copy_attributes
from lockstep.strategies.optimizers.copies import (
    Contents,
    Name,
    Place,
    closure_step,
    counting,
    duplicate,
    make_it_move,
    make_older,
    names_of_kept,
    plain_step,
    step_counts,
)

MAX_DIM = 144
"""Dimensions of the small tensors: above 128, up to which some optimizers take a matrix for a vector."""
BLOCK = 256
"""Some quantize state in blocks of so many elements, and only of tensors of several thousand."""
KEPT_PER_GROUP = 3
SCALES = (1.0, 100.0, 0.01, 1.0, 10.0, 1.0)
"""Factors of the gradient in each step: thresholds (clipping, trust regions) are crossed in both directions."""

AGES = (20, 1000, 100_000)
"""Numbers to which what counts steps is set afterwards: what begins late, or is done at every tenth step, is tried."""


class Trial(NamedTuple):
    """Where tensors were after the steps."""

    moved: list[Tensor]
    """What each tensor of each group has moved, flat."""
    numbers: list[Any]
    """What the groups remember besides."""
    drew: bool
    """Whether random numbers were drawn."""
    counted: bool
    """Whether numbers in the groups changed."""
    edited: bool
    """Whether a step changed or dropped gradients."""


class Trials:
    """Steps copies of `optimizer`, in ways that the first call of `trial` shows to work."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._call: Callable[[Optimizer, Callable[[], Any]], Any] = plain_step
        self._sparse = False
        self._ages: tuple[int, ...] = AGES
        self._aging: frozenset[Name] | None = None
        """What counts steps, as the first trial has shown; of some of the parameters another number may look so."""
        self.keeps_numbers = self.edits_gradients = False
        walk = Contents(optimizer)
        self._parameters = walk.parameters
        self._trimmed = self._trims(walk)
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._kept = [self._chosen(group) for group in optimizer.param_groups]
        self._draw(MAX_DIM)

    # ---- one trial -------------------------------------------------------------------------------------

    def trial(
        self,
        changed: Callable[[int, Tensor], Tensor | None] | None = None,
        alone: list[list[int]] | None = None,
        pieces: Callable[[Tensor], list[Tensor]] | None = None,
        bare: bool = False,
    ) -> Trial:
        """Step a copy.

        `changed` gives, by the index of a tensor, the elements whose gradients are others. `alone` says which of the
        tensors of each group stay. `pieces` cuts tensors. With `bare` these lack what user code has set on them.
        """
        trial = duplicate(self._optimizer, self._memo())
        gradients: dict[int, list[Tensor]] = {}
        tensors: list[Tensor] = []
        index = 0
        for g, (group, kept) in enumerate(zip(trial.param_groups, self._kept, strict=True)):
            chosen = [group["params"][i] for i in kept]
            names = [group["param_names"][i] for i in kept] if "param_names" in group else []
            stays: list[Tensor] = []
            of_these: list[str] = []
            for i, tensor in enumerate(chosen):
                signal = self._signals[index]
                if bare:
                    vars(tensor).clear()
                elements = None if changed is None else changed(index, tensor.detach())
                if elements is not None:
                    signal = [torch.where(elements, -37.0 * s, s) for s in signal]
                if alone is None or i in alone[g]:
                    cut = [tensor] if pieces is None or not tensor.dim() else self._cut(trial, tensor, pieces)
                    stays += cut
                    of_these += names[i : i + 1] * len(cut)
                    for j, piece in enumerate(cut):
                        own = signal if piece is tensor else [pieces(s)[j] for s in signal]  # type: ignore[misc]
                        gradients[id(piece)] = own
                index += 1
            group["params"][:] = stays
            if names:
                group["param_names"] = of_these
            tensors += stays
            make_it_move(group)
        if callable(train := getattr(trial, "train", None)):
            train()  # schedule-free optimizers
        return self._steps(trial, tensors, gradients)

    def _steps(self, duplicate: Optimizer, tensors: list[Tensor], gradients: dict[int, list[Tensor]]) -> Trial:
        before = [t.detach().clone() for t in tensors]
        at_first = copy.deepcopy(group_numbers(duplicate))
        seed_streams(7)
        states = stream_states()
        counts: list[dict[Place, float]] = []
        edited = False
        for step, (k, scale) in enumerate([*enumerate(SCALES), *[*enumerate(SCALES[:3])] * len(self._ages)]):
            late, first = divmod(step - len(SCALES), 3)
            if late >= 0 and not first:
                make_older(duplicate, self._aging or frozenset(), self._ages[late] - 2)

            def closure(k: int = k, scale: float = scale) -> Tensor:
                loss = torch.zeros((), dtype=torch.float64)
                for t in tensors:
                    with torch.no_grad():
                        gradient = scale * (gradients[id(t)][k] + 0.1 * t.tanh())
                        loss += real(gradient * t).sum().cpu()
                        t.grad = gradient.to_sparse(1) if self._sparse else gradient
                return loss.requires_grad_()

            closure()
            given = [t.grad for t in tensors if t.grad is not None]
            copies = [gradient.clone() for gradient in given]
            self._call(duplicate, closure)
            edited |= any(
                t.grad is not g or not torch.equal(_values(g), _values(c))
                for t, g, c in zip(tensors, given, copies, strict=True)
            )
            if self._aging is None:
                counts.append(step_counts(duplicate))
                if step == len(SCALES) - 1:
                    self._aging = counting(counts[-3:])
            if step == len(SCALES) - 1 and not self._aging:
                break
        drew = has_drawn(states) or any(not torch.equal(g.get_state(), s) for g, s in self._generators)
        moved = [(t.detach() - b).flatten() for t, b in zip(tensors, before, strict=True)]
        numbers = group_numbers(duplicate)
        return Trial(moved, numbers, drew, not equal(at_first, numbers), edited)

    def fails_on(self, cut: Callable[[Tensor, Tensor], Tensor], around: Callable[[Optimizer], Any]) -> bool:
        for call in (plain_step, closure_step):
            try:
                self._step_shards(call, cut, around)
            except Exception:
                continue
            return False
        return True

    def _step_shards(self, call: Any, cut: Callable[[Tensor, Tensor], Tensor], around: Any) -> None:
        memo = self._memo()
        for parameter in self._parameters:
            small = memo[id(parameter)]
            memo[id(parameter)] = nn.Parameter(cut(small.detach(), parameter))
            copy_attributes(small, memo[id(parameter)])
        for tensor in Contents(self._optimizer).tensors:
            if hasattr(tensor, "device_mesh") and id(tensor) in memo:
                memo[id(tensor)] = cut(memo[id(tensor)], tensor)
        trial = duplicate(self._optimizer, memo)
        for group, kept, real in zip(trial.param_groups, self._kept, self._optimizer.param_groups, strict=True):
            layouts: dict[Any, int] = {}  # kernels that take many tensors at once may not take all of them together
            for i, parameter in enumerate(real["params"]):
                layouts.setdefault((type(parameter.data), getattr(parameter, "placements", None)), i)
            chosen = sorted({*kept, *layouts.values()}) if self._trimmed else kept
            group.update(names_of_kept(group, [i in chosen for i in range(len(group["params"]))]))
            group["params"][:] = [group["params"][i] for i in chosen]
            make_it_move(group)
        if callable(train := getattr(trial, "train", None)):
            train()
        for _ in range(2):
            for parameter in (p for group in trial.param_groups for p in group["params"]):
                parameter.grad = (parameter.detach() + 0.1).requires_grad_(False)
            with around(trial):
                call(trial, lambda: torch.zeros(()))

    def _cut(self, duplicate: Optimizer, tensor: Tensor, pieces: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """The pieces of a tensor as parameters, with their pieces of its state."""
        cut: list[Tensor] = [nn.Parameter(piece.clone()) for piece in pieces(tensor.detach())]
        for piece in cut:
            copy_attributes(tensor, piece)
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
        """Which parameters of a group are tried: the largest and the smallest, and one of each number of dimensions
        with each attribute that user code has set and each last part of a name."""
        params = group["params"]
        if not self._trimmed:
            return list(range(len(params)))
        order = sorted(range(len(params)), key=lambda i: -params[i].numel())
        chosen: list[int] = []
        for dim in dict.fromkeys(params[i].dim() for i in order):
            chosen += [i for i in order if params[i].dim() == dim][:2]
        named: dict[str, int] = {}
        for i in order:
            if "param_names" in group:
                named.setdefault(f".{group['param_names'][i].rpartition('.')[2]}", i)
            named.update(dict.fromkeys(attributes(params[i]).keys() - named.keys(), i))
        return sorted({*chosen[:KEPT_PER_GROUP], *order[-1:], *named.values()})

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
        return self._small(parameter.shape), dtype, "cpu" if parameter.is_meta else parameter.device

    def _small(self, shape: torch.Size) -> list[int]:
        """The shape of a trial: the largest dimension grows in whole blocks where the others are small."""
        small = [min(size, self._largest) for size in shape]
        if self._largest == MAX_DIM and shape.numel() > math.prod(small):
            i = max(range(len(shape)), key=shape.__getitem__)
            others = math.prod(small) // small[i]
            small[i] = min(shape[i], max(small[i], MAX_DIM**2 // others // BLOCK * BLOCK))
        return small

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
        for parameter in self._parameters:  # a copy each, as an optimizer may write to them
            vars(memo[id(parameter)]).update(copy.deepcopy(_attributes(parameter, self._small(parameter.shape)), memo))
        shapes = {tuple(parameter.shape) for parameter in self._parameters}
        for tensor in walk.tensors:
            if id(tensor) in memo or (tensor.numel() <= 1 and not hasattr(tensor, "full_tensor")):
                continue
            if any(size > largest for size in tensor.shape) or tuple(tensor.shape) in shapes:
                sizes = self._small(tensor.shape) if tuple(tensor.shape) in shapes else [largest] * tensor.dim()
                small = tensor.detach()[tuple(map(slice, sizes))]
                small = (small.full_tensor() if hasattr(small, "full_tensor") else small).clone()
                memo[id(tensor)] = small.double() if small.is_floating_point() else small
        return memo


def _attributes(parameter: Tensor, sizes: list[int]) -> dict[str, Any]:
    """What user code has set on a parameter; of a tensor of its shape the part that goes with the small one."""
    few = tuple(map(slice, sizes))
    return {
        name: value.detach()[few] if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for name, value in attributes(parameter).items()
    }


def _values(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.is_sparse else tensor


def group_numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups hold besides parameters."""
    return [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=1e-9, equal_nan=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return not isinstance(a, bool | int | str) or a == b
