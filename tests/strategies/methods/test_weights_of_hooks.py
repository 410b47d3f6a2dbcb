"""What hooks write to the weights of learners on ranks of their own: it becomes common, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from lockstep import Module
from lockstep.strategies import DiLoCo, LocalSGD, ParameterServer, Strategy
from tests.trainer.test_user_code import batches
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class Student(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 1).double()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self) -> None:
        for target, weight in zip(self.target.parameters(), self.net.parameters(), strict=True):
            target.data.lerp_(weight.data, 0.3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.net(x), x.sum(1, keepdim=True)) + mse_loss(self.net(x), self.target(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0].double())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[0].double()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.02)


class InHook(Student):
    """A target network that each rank moves, after its learner's step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()

    def on_validation_epoch_end(self) -> None:
        one, other = self.all_gather(self.target.weight.detach())
        assert torch.equal(one, other)
        assert not torch.equal(one, self.net.weight)


class InStep(Student):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.follow()


class OfRankZero(Student):
    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.net.weight.data.clamp_(-0.1, 0.1)


class OwnAverage(Student):
    """Evaluates the average of weights that each rank has kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.average = self.net.weight.detach().clone()

    def on_train_batch_end(self, *_: Any) -> None:
        self.average = self.average.lerp(self.net.weight.detach(), 0.2)

    def on_validation_epoch_start(self) -> None:
        self.kept = self.net.weight.detach().clone()
        self.net.weight.data.copy_(self.average)

    def on_validation_epoch_end(self) -> None:
        self.net.weight.data.copy_(self.kept)


class PulledBack(OwnAverage):
    """Writes to weights after each batch, also where learners have just come together."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.net.weight.data.lerp_(self.average, 0.5)


def trained(module: Module, strategy: Strategy, devices: int, validates: bool = True) -> dict[str, torch.Tensor]:
    run = quiet(strategy=strategy, devices=devices, precision="64-true", max_epochs=2)
    run.fit(module, batches(64), *([batches(16)] if validates else []))
    return {**module.state_dict(), **run.callback_metrics}


@pytest.mark.parametrize("strategy", [LocalSGD(period=2), DiLoCo(period=3, fragments=2, delay=1)])
def test_parameters_without_optimizer_are_those_of_learner_0_in_an_evaluation(strategy: Strategy) -> None:
    trained(InHook(), strategy, 2)


def test_parameters_without_optimizer_are_a_learners_own_in_rounds_on_any_ranks() -> None:
    alone, together = (trained(InStep(), LocalSGD(learners=2, period=2), devices) for devices in (1, 2))
    for key, value in together.items():
        assert torch.equal(alone[key], value), key


@pytest.mark.parametrize(("make", "validates"), [(OfRankZero, False), (OwnAverage, True), (PulledBack, False)])
def test_weights_that_hooks_write_differently_on_ranks_are_refused(make: Callable[[], Module], validates: bool) -> None:
    with pytest.raises(RuntimeError, match="net.weight should be common to all learners"):
        trained(make(), LocalSGD(period=2), 2, validates)


class ByRank(Student):
    """Writes what each rank has of its own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _write(self) -> None:
        with torch.no_grad():
            self.net.weight.mul_(1 + 0.1 * self.global_rank)

    def on_validation_epoch_start(self) -> None:
        if self.where == "evaluation":
            self._write()

    def on_train_epoch_end(self) -> None:
        if self.where == "whole":
            with self.trainer.whole(self):
                self._write()


@pytest.mark.parametrize("where", ["evaluation", "whole"])
def test_a_parameter_server_refuses_weights_that_ranks_write_otherwise(where: str) -> None:
    run = quiet(strategy=ParameterServer(staleness=1), devices=2, accelerator="cpu", max_epochs=1, precision="64-true")
    with pytest.raises(RuntimeError, match="a hook has written other values of net.weight on some ranks, of which Par"):
        run.fit(ByRank(where), batches(32), batches(8))
