"""The order in which a forward calls submodules, read from its source."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lockstep.strategies.modules.source_order import call_order
from lockstep.strategies.pipeline.partition import cut


class Decoder(nn.Module):
    """Defines its norm before its layers, as OPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(2, 2)
        self.parts = nn.ModuleDict({"ln": nn.Linear(2, 2), "wte": nn.Linear(2, 2)})
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.extra: Any = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts.ln(self.parts["wte"](x)) if x is None else self.parts.ln(x)  # type: ignore[operator]
        for i, layer in enumerate(self.layers[:3]):
            x = layer(x) + i
        if self.extra is not None:
            x = self.extra(x)
        return self.norm(x)


class Once(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        x = self.parts.ln(self.parts.wte(x))  # type: ignore[operator]
        hidden = [layer(x) for layer in self.layers if self.extra is not None]
        return self.norm(self.extra(hidden[-1]))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.decoder = nn.Linear(2, 1), Once()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(x))


NAMES = ["norm", "parts.ln", "parts.wte", "layers.0", "layers.1", "layers.2", "extra"]
CALLED = ["parts.wte", "parts.ln", "layers.0", "layers.1", "layers.2", "extra", "norm"]


def test_the_order_of_calls_is_found() -> None:
    assert call_order(Once(), NAMES) == CALLED
    parts = cut(Outer())
    assert [layer.name for layer in parts.layers] == [*(f"decoder.{name}" for name in CALLED), "head"]


@pytest.mark.parametrize(
    "module",
    [Decoder(), nn.Sequential(nn.Linear(2, 2)), nn.Module()],
    ids=["two places", "no place", "no forward"],
)
def test_the_order_stays_if_the_source_does_not_show_it(module: nn.Module) -> None:
    assert call_order(module, NAMES) == NAMES
