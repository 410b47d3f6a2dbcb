"""What a step of manual optimization does by itself is as on one process where parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from lockstep import Module
from tests.trainer.toy import Net, distance, loader, quiet, weights

SLOW = [pytest.mark.ranks, pytest.mark.slow]
STRATEGIES = [pytest.param("fsdp", marks=pytest.mark.ranks)]
STRATEGIES += [pytest.param(name, marks=SLOW) for name in ("ddp", "tensor", "fsdp=2,tensor=2")]


class Sharpness(Optimizer):
    """Sharpness-aware minimization: moves along the gradient that it is given, and steps from where it was with the
    gradient of there, for which it calls the closure."""

    def __init__(self, params: Any, keeps: bool = False) -> None:
        super().__init__(params, {})
        self.inner, self.keeps = SGD(self.param_groups, lr=0.1), keeps
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm, before = torch.stack([p.grad.norm() for p in params]).norm(), [p.clone() for p in params]
        for p in params:
            p.add_(p.grad / norm, alpha=0.05)
            if self.keeps:
                p.grad.mul_(0.5)
        if not self.keeps:
            self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, value in zip(params, before, strict=True):
            p.copy_(value)
        self.inner.step()
        self.zero_grad(set_to_none=self.keeps)


class Closes(Net):
    """Steps by closure; one that does not drop gradients (`drops`) leaves that to the optimizer."""

    automatic_optimization = False

    def __init__(self, make: Callable[[Any], Optimizer], drops: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.make, self.drops = make, drops

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            if self.drops:
                optimizer.zero_grad()
            loss = Net.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if not self.drops:
            closure()
        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def fit(module: Module, strategy: str) -> list[Tensor]:
    devices = {"single": 1, "fsdp=2,tensor=2": 4}.get(strategy, 2)
    own = 8 // (1 if strategy in ("single", "tensor") else 2)
    quiet(strategy=strategy, devices=devices, accelerator="cpu", precision="64-true").fit(module, loader(48, own))
    return weights(module)


CLOSED: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "SGD": (lambda parameters: SGD(parameters, lr=0.1), True),
    "LBFGS": (lambda parameters: LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe"), True),
    "drops gradients": (Sharpness, False),
    "scales gradients": (lambda parameters: Sharpness(parameters, keeps=True), False),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", CLOSED)
def test_a_closure_is_evaluated_where_the_optimizer_has_moved_to(how: str, strategy: str) -> None:
    assert distance(fit(Closes(*CLOSED[how]), strategy), fit(Closes(*CLOSED[how]), "single")) < 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(torch.relu(self.one(x)))


class Turns(Module):
    """A generator and a critic in blocks, of which the step freezes the one that does not step, by way of the model."""

    automatic_optimization = False

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.late = late
        self.generator = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(2)])
        self.critic = nn.Sequential(*[Block() for _ in range(2)], nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, (first, second) = batch[0], self.optimizers()
        self.critic.requires_grad_(False)
        first.zero_grad()
        self.manual_backward(F.softplus(-self.critic(self.generator(x))).mean())
        first.step()
        self.critic.requires_grad_(True)
        self.generator.requires_grad_(self.late)
        second.zero_grad()
        loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(self.generator(x))).mean()
        self.generator.requires_grad_(False)
        self.manual_backward(loss)
        second.step()
        self.generator.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return [SGD(self.generator.parameters(), lr=0.1), Adam(self.critic.parameters(), lr=0.01)]


class Freezes(Net):
    """Freezes the biases in every other step, and the first layer for good in the fourth."""

    automatic_optimization = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.net[3].bias.requires_grad_(batch_idx % 2 == 0)
        if batch_idx == 3:
            self.net[0].requires_grad_(False)
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, batch_idx))
        optimizer.step()

    def on_train_end(self) -> None:
        assert [p.requires_grad for p in self.parameters()] == [False, False, True, False]

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "make", [Turns, lambda: Turns(late=True), Freezes], ids=["in turns", "before the backward", "one layer"]
)
def test_what_a_step_freezes_by_way_of_the_model_is_frozen(make: Callable[[], Module], strategy: str) -> None:
    assert distance(fit(make(), strategy), fit(make(), "single")) < 1e-12


class Edits(Net):
    """A step that changes weights or gradients by itself, as `how` says."""

    automatic_optimization = False

    def __init__(self, how: str) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, early = self.optimizers(), list(self.parameters())
        optimizer.zero_grad()
        inner = SGD(self.parameters(), lr=0.1)
        for _ in range(2 if self.how == "another optimizer" else 1):
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            if self.how == "another optimizer":
                inner.step()
        if self.how == "gradients of parameters taken before":
            early[1].grad = None
        elif self.how == "gradients of parameters taken again":
            list(self.parameters())[1].grad = None
        elif self.how == "gradients of whole parameters":
            loss, own = Net.training_step(self, batch, batch_idx), list(self.parameters())
            for p, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                p.grad = gradient
        optimizer.step()
        if self.how == "data":
            for p in early:
                p.data = p.data * 0.9
        elif self.how == "by way of param_groups":
            for p in optimizer.param_groups[0]["params"]:
                p.data.mul_(0.9)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["data", "gradients of parameters taken again"])
def test_what_a_step_changes_by_itself_holds(how: str, strategy: str) -> None:
    assert distance(fit(Edits(how), strategy), fit(Edits(how), "single")) < 1e-12


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[-1]])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("gradients of parameters taken before", "took from the module while it was whole, but it has been freed"),
        ("another optimizer", "took from the module while it was whole, but it has been freed"),
        ("gradients of whole parameters", r"written the gradient of net\.0\.weight, which \w+ makes whole only while"),
        ("by way of param_groups", "parameters that an optimizer holds were changed within training_step"),
    ],
)
def test_what_would_be_lost_is_refused(how: str, why: str, strategy: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        fit(Edits(how), strategy)


class Reptile(Net):
    """An inner optimizer made of what a `state_dict` left sharded."""

    automatic_optimization = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.net.state_dict()
        inner = SGD(self.parameters(), lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            inner.step()


@pytest.mark.ranks
def test_an_inner_optimizer_of_sharded_parameters_steps_them() -> None:
    assert distance(fit(Reptile(), "fsdp"), fit(Reptile(), "single")) < 1e-12


class ByHand(Net):
    """Changes the gradients by hand after each of two backwards, which may be of one graph each, of two that are there
    at once, or of gradients."""

    automatic_optimization = False

    def __init__(self, how: str, blocks: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.how = how
        if blocks:
            self.net = nn.Sequential(Block(), Block(), *self.net)

    def loss(self, batch: Any, scale: int) -> Tensor:
        x = (batch[0] * scale).requires_grad_()
        y = self.net(x)
        if self.how != "gradients of gradients":
            return F.cross_entropy(y, batch[1])
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return F.cross_entropy(y, batch[1]) + slope.square().sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, ahead = self.optimizers(), self.how != "one after the other"
        losses = [self.loss(batch, scale) for scale in (1, 2)] if ahead else []
        optimizer.zero_grad()
        for i in range(2):
            self.manual_backward(losses[i] if ahead else self.loss(batch, i + 1))
            nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5)


@pytest.mark.ranks
@pytest.mark.parametrize("blocks", [False, True], ids=["no blocks", "blocks"])
@pytest.mark.parametrize("how", ["one after the other", "two graphs", "gradients of gradients"])
def test_each_backward_of_a_step_leaves_gradients_that_its_code_can_change(how: str, blocks: bool) -> None:
    assert distance(fit(ByHand(how, blocks), "fsdp"), fit(ByHand(how, blocks), "single")) < 1e-12


class Attacks(Net):
    """Trains on inputs that are moved along their gradients, which come from `backward`; `drops` drops the gradients
    that this leaves of parameters."""

    automatic_optimization = False

    def __init__(self, how: str, drops: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.how, self.drops = how, drops

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, optimizer = batch[0].clone().requires_grad_(), self.optimizers()
        loss = F.cross_entropy(self.net(x), batch[1])
        if self.how == "torch.autograd.grad":
            (x.grad,) = torch.autograd.grad(loss, x)
        else:
            loss.backward()
        assert x.grad is not None
        if self.drops:
            optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)
        self.manual_backward(F.cross_entropy(self.net((x + 0.1 * x.grad.sign()).detach()), batch[1]))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_inputs_leave_those_of_parameters_alone(strategy: str) -> None:
    expected = fit(Attacks("backward", drops=True), "single")
    assert distance(fit(Attacks("torch.autograd.grad", drops=False), strategy), expected) < 1e-12
    if strategy in ("ddp", "tensor"):
        assert distance(fit(Attacks("backward", drops=True), strategy), expected) < 1e-12


class Later(Net):
    """Accumulates over two batches, the first by `backward`, and may scale what that left."""

    automatic_optimization = False

    def __init__(self, scales: bool) -> None:
        super().__init__(optimizer="SGD")
        self.scales = scales

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = F.cross_entropy(self.net(batch[0]), batch[1]), self.optimizers()
        if batch_idx == 0:
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        elif batch_idx == 1:
            loss.backward()
            for p in self.parameters() if self.scales else ():
                p.grad = None if p.grad is None else p.grad * 0.5
        else:
            optimizer.step()


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("scales", [False, True])
def test_a_backward_of_one_rank_alone_is_refused_in_a_later_step_too(scales: bool) -> None:
    with pytest.raises(RuntimeError, match="training_step called backward, .* call self.manual_backward"):
        fit(Later(scales), "ddp")


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "drops"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_a_backward_of_one_rank_alone_is_refused(strategy: str, drops: bool) -> None:
    with pytest.raises(RuntimeError, match="training_step called backward, .* call self.manual_backward"):
        fit(Attacks("backward", drops), strategy)


class Drops(Net):
    """Drops, scales or replaces gradients by way of the module, as `how` says, while it is whole."""

    automatic_optimization = False

    def __init__(self, how: str, blocks: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.how = how
        if blocks:
            self.net = nn.Sequential(Block(), Block(), *self.net)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), F.cross_entropy(self.net(batch[0]), batch[1])
        if self.how == "after gradients of inputs":
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            loss = loss + slope.square().mean()
        if self.how == "scaled":
            for p in self.parameters():
                if p.grad is not None:
                    p.grad = p.grad * 0.5
        elif self.how == "by the optimizer":
            optimizer.zero_grad()
        else:
            self.zero_grad(set_to_none=self.how != "to zero")
        self.manual_backward(loss)
        optimizer.step()
        self.log("norm", sum(p.grad.square().sum() for p in self.net[-1].parameters()).item())

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.ranks
@pytest.mark.parametrize("blocks", [False, True], ids=["no blocks", "blocks"])
@pytest.mark.parametrize("how", ["to none", "to zero", "scaled", "by the optimizer", "after gradients of inputs"])
def test_what_a_step_does_to_gradients_of_whole_parameters_holds(how: str, blocks: bool) -> None:
    assert distance(fit(Drops(how, blocks), "fsdp"), fit(Drops(how, blocks), "single")) < 1e-12
