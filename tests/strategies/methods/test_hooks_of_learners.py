"""What hooks of users read and change while learners train: the same numbers if one rank runs them all, or refused."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

from lockstep import Module
from lockstep.callbacks import Callback
from lockstep.strategies import DiLoCo, LocalSGD, Strategy
from tests.trainer.test_user_code import Base, batches
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks

UNEVEN = 17
"""Samples, of which the last batch of 8 leaves one of two learners without any."""


class Decaying(Base):
    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def note(self, name: str, value: Any) -> None:
        self.log(name, torch.as_tensor(value, dtype=torch.float64), on_step=False, on_epoch=True)

    def norm(self) -> Any:
        return sum(p.detach().square().sum() for p in self.net.parameters())


class Reads(Decaying):
    """Weights, gradients, optimizer state, rates, steps and random numbers, in both hooks that follow a step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("rate before", optimizer.param_groups[0]["lr"])
        self.note("gradient", sum(p.grad.square().sum() for p in self.net.parameters()))
        self.note("weights before", self.norm())
        self.note("drawn before", torch.rand(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("weights", self.norm())
        self.note("rate", self.optimizers().param_groups[0]["lr"])
        self.note("step", self.global_step)
        self.note("state", sum(s["exp_avg"].square().sum() for s in self.optimizers().state.values()))
        self.note("cleared", sum(p.grad is None for p in self.net.parameters()))
        self.note("drawn", torch.rand(()))
        if outputs is not None:
            self.note("returned", outputs)


class Assigns(Decaying):
    """New tensors as `data`, within a learner's own step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.net.parameters():
            parameter.data = parameter.data * 0.99


class Scales(Decaying):
    """A rate that follows from the one before, in every learner's step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9


class InTensors(Scales):
    """The same of a rate in a tensor, which optimizers and hooks change in place."""

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=torch.tensor(0.02), foreach=False)


class Noisy(Decaying):
    """Random numbers within `whole`: the learner's own, or those of all learners while these step together."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.whole(self):
            for parameter in self.net.parameters():
                parameter.grad += 0.1 * torch.randn_like(parameter)


class Appends(Decaying):
    """Lists of its own that it reads again: each learner has appended to its own only."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.norms: dict[str, list[float]] = {"all": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss / (sum(self.losses[-3:]) + 0.01 * len(self.losses))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters()])
        self.norms["all"].append(float(norm))
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), statistics.median(self.norms["all"]) / 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(batch[0].sum()))

    def on_train_epoch_end(self) -> None:
        self.losses.clear()
        self.norms["all"].append(1.0)


class Every(Callback):
    """Counts batches, and shrinks gradients by the count."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            parameter.grad /= 1 + self.batches


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "diloco": lambda: DiLoCo(learners=2, period=3),
    "fragments": lambda: DiLoCo(learners=2, period=4, fragments=2, delay=1, mixing=0.5),
    "a synchronous start": lambda: LocalSGD(learners=2, period=2, start=3),
    "error reset": lambda: LocalSGD(learners=2, period=1, compress="topk=0.3"),
}


def trained(module: Module, strategy: Strategy, devices: int, **options: Any) -> dict[str, torch.Tensor]:
    run = quiet(strategy=strategy, devices=devices, precision="64-true", max_epochs=2, split_batches=True, **options)
    run.fit(module, batches(UNEVEN))
    return {**module.state_dict(), **run.callback_metrics}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("make", [Reads, Assigns, Scales, InTensors, Noisy, Appends])
def test_learners_of_one_rank_are_those_of_two(make: Callable[[], Module], name: str) -> None:
    runs = (trained(make(), STRATEGIES[name](), devices, callbacks=[Every()]) for devices in (1, 2))
    alone, together = runs
    assert alone.keys() == together.keys()
    for key, value in together.items():
        assert torch.equal(alone[key].double(), value.double()), key


class Average(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mine, parameter in zip(self.average, module.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.1)


class ByNumpy(Decaying):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].weight.detach().numpy()[...] *= 0.9


class ByData(Decaying):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.net[0].weight.data = self.net[0].weight.data * 0.9


class Rate(Decaying):
    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().param_groups[0]["lr"] *= 0.9


class OwnRate(Decaying):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = float(self.norm()) * 0.01


class InDict(Decaying):
    """A mean of gradients, added to each."""

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.means[name] = self.means.get(name, 0.0) * 0.9 + parameter.grad * 0.1
            parameter.grad += self.means[name]


class Mean:
    def __init__(self, net: torch.nn.Module) -> None:
        self.weights = [p.detach().clone() for p in net.parameters()]

    def update(self, net: torch.nn.Module) -> None:
        for mine, parameter in zip(self.weights, net.parameters(), strict=True):
            mine.copy_(parameter.detach())


class InObject(Decaying):
    def __init__(self) -> None:
        super().__init__()
        self.mean = Mean(self.net)

    def on_train_batch_end(self, *_: Any) -> None:
        self.mean.update(self.net)


class InClosure(Decaying):
    def __init__(self) -> None:
        super().__init__()
        calls = [0]

        def shrink(gradient: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return gradient / calls[0]

        self.net[0].weight.register_hook(shrink)


class InClass(Decaying):
    calls = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        InClass.calls += 1


class OwnNoise(Decaying):
    def __init__(self) -> None:
        super().__init__()
        self.noise = numpy.random.default_rng(0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad *= self.noise.random()


class Shortens(Decaying):
    """A list of which code between steps takes a part of what all learners have appended."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(float(self.norm()))

    def on_train_epoch_end(self) -> None:
        self.losses = self.losses[-2:]


class OnlyOne(Decaying):
    """Changed for the last learner only: the 8th sample is its."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.sample = batches(UNEVEN).dataset.tensors[0][7].clone()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if bool((batch[0] == self.sample).all(1).any()):
            self.scale = self.scale / 2


class ResetsState(Decaying):
    def on_train_epoch_start(self) -> None:
        for state in self.optimizers().state.values():
            state["exp_avg"].zero_()


class ResetsByNumpy(Decaying):
    def on_train_epoch_start(self) -> None:
        for state in self.optimizers().state.values():
            state["exp_avg"].numpy()[...] = 0


@pytest.mark.parametrize(
    ("make", "options", "what"),
    [
        (InDict, {}, "a step changed means, which the learners on this rank have in common"),
        (InObject, {}, "on_train_batch_end changed mean"),
        (InClosure, {}, "a step changed what shrink remembers, a hook of net.0.weight"),
        (InClass, {}, "a step changed InClass.calls"),
        (OwnNoise, {}, "a step changed noise"),
        (Shortens, {}, "losses was changed between steps, but holds what several"),
        (OnlyOne, {}, "on_train_batch_end changed scale"),
        (ResetsState, {}, "state of optimizer '0' was changed outside of a learner's turn"),
        (ResetsByNumpy, {}, "state of optimizer '0' was changed outside of a learner's turn"),
        (Decaying, {"callbacks": [Average()]}, "on_train_batch_end changed Average.average"),
        (ByNumpy, {}, "on_train_batch_end changed net.0.weight"),
        (ByData, {}, "on_before_zero_grad changed net.0.weight"),
        (Rate, {}, "on_train_batch_end changed lr of group 0"),
        (OwnRate, {}, "leave different values of lr in param_groups"),
    ],
)
def test_what_a_rank_would_change_once_for_each_learner_is_refused(make: Any, options: Any, what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        trained(make(), DiLoCo(learners=2), 1, **options)
