"""Generators of random numbers that a module keeps: a step draws once a micro-batch, or is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.strategies import Pipeline
from tests.strategies.pipeline.classifiers import ALL, TWO, Base, exact, fit, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks

OF_FILE = random.Random(5)


class Keeps(Base):
    """Its step draws by `draw` before it calls the net, and by `draw_late` afterwards."""

    def __init__(self, draw: Callable[[Any, Tensor], Any], draw_late: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.draw, self.draw_late = draw, draw_late
        self.python, self.torchs = random.Random(5), torch.Generator().manual_seed(5)
        self.held = {"numpy": np.random.default_rng(5), "old": [np.random.RandomState(5)]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x * self.draw(self, x) + OF_FILE.random()), y)
        return loss if self.draw_late is None else loss * self.draw_late(self)


def make() -> Keeps:
    OF_FILE.seed(5)
    return Keeps(of_all)


def of_torch(module: Any, x: Tensor) -> Tensor:
    return torch.rand((), generator=module.torchs, dtype=x.dtype)


def of_all(module: Any, x: Tensor) -> Any:
    numpys = module.held["numpy"].random() + module.held["old"][0].random_sample()
    return module.python.random() + of_torch(module, x) + numpys


def of_samples(module: Any, x: Tensor) -> Tensor:
    return torch.rand(len(x), 1, generator=module.torchs, dtype=x.dtype)


class Renewed(Keeps):
    def __init__(self, draw: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(draw)
        OF_FILE.seed(5)

    def on_train_epoch_start(self) -> None:
        self.torchs = torch.Generator().manual_seed(self.current_epoch)


def test_a_draw_before_the_net_is_one_for_the_whole_micro_batch() -> None:
    exact(make, ALL, max_epochs=1)


def test_a_generator_that_hooks_replace_is_followed() -> None:
    exact(partial(Renewed, of_torch), TWO, max_epochs=3)


@pytest.mark.long
def test_stages_of_one_rank_draw_alike() -> None:
    def of_four() -> Keeps:
        module = make()
        torch.manual_seed(1)
        module.net.insert(0, nn.Linear(8, 8).double())
        return module

    exact(of_four, {lambda: Pipeline(schedule="interleaved_1f1b"): 2}, max_epochs=1)


def test_numbers_for_each_sample_are_refused() -> None:
    with pytest.raises(RuntimeError, match="draws other numbers from torchs for a part of a micro-batch than for"):
        fit(Keeps(of_samples), "pipeline", 2)

    def from_the_sixth(module: Any, x: Tensor) -> Any:
        return of_samples(module, x) if module.global_step > 5 else 1.0

    with pytest.raises(RuntimeError, match="draws other numbers from torchs for a part of a micro-batch than for"):
        fit(Keeps(from_the_sixth), "pipeline", 2, n=64)


def test_what_not_all_ranks_draw_is_refused() -> None:
    def late(module: Any) -> float:
        return float(module.python.random())

    with pytest.raises(RuntimeError, match="a step draws from python after it has called the pipelined module"):
        fit(Keeps(of_torch, late), "pipeline", 2)

    class Hooked(Keeps):
        def on_before_backward(self, loss: Tensor) -> None:
            self.python.random()

    with pytest.raises(RuntimeError, match="on_before_backward draws from python, but in a pipeline only one rank"):
        fit(Hooked(of_torch), "pipeline", 2)

    class OfParameter(Keeps):
        def on_fit_start(self) -> None:
            self.net[0].weight.register_hook(lambda gradient: gradient * self.python.random())

    with pytest.raises(RuntimeError, match="a hook of a parameter draws from python, but in a pipeline only one rank"):
        fit(OfParameter(of_torch), "pipeline", 2)


class Evaluated(Keeps):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


@pytest.mark.parametrize("is_late", [False, True])
def test_an_evaluation_draws_before_the_net_only(is_late: bool) -> None:
    def late(module: Any) -> float:
        return float(module.python.random())

    def run(strategy: str, devices: int) -> float:
        OF_FILE.seed(5)
        trainer = quiet(strategy=strategy, devices=devices, max_epochs=1, seed=0, precision="64-true")
        loader = torch.utils.data.DataLoader(samples(), batch_size=8)
        trainer.validate(Evaluated(of_torch, late if is_late else None), loader)
        return float(trainer.callback_metrics["loss"])

    if not is_late:
        assert run("pipeline", 2) == pytest.approx(run("single", 1), abs=1e-12)
        return
    with pytest.raises(RuntimeError, match="a step draws from python after it has called the pipelined module"):
        run("pipeline", 2)
