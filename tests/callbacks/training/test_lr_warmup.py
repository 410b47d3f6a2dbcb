"""LRWarmup on top of real schedulers, against tables computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lockstep.callbacks._support.lr_factor import lr_factor
from lockstep.callbacks.training.lr_warmup import LRWarmup

BASE = 0.3


def linear(t: int, steps: int = 5, start: float = 0.0) -> float:
    return min(1.0, start + (1 - start) * (t + 1) / (steps + 1))


class Run:
    """A training of one number, in the loop's order; `effective` are the rates that moved it, `shown` those in the
    group."""

    def __init__(
        self, scheduler: Callable[[torch.optim.Optimizer], Any] | None, *callbacks: LRWarmup, accumulate: int = 1
    ) -> None:
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.weight], lr=BASE)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.callbacks = callbacks
        self.accumulate = accumulate
        owned = SimpleNamespace(windows_at_start=3)
        self.trainer: Any = SimpleNamespace(global_step=0, optimizers=[self.optimizer], _run=owned)
        self.effective: list[float] = []
        self.shown: list[float] = []
        self.announced: list[float] = []

    def start(self) -> Run:
        for callback in self.callbacks:
            callback.on_fit_start(self.trainer, None)  # type: ignore[arg-type]
        return self

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.weight.data.zero_()
            self.optimizer.zero_grad()
            for _ in range(self.accumulate):
                (self.weight / self.accumulate).backward()
            self.announced.append(self.optimizer.param_groups[0]["lr"] * lr_factor(self.optimizer))
            self.optimizer.step()
            self.effective.append(-self.weight.item())
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif self.scheduler:
                self.scheduler.step()
            self.shown.append(self.optimizer.param_groups[0]["lr"])
            self.trainer.global_step += 1
        return self


def one_cycle(t: int) -> float:
    """`OneCycleLR(max_lr=1, total_steps=11, pct_start=0.4, linear)`: up from 1/25 until step 3.4, down to 1/25e4 at
    step 10."""
    low, high, end = 1 / 25, 1.0, 1 / 25e4
    return low + (high - low) * t / 3.4 if t <= 3.4 else high + (end - high) * (t - 3.4) / (10 - 3.4)


SCHEDULERS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any] | None, Callable[[int], float]]] = {
    "none": (None, lambda t: BASE),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.9), lambda t: BASE * 0.9**t),
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)), lambda t: BASE / (1 + t)),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 20), lambda t: BASE * (1 + math.cos(math.pi * t / 20)) / 2),
    "onecycle": (
        lambda o: lr_scheduler.OneCycleLR(
            o, 1.0, total_steps=11, pct_start=0.4, anneal_strategy="linear", cycle_momentum=False
        ),
        one_cycle,
    ),
    "step": (lambda o: lr_scheduler.StepLR(o, 4, 0.5), lambda t: BASE * 0.5 ** (t // 4)),
    # The first call sets the best; every second one after it without improvement halves.
    "plateau": (
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
        lambda t: BASE * 0.5 ** max(0, (t - 1) // 2),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_effective_rate_is_warmup_times_schedule(name: str) -> None:
    scheduler, formula = SCHEDULERS[name]
    run = Run(scheduler, LRWarmup(steps=5)).start().steps(11)
    expected = [linear(t) * formula(t) for t in range(11)]
    assert run.effective == pytest.approx(expected, abs=1e-12, rel=1e-12)
    assert run.announced == pytest.approx(expected, abs=1e-12, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_and_the_rates_after_warmup_are_bitwise_those_without(name: str) -> None:
    scheduler = SCHEDULERS[name][0]
    warmed, plain = Run(scheduler, LRWarmup(steps=5)).start().steps(11), Run(scheduler).steps(11)
    assert warmed.shown == plain.shown
    assert warmed.effective[5:] == plain.effective[5:]
    assert all(a < b for a, b in zip(warmed.effective[:5], plain.effective[:5], strict=True))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("at", [3, 7])
def test_a_resumed_run_continues_bitwise(name: str, at: int) -> None:
    scheduler = SCHEDULERS[name][0]
    whole = Run(scheduler, LRWarmup(steps=5, shape="cosine")).start().steps(11)
    first = Run(scheduler, LRWarmup(steps=5, shape="cosine")).start().steps(at)
    second = Run(scheduler, LRWarmup(steps=5, shape="cosine"))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    if second.scheduler:
        second.scheduler.load_state_dict(first.scheduler.state_dict())
    second.trainer.global_step = at
    second.start().steps(11 - at)
    assert first.effective + second.effective == whole.effective


def test_the_shapes_and_the_start() -> None:
    run = Run(None, LRWarmup(steps=3, start_factor=0.2)).start().steps(4)
    assert run.effective == pytest.approx([BASE * f for f in (0.4, 0.6, 0.8, 1.0)], abs=1e-15)
    run = Run(None, LRWarmup(steps=3, shape="cosine")).start().steps(4)
    assert run.effective == pytest.approx(
        [BASE * f for f in ((1 - math.sqrt(0.5)) / 2, 0.5, (1 + math.sqrt(0.5)) / 2, 1.0)], abs=1e-15
    )
    assert Run(None, LRWarmup(steps=0)).start().steps(2).effective == [BASE, BASE]


def test_steps_are_optimizer_steps_whatever_a_step_accumulates() -> None:
    one = Run(None, LRWarmup(steps=5)).start().steps(8)
    four = Run(None, LRWarmup(steps=5), accumulate=4).start().steps(8)
    assert four.effective == one.effective


def test_epochs_are_counted_in_the_steps_of_this_run() -> None:
    warmup = LRWarmup(epochs=1.5)
    with pytest.raises(RuntimeError, match="until fit has started"):
        warmup.factor_at(0)
    run = Run(None, warmup).start()
    assert warmup.steps == 4  # 1.5 epochs of 3 steps, 4.5, rounded to even
    assert run.steps(5).effective == pytest.approx([BASE * f / 5 for f in (1, 2, 3, 4, 5)], abs=1e-15)

    endless = Run(None, LRWarmup(epochs=1))
    endless.trainer._run.windows_at_start = None
    with pytest.raises(ValueError, match="set steps="):
        endless.start()


def test_several_optimizers_are_warmed_and_a_second_fit_starts_from_scratch() -> None:
    weights = [nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=lr) for weight, lr in zip(weights, (0.1, 0.2), strict=True)]
    trainer: Any = SimpleNamespace(global_step=0, optimizers=optimizers)
    warmup = LRWarmup(steps=1)
    for _ in range(2):
        warmup.on_fit_start(trainer, None)  # type: ignore[arg-type]
        assert [lr_factor(optimizer) for optimizer in optimizers] == [0.5, 0.5]
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.data.zero_()
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert [-weight.item() for weight in weights] == [0.05, 0.1]
        warmup.teardown(trainer, None, "fit")  # type: ignore[arg-type]
        assert [lr_factor(optimizer) for optimizer in optimizers] == [1.0, 1.0]


def test_training_is_bitwise_that_of_a_hand_written_warmup() -> None:
    def train(by_hand: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Linear(8, 1)
        x, y = torch.randn(32, 8), torch.randn(32, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        warmup = LRWarmup(steps=4)
        trainer: Any = SimpleNamespace(global_step=0, optimizers=[optimizer])
        if not by_hand:
            warmup.on_fit_start(trainer, None)  # type: ignore[arg-type]
        for t in range(8):
            if by_hand:
                optimizer.param_groups[0]["lr"] = 0.01 * 0.9**t * linear(t, steps=4)
            else:
                optimizer.param_groups[0]["lr"] = 0.01 * 0.9**t
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            trainer.global_step += 1
        return model.weight.detach()

    assert torch.equal(train(by_hand=True), train(by_hand=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either steps or epochs"),
        ({"steps": 1, "epochs": 1}, "either steps or epochs"),
        ({"steps": -1}, "steps=-1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"epochs": math.inf}, "epochs=inf"),
        ({"steps": 1, "start_factor": 2}, "must be from 0 to 1, got 2"),
        ({"steps": 1, "shape": "square"}, "'square'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRWarmup(**arguments)
