"""Optimizers that need a closure, steps that only the loop may take, and schedulers that step on a value of each
step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.strategies.optimizers.closures import needs_closure
from tests.trainer.toy import Net, distance, loader, net, quiet, weights

pytestmark = pytest.mark.ranks


class Sharp(Optimizer):
    """Moves to where the loss is sharpest nearby, takes the gradient there and steps with it from where it was."""

    def __init__(self, parameters: Any, to_none: bool = True) -> None:
        super().__init__(list(parameters), {"lr": 0.1})
        self.to_none = to_none

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("Sharp needs a closure")
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.05 / float(norm))
        self.zero_grad(set_to_none=self.to_none)
        loss = closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old - 0.1 * p.grad)
        return loss


class Required(Sharp):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


class Learns(Net):
    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


KINDS = {"to none": Sharp, "to zero": lambda p: Sharp(p, to_none=False), "required": Required}


def by_hand(make: Callable[[Any], Optimizer]) -> Net:
    module = net()
    module.double()
    optimizer = make(module.parameters())
    for x, y in loader(44, 8):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = F.cross_entropy(module(x.double()), y)
                loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    return module


def trained(strategy: str, devices: int, make: Callable[[Any], Optimizer], kind: Any = Learns, **options: Any) -> Any:
    torch.manual_seed(0)
    module = kind(make)
    module.load_state_dict(net().state_dict())
    quiet(
        strategy=strategy, devices=devices, accelerator="cpu", precision="64-true", split_batches=True, **options
    ).fit(module, loader(44, 8))
    return module


class Asserts(SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "a closure is needed"
        return super().step(closure)


class Calls(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step()


class Inherits(Asserts):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class May(SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            loss = closure()
        super().step()
        return loss


class Counts(SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        Counts.calls += 1
        return super().step(closure)


class AssertsNone(SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "closures are not supported"
        return super().step()


class Refuses(SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is not None or self.defaults["lr"] < 0:
            raise ValueError("closures are not supported")
        return super().step()


class RefusesElse(SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        else:
            raise ValueError("closures are not supported")


class Raises(SGD):
    def step(self, closure: Any = None) -> Any:
        if not callable(closure) or closure is None:
            raise ValueError("a closure is needed")
        return super().step(closure)


class RaisesElse(SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is not None and True:
            return super().step(closure)
        else:
            raise ValueError("a closure is needed")


@pytest.mark.parametrize("kind", [AssertsNone, Refuses, RefusesElse])
def test_an_optimizer_that_takes_no_closure_needs_none(kind: Any) -> None:
    assert not needs_closure(kind([torch.nn.Parameter(torch.ones(1))]))
    one, other = (trained("single", 1, lambda params, made=made: made(params, lr=0.1)) for made in (kind, SGD))
    assert distance(weights(one), weights(other)) == 0.0


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        (Raises, True),
        (RaisesElse, True),
        (Asserts, True),
        (Calls, True),
        (Inherits, True),
        (Sharp, True),
        (Required, True),
        (May, False),
        (Counts, False),
    ],
)
def test_which_optimizers_need_a_closure(kind: Any, needs: bool) -> None:
    assert needs_closure(kind([torch.nn.Parameter(torch.ones(1))])) is needs
    assert Counts.calls == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_closure_evaluates_the_step_where_the_parameters_are(kind: str) -> None:
    want = weights(by_hand(KINDS[kind]))
    assert distance(weights(trained("single", 1, KINDS[kind])), want) < 1e-12
    assert distance(weights(trained("single", 1, KINDS[kind], accumulate_grad_batches=2)), want) < 1e-12
    assert distance(weights(trained("ddp", 2, KINDS[kind])), want) < 1e-12
    assert distance(weights(trained("dp", 2, KINDS[kind])), want) < 1e-12
    assert distance(weights(trained("fsdp", 2, KINDS[kind])), want) < 1e-12
    assert distance(weights(trained("tensor", 2, KINDS[kind], accumulate_grad_batches=2)), want) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("pipeline", r"\(Sharp\) cannot be stepped in a pipeline"),
    ],
)
def test_strategies_that_cut_the_model_refuse_it_by_name(strategy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(strategy, 2, Sharp)


def plain(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


class StepsItself(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.how == "in the step":
            self.own.step()
        elif self.how == "by its handle":
            self.optimizers().step()
        return loss

    def on_after_backward(self) -> None:
        if self.how == "in a hook":
            self.own.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "after steps of the loop" and batch_idx == 2:
            self.own.step()

    def configure_optimizers(self) -> Any:
        self.__dict__["own"] = SGD(self.parameters(), lr=0.1)
        return self.own


@pytest.mark.parametrize("how", ["in the step", "by its handle", "in a hook", "after steps of the loop"])
def test_a_step_by_hand_in_automatic_optimization_is_refused(how: str) -> None:
    for devices in (1, 2):
        module = StepsItself(how)
        with pytest.raises(
            RuntimeError, match="SGD.step was called, but with automatic optimization the loop steps it"
        ):
            quiet(devices=devices, accelerator="cpu").fit(module, loader())
        if devices == 1:
            module.own.step()  # the user's again


class Plateau(Net):
    """Steps a scheduler on the loss of each step, of every second step, and logs nothing else so often."""

    def __init__(self, frequency: int) -> None:
        super().__init__()
        self.frequency = frequency
        self.seen: list[float] = []

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append(float(metric))
        super().lr_scheduler_step(scheduler, metric)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": scheduler, "interval": "step", "frequency": self.frequency, "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def plateau_by_hand(frequency: int) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    module, seen = Plateau(frequency).double(), []
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for number in range(12):
        x, y = list(loader(48, 8))[number % 6]
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x.double()), y)
        loss.backward()
        optimizer.step()
        if (number + 1) % frequency == 0:
            seen.append(loss.item())
            scheduler.step(loss.item())
    return weights(module), seen


@pytest.mark.parametrize(("frequency", "log_every"), [(1, 50), (2, 3), (3, 1)])
def test_a_plateau_by_steps_follows_the_loss_of_each_step(frequency: int, log_every: int) -> None:
    want, seen = plateau_by_hand(frequency)
    for devices in (1, 2):
        torch.manual_seed(0)
        module = Plateau(frequency)
        quiet(
            devices=devices,
            accelerator="cpu",
            precision="64-true",
            split_batches=True,
            max_epochs=2,
            log_every_n_steps=log_every,
        ).fit(module, loader(48, 8))
        assert distance(weights(module), want) < 1e-12
        if devices == 1:
            assert module.seen == pytest.approx(seen, rel=1e-12)


class Halves(Net):
    """Steps by a closure of its own, which halves the gradients."""

    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())

    def halve(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.halve()
            return loss

        optimizer.step(closure=closure)


class HalvesInAHook(Halves):
    """Steps by hand with a closure that computes the gradients, which a hook halves."""

    optimizer_step = Net.optimizer_step

    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.halve()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


OWN = {
    "torch's": (Halves, lambda p: SGD(p, lr=0.1)),
    "by hand": (HalvesInAHook, lambda p: SGD(p, lr=0.1)),
    "by hand, again": (HalvesInAHook, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)),
}


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("name", OWN)
def test_a_closure_of_user_code_is_called_and_hooks_see_its_gradients(name: str, strategy: str, devices: int) -> None:
    kind, make = OWN[name]
    module = net()
    module.double()
    optimizer = make(module.parameters())
    for x, y in loader(44, 8):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x.double()), y)
            loss.backward()
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            return loss

        optimizer.step(closure)
    assert distance(weights(trained(strategy, devices, make, kind)), weights(module)) < 1e-12
