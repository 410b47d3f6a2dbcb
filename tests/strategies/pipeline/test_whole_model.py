"""Hooks may read and change the whole model; a step may not."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from tests.strategies.pipeline.classifiers import ALL, Base, exact, fit

pytestmark = pytest.mark.ranks


class Whole(Base):
    """Reads and changes weights and gradients of all layers, moves a slow copy, freezes, and saves a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("norms", torch.zeros(8, dtype=torch.float64))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        with self.trainer.whole(self):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in held if p.grad is not None]
            self.norms[self.global_step] = torch.nn.utils.get_total_norm(gradients)
            assert len(held) == 6 and all(type(p) is nn.Parameter for p in self.parameters())
            for gradient in gradients:
                gradient.mul_(0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for p, q in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                q.lerp_(p, 0.5)
            self.net[4].bias.add_(0.01 * self.net[0].bias.sum())
            torch.save(self.state_dict(), io.BytesIO())
            with self.trainer.whole(self):
                self.load_state_dict({name: value * 0.99 for name, value in self.state_dict().items()})
        if self.current_epoch == 0:
            with self.trainer.whole(self):
                self.net[2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return SGD(self.net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.long
def test_hooks_see_and_change_the_whole_model_for_a_while() -> None:
    exact(Whole, ALL)


class WholeInAStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.whole(self):
            return super().training_step(batch, batch_idx)


def test_the_whole_model_is_refused_within_a_step() -> None:
    with pytest.raises(RuntimeError, match=r"whole\(\) was called within a step"):
        fit(WholeInAStep(), "pipeline", 2)
