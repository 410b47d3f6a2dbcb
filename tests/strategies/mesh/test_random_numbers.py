"""Random numbers that user code draws while it changes weights or gradients of which ranks hold shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import TensorParallel
from lockstep.strategies.launch.launcher import launch
from tests.strategies.mesh.perceptrons import Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, weights

pytestmark = pytest.mark.ranks


class Hooked(Perceptron):
    """Hooks on parameters that draw from each stream, some of them not in each step."""

    def __init__(self) -> None:
        super().__init__()
        net, self.calls = self.net, 0
        net[0].weight.register_hook(lambda gradient: gradient * (1 + random.random()))
        net[2].bias.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))
        net[4].weight.register_post_accumulate_grad_hook(self.sometimes)

    def sometimes(self, parameter: Tensor) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            assert parameter.grad is not None
            parameter.grad.mul_(1 + np.random.rand())


class HookedLate(Perceptron):
    """A hook that draws for the first time after many steps; its code says that it may, unless `hides`."""

    hides = False

    def __init__(self) -> None:
        super().__init__()
        calls = []

        def late(gradient: Tensor) -> Tensor | None:
            calls.append(1)
            if len(calls) < 19:
                return None
            return gradient * (1 + random.random())

        def hidden(gradient: Tensor) -> Tensor | None:
            calls.append(1)
            return None if len(calls) < 19 else gradient * vars(__import__("random"))["random"]()

        self.net[0].weight.register_hook(hidden if self.hides else late)


class HidesIt(HookedLate):
    hides = True


class AddsHooks(Perceptron):
    """A hook that a run adds, and one that it removes."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.handle.remove()
        self.handle = self.net[0].weight.register_hook(lambda gradient: gradient * (1 + random.random()))


def test_hooks_on_parameters_draw_what_they_draw_on_one_process() -> None:
    exact("fsdp", 2, Hooked, AddsHooks, n=17)
    exact("ddp", 2, Hooked, AddsHooks, n=17)


@pytest.mark.slow
def test_hooks_on_parameters_draw_what_they_draw_on_one_process_over_meshes() -> None:
    exact("fsdp", 2, Hooked, n=24, accumulate_grad_batches=2, gradient_clip_val=0.1)
    exact("fsdp", 2, HookedLate, n=24, max_epochs=8)
    exact("tensor", 2, Hooked, n=17)
    exact("fsdp=2,tensor=2", 4, Hooked, n=17)


def test_a_hook_on_a_parameter_that_draws_late_is_refused_if_its_code_does_not_say_so() -> None:
    with pytest.raises(RuntimeError, match="a hook on a parameter draws random numbers for the first time after 16"):
        fit("fsdp", 2, HidesIt(), labeled(24), max_epochs=8)


def test_hooks_on_parameters_draw_alike_for_any_number_of_ranks_with_virtual_ranks() -> None:
    found = []
    for devices in (1, 2):
        fit("fsdp", devices, module := Hooked(), labeled(17), virtual_ranks=2)
        found.append(weights(module))
    assert distance(*found) == 0


def test_a_resumed_run_draws_in_hooks_on_parameters_what_it_would_have_drawn(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    fit("fsdp", 2, whole := Hooked(), labeled(24), callbacks=[saver], enable_checkpointing=True, max_epochs=3)
    fit("fsdp", 2, resumed := Hooked(), labeled(24), max_epochs=3, ckpt_path=tmp_path / "step=4")
    assert distance(weights(whole), weights(resumed)) == 0


class OnRankZero(Perceptron):
    """A hook on one rank alone, which may look, and not draw."""

    draws = False

    def on_train_start(self) -> None:
        self.seen: list[float] = []
        if self.trainer.is_global_zero:
            self.net[0].weight.register_hook(self.look)

    def look(self, gradient: Tensor) -> None:
        self.seen.append(float(gradient.norm()) + (random.random() if self.draws else 0))


class DrawsOnRankZero(OnRankZero):
    draws = True


def test_a_hook_on_a_parameter_of_one_rank_alone_may_look_and_not_draw() -> None:
    exact("ddp", 2, OnRankZero)
    with pytest.raises(RuntimeError, match="a hook on a parameter draws random numbers and is not on all ranks"):
        fit("ddp", 2, DrawsOnRankZero(), labeled())


def test_hooks_on_parameters_do_not_draw_in_a_pipeline() -> None:
    with pytest.raises(RuntimeError, match="a hook of a parameter draws from torch, numpy or random, but in a pipe"):
        fit("pipeline", 2, Hooked(), labeled())


class ByHand(Perceptron):
    """Manual optimization, in which `change` runs between backward and step."""

    automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.change()
        optimizer.step()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def change(self) -> None: ...


class HookedByHand(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * random.random())


class Scales(ByHand):
    def change(self) -> None:
        for gradient in self.gradients():
            gradient.mul_(1 + random.random())


class ScalesByData(ByHand):
    def change(self) -> None:
        for gradient in self.gradients():
            gradient.data.mul_(1 + np.random.rand())


class ScalesLists(ByHand):
    def change(self) -> None:
        torch._foreach_mul_(self.gradients(), 1 + random.random())


class Assigns(ByHand):
    def change(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad * (1 + torch.rand(()).item())


class ScalesWeights(ByHand):
    def change(self) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(1 + random.random())


class DrawsBefore(ByHand):
    """A number that was drawn before the backward, in another hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn = random.random()

    def change(self) -> None:
        for gradient in self.gradients():
            gradient.mul_(1 + self.drawn)


class ByLocalLoss(ByHand):
    """A number of this rank's samples."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.latest = loss.item()
        return loss

    def change(self) -> None:
        for gradient in self.gradients():
            gradient.mul_(self.latest)


class Surgery(ByHand):
    """Gradients of two losses, of which each is projected on what is orthogonal to the other, in random order."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, found = self.optimizers(), []
        for power in (1, 2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) ** power)
            found.append([gradient.clone() for gradient in self.gradients()])
        if not self.global_step:
            random.seed(self.trainer.global_rank)  # of which the first two shuffle in different ways
        random.shuffle(found)
        for first, second in zip(*found, strict=True):
            first.sub_(second * ((first * second).sum() / (second * second).sum()))
        for parameter, first, second in zip(self.parameters(), *found, strict=True):
            parameter.grad = first + second
        optimizer.step()


REFUSED = "the ranks disagree on their changes of weights"
BY_HAND = [Scales, ScalesByData, ScalesLists, Assigns, DrawsBefore, ByLocalLoss, Surgery]


@pytest.mark.long
@pytest.mark.parametrize("make", [*BY_HAND, ScalesWeights])
def test_manual_steps_that_change_shards_by_what_each_rank_has_are_refused(make: Callable[[], Module]) -> None:
    with pytest.raises(RuntimeError, match=REFUSED if make is not ScalesWeights else "net.0"):
        fit("fsdp", 2, make(), labeled())


def test_hooks_on_parameters_do_not_draw_in_manual_optimization() -> None:
    with pytest.raises(RuntimeError, match="a hook on a parameter draws random numbers in manual optimization"):
        fit("fsdp", 2, HookedByHand(), labeled())


class Allowed(ByHand):
    """Gradients scaled alike on all ranks, with numbers drawn besides, as for the noise of a later forward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for gradient in self.gradients():
            gradient.mul_(random.Random(batch_idx).random())
        self.noise = torch.randn(4), random.random(), np.random.rand()
        self.manual_backward(self.loss(batch))
        self.noise = torch.randn(4), random.random(), np.random.rand()
        self.clip_gradients(self.optimizers(), 0.5)
        for gradient in self.gradients():
            gradient.div_(gradient.norm() + 0.1)
        self.optimizers().step()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.5, 0.5)


class WithinWhole(ByHand):
    def change(self) -> None:
        with self.trainer.whole(self):
            for gradient in self.gradients():
                gradient.mul_(1 + random.random())


def test_manual_steps_that_change_shards_alike_follow_one_process() -> None:
    exact("fsdp", 2, Allowed, WithinWhole, n=17)
    exact("tensor", 2, Allowed)


@pytest.mark.slow
def test_manual_steps_that_change_shards_alike_follow_one_process_over_meshes() -> None:
    exact("fsdp=2,tensor=2", 4, Allowed, WithinWhole, n=17)
    exact("ddp=2,tensor=2", 4, Allowed, WithinWhole, n=17)
    for strategy in ("fsdp=2,tensor=2", "ddp=2,tensor=2"):
        for make in BY_HAND:
            with pytest.raises(RuntimeError, match=rf"{REFUSED}|is not the same on the ranks"):
                fit(strategy, 4, make(), labeled())


class NoiseWithinWhole(Perceptron):
    """Dropout, and noise for the weights, from the same streams."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, nn.Dropout(0.3))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.whole(self):
            for parameter in self.parameters():
                parameter.data.add_(0.01 * torch.randn_like(parameter))


def test_ranks_that_share_samples_drop_out_alike_after_draws_within_whole() -> None:
    exact("tensor", 2, NoiseWithinWhole)


class OwnStep(Perceptron):
    """Steps by itself, and calls the closure before."""

    def change(self) -> None: ...

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        self.change()
        optimizer.step(optimizer_closure)
        self.noise = random.random()


class OwnStepScales(OwnStep):
    def change(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + random.random())


class OwnStepScalesAlike(OwnStep):
    def change(self) -> None:
        drawn = random.Random(self.global_step)
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + drawn.random())
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, torch._foreach_pow(2.0, gradients))


class OwnStepScalesAfter(OwnStep):
    @torch.no_grad()
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for parameter in self.parameters():
            parameter.data.mul_(1 + self.noise)


class DataInHook(Perceptron):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(1 + random.random())


class DrawsInAnotherHook(Perceptron):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn = random.random()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + self.drawn)


class DrawsLate(Perceptron):
    """Scales by other numbers on each rank once many steps of an epoch are done."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + (random.random() if self.global_step >= 40 else 0))


class ByRank(Perceptron):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.tensor(1.0 + self.trainer.global_rank))


@pytest.mark.parametrize("make", [OwnStepScales, OwnStepScalesAfter, DataInHook, DrawsInAnotherHook, ByRank])
def test_hooks_and_own_steps_that_change_shards_by_what_each_rank_has_are_refused(make: Callable[[], Module]) -> None:
    with pytest.raises(RuntimeError, match=rf"{REFUSED}.*net\.0\.bias by mul_\(\d"):
        fit("fsdp", 2, make(), labeled())


def test_what_hooks_change_shards_by_is_compared_in_some_of_the_later_steps_too() -> None:
    with pytest.raises(RuntimeError, match=rf"{REFUSED}.*net\.0\.bias by mul_\(\d"):
        fit("fsdp", 2, DrawsLate(), labeled(8 * 70), max_epochs=1)


class AnotherForward(ByHand):
    """Computes a loss with the gradients of another one at hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch) ** 2)
        self.optimizers().step()
        self.optimizers().zero_grad()


def fit_by_class(makes: list[Callable[[], Module]]) -> list[Any]:
    """The weights after training each module, and how many operators are left with a way of their own."""
    from torch.distributed.tensor import DTensor

    found: list[Any] = []
    for make in makes:
        fit(TensorParallel(loss_parallel=True), 2, module := make(), labeled())
        found += [weights(module), len(DTensor._op_dispatcher._custom_op_handlers)]  # type: ignore[attr-defined]
    return found


def test_losses_by_class_are_computed_in_manual_steps_and_leave_nothing_behind() -> None:
    by_hand, left, _, at_the_end = launch(fit_by_class, ([AnotherForward, Perceptron],), 2)
    fit("single", 1, one := AnotherForward(), labeled())
    assert distance(by_hand, weights(one)) < 1e-12
    assert left == at_the_end


def test_steps_of_the_modules_own_that_change_shards_alike_follow_one_process() -> None:
    exact("fsdp", 2, OwnStepScalesAlike, n=17, gradient_clip_val=0.5)
    exact("ddp", 2, OwnStepScalesAlike, n=17)
