"""Tensors that have a shape, a dtype and a device, but no data: what stands for what another stage computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MAX_KNOWN = 4096
"""Operations whose result is kept: less than a kilobyte each."""


class Mode(FakeTensorMode):
    """The fake mode of one model, with what operations on its tensors have given."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.known: dict[Any, Blank] = {}


class Blank:
    """What a tensor without data is like, to make more of them: a tenth of the time of a detach, which goes through the
    fake mode."""

    __slots__ = ("_device", "_like", "_mode")

    def __init__(self, tensor: FakeTensor) -> None:
        self._mode, self._device = tensor.fake_mode, tensor.fake_device
        self._like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    def tensor(self) -> FakeTensor:
        return _Known(self._mode, self._like, self._device)


class _Known(FakeTensor):
    """Looks up what an operation gives that was asked before, which takes the fake mode many times as long to find
    out."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        question = _question(func, args, kwargs)
        mode = None if question is None else _mode_of(args)
        if mode is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        answer = mode.known.get(question)
        if answer is None:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if not isinstance(result, FakeTensor) or result.constant is not None:
                return result
            if len(mode.known) >= MAX_KNOWN:
                mode.known.clear()
            answer = mode.known[question] = Blank(result)
        return answer.tensor()


_makes_anew: dict[Any, bool] = {}


def _question(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """All that the result of an operation depends on where its tensors have no data; None where it is not such a
    one."""
    if func not in _makes_anew:
        arguments, returns = func._schema.arguments, func._schema.returns
        _makes_anew[func] = (
            len(returns) == 1
            and str(returns[0].type) == "Tensor"
            and not any(value.alias_info for value in (*arguments, *returns))
        )
    if not _makes_anew[func]:
        return None
    parts = [_part(value) for value in (*args, *kwargs.values())]
    return None if None in parts else (func, *kwargs, *parts)


_TENSORS = (Tensor, nn.Parameter, FakeTensor, _Known)
_PLAIN = (bool, int, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _part(value: Any) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        if value.layout is not torch.strided or getattr(value, "constant", None) is not None:
            return None
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.fake_device if isinstance(value, FakeTensor) else value.device,
        )
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        parts = [_part(element) for element in value]
        return None if None in parts else (kind, *parts)
    return None


def _mode_of(values: Sequence[Any]) -> Mode | None:
    for value in values:
        mode = (
            value.fake_mode
            if isinstance(value, FakeTensor)
            else _mode_of(value)
            if isinstance(value, list | tuple)
            else None
        )
        if isinstance(mode, Mode):
            return mode
    return None
