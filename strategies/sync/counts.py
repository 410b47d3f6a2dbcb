"""Numbers in attributes of user code that add up what one rank, or one device, has seen of each batch."""

from __future__ import annotations

import math
import re
import time
import timeit
import warnings
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice, pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.strategies.launch.program.functions import named_by
from lockstep.strategies.launch.program.values import attributes_of

_MOST_LOOKS = 4
_MOST = 64
"""Items of a list or dict that are read."""
_FEWEST_LOOKS = 4
"""Random numbers seldom grow as often, on every rank."""
_LARGE = 2**24
"""From here on a number may be of bytes or nanoseconds."""
_DIFFERS = re.compile(
    r"(?<![a-z])(\w*times?|timers?|timings?|timestamps?|clocks?|elapsed|durations?|latenc(y|ies)|[mun]?secs?|"
    r"(milli|micro|nano)?seconds?|s|ms|us|ns|mem|memory|(max)?rss|[a-z]*bytes|seeds?|rng|pid|ranks?|workers?)(?![a-z])"
)
"""In names, by lower-case words, of what is each rank's own."""
_CLOCKS = {read for name, read in vars(time).items() if callable(read) and ("time" in name or name.endswith("_ns"))}
_CLOCKS |= {time.perf_counter, time.monotonic, timeit.default_timer, datetime, torch.cuda.Event, torch.Event}
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_LOSS = "a loss"
_NOT_OF_USERS = ("torch", "lockstep", "torchmetrics", "builtins")
_OF_MODULES = frozenset(vars(nn.Module()))
_OF_DEEPSPEED = ("ds_", "applied_pre_backward")
"""How attributes begin that it sets on every module."""


class PartialCounts:
    """Looks around the first two batches of a loop for numbers that grow by the samples, the elements, the sum of a
    tensor or the loss of this rank's part in both, and warns of them: one process adds up those of the whole batch.

    `owners`: by name the objects of the user whose attributes are read. `parts`: of which a batch consists.
    `instead`: what to do.
    """

    def __init__(self, owners: Mapping[str, Any], parts: int, strategy: str, instead: str) -> None:
        self._owners, self._parts, self._strategy, self._instead = owners, parts, strategy, instead
        self._before: dict[str, float] = {}
        self._found: dict[str, str] | None = None
        """What may be one, after the first batch."""
        self.named: dict[str, str] = {}
        """What was warned of."""
        self.done = False
        self._begun = 0

    def begin(self) -> None:
        self._begun += 1
        self.done = self.done or self._begun > _MOST_LOOKS  # at parts of one sample, which say nothing
        self._before = {} if self.done else dict(_numbers(self._owners))

    def end(self, own: int, batch: Any, output: Any) -> None:
        """After a part of `own` samples, for which a step returned `output`."""
        if self.done or own < 2:
            return
        amounts, found = _amounts(own, batch, output), {}
        for name, value in _numbers(self._owners):
            growth = value - self._before.get(name, 0.0)
            what = next((what for what, amount in amounts if _is(growth, amount)), None)
            whole = any(_is(growth, amount * self._parts) for kind, amount in amounts if kind != _LOSS)
            if what is not None and growth not in (0, 1) and not whole:  # 1 counts batches
                found[name] = what
        first, self._found = self._found, found
        if first is None:
            return
        self.named = {name: what for name, what in found.items() if first.get(name) == what}
        self.done = True
        if self.named:
            counts = ", ".join(f"{name} ({what})" for name, what in self.named.items())
            warnings.warn(
                f"attributes add up a part of each batch under {self._strategy}, and not the whole as on one process: "
                f"{counts}; {self._instead}",
                stacklevel=2,
            )


class GrowingCounts:
    """Looks on each rank at numbers that may add up something, such as correct predictions or accuracies: those that
    never fall while its first batches run. One that then differs between ranks is of a part on each.

    Clocks, memory and seeds differ too, so names that tell of them are left alone, and large numbers; and fractions
    where code of the user's reads a clock.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._owners = owners
        self._seen: list[dict[str, float]] = []
        self._fractions = True

    @property
    def has_begun(self) -> bool:
        return bool(self._seen)

    @property
    def done(self) -> bool:
        return len(self._seen) > _MOST_LOOKS

    def look(self) -> None:
        """Called before the first batch and after each."""
        if not self.done:
            self._seen.append(dict(_numbers(self._owners)))

    def found(self) -> list[str] | None:
        """The names of what may count; None if too few batches have run to tell."""
        if len(self._seen) < _FEWEST_LOOKS:
            return None
        self._fractions = not reads_a_clock(self._owners.values())
        return [name for name in self._seen[-1] if not is_of_rank(name) and self._growths(name) > 1]

    def values(self, names: Iterable[str]) -> list[float]:
        """What the numbers are now; NaN for one that has not grown on this rank, such as of what rank 0 writes."""
        now = dict(_numbers(self._owners))
        return [now.get(name, math.nan) if self._growths(name) > 0 else math.nan for name in names]

    def _growths(self, name: str) -> int:
        """In how many looks the number had grown; -1 if it does not count."""
        values = [seen[name] for seen in self._seen if name in seen]
        steps = [after - before for before, after in pairwise(values)]
        whole = all(value.is_integer() for value in values)
        if len(values) < _FEWEST_LOOKS - 1 or not (whole or self._fractions):
            return -1
        if not all(abs(value) < _LARGE for value in values):  # infinite or no number, too
            return -1
        return -1 if min(steps) < 0 else sum(step > 0 for step in steps)


def is_of_rank(name: str) -> bool:
    """Whether an attribute's name tells of a clock, memory, seeds or the like, which are each rank's own."""
    return _DIFFERS.search(_CAPITAL.sub("_", name).lower()) is not None


def warn_of_differing(found: Mapping[str, Iterable[float]], strategy: str, instead: str) -> None:
    """Warn of what ranks have added up of their own parts, by name with the values of the ranks."""
    shown = [f"{name} ({', '.join(f'{value:.8g}' for value in values)})" for name, values in found.items()]
    if shown:
        warnings.warn(
            f"attributes add up something else on each rank under {strategy}, and not the whole as on one process: "
            f"{', '.join(shown)}; {instead}",
            stacklevel=2,
        )


def _amounts(own: int, batch: Any, output: Any) -> list[tuple[str, float]]:
    """What a step may have added up of its part, by what it is."""
    elements, sums = sizes_and_sums([batch])
    amounts: list[tuple[str, float]] = [("samples", own)]
    amounts += [("elements of the batch", size) for size in elements]
    amounts += [("the sum of a tensor of the batch", number) for number in sums]
    for leaf in tree_leaves(output):
        if type(leaf) is Tensor and leaf.numel() == 1 and leaf.is_floating_point():
            loss = float(leaf.detach())
            amounts += [(_LOSS, loss), (_LOSS, loss * own)]
    return amounts


def sizes_and_sums(batches: Iterable[Any]) -> tuple[set[int], set[float]]:
    """Of each tensor, in all micro-batches together, the number of elements; and of whole numbers and masks the sum."""
    leaves = [[leaf if type(leaf) is Tensor else None for leaf in tree_leaves(batch)] for batch in batches]
    sizes, sums = set[int](), set[float]()
    for tensors in zip(*leaves, strict=False):
        sizes.add(sum(0 if tensor is None else tensor.numel() for tensor in tensors))
        if all(tensor is not None and _may_mask(tensor) for tensor in tensors):
            sums.add(sum(float(tensor.sum()) for tensor in tensors if tensor is not None))
    return sizes - {0}, sums - {0.0, 1.0}  # 1 may count batches


def _may_mask(tensor: Tensor) -> bool:
    """Whether it may mark elements to count: labels of samples are whole numbers as well."""
    return tensor.dtype == torch.bool or (
        tensor.dim() > 1 and not tensor.is_floating_point() and not tensor.is_complex()
    )


def _is(growth: float, amount: float) -> bool:
    return math.isclose(growth, amount, rel_tol=1e-5)


def _numbers(owners: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """By name the numbers among the attributes of `owners`, of layers and of objects of the user's classes in them."""
    seen: set[int] = set()
    for prefix, owner in owners.items():
        layers = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
        for path, layer in layers:
            if path and (type(layer).__module__.startswith("torch.") or hasattr(type(layer), "metric_state")):
                continue
            place = ".".join(filter(None, (prefix, path)))
            for name, value in _attributes(layer):
                yield from _numbers_in(f"{place}.{name}".lstrip("."), value, seen, 2)


def reads_a_clock(owners: Iterable[Any]) -> bool:
    """Whether a method of a class of the user's among these, of layers and of objects in attributes names a clock."""
    classes = set[type]()
    for owner in owners:
        for layer in owner.modules() if isinstance(owner, nn.Module) else [owner]:
            held = [type(value) for _, value in _attributes(layer)]
            classes |= {base for kind in (type(layer), *held) for base in kind.__mro__}
    users = [kind for kind in classes if kind.__module__.partition(".")[0] not in _NOT_OF_USERS]
    functions = [_function_of(value) for kind in users for value in vars(kind).values()]
    named = [value for function in filter(None, functions) for value in named_by(function)]
    helpers = [value for value in map(_function_of, named) if value is not None]
    named += (value for helper in helpers for value in named_by(helper))
    return any(value is clock for value in named for clock in _CLOCKS)


def _function_of(value: Any) -> FunctionType | None:
    """What a method, a property or a decorated function of the user's runs."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    is_own = isinstance(value, FunctionType) and str(value.__module__).partition(".")[0] not in _NOT_OF_USERS
    return value if is_own else None


def _numbers_in(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | np.bool_):
        return
    if isinstance(value, int | float | np.integer | np.floating):
        number: Any = value
        yield name, float(number) if abs(number) < 2**63 else math.inf
    elif type(value) is Tensor:
        if value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool and not value.is_meta:
            yield name, float(value.detach())
    elif depth and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, dict | list):
            for key, item in islice(dict.items(value) if isinstance(value, dict) else enumerate(value), _MOST):
                yield from _numbers_in(f"{name}[{key!r}]", item, seen, depth - 1)
        elif type(value).__module__.partition(".")[0] not in _NOT_OF_USERS and not isinstance(value, nn.Module):
            for key, item in _attributes(value):
                yield from _numbers_in(f"{name}.{key}", item, seen, depth - 1)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    held = attributes_of(owner).items()
    return [(k, value) for k, value in held if k not in _OF_MODULES and not k.startswith(_OF_DEEPSPEED)]
