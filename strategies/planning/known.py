"""What operators give on tensors without data, asked of torch once: the blocks of a model ask the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from lockstep.strategies.pipeline.shapes.fake_tensors import blank

NEW, IN_PLACE, VIEW, OTHER = range(4)
_PLAIN = (bool, int, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Known:
    """Results of the operators that make one new tensor, view their first argument or write to it, by all they depend
    on."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._kinds: dict[Any, int] = {}
        self._results: dict[Any, tuple[Any, ...] | None] = {}

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ask: Callable[[], Any]) -> Any:
        """What `func` gives; `ask()` runs it, where that is not known."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        storage = args[0].untyped_storage() if kind == VIEW and isinstance(args[0], FakeTensor) else None
        if storage is not None and not storage.nbytes():  # an engine has emptied it
            return ask()
        question = None if kind == OTHER else _question(func, args, kwargs)
        if question is None:
            return ask()
        known = self._results.get(question)
        if known is None:
            output = ask()
            if kind == IN_PLACE and output is args[0]:
                self._results[question] = ()
            elif kind != IN_PLACE and all(map(_can_be_made, output if type(output) is list else (output,))):
                self._keep(func, kind, question, args, output)
            return output
        if kind == IN_PLACE:
            return args[0]
        made = [self._made(storage, *each) for each in known[1:]]
        return made if known[0] else made[0]

    def _keep(self, func: Any, kind: int, question: Any, args: Sequence[Any], output: Any) -> None:
        outputs = output if type(output) is list else [output]
        if kind == NEW and any(_shares(each, args) for each in outputs):  # _unsafe_view and the like do not say so
            self._kinds[func] = OTHER
        elif kind == NEW or all(each is not args[0] and _shares(each, args[:1]) for each in outputs):
            found = [(t.size(), t.stride(), t.storage_offset(), t.dtype, t.fake_device) for t in outputs]
            self._results[question] = (outputs is output, *found)

    def _made(self, storage: Any, size: Any, stride: Any, offset: int, dtype: Any, device: Any) -> FakeTensor:
        if storage is None:
            return FakeTensor(self._mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
        view = torch.empty((0,), dtype=dtype, device="meta")
        return FakeTensor(self._mode, view.set_(storage, offset, size, stride), device)


def _can_be_made(value: Any) -> bool:
    return type(value) is FakeTensor and value.constant is None


def _kind(func: Any) -> int:
    arguments, returns = func._schema.arguments, func._schema.returns
    if func.namespace not in ("aten", "prims") or len(returns) != 1 or not arguments:
        return OTHER
    if str(returns[0].type) not in ("Tensor", "List[Tensor]"):
        return OTHER
    aliases = [value.alias_info for value in (*arguments[1:], *arguments[:1], *returns)]
    *rest, first, out = aliases
    if any(rest):
        return OTHER
    if not first and not out:
        return NEW
    if func.is_view and torch.Tag.inplace_view not in func.tags:
        return VIEW
    writes = first is not None and first.is_write and out is not None and torch.Tag.inplace_view not in func.tags
    return IN_PLACE if writes and str(returns[0].type) == "Tensor" else OTHER


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
        if value.dtype.is_complex:  # which may be lazily conjugated
            return None
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple, torch.Size):
        parts = [_part(element) for element in value]
        return None if None in parts else (kind, *parts)
    return None


def mode_of(tensor: Tensor) -> FakeTensorMode | None:
    """Of a tensor without data; None for one with."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def like(tensor: FakeTensor, mode: FakeTensorMode) -> FakeTensor:
    """A tensor of `mode` that is like `tensor`."""
    return tensor if tensor.fake_mode is mode else blank(tensor, mode)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors of the same elements of the same storage."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride()
