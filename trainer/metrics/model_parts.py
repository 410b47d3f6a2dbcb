"""The layers of a module, as they are asked for in each step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import nn

from lockstep.strategies.modules.blocks import is_metric, is_of_torch, is_of_user
from lockstep.strategies.modules.side_effect_free import PlainAttributes, UserAttributes
from lockstep.trainer.checkpoint.rank_state import torchmetrics_of


class ModelParts:
    """The parts of a module, walked through once."""

    def __init__(self, module: nn.Module) -> None:
        self.metrics = torchmetrics_of(module)
        of_metrics = {part for metric in self.metrics.values() for part in metric.modules()}
        all_parts = list(module.named_modules())
        self.parts = [(name, part) for name, part in all_parts if part not in of_metrics]
        self.users = [(f"{name}." if name else "", part) for name, part in self.parts if is_of_user(part)]
        self.attributes = UserAttributes(part for _, part in self.users)
        self.names = {part: name for name, part in self.parts}
        self.plain = PlainAttributes(part for _, part in self.parts if is_of_torch(part) and not is_metric(part))
        self.parameters = list(module.named_parameters())
        self.known = [*(part for _, part in all_parts), *(p for _, p in self.parameters), *module.buffers()]
        self._tables = [table for _, part in all_parts for table in (part._modules, part._parameters, part._buffers)]
        self._lengths = [*map(len, self._tables)]
        self._filled = [table for table in self._tables if table]
        self._held = [*self._contents()]

    def holds(self) -> bool:
        """Whether the module has the same parts, parameters and buffers as then."""
        return [*map(len, self._tables)] == self._lengths and all(map(is_, self._contents(), self._held))

    def _contents(self) -> Iterator[Any]:
        return chain.from_iterable(map(_VALUES, self._filled))


_VALUES = methodcaller("values")


class Parts:
    """Walks through a module again when it has others."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._known: ModelParts | None = None

    def now(self) -> ModelParts:
        if self._known is None or not self._known.holds():
            self._known = ModelParts(self.module)
        return self._known
