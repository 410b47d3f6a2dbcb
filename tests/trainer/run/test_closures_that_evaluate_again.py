"""What an optimizer's closure evaluates again is treated as what the loop has computed: by `backward` and hooks of
the user, by clipping, and without a change to the gradients of other optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, Optimizer

from lockstep import Module
from tests.trainer.run.test_steps_with_closures import Learns, Sharp, trained
from tests.trainer.toy import Net, distance, loader, net, quiet, weights

pytestmark = pytest.mark.ranks


def shape(module: Any) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(0.9)


def mask(module: Any) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.grad.zero_()


class Shapes(Learns):
    """Does to each gradient all that user code may."""

    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__(make)
        self.losses: list[float] = []

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())

    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        (loss / 2).backward()

    def on_after_backward(self) -> None:
        shape(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        mask(self)


def shaped_by_hand(make: Callable[[Any], Optimizer]) -> Net:
    module = net().double()
    optimizer = make(module.parameters())
    for x, y in loader(44, 8):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = F.cross_entropy(module(x.double()), y)
                (loss / 2).backward()
            shape(module)
            mask(module)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            return loss

        closure()
        optimizer.step(closure)
    return module


@pytest.mark.long
def test_what_users_do_to_gradients_is_done_where_the_closure_evaluates_again() -> None:
    want = weights(shaped_by_hand(Sharp))
    for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp", 2), ("tensor", 2)):
        module = trained(strategy, devices, Sharp, Shapes, gradient_clip_val=0.05)
        assert distance(weights(module), want) < 1e-12, strategy
        if devices == 1:
            assert len(module.losses) == 12, "twice a step"


class Twice(Net):
    """Steps by itself, with what its second evaluation of the batch finds."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)

    def on_after_backward(self) -> None:
        shape(self)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(parameter.grad)  # uphill
        optimizer_closure()
        optimizer.step()


def test_an_own_step_that_evaluates_the_batch_again_is_clipped_again() -> None:
    module, by_hand = net(), net()
    module.__class__ = Twice
    quiet(gradient_clip_val=0.05).fit(module, loader(16))
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    for x, y in loader(16):
        for again in (False, True):
            optimizer.zero_grad()
            F.cross_entropy(by_hand(x), y).backward()
            shape(by_hand)
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)
            if not again:
                with torch.no_grad():
                    for parameter in by_hand.parameters():
                        parameter.add_(parameter.grad)
        optimizer.step()
    assert distance(weights(module), weights(by_hand)) < 1e-6


class PairOfLosses(Module):
    """A sharpness-aware optimizer beside another; each has a loss of its own, or both one."""

    def __init__(self, names: tuple[Any, Any] | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.names, self.body, self.head = names, torch.nn.Linear(8, 6), torch.nn.Linear(6, 3)

    def of(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(batch[0]).tanh())
        return F.cross_entropy(logits, batch[1]), logits.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.of(batch)
        return sum(losses) if self.names is None else dict(zip(self.names, losses, strict=True))

    def configure_optimizers(self) -> Any:
        pair = Sharp(self.body.parameters()), SGD(self.head.parameters(), 0.1, momentum=0.9)
        return [*pair] if self.names is None else dict(zip(self.names, pair, strict=True))


def pair_by_hand(apart: bool) -> list[torch.Tensor]:
    module = PairOfLosses(None).double()
    sharp, plain = module.configure_optimizers()
    bodies, heads = [*module.body.parameters()], [*module.head.parameters()]
    for x, y in loader(44, 8):

        def compute(of: list[Any], i: int, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            with torch.enable_grad():
                losses = module.of((x.double(), y))
                loss = losses[i] if apart else sum(losses)
            for parameter, gradient in zip(of, torch.autograd.grad(loss, of), strict=True):  # type: ignore[arg-type]
                parameter.grad = gradient
            return loss  # type: ignore[return-value]

        compute(heads, 1)
        compute(bodies, 0)
        sharp.step(lambda: compute(bodies, 0))
        plain.step()
    return weights(module)


@pytest.mark.long
@pytest.mark.parametrize("names", [None, ("body", "head"), (0, 1)])
def test_a_closure_leaves_the_gradients_of_other_optimizers_alone(names: Any) -> None:
    want = pair_by_hand(apart=names is not None)
    cases = ("single", 1), ("ddp", 2), ("fsdp", 2), ("tensor", 2)
    for strategy, devices in cases if names != (0, 1) else cases[:1]:
        module = PairOfLosses(names)
        quiet(strategy=strategy, devices=devices, accelerator="cpu", precision="64-true", split_batches=True).fit(
            module, loader(44, 8)
        )
        assert distance(weights(module), want) < 1e-12, strategy


class Explodes(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * (float("nan") if self.calls == 4 else 1)

    def configure_optimizers(self) -> Any:
        return Sharp(self.parameters())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_gradient_of_a_closure_that_is_not_finite_ends_the_run(devices: int) -> None:
    with pytest.raises(
        FloatingPointError, match=r"is NaN or infinite in step 1 where Sharp, .* evaluates the batch again"
    ):
        quiet(devices=devices, accelerator="cpu").fit(Explodes(), loader())
