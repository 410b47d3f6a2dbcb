"""Casts of parameters by `Module.to`, `half`, `double` and the like, of which engines that hold them learn nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch.utils
from torch import Tensor, nn

_followed: dict[int, Callable[[], None]] = {}
"""By the id of a parameter of the model what to call once it was cast."""
_cast: set[int] = set()
_apply = nn.Module._apply
_swap_tensors: Any = torch.utils.swap_tensors
_swap = FunctionType(_swap_tensors.__code__, _swap_tensors.__globals__)
_replaced: list[Any] = []


def watch_casts() -> None:
    """Note casts of the parameters that are followed from here on, until `forget_casts`; also casts that are undone at
    once, by which torch gives a parameter other memory and another node of the graph. Replaces a method of
    `nn.Module`, and the code of `torch.utils.swap_tensors`, which others may have imported, but not within
    `converting_by`."""
    global _apply
    forget_casts()
    if not _replaced:
        _apply = nn.Module._apply
        nn.Module._apply = _watched  # type: ignore[method-assign]
        _swap_tensors.__kwdefaults__ = {"call": _swapped}  # first, as another thread may call it
        _swap_tensors.__code__ = _calls.__code__


def forget_casts() -> None:
    """Follow no parameter, hold no model, and give `nn.Module` its method back."""
    _followed.clear()
    _cast.clear()
    if nn.Module._apply is _watched:
        nn.Module._apply = _apply  # type: ignore[method-assign]
        _swap_tensors.__code__, _swap_tensors.__kwdefaults__ = _swap.__code__, None


@contextmanager
def converting_by(apply: Callable[..., Any]) -> Iterator[None]:
    """While it lasts `apply` is what `Module.to` and the like call of each module, and casts are not watched."""
    original = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    _replaced.append(apply)
    try:
        yield
    finally:
        _replaced.pop()
        nn.Module._apply = original  # type: ignore[method-assign]


def follow_casts(parameter: Tensor, call: Callable[[], None] | None = None) -> None:
    """Note casts of `parameter`, and call `call` after each, and after its values were swapped with another's."""
    _followed.setdefault(id(parameter), call or _nothing)


def take_casts(parameters: Callable[[], Iterable[tuple[str, Tensor]]]) -> list[str]:
    """The names of those that were cast since the last call."""
    if not _cast:
        return []
    named = [*parameters()]
    names = [name for name, parameter in named if id(parameter) in _cast]
    _cast.difference_update(id(parameter) for _, parameter in named)
    return names


def _watched(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    held = [(p, p.dtype) for p in module._parameters.values() if id(p) in _followed and p is not None]
    done = _apply(module, fn, recurse)
    for parameter, dtype in held:
        if parameter.dtype != dtype:
            _cast.add(id(parameter))
            _followed[id(parameter)]()
    return done


def _calls(t1: Tensor, t2: Tensor, *, call: Callable[[Tensor, Tensor], None]) -> None:
    call(t1, t2)


def _swapped(one: Tensor, other: Tensor) -> None:
    try:
        _swap(one, other)
    except RuntimeError as error:
        raise RuntimeError(
            "torch.utils.swap_tensors() was called with a parameter that the strategy or a graph of autograd holds, "
            "which torch cannot swap; swap the values, as in a.data, b.data = b.data, a.data"
        ) from error
    for tensor in (one, other):
        _followed.get(id(tensor), _nothing)()


def _nothing() -> None: ...
