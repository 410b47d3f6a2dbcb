"""Manual optimization is the hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lockstep import Module
from tests.trainer.toy import Net, data, distance, equal, loader, net, quiet, weights


class Gan(Module):
    """A generator and a discriminator that step in turn."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gen = nn.Linear(8, 8)
        self.disc = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_d(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(self.disc(self.gen(x).detach())).mean() + F.softplus(-self.disc(x)).mean()

    def loss_g(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.disc(self.gen(x))).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        opt_g, opt_d = self.optimizers()
        self.toggle_optimizer(opt_d)
        assert not any(p.requires_grad for p in self.gen.parameters())
        self.manual_backward(self.loss_d(x))
        norm = self.clip_gradients(opt_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        assert norm is not None and norm > 0
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        self.manual_backward(self.loss_g(x))
        assert all(p.grad is None for p in self.disc.parameters())
        if (batch_idx + 1) % 2 == 0:  # accumulates over two batches
            self.clip_gradients(opt_g, 0.01, "value")
            opt_g.step()
            opt_g.zero_grad()
            self.lr_schedulers().step()
        self.untoggle_optimizer(opt_g)
        assert all(p.requires_grad for p in self.parameters())
        self.log("loss/d", self.loss_d(x).detach())

    def configure_optimizers(self) -> Any:
        opt_g, opt_d = torch.optim.Adam(self.gen.parameters(), 0.01), torch.optim.Adam(self.disc.parameters(), 0.01)
        return [opt_g, opt_d], [StepLR(opt_g, 1, 0.9)]


def gan_by_hand(dtype: torch.dtype) -> list[torch.Tensor]:
    model = Gan().to(dtype)
    (opt_g, opt_d), (scheduler,) = model.configure_optimizers()
    x = data(44).tensors[0].to(dtype)
    for batch_idx, begin in enumerate(range(0, 44, 11)):
        part = x[begin : begin + 11]
        opt_d.zero_grad()
        model.loss_d(part).backward()
        nn.utils.clip_grad_norm_(model.disc.parameters(), 0.5)
        opt_d.step()
        model.loss_g(part).backward()
        if batch_idx % 2:
            nn.utils.clip_grad_value_(model.gen.parameters(), 0.01)
            opt_g.step()
            opt_g.zero_grad()
            scheduler.step()
    return weights(model)


def test_manual_optimization_is_the_hand_written_loop() -> None:
    model, trainer = Gan(), quiet(log_every_n_steps=1)
    trainer.fit(model, loader(44, 11))
    assert equal(weights(model), gan_by_hand(torch.float32))
    assert trainer.global_step == 4 and "loss/d" in trainer.callback_metrics
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.81)


def test_an_optimizer_of_ones_own_may_forget_gradients_without_arguments() -> None:
    class Forgets(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad()

    class Forgetting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return Forgets(self.parameters(), lr=0.1)

    trainer = quiet()
    trainer.fit(Forgetting(), loader())
    assert trainer.global_step > 0


@pytest.mark.ranks
def test_manual_optimization_on_two_ranks_has_the_gradients_of_one() -> None:
    """Global batches of 11 samples: one rank has 6 of them, the other 5."""
    model = Gan()
    trainer = quiet(devices=2, split_batches=True, precision="64-true")
    trainer.fit(model, loader(44, 11))
    assert distance(weights(model), gan_by_hand(torch.float64)) < 1e-12
    assert trainer.global_step == 4


@pytest.mark.ranks
def test_manual_step_with_a_closure() -> None:
    class Closure(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> torch.Tensor:
                loss = F.cross_entropy(self(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    def fit(**options: Any) -> list[torch.Tensor]:
        model = net()
        model.__class__ = Closure
        quiet(precision="64-true", **options).fit(model, loader(30, 12))
        return weights(model)

    reference = net()
    quiet(precision="64-true").fit(reference, loader(30, 12))
    assert equal(fit(), weights(reference))
    assert distance(fit(devices=2, split_batches=True), weights(reference)) < 1e-12


@pytest.mark.ranks
def test_manual_line_search_is_the_same_on_all_ranks() -> None:
    """LBFGS with a line search decides by losses, so the ranks must see the loss of the global batch."""

    class Search(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(self(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=6, line_search_fn="strong_wolfe")

    def fit(**options: Any) -> list[torch.Tensor]:
        model = net()
        model.__class__ = Search
        quiet(precision="64-true", max_epochs=3, **options).fit(model, loader(31, 31))
        return weights(model)

    assert distance(fit(devices=2, split_batches=True), fit()) < 1e-9


def test_manual_optimization_refuses_what_is_automatic() -> None:
    for options, message in (
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 needs automatic"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 needs automatic"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet(**options).fit(Gan(), loader(8))


class Critic(Net):
    """Steps three times within a step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(3):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=pytest.mark.ranks)])
def test_each_forward_of_a_step_casts_the_weights_of_then(strategy: str) -> None:
    torch.manual_seed(0)
    module, expected = Critic(), Critic()
    expected.load_state_dict(module.state_dict())
    devices = 1 if strategy == "single" else 2
    quiet(strategy=strategy, devices=devices, accelerator="cpu", precision="bf16-mixed").fit(
        module, loader(48, 16 // devices)
    )
    optimizer = expected.configure_optimizers()
    for x, y in loader(48, 16):
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(expected.net(x), y)
            loss.backward()
            optimizer.step()
    if strategy == "single":
        assert equal(weights(module), weights(expected))
    assert distance(weights(module), weights(expected)) < 1e-2


class Rated(torch.optim.SGD):
    """Steps by a rate that is an attribute."""

    rate = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=self.rate * self.param_groups[0]["lr"])


class SetsTheRate(Net):
    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic

    def configure_optimizers(self) -> Any:
        return Rated(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.optimizers().rate = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


@pytest.mark.parametrize("automatic", [True, False])
def test_an_attribute_set_by_way_of_optimizers_is_the_optimizers(automatic: bool) -> None:
    torch.manual_seed(0)
    module, plain = SetsTheRate(automatic), net()
    quiet(accelerator="cpu", devices=1).fit(module, loader(16))
    for x, y in loader(16):
        loss = F.cross_entropy(plain(x), y)
        for parameter, gradient in zip(
            plain.parameters(), torch.autograd.grad(loss, [*plain.parameters()]), strict=True
        ):
            parameter.data.sub_(gradient, alpha=0.05)
    assert equal(weights(plain), weights(module))
