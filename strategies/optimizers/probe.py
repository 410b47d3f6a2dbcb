"""What an optimizer needs to see at once, found by stepping copies of it on small random tensors.

A strategy that keeps parameters, or pieces of them, on other ranks may step an optimizer on what a rank holds only if
the step is the same there. That depends on the optimizer's code, not on its name, so it is tried: a copy of the
optimizer steps random tensors, then again with some gradients changed, with tensors missing, and with tensors in
pieces. What moves that should not have moved says what the optimizer checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.modules.parameter_hooks import attributes
from lockstep.strategies.optimizers.copies import (
    Contents,
    UnknownOptimizer,
    closure_step,
    is_of_torch,
    plain_step,
    steps_by_own_code,
    steps_with,
)
from lockstep.strategies.optimizers.trials import Trial, Trials, equal, real

if TYPE_CHECKING:
    from lockstep.strategies.spmd import SPMDStrategy

MAX_CHANGED = 4
"""Tensors whose gradients are changed, one at a time."""


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
    keeps_numbers: bool = False
    """Whether its steps change numbers in its parameter groups."""
    draws: bool = False
    """Whether its steps draw random numbers."""
    edits_gradients: bool = False
    """Whether its steps change or drop gradients."""


def probe(optimizer: Optimizer) -> Finding:
    """Find out what `optimizer` needs to see at once.

    Steps copies: parameters, gradients, state and hooks of `optimizer` and all random streams stay as they are. Takes
    some milliseconds to tenths of a second, and none for those of `is_plain`. Raises nothing: an optimizer whose copy
    cannot be stepped is "unknown".
    """
    if is_plain(optimizer):
        return PLAIN
    with unset_fake_temporarily(), kept_streams(), torch.enable_grad():  # a planned run has no values
        try:
            tried = _Probe(optimizer)
            return tried.finding()._replace(keeps_numbers=tried.keeps_numbers, edits_gradients=tried.edits_gradients)
        except Exception as error:
            return Finding("unknown", f"a copy of it could not be stepped ({_in_short(error)})")


PLAIN = Finding("elementwise", "", flattens=True)
"""What a probe finds of every optimizer that `is_plain`."""


def is_plain(optimizer: Optimizer) -> bool:
    """Whether it is torch's SGD, Adam or AdamW with numbers as options: its code is known, so it need not be tried."""
    kind = type(optimizer)
    return (
        kind in (SGD, Adam, AdamW)
        and not steps_by_own_code(optimizer)
        and all(map(is_of_torch, (optimizer.step, *_functions_of(kind))))
        and {name for name in optimizer.__dict__ if name[0] != "_"} <= {"defaults", "param_groups", "state", "step"}
        and not any(callable(getattr(kind, name, None)) for name in optimizer.__dict__ if name != "step")
        and all(_is_plain(name, group[name]) for group in optimizer.param_groups for name in optimizer.defaults)
    )


def _functions_of(kind: type[Optimizer]) -> list[Any]:
    """What the `step` of `kind` calls, by the names that a patch would replace; None for one that torch lacks."""
    base = Adam if kind is AdamW else kind
    module, name = vars(sys.modules[base.__module__]), base.__name__.lower()
    return [getattr(kind, "_init_group", None), module.get(name), module.get(f"_single_tensor_{name}")]


def _is_plain(name: str, value: Any) -> bool:
    if name in ("foreach", "fused", "capturable", "differentiable"):  # other kernels
        return not value
    return all(isinstance(number, int | float | None) for number in (value if isinstance(value, tuple) else (value,)))


def needs_whole(
    key: str,
    optimizer: Optimizer,
    found: Finding,
    ranks: SPMDStrategy,
    cut: Callable[[Tensor, Tensor], Tensor],
    around: Callable[[Optimizer], Any],
) -> Finding | None:
    """What `optimizer` needs if it cannot step shards; None if it can.

    `found` is what a probe of it has found; `cut` and `around` are those of `fails_on`. Raises ValueError for an
    optimizer that would step other numbers either way.
    """
    meshes = {getattr(p, "device_mesh", None) for group in optimizer.param_groups for p in group["params"]}
    if is_plain(optimizer) and len(meshes) == 1:
        return None
    if found.kind == "elementwise" and not fails_on(optimizer, cut, around):
        return None
    why = ""
    if found.kind == "unknown" or found.draws:
        why = found.reason
    elif Contents(optimizer).elsewhere:
        why = "it keeps parameters, or tensors that go with them, outside of param_groups and state"
    elif ranks.precision.scaler is not None and (found.kind == "coupled" or found.needs_all_groups):
        why = "precision='16-mixed' scales the gradients of each rank, and not every rank steps it ('bf16-mixed' can)"
    elif hooked := steps_with(optimizer):
        why = f"it has {hooked}, which would see one rank's parameters only"
    if why:
        raise ValueError(
            f"optimizer {key!r} ({type(optimizer).__name__}) cannot be stepped by {ranks.name}, where each "
            f"rank holds shards of the parameters, because {why}; use strategy='ddp', or another optimizer"
        )
    return found


def fails_on(
    optimizer: Optimizer, cut: Callable[[Tensor, Tensor], Tensor], around: Callable[[Optimizer], Any] = nullcontext
) -> bool:
    """Whether a copy of an elementwise `optimizer` raises an error on shards.

    `cut(whole, like)` makes a shard of a small tensor, laid out as the parameter `like` is; `around` is the context in
    which an optimizer steps shards.
    """
    with unset_fake_temporarily(), kept_streams():
        return _Probe(optimizer).fails_on(cut, around)


def reads_attributes(optimizer: Optimizer) -> bool:
    """Whether `optimizer`, which a probe has found to be elementwise, moves parameters by what user code has set on
    them (`parameter.lr_scale = 0.1`)."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if is_plain(optimizer) or not any(map(attributes, held)):
        return False
    with unset_fake_temporarily(), kept_streams(), torch.enable_grad():
        return _Probe(optimizer).reads_attributes()


def steps_groups_alike(optimizer: Optimizer, empties: bool) -> bool:
    """Whether `optimizer` steps as before where its `step` is called once for each of its groups, which then is the
    only one, or with `empties` the only one that has parameters."""
    if len(optimizer.param_groups) < 2 or is_plain(optimizer):
        return True
    with unset_fake_temporarily(), kept_streams(), torch.enable_grad():
        return _Probe(optimizer).steps_groups_alike(empties)


class _Probe(Trials):
    # ---- what is tried ---------------------------------------------------------------------------------

    def finding(self) -> Finding:
        if not any(self._kept):
            return Finding("elementwise", "", flattens=True)
        whole = self._first()
        self.keeps_numbers, self.edits_gradients = whole.counted, whole.edited
        if whole.drew:
            why = "it draws random numbers, whose order depends on which parameters it holds"
            return Finding("coupled", why, draws=True)
        if not all(bool(t.isfinite().all()) for t in map(real, whole.moved)):
            return Finding("unknown", "a copy of it went to NaN or infinity on random gradients")
        if not any(bool(t.any()) for t in whole.moved):
            return Finding("unknown", "a copy of it moved no parameter")
        if not _same(whole, self.trial()):
            return Finding("unknown", "two copies of it moved differently")
        empty = self._fails_on_empty_groups()
        found = self._coupled(whole)
        if found:
            return Finding("coupled", found, needs_all_groups=empty)
        found = self._whole_tensor(whole)
        if found:
            return Finding("whole_tensor", found, needs_all_groups=empty)
        return Finding("elementwise", "", self._like_pieces(whole, _flat) is True, empty)

    def reads_attributes(self) -> bool:
        whole = self._first()
        try:
            return not _same(whole, self.trial(bare=True))
        except Exception:  # it cannot step without them
            return True

    def steps_groups_alike(self, empties: bool) -> bool:
        whole, call = self._first(), self._call

        def one_by_one(optimizer: Optimizer, closure: Callable[[], Any]) -> None:
            groups = [(group, list(group["params"])) for group in optimizer.param_groups]
            for group, params in groups:
                for other, _ in groups:
                    other["params"][:] = params if other is group else []
                optimizer.param_groups[:] = [other for other, _ in groups] if empties else [group]
                call(optimizer, closure)
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, params in groups:
                group["params"][:] = params

        self._call = one_by_one
        try:
            apart = self.trial()
        except Exception:  # it fails on groups without the others
            return False
        return _same(whole, apart) and equal(whole.numbers, apart.numbers)

    def _first(self) -> Trial:
        """The reference: of an optimizer that works so late in a run, if it does."""
        try:
            whole = self._by_call()
            if all(bool(t.isfinite().all()) for t in map(real, whole.moved)):
                return whole
        except UnknownOptimizer:
            raise
        except Exception:
            pass  # what fails so late is tried early, and raises there if it fails at all
        self._ages = ()
        return self._by_call()

    def _by_call(self) -> Trial:
        """The reference, by the first way of calling `step` that works."""
        errors = []
        for call, sparse in ((plain_step, False), (closure_step, False), (plain_step, True)):
            self._call, self._sparse, self._aging = call, sparse, None
            if sparse:  # slow, and no optimizer asks how large a sparse gradient is
                self._draw(8)
            try:
                return self.trial()
            except UnknownOptimizer:
                raise
            except Exception as error:
                errors.append(error)
        raise errors[0]

    def _coupled(self, whole: Trial) -> str:
        count = len(whole.moved)
        for chosen in dict.fromkeys(round(i * (count - 1) / (MAX_CHANGED - 1)) for i in range(MAX_CHANGED)):

            def all_of_one(i: int, tensor: Tensor, chosen: int = chosen) -> Tensor | None:
                return torch.ones_like(tensor, dtype=torch.bool) if i == chosen else None

            other = self.trial(changed=all_of_one)
            rest = [i for i in range(count) if i != chosen]
            if not all(_close(whole.moved[i], other.moved[i]) for i in rest):
                return "what it does to a parameter depends on the gradients of others"
            if not equal(whole.numbers, other.numbers):
                return "its parameter groups remember a number that depends on all gradients"
        most = max(len(kept) for kept in self._kept)
        for turn in range(min(most, MAX_CHANGED)) if count > 1 else ():
            alone = [[turn % len(kept)] if kept else [] for kept in self._kept]
            try:
                part = self.trial(alone=alone)
            except Exception as error:
                return f"it fails on some of its parameters without the others ({_in_short(error)})"
            starts = [sum(map(len, self._kept[:g])) for g in range(len(self._kept))]
            held = [start + i for start, group in zip(starts, alone, strict=True) for i in group]
            if not all(_close(whole.moved[i], t) for i, t in zip(held, part.moved, strict=True)):
                return "what it does to a parameter depends on which others it holds"
        return ""

    def _whole_tensor(self, whole: Trial) -> str:
        masks: dict[int, Tensor] = {}

        def some(i: int, tensor: Tensor) -> Tensor:
            masks[i] = (torch.arange(tensor.numel()) % 3 == 1).to(tensor.device).view_as(tensor)
            return masks[i]

        other = self.trial(changed=some)
        for i, (a, b) in enumerate(zip(whole.moved, other.moved, strict=True)):
            rest = ~masks[i].flatten()
            if not _close(a[rest], b[rest]):
                return "what it does to an element depends on the gradients of other elements of its tensor"
        if self._like_pieces(whole, _halves) is False:
            return "what it does to a tensor is not what it does to its halves"
        return ""

    def _like_pieces(self, whole: Trial, pieces: Callable[[Tensor], list[Tensor]]) -> bool | None:
        """Whether tensors in pieces move as they do whole; None where that cannot be tried."""
        if not self._trimmed:  # attributes hold the whole tensors
            return None
        try:
            found = self.trial(pieces=pieces)
        except Exception:
            return None
        return _close(torch.cat(whole.moved).cpu(), torch.cat(found.moved).cpu())

    def _fails_on_empty_groups(self) -> str:
        """The error that it raises where a group is empty: tried with the first, and with all but it."""
        all_of = [[*range(len(kept))] for kept in self._kept]
        first = next(i for i, kept in enumerate(self._kept) if kept)
        others = [kept if i == first else [] for i, kept in enumerate(all_of)]
        tried = [
            [[] if i == first else kept for i, kept in enumerate(all_of)],
            *([others] if any(all_of[first + 1 :]) else []),
        ]
        for alone in tried:
            try:
                self.trial(alone=alone)
            except Exception as error:
                return _in_short(error)
        return ""


def _halves(tensor: Tensor) -> list[Tensor]:
    return list(tensor.tensor_split(2)) if tensor.dim() and len(tensor) > 1 else [tensor]


def _flat(tensor: Tensor) -> list[Tensor]:
    return [tensor.reshape(-1)]


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two movements are the same up to the order of operations."""
    if a.numel() == 0:
        return True
    a, b = real(a), real(b)
    return float((a - b).abs().max()) <= 1e-9 * float(a.abs().max()) + 1e-14


def _same(a: Trial, b: Trial) -> bool:
    return all(map(_close, a.moved, b.moved))


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
