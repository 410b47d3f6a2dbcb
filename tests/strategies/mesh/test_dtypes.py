"""Models whose trained parameters have several dtypes, under FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Module
from lockstep.strategies import FSDP, Strategy
from lockstep.strategies.mesh import steps
from tests.strategies.mesh.test_fsdp import fit, rows, seeded
from tests.trainer.toy import distance, weights

pytestmark = pytest.mark.ranks


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)


class SeveralDtypes(Module):
    """A layer in float64 and a complex filter beside layers in float32."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8).double(), nn.Linear(8, 2)
        self.spectrum = Spectrum()
        self.middle.requires_grad_(not frozen)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.middle.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.middle(self.first(batch[0]).double()).float()
        return self.last(self.spectrum(hidden)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


@pytest.mark.parametrize(("clip", "wrap"), [(None, "auto"), (0.1, Spectrum)])
def test_parameters_of_several_dtypes_train_as_on_one_process(clip: float | None, wrap: Any) -> None:
    one, sharded = seeded(SeveralDtypes), seeded(SeveralDtypes)
    runs: list[tuple[Module, Strategy | str, int]] = [(one, "single", 1), (sharded, FSDP(wrap=wrap), 2)]
    for module, strategy, devices in runs:
        fit(strategy, devices, module, rows(13), precision="32-true", gradient_clip_val=clip)
    assert [p.dtype for p in sharded.parameters()] == [p.dtype for p in one.parameters()]
    assert distance(weights(one), weights(sharded)) < 1e-6


class WithoutElements(Module):
    """One of its branches has no width, as code that is configured by numbers makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.none = nn.Parameter(torch.empty(0, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (
            self.last(torch.cat([self.first(batch[0]), nn.functional.linear(batch[0], self.none)], dim=1))
            .square()
            .mean()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_a_layer_without_elements_is_left_whole(strategy: str) -> None:
    one, several = seeded(WithoutElements), seeded(WithoutElements)
    fit("single", 1, one, rows(13))
    fit(strategy, 2, several, rows(13))
    assert [p.shape for p in several.parameters()] == [p.shape for p in one.parameters()]
    expected, found = ([p for p in weights(module) if p.numel()] for module in (one, several))
    assert distance(found, expected) < 1e-12


def test_unfreezing_a_layer_of_another_dtype_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"middle\.weight, middle\.bias changed requires_grad or dtype, and another dtype"
    ):
        fit("fsdp", 2, seeded(SeveralDtypes, frozen=True), rows(8), precision="32-true")


def test_complex_gradients_differ_by_their_imaginary_parts_too() -> None:
    one, other = (steps._summary(torch.tensor([1.0, value]), torch.device("cpu")) for value in (1j, 2j))
    assert not torch.allclose(one, other)
