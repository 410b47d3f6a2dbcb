"""Weights that user code writes while ranks hold them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.strategies.modules.absent import is_here
from tests.strategies.pipeline.classifiers import Base, fit

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
