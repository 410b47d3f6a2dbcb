"""What user code writes to in a model, for ranks to compare: what one does, all are to do."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.modules.absent import is_here


class Numbers(Protocol):
    """See `strategies/mesh/user_code/numbers.py`."""

    def begin(self) -> None: ...

    def end(self) -> list[str]: ...

    def stop(self) -> list[str]: ...

    def take(self) -> list[str]: ...

    def step(self) -> None: ...

    def renew(self) -> None: ...


class UserEdits:
    """The names of what user code writes to between `begin` and `end`: values, gradients and `requires_grad` of
    parameters, the state of optimizers and what their groups hold.

    Of a model whose parameters are on several ranks, in place of gradients, of which each rank has others, the names of
    buffers, of which each rank has all. Writes that torch does not count (to the memory of a plain tensor through
    `.data` or numpy) are not seen. What engines write outside of the two is not seen either.
    """

    numbers: Numbers | None = None
    """The numbers that user code changes shards by, where there are some."""

    def __init__(self, model: nn.Module | None = None, optimizers: Mapping[str, Optimizer] | None = None) -> None:
        self._parameters = {} if model is None else dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._optimizers = optimizers or {}
        self._are_sharded = any(hasattr(parameter, "_local_tensor") for parameter in self._parameters.values())
        self._with_gradients = all(map(is_here, self._parameters.values()))
        self._buffers: list[tuple[str, nn.Module, str]] = []
        if model is not None and not self._with_gradients:
            for path, module in model.named_modules():
                self._buffers += [(f"{path}.{name}" if path else name, module, name) for name in module._buffers]
        self._before: tuple[list[object], tuple[list[Any], list[int]]] | None = None
        self._found: Counter[str] = Counter()
        self.watches = bool(self._parameters or self._optimizers)

    def begin(self) -> None:
        self._before = self._of_model(), self._of_optimizers()
        if self.numbers is not None:
            self.numbers.begin()

    def end(self) -> None:
        if self._before is None:
            return
        if self.numbers is not None:
            self._found.update(self.numbers.end())
        before, now = self._before[0], self._of_model()
        if before != now:
            gradients = self._parameters if self._with_gradients else ()
            names = [*self._parameters, *gradients, *(name for name, *_ in self._buffers)]
            self._found.update({name for name, a, b in zip(names, before, now, strict=True) if a != b})
        held, holds = self._before[1], self._of_optimizers()
        if held[1] != holds[1] or len(held[0]) != len(holds[0]) or not all(map(operator.is_, held[0], holds[0])):
            self._found.update(self._changed(held[0], holds[0], held[1], holds[1]))
        self._before = None

    def begin_own(self) -> None:
        """The user's step continues with gradients of all ranks: follow its numbers, until `end_own`."""
        if self.numbers is not None:
            self.numbers.renew()
            self.numbers.begin()

    def end_own(self) -> None:
        if self.numbers is not None:
            self._found.update(self.numbers.stop())

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around the steps of the user for a window of batches: see `begin_own`."""
        try:
            yield
        finally:
            self.end_own()
            if self.numbers is not None:
                self.numbers.step()

    def add(self, names: Iterable[str]) -> None:
        """Name what else user code has changed."""
        self._found.update(names)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it an engine writes, though user code has called it."""
        was_on = self._before is not None
        self.end()
        try:
            yield
        finally:
            if was_on:
                self.begin()

    def take(self) -> list[str]:
        """What was found since the last call, and in how many hooks: ranks may call one for more batches than others.

        Within `begin` and `end` it continues to look.
        """
        if self._before is not None:
            self.end()
            self.begin()
        elif self.numbers is not None:
            self._found.update(self.numbers.take())
        found = [f"{name} ({times} times)" if times > 1 else name for name, times in sorted(self._found.items())]
        self._found.clear()
        return found

    def _of_model(self) -> list[object]:
        """What a write changes, of each parameter and buffer."""
        parameters = self._parameters.values()
        marks: list[object] = [(version(p), p.requires_grad) for p in parameters]
        written = [p.grad for p in parameters] if self._with_gradients else []
        written += [getattr(module, name, None) for _, module, name in self._buffers]
        return marks + [None if tensor is None else (id(tensor), version(tensor)) for tensor in written]

    def _of_optimizers(self) -> tuple[list[Any], list[int]]:
        """What optimizers hold, and how often each was written to."""
        values: list[Any] = []
        for optimizer in self._optimizers.values():
            values += _state_of(optimizer)
            values += [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
        versions = [value._version for value in values if isinstance(value, Tensor)]
        if self._are_sharded:
            versions += [value._local_tensor._version for value in values if hasattr(value, "_local_tensor")]
        return values, versions

    def _changed(self, held: list[Any], now: list[Any], old: list[int], new: list[int]) -> set[str]:
        """The names of what optimizers hold other values of, or that were written to more often."""
        same_places, names = len(held) == len(now), list[str]()
        for key, optimizer in self._optimizers.items():
            state, of_state = optimizer.state, f"the state of optimizer {key!r}"
            if hasattr(state, "times_cleared") or not same_places:
                names += [of_state] * len(_state_of(optimizer))
            else:
                owners = [(self._names.get(id(p), "a parameter"), values) for p, values in state.items()]
                names += [f"{name} of {owner} in {of_state}" for owner, values in owners for name in _dict_of(values)]
            for i, group in enumerate(optimizer.param_groups):
                names += [f"{name} of group {i} of optimizer {key!r}" for name in group if name != "params"]
        if not same_places:
            return {name for name in names if name.startswith("the state of")} or {"the state of optimizers"}
        written = dict.fromkeys(i for i, value in enumerate(now) if isinstance(value, Tensor))
        places = [*written, *(i for i in written if self._are_sharded and hasattr(now[i], "_local_tensor"))]
        found = {i for i, one, other in zip(places, old, new, strict=False) if one != other}
        return {name for i, name in enumerate(names) if i in found or held[i] is not now[i]}


def version(tensor: Tensor) -> int:
    """How often it was written to; a DTensor also as what this rank holds of it."""
    own = getattr(tensor, "_local_tensor", None)
    return tensor._version if own is None else tensor._version + own._version


def _state_of(optimizer: Optimizer) -> list[Any]:
    state = optimizer.state
    if hasattr(state, "times_cleared"):  # spread over ranks: see strategies/optimizers/hidden_state.py
        return [state.times_cleared]
    return [value for values in state.values() for value in _dict_of(values).values()]


def _dict_of(values: Any) -> dict[Any, Any]:
    return values if isinstance(values, dict) else {"the value": values}
