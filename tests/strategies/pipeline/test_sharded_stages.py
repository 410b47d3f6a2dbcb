"""Weights that user code writes while ranks hold them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.strategies.modules.absent import is_here
from tests.strategies.pipeline.classifiers import Base, difference, fit

pytestmark = pytest.mark.ranks


class Edits(Base):
    def __init__(self, edit: Callable[[torch.nn.Parameter], Any]) -> None:
        super().__init__()
        self.edit = edit

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the first of two micro-batches
            self.edit(next(p for p in self.net.parameters() if is_here(p)))


def by_method(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def by_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.mul_(0.5)


def by_sign(parameter: torch.nn.Parameter) -> None:
    parameter.data.neg_()


def by_numpy(parameter: torch.nn.Parameter) -> None:
    parameter.detach().numpy()[:] = 0.0


def by_replacing(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize("edit", [by_method, by_data, by_sign, by_numpy, by_replacing])
def test_weights_written_within_a_window_of_sharded_stages_are_refused(edit: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"weights were changed within an accumulation window \(net\.\d\.weight\)"):
        fit(Edits(edit), "fsdp=2,pipeline=2", 4, accumulate_grad_batches=2, max_epochs=1)


class FreezesInTurn(Base):
    """Freezes a layer of the first stage for each second batch, after the stages have become whole."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


@pytest.mark.long
def test_layers_are_frozen_from_one_batch_to_the_next() -> None:
    expected = fit(FreezesInTurn(), "single", 1, n=42)
    assert difference(fit(FreezesInTurn(), "fsdp=2,pipeline=2", 4, n=42), expected) < 1e-12
    assert difference(fit(Base(), "single", 1, n=42), expected) > 1e-4


@pytest.mark.parametrize("strategy", ["fsdp=2,pipeline=2", "ddp=2,pipeline=2"])
def test_layers_that_are_frozen_within_a_window_are_refused(strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"requires_grad of net\.0\.weight, net\.0\.bias changed between the micro"):
        fit(FreezesInTurn(), strategy, 4, n=42, accumulate_grad_batches=2)
