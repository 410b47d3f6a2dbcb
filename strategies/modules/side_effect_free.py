"""Running a step so that nothing remembers it: what keeps ranks without samples in step with the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.strategies.modules.step_state import OF_ZERO


@contextmanager
def side_effect_free(model: nn.Module) -> Iterator[None]:
    """Put back, at the end, the buffers and attributes of every submodule and torch's random state.

    Counters, lists of outputs, statistics of BatchNorm and the sums of torchmetrics objects are then what they
    were; parameters and their gradients are not touched. Reaches into attributes that are lists, dicts, tuples
    and tensors, not into other objects, which may belong to somebody else.
    """
    before = [
        (module, {key: _copy(value) for key, value in vars(module).items() if _is_state(key)}, dict(module._buffers))
        for module in model.modules()
    ]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.data.copy_(value)  # a backward may still need the buffer, and must not find it changed
        for module, attributes, buffers in before:
            for key in [key for key in vars(module) if _is_state(key) and key not in attributes]:
                del vars(module)[key]
            vars(module).update(attributes)
            module._buffers.update(buffers)


def _is_state(key: str) -> bool:
    if key.startswith(OF_ZERO):
        return False
    return key not in ("_parameters", "_buffers", "_modules", "_trainer") and "hooks" not in key


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_leaf and not isinstance(value, nn.Parameter) else value
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copy(item) for item in value)
    if type(value) is deque:
        return deque((_copy(item) for item in value), value.maxlen)
    return value
