"""Strategies: where the work runs, never what it computes."""

from strategies.base import Loss, Strategy
from strategies.ddp import DDP
from strategies.registry import build
from strategies.single import SingleDevice

__all__ = ["DDP", "Loss", "SingleDevice", "Strategy", "build"]
