"""What slices leave in the objects that they share: what they leave alike, or a sentence."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.dp.copies import Copies
from lockstep.strategies.dp.held import Held, is_metric
from lockstep.strategies.dp.parts import Part, Replaced, identical, inside
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.sync.contents import same_bits, same_values, sum_of_bits

T = TypeVar("T")


def in_turn(start: Held, first: Replaced, copies: list[Copies], work: Callable[[int], T]) -> list[T]:
    """What `work` returns for the first slice and for each of `copies`, one after the other.

    Each begins with what is found now, which is `start`, has its copies in the place of tensors, and leaves what the
    first leaves: what differs refuses any use, but for the slice itself the next time, as `first` and `copies` know.
    Raises RuntimeError for a buffer, and for an attribute that a module has after some alone.
    """
    if not copies:
        return [work(0)]
    results: list[T] = []
    changed, found = dict[int, Part](), list[Held]()
    now, values = start.moment, [first, *copies]
    try:
        for index, replaced in enumerate(values):
            if index or first:
                now = start.put(replaced, changed.values())
            results.append(work(index))
            changed |= {id(part): part for part in start.changed(now)[0]}
            found.append(start.after([*start.loose, *changed.values()]))
        if start.loose or changed:
            end = End(start, found[0], first, changed.values())
            for other, copied in zip(found[1:], copies, strict=True):
                end.compare(other, copied)
            end.put()
        else:
            start.put(Replaced(), ())
    except BaseException:
        start.put_back()
        raise
    return results


class End:
    """What the first slice left, of which only what others leave too is kept."""

    def __init__(self, start: Held, first: Held, values: Replaced, changed: Collection[Part]) -> None:
        """`changed`: the parts of `start` that slices have changed."""
        self._start, self._first, self._values = start, first, values
        self._parts = first.own([*start.loose, *changed])
        self._refused = Replaced()
        """What refuses any use in the place of containers and objects that cannot be kept in part."""

    def put(self) -> None:
        """Let all hold what is kept."""
        self._start.put(Replaced(), ())
        for part in self._first.parts() if self._refused else self._parts:
            part.put(self._refused.of)

    def compare(self, other: Held, copies: Copies) -> None:
        """With what another slice left."""
        first, seen = self._first, set[tuple[int, int]]()
        pairs = deque((part.owner, part.owner) for part in self._parts)
        while pairs:
            one, two = pairs.popleft()
            if (id(one), id(two)) in seen or two not in other:
                continue
            seen.add((id(one), id(two)))
            for own, theirs in (first.attributes, other.attributes), (first.containers, other.containers):
                if id(one) in own and id(two) in theirs:
                    pairs.extend(self._join(own[id(one)], theirs[id(two)], copies))

    def _join(self, own: Part, theirs: Part, copies: Copies) -> list[tuple[Any, Any]]:
        """Pairs of objects and containers in both, to compare too."""
        pairs: list[tuple[Any, Any]] = []
        if own.kind == "statistic":
            return pairs
        if not self._are_alike(own, theirs, copies, pairs):
            self._refuse(own, theirs)
            return pairs
        if own.base is not None and identical(own.items, theirs.items):
            return pairs
        there = dict(zip(theirs.keys, theirs.items, strict=True)) if own.base is None else {}
        is_of_torch = own.base is None and type(own.owner).__module__.startswith("torch.nn.")
        for i, one in enumerate(own.items if own.base is not set else ()):
            two = theirs.items[i] if own.base is not None else there[own.keys[i]]
            if one is two or (is_of_torch and own.keys[i].startswith("_")):
                continue
            if not self._are_same(one, two, copies, pairs):
                if own.kind:
                    raise _differs(own.kind, own.name(i))
                if type(one) is not Refusing:  # by another slice
                    own.items[i] = _refusing(own.name(i))
                    self._values.add(own.items[i], one)
                copies.add(own.items[i], two)
        return pairs

    def _are_alike(self, own: Part, theirs: Part, copies: Copies, pairs: list[tuple[Any, Any]]) -> bool:
        """Whether there are the same names, keys or numbers of items."""
        if own.base is None:
            return {*own.keys} == {*theirs.keys}
        if own.base is set:
            return _equal({*map(copies.of, own.items)}, {*theirs.items})
        if len(own.items) != len(theirs.items):
            return False
        return identical(own.keys, theirs.keys) or all(
            self._are_same(*pair, copies, pairs) for pair in zip(own.keys, theirs.keys, strict=True)
        )

    def _refuse(self, own: Part, theirs: Part) -> None:
        names = sorted({*own.keys} ^ {*theirs.keys}) if own.base is None or own.kind else []
        place = f"{own.place}.{names[0]}".lstrip(".") if names else own.place
        if own.kind:
            raise _differs(own.kind, place)
        if isinstance(own.owner, nn.Module):
            raise RuntimeError(
                f"training_step set or deleted the attribute {place} by the samples of a slice, and strategy 'dp' runs "
                "it on slices; set it in each step, such as to None, or use strategy='single' or 'ddp'"
            )
        self._refused.add(own.owner, _refusing(place))

    def _are_same(self, one: Any, two: Any, copies: Copies, pairs: list[tuple[Any, Any]]) -> bool:
        kind: Any = type(one)
        if one is two or ((isinstance(one, nn.Parameter) or is_metric(one)) and copies.of(one) is two):
            return True  # the bits of parameters are compared together
        if kind is not type(two):
            return False
        if issubclass(kind, Tensor):
            return _same_tensor(one, two)
        if issubclass(kind, np.ndarray):
            equal_nan = one.dtype.kind in "fc"
            return one.dtype == two.dtype and bool(np.array_equal(one, two, equal_nan=equal_nan))
        if one in self._first:
            pairs.append((one, two))
            return one not in self._start and two not in self._start  # else each slice has another of what there was
        if kind is frozenset:
            return _equal(frozenset(map(copies.of, one)), two)
        own, its = inside(one), inside(two)
        if own is None or its is None:
            return _equal(one, two)
        return len(own) == len(its) and all(self._are_same(*p, copies, pairs) for p in zip(own, its, strict=True))


def refuse_differing(copies: list[Copies], on_cpu: bool) -> None:
    """Raise RuntimeError for a parameter that slices have changed to different values. Waits for the devices."""
    for found in copies:
        own, theirs = found.originals, found.parameters
        if on_cpu and not found.is_apart:
            same = [True] if _are_same(own, theirs) else [*map(same_bits, own, theirs)]
        else:
            sums = [torch.stack([*map(sum_of_bits, side)]).tolist() if side else [] for side in (own, theirs)]
            same = [*map(operator.eq, *sums)]
        if not all(same):
            raise _differs("parameter", found.names[same.index(False)])


def _are_same(own: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether all values are the same, as far as torch compares such tensors and none is NaN."""
    try:
        return all(map(torch.equal, own, theirs))
    except RuntimeError:
        return False


def _differs(kind: str, name: str) -> RuntimeError:
    return RuntimeError(
        f"training_step changed the {kind} {name} by the samples of a slice, and strategy 'dp' runs it on slices; "
        "change it in on_train_batch_end, or use strategy='single'"
    )


def _refusing(name: str) -> Refusing:
    return Refusing(
        f"{name} was set by training_step, which strategy 'dp' runs on slices of a batch, so there is one for each "
        "slice and none of the batch; return it from training_step or log it, or use strategy='single' or 'ddp'"
    )


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        one, other = one.detach(), other.detach()
        return same_values(one if one.device == other.device else one.to(other.device), other)
    except RuntimeError:  # of a layout or dtype without a comparison
        return False


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a comparison of the user's, or of a library
        return False
