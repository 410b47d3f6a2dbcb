"""What operators give on tensors without data, asked of torch once: the blocks of a model ask the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

NEW, IN_PLACE, OTHER = range(3)
_PLAIN = (bool, int, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Known:
    """Results of the operators that make one new tensor, or write to their first argument, by all they depend on."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kinds: dict[Any, int] = {}
        self._results: dict[Any, tuple[Any, ...] | None] = {}

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ask: Callable[[], Any]) -> Any:
        """What `func` gives; `ask()` runs it, where that is not known."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        question = None if kind == OTHER else _question(func, args, kwargs)
        if question is None:
            return ask()
        known = self._results.get(question)
        if known is None:
            output = ask()
            if kind == IN_PLACE and output is args[0]:
                self._results[question] = ()
            elif kind == NEW and type(output) is FakeTensor and output.constant is None:
                if _shares(output, args):  # _unsafe_view and the like, which do not say so
                    self._kinds[func] = OTHER
                else:
                    self._results[question] = output.size(), output.stride(), output.dtype, output.fake_device
            return output
        if kind == IN_PLACE:
            return args[0]
        size, stride, dtype, device = known
        return FakeTensor(self._mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)


def _kind(func: Any) -> int:
    arguments, returns = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" or len(returns) != 1 or str(returns[0].type) != "Tensor" or not arguments:
        return OTHER
    aliases = [value.alias_info for value in (*arguments[1:], *arguments[:1], *returns)]
    *rest, first, out = aliases
    if any(rest):
        return OTHER
    if not first and not out:
        return NEW
    writes = first is not None and first.is_write and out is not None and torch.Tag.inplace_view not in func.tags
    return IN_PLACE if writes else OTHER


def _shares(output: FakeTensor, args: Sequence[Any]) -> bool:
    storage = output.untyped_storage()._cdata
    return any(
        value.untyped_storage()._cdata == storage for value in tree_leaves(args) if isinstance(value, FakeTensor)
    )


def _question(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    parts = [_part(value) for value in (*args, *kwargs.values())]
    return None if None in parts else (func, *kwargs, *parts)


def _part(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor or kind is nn.Parameter:
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.constant is not None:
            return None
        return value.shape, value.stride(), value.dtype, value.fake_device
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple, torch.Size):
        parts = [_part(element) for element in value]
        return None if None in parts else (kind, *parts)
    return None
