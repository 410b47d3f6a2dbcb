"""Clipping gradients of complex parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.toy import Net, distance, loader, quiet, weights


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x.to(self.turn.dtype) @ self.turn).abs())


def trained(**options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Complex()
    quiet(accelerator="cpu", seed=0, **options).fit(module, loader())
    return [torch.view_as_real(p) if p.is_complex() else p for p in weights(module)]


@pytest.mark.parametrize("strategy", ["single", "local_sgd"])
def test_the_norm_counts_both_parts(strategy: str) -> None:
    virtual = {"virtual_ranks": 2, "split_batches": True} if strategy == "single" else {}
    found = trained(gradient_clip_val=0.1, strategy=strategy, **virtual)
    assert distance(found, trained(gradient_clip_val=0.1)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 2, "split_batches": True}])
def test_bounds_of_elements_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a parameter of shape .8, 8. is complex; use gradient_clip_algorithm='norm'"):
        trained(gradient_clip_val=0.1, gradient_clip_algorithm="value", **options)
