"""What is kept of what a training step returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.strategies.base import Loss


def detach(output: Any) -> Any:
    """`output` without the graph of its tensors, so that keeping it keeps no memory alive."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Loss):
        return Loss(output.total.detach(), output.count)
    if isinstance(output, Mapping):
        return {key: detach(value) for key, value in output.items()}
    return output
