"""Which layers tensor parallelism cuts, and how."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from strategies.options import Options


def make_plan(model: nn.Module, size: int, options: Options) -> dict[str, Any]:
    """How each layer is cut, by name."""
    raise NotImplementedError


def apply_plan(model: nn.Module, unit: nn.Module, name: str, mesh: DeviceMesh, styles: dict[str, Any]) -> None:
    """Cut the layers of `unit`."""


def tie(model: nn.Module) -> None:
    """Make tied parameters one again."""
