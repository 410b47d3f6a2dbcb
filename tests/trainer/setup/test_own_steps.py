"""Several optimizers, closures, and modules that override how an optimizer steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from lockstep import Module
from lockstep.strategies.step import weighted_losses
from tests.trainer.toy import Net, data, distance, equal, loader, net, quiet, weights


class Pair(Module):
    """Two optimizers in automatic mode; each loss reaches the parameters of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def losses(self, batch: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(batch[0]).tanh())
        return {"body": F.cross_entropy(logits, batch[1]), "head": logits.square().mean()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(batch)

    def configure_optimizers(self) -> Any:
        return {
            "body": torch.optim.Adam(self.body.parameters(), 0.01),
            "head": SGD(self.head.parameters(), 0.1, momentum=0.9),
        }


def pair_by_hand() -> list[torch.Tensor]:
    model = Pair().double()
    optimizers = model.configure_optimizers()
    x, y = data(44).tensors
    for begin in range(0, 44, 12):
        losses = model.losses((x[begin : begin + 12].double(), y[begin : begin + 12]))
        for name in optimizers:
            own = list(getattr(model, name).parameters())
            for parameter, gradient in zip(own, torch.autograd.grad(losses[name], own, retain_graph=True), strict=True):
                parameter.grad = gradient
        for optimizer in optimizers.values():
            optimizer.step()
    return weights(model)


@pytest.mark.ranks
@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_several_optimizers_move_by_their_own_losses(devices: int, accumulate: int) -> None:
    model = Pair()
    trainer = quiet(devices=devices, accumulate_grad_batches=accumulate, split_batches=True, precision="64-true")
    trainer.fit(model, loader(44, 12))
    assert distance(weights(model), pair_by_hand()) < 1e-12
    assert trainer.global_step == 4, "one a window, however many optimizers there are"


def test_losses_must_be_named_after_the_optimizers() -> None:
    class Typo(Pair):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = self.losses(batch)
            return {"body": losses["body"], "heads": losses["head"]}

    with pytest.raises(ValueError, match="one mean loss .* for each optimizer \\(body, head\\).* head, heads"):
        quiet().fit(Typo(), loader(8))


class Smooth(Net):
    """Full-batch LBFGS on a smooth loss."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=5)


@pytest.mark.ranks
@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (1, 2), (2, 1)])
def test_lbfgs_evaluates_the_loss_of_the_whole_window(devices: int, accumulate: int) -> None:
    model = net()
    model.__class__ = Smooth
    trainer = quiet(
        max_epochs=3, devices=devices, accumulate_grad_batches=accumulate, split_batches=True, precision="64-true"
    )
    trainer.fit(model, loader(30, 30))

    reference = net().double()
    optimizer = torch.optim.LBFGS(reference.parameters(), lr=0.5, max_iter=5)
    x, y = data(30).tensors

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(x.double()), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert distance(weights(model), weights(reference)) < 1e-9
    assert trainer.global_step == 3


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_optimizer_step_override_with_closure(devices: int) -> None:
    class Stepped(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:  # the warmup of old days
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 3)
            optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=1.0)

    model = net()
    model.__class__ = Stepped
    trainer = quiet(devices=devices, split_batches=True, precision="64-true", gradient_clip_val=0.5)
    trainer.fit(model, loader(48, 12))
    reference = net().double()
    optimizer = SGD(reference.parameters(), lr=1.0)
    x, y = data(48).tensors
    for step, begin in enumerate(range(0, 48, 12)):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 3)
        optimizer.zero_grad()
        F.cross_entropy(reference(x[begin : begin + 12].double()), y[begin : begin + 12]).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    assert distance(weights(model), weights(reference)) < 1e-12
    assert trainer.global_step == 4


def test_optimizer_step_override_that_skips_does_not_count() -> None:
    class Seldom(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    trainer = quiet()
    trainer.fit(Seldom(), loader(32))
    assert trainer.global_step == 2


class KeepsGradients(torch.optim.SGD):
    """Keeps a tenth of each gradient for the next step, as an optimizer may that overrides what the loop calls."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.1)


@pytest.mark.parametrize("own", ["class", "instance", "none"])
def test_an_optimizers_own_zero_grad_is_called(own: str) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = (KeepsGradients if own == "class" else torch.optim.SGD)(model.parameters(), lr=0.1)
        if own == "instance":
            optimizer.zero_grad = partial(KeepsGradients.zero_grad, optimizer)  # type: ignore[method-assign, arg-type]
        return optimizer

    class Model(Net):
        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    torch.manual_seed(0)
    model = Model()
    by_hand = net()
    optimizer = optimizer_of(by_hand)
    for x, y in loader(32):
        F.cross_entropy(by_hand(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    quiet().fit(model, loader(32))
    assert equal(weights(model), weights(by_hand))
    assert all((p.grad is None) == (own == "none") for p in model.parameters())


def test_configure_gradient_clipping_override() -> None:
    calls = []

    class Clipped(Net):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            calls.append((gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val * 2, gradient_clip_algorithm=gradient_clip_algorithm
            )

    model = net()
    model.__class__ = Clipped
    quiet(gradient_clip_val=0.05).fit(model, loader(16))
    assert calls == [(0.05, "norm")] * 2
    reference = net()
    quiet(gradient_clip_val=0.1).fit(reference, loader(16))
    assert equal(weights(model), weights(reference))


@pytest.mark.unit
def test_losses_may_be_named_by_the_numbers_of_optimizers() -> None:
    value = torch.ones((), requires_grad=True)
    losses, count = weighted_losses({0: value, 1: 2 * value}, 4, None, {"0": [], "1": []})
    assert [loss.item() for loss, *_ in losses] == [1.0, 2.0] and count == 4
