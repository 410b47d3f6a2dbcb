"""What users write in a Module and a DataModule, in the forms in which they write it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from lockstep import CheckpointError, DataModule, Loss, Module, Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from tests.trainer.toy import Net, data, distance, equal, loader, net, quiet, weights

# ---- configure_optimizers ------------------------------------------------------------------------


class Lrs(Callback):
    """Learning rates as they were when each step was taken."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if optimizer is trainer.optimizers[0]:
            self.seen.append([float(o.param_groups[0]["lr"]) for o in trainer.optimizers])


def one(m: nn.Module) -> SGD:
    return SGD(m.parameters(), lr=1.0)


def two(m: Any) -> tuple[SGD, SGD]:
    return SGD(m.net[0].parameters(), lr=1.0), SGD(m.net[3].parameters(), lr=10.0)


def halving(optimizer: SGD) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def dictionary(optimizer: SGD, **options: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving(optimizer), **options}}


CONSTANT, EPOCHWISE, STEPWISE = [[1.0]] * 4, [[1.0]] * 2 + [[0.5]] * 2, [[1.0], [0.5], [0.25], [0.125]]
FORMS: dict[str, tuple[Callable[[Any], Any], list[list[float]]]] = {
    "optimizer": (one, CONSTANT),
    "[opt]": (lambda m: [one(m)], CONSTANT),
    "(opt, opt)": (two, [[1.0, 10.0]] * 4),
    "[opt, opt]": (lambda m: list(two(m)), [[1.0, 10.0]] * 4),
    "[opt], [sch]": (lambda m: ([o := one(m)], [halving(o)]), EPOCHWISE),
    "[[opt], [sch]]": (lambda m: [[o := one(m)], [halving(o)]], EPOCHWISE),
    "[opt], sch": (lambda m: ([o := one(m)], halving(o)), EPOCHWISE),
    "[opt], []": (lambda m: ([one(m)], []), CONSTANT),
    "[opt], [{}]": (lambda m: ([o := one(m)], [{"scheduler": halving(o), "interval": "step"}]), STEPWISE),
    "[opt], {}": (lambda m: ([o := one(m)], {"scheduler": halving(o), "interval": "step", "frequency": 1}), STEPWISE),
    "[opts], [sch]": (lambda m: (list(os := two(m)), [halving(os[1])]), [[1.0, 10.0]] * 2 + [[1.0, 5.0]] * 2),
    "{opt}": (lambda m: {"optimizer": one(m)}, CONSTANT),
    "{opt, sch}": (lambda m: {"optimizer": (o := one(m)), "lr_scheduler": halving(o)}, EPOCHWISE),
    "{opt, {sch}}": (lambda m: dictionary(one(m), interval="step"), STEPWISE),
    "{opt, sch, monitor}": (
        lambda m: {"optimizer": (o := one(m)), "lr_scheduler": halving(o), "monitor": "train/loss_epoch"},
        EPOCHWISE,
    ),
    "{opt, {sch, monitor}}": (lambda m: dictionary(one(m), monitor="not/there", strict=True, name="rate"), EPOCHWISE),
    "[{}, {}]": (lambda m: [dictionary(o) for o in two(m)], [[1.0, 10.0]] * 2 + [[0.5, 5.0]] * 2),
    "({}, {})": (lambda m: tuple(dictionary(o) for o in two(m)), [[1.0, 10.0]] * 2 + [[0.5, 5.0]] * 2),
    "{name: opt}": (lambda m: dict(zip("ab", two(m), strict=True)), [[1.0, 10.0]] * 4),
    "{name: {}}": (lambda m: {"a": dictionary(two(m)[0]), "b": two(m)[1]}, [[1.0, 10.0]] * 2 + [[0.5, 10.0]] * 2),
}


@pytest.mark.parametrize(("form", "expected"), FORMS.values(), ids=FORMS)
def test_forms_of_configure_optimizers(form: Callable[[Any], Any], expected: list[list[float]]) -> None:
    class Formed(Net):
        def configure_optimizers(self) -> Any:
            return form(self)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return dict.fromkeys(self.trainer._run.optimizers, loss) if len(self.trainer.optimizers) > 1 else loss

    lrs = Lrs()
    quiet(max_epochs=2, callbacks=lrs).fit(Formed(), loader(16))
    assert lrs.seen == expected


WRONG_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda m: None, "Formed.configure_optimizers returned no optimizer"),
    "no optimizer": (lambda m: "adam", "returned str where an optimizer belongs"),
    "unknown key": (lambda m: {"optimizer": one(m), "scheduler": None}, "'scheduler'"),
    "unknown key of a scheduler": (lambda m: dictionary(one(m), intervall="step"), "but it has intervall"),
    "interval": (lambda m: dictionary(one(m), interval="batch"), "interval='batch'"),
    "frequency": (lambda m: dictionary(one(m), frequency=0), "frequency=0"),
    "plateau without monitor": (
        lambda m: ([o := one(m)], [ReduceLROnPlateau(o)]),
        "ReduceLROnPlateau needs the name of a metric",
    ),
    "no scheduler": (
        lambda m: {"optimizer": one(m), "lr_scheduler": {"interval": "step"}},
        "needs the key 'scheduler'",
    ),
    "stranger": (
        lambda m: ([one(m)], [Warm(one(m))]),
        "Warm is not a scheduler of torch: it has no step, so Formed needs lr_scheduler_step",
    ),
    "stateless": (lambda m: ([one(m)], [object()]), "object has no state_dict"),
}


@pytest.mark.parametrize(("form", "message"), WRONG_FORMS.values(), ids=WRONG_FORMS)
def test_wrong_forms_are_named(form: Callable[[Any], Any], message: str) -> None:
    class Formed(Net):
        def configure_optimizers(self) -> Any:
            return form(self)

    with pytest.raises((ValueError, TypeError), match=message):
        quiet().fit(Formed(), loader(8))


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedulers_step_as_in_a_hand_written_loop(interval: str, frequency: int, accumulate: int) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1e-3)
            return [optimizer], [
                {"scheduler": ExponentialLR(optimizer, 0.5), "interval": interval, "frequency": frequency}
            ]

    lrs = Lrs()
    quiet(max_epochs=4, accumulate_grad_batches=accumulate, callbacks=lrs).fit(Scheduled(), loader(24))

    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1e-3)
    scheduler, expected, steps = ExponentialLR(optimizer, 0.5), [], 0
    for epoch in range(1, 5):
        for _ in range(0, 3, accumulate):
            expected.append([optimizer.param_groups[0]["lr"]])
            optimizer.step()
            steps += 1
            if interval == "step" and steps % frequency == 0:
                scheduler.step()
        if interval == "epoch" and epoch % frequency == 0:
            scheduler.step()
    assert lrs.seen == expected


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_plateau_follows_a_metric_of_the_validation(devices: int) -> None:
    class Plateau(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/score", [3.0, 2.0, 2.0, 2.0, 1.0][self.current_epoch])

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": ReduceLROnPlateau(optimizer, factor=0.1, patience=0),
                "monitor": "val/score",
            }

        def on_train_epoch_start(self) -> None:
            assert self.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(
                [1.0, 1.0, 1.0, 0.1, 0.01][self.current_epoch]
            )

    trainer = quiet(max_epochs=5, devices=devices)
    trainer.fit(Plateau(), loader(16, 4), loader(8))
    assert trainer.current_epoch == 5


def test_missing_monitor_is_an_error_unless_not_strict() -> None:
    class Plateau(Net):
        strict = True

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": ReduceLROnPlateau(optimizer),
                    "monitor": "val/typo",
                    "strict": self.strict,
                },
            }

    with pytest.raises(
        ValueError, match="a scheduler monitors 'val/typo', which has not been logged.* train/loss_epoch"
    ):
        quiet().fit(Plateau(), loader(8))
    lenient = Plateau()
    lenient.strict = False
    quiet().fit(lenient, loader(8))


class Warm:
    """A scheduler as some packages have them: no LRScheduler, stepped with a counter."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer, self.last = optimizer, 0

    def step_update(self, num_updates: int) -> None:
        self.last = num_updates
        self.optimizer.param_groups[0]["lr"] = 1.0 / (1 + num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


def test_schedulers_of_other_makes_step_through_lr_scheduler_step(tmp_path: Path) -> None:
    class Custom(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": Warm(optimizer), "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            assert metric is None
            scheduler.step_update(self.global_step + 1)

    lrs = Lrs()
    trainer = quiet(callbacks=[lrs, ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
    trainer.fit(Custom(), loader(24))
    assert lrs.seen == [[1.0], [1 / 2], [1 / 3]]
    again = quiet(max_epochs=2)
    again.fit(Custom(), loader(24), ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert again._run.schedulers[0].scheduler.last == 6


def test_scheduler_step_sees_the_metric_it_declares() -> None:
    """`reduce_on_plateau` marks a scheduler that is stepped on a metric and is no ReduceLROnPlateau."""
    seen = []

    class Custom(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": Warm(optimizer), "monitor": "val/loss", "reduce_on_plateau": True}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen.append((metric, self.trainer.callback_metrics["val/loss"]))

    quiet().fit(Custom(), loader(8), loader(8))
    assert len(seen) == 1 and seen[0][0] == seen[0][1]


# ---- steps -----------------------------------------------------------------------------------------


def test_training_step_may_take_fewer_or_other_arguments() -> None:
    def loss(self: Any, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    steps: dict[str, Callable[..., Any]] = {
        "batch": lambda self, batch: loss(self, batch),
        "names": lambda self, data, index: loss(self, data),
        "args": lambda self, *args: loss(self, args[0]) + 0 * args[1],
        "both": lambda self, batch, *args, **kwargs: loss(self, batch) + 0 * args[0],
        "default": lambda self, batch, batch_idx=None, unused=3: loss(self, batch) + 0 * batch_idx,
    }
    reference = net()
    quiet().fit(reference, loader(24))
    for step in steps.values():
        model = net()
        model.__class__ = type("Other", (Net,), {"training_step": step})
        quiet().fit(model, loader(24))
        assert equal(weights(model), weights(reference))


def test_step_with_an_argument_that_the_loop_does_not_give() -> None:
    class Old(Net):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any: ...  # type: ignore[override]

    with pytest.raises(
        TypeError,
        match=(
            "training_step has the argument 'optimizer_idx', which the loop does not give; it gives \\(batch, "
            "batch_idx\\)"
        ),
    ):
        quiet().fit(Old(), loader(8))


def test_validation_step_takes_dataloader_idx_in_every_way() -> None:
    seen: list[Any] = []
    steps: dict[str, Callable[..., Any]] = {
        "default": lambda self, batch, batch_idx, dataloader_idx=0: seen.append(dataloader_idx),
        "required": lambda self, batch, batch_idx, dataloader_idx: seen.append(dataloader_idx),
        "keyword": lambda self, batch, batch_idx, *, dataloader_idx=0: seen.append(dataloader_idx),
        "args": lambda self, batch, *args: seen.append(args[1]),
        "kwargs": lambda self, batch, batch_idx, **kwargs: seen.append(kwargs["dataloader_idx"]),
    }
    for name, step in steps.items():
        seen.clear()
        model = type("Loaders", (Net,), {"validation_step": step})()
        quiet().validate(model, [loader(8), loader(16)], verbose=False)
        assert seen == [0, 1, 1], name
    seen.clear()
    model = type("Loaders", (Net,), {"validation_step": lambda self, batch: seen.append(len(batch))})()
    quiet().validate(model, [loader(8), loader(16)], verbose=False)
    assert seen == [2, 2, 2]
    quiet().validate(type("Default", (Net,), {"validation_step": steps["default"]})(), loader(8), verbose=False)
    assert seen[-1] == 0


def test_what_a_training_step_may_return() -> None:
    def fit(returns: Callable[[torch.Tensor, int], Any]) -> tuple[Trainer, list[torch.Tensor]]:
        class Returns(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                x, y = batch
                return returns(F.cross_entropy(self(x), y), len(x))

        model, trainer = net(), quiet()
        model.__class__ = Returns
        trainer.fit(model, loader(20))
        return trainer, weights(model)

    _, expected = fit(lambda loss, n: loss)
    assert equal(fit(lambda loss, n: {"loss": loss, "n": n, "other": [loss]})[1], expected)
    assert distance(fit(lambda loss, n: Loss(loss * n, n))[1], expected) < 1e-5
    assert distance(fit(lambda loss, n: {"loss": Loss(loss * n, torch.tensor(n)), "more": "text"})[1], expected) < 1e-5
    with pytest.raises(ValueError, match="returned a loss in none of the run's 3 steps"):
        fit(lambda loss, n: None)
    trainer, _ = fit(lambda loss, n: loss if n == 8 else None)  # the last batch has 4 samples
    assert trainer.global_step == 2


def test_batches_without_a_loss_have_no_weight() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    model = net()
    model.__class__ = Skips
    quiet(accumulate_grad_batches=2).fit(model, loader(32))
    x, y = data(32).tensors
    reference = net()
    optimizer = reference.configure_optimizers()
    for begin in (0, 16):
        F.cross_entropy(reference(x[begin : begin + 8]), y[begin : begin + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(model), weights(reference)) < 1e-5


# ---- optimization by hand, by several optimizers, by closures ----------------------------------------


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


# ---- batches ---------------------------------------------------------------------------------------


class Bag:
    """A batch object with its own `to`."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, moved: int = 0) -> None:
        self.x, self.y, self.moved = x, y, moved

    def to(self, device: torch.device) -> Bag:
        return Bag(self.x.to(device), self.y.to(device), self.moved + 1)

    def __len__(self) -> int:
        return len(self.x)


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    label: str = "text"


Both = namedtuple("Both", ["x", "y"])


def stacked(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


COLLATES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "own to": (lambda items: Bag(*stacked(items)), lambda b: (b.x, b.y) if b.moved == 1 else None),
    "dict": (lambda items: dict(zip("xy", stacked(items), strict=True)), lambda b: (b["x"], b["y"])),
    "nested": (lambda items: {"deep": [(stacked(items),)], "name": "n"}, lambda b: b["deep"][0][0]),
    "dataclass": (lambda items: Record(*stacked(items)), lambda b: (b.x, b.y) if b.label == "text" else None),
    "namedtuple": (lambda items: Both(*stacked(items)), lambda b: (b.x, b.y)),
}


@pytest.mark.parametrize(("collate", "xy"), COLLATES.values(), ids=COLLATES)
def test_batches_of_every_kind_have_the_weight_of_their_samples(collate: Any, xy: Any) -> None:
    class Kinds(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = xy(batch)
            loss = F.cross_entropy(self(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        validation_step = training_step  # type: ignore[assignment]

    model, reference = net(), net()
    model.__class__ = Kinds
    trainer, plain = quiet(accumulate_grad_batches=2), quiet(accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(data(20), batch_size=8, collate_fn=collate))
    plain.fit(reference, loader(20))
    assert equal(weights(model), weights(reference))
    assert trainer.callback_metrics["loss"] == plain.callback_metrics["train/loss_epoch"]


def test_transfer_batch_to_device_override() -> None:
    calls = []

    class Transfers(Net):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            calls.append((device, dataloader_idx))
            batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return batch[0] * 0, batch[1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not batch[0].any()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert not batch[0].any()

    quiet().fit(Transfers(), loader(8), [loader(8), loader(8)])
    assert calls == [(torch.device("cpu"), 0), (torch.device("cpu"), 0), (torch.device("cpu"), 1)]


# ---- loaders and DataModule ---------------------------------------------------------------------------


def test_loaders_may_be_methods_of_the_module() -> None:
    class Own(Net):
        def train_dataloader(self) -> Any:
            return loader(16)

        def val_dataloader(self) -> Any:
            return [loader(8), loader(8)]

        def test_dataloader(self) -> Any:
            return loader(8)

        def predict_dataloader(self) -> Any:
            return loader(12)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

        test_step = validation_step

    trainer = quiet()
    trainer.fit(Own())
    assert trainer.global_step == 2 and "val/loss/dataloader_idx_1" in trainer.callback_metrics
    assert len(trainer.num_val_batches) == len(trainer.val_dataloaders) == 2
    assert "val/loss" in quiet().test(Own(), verbose=False)[0]
    assert [len(p) for p in quiet().predict(Own())] == [8, 4]
    trainer = quiet()
    trainer.fit(Own(), loader(24))
    assert trainer.global_step == 3, "what the caller gives comes first"


class Data(DataModule):
    """Writes what is called, and on which rank."""

    def __init__(self, folder: str, size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []

    def note(self, what: str) -> None:
        rank = self.trainer.global_rank if self.trainer is not None else None
        with open(Path(self.hparams.folder) / f"rank{rank}", "a") as file:
            file.write(what + "\n")

    def prepare_data(self) -> None:
        self.note("prepare")

    def setup(self, stage: str) -> None:
        self.note(f"setup {stage}")
        self.data = data(self.hparams.size)

    def teardown(self, stage: str) -> None:
        self.note(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.mark.ranks
def test_data_module_on_two_ranks(tmp_path: Path) -> None:
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.datamodule.hparams.size == 16
            self.log("n", float(len(batch[0])), reduce_fx="sum")

    module = Data(str(tmp_path))
    trainer = quiet(devices=2)
    trainer.fit(Tested(), datamodule=module)
    assert (tmp_path / "rank0").read_text().split("\n")[:-1] == ["prepare", "setup fit", "teardown fit"]
    assert (tmp_path / "rank1").read_text().split("\n")[:-1] == ["setup fit", "teardown fit"], (
        "one rank of a node prepares"
    )
    assert trainer.global_step == 2 and "val/loss" in trainer.callback_metrics
    assert trainer.test(Tested(), datamodule=module, verbose=False) == [{"n": 16.0}]
    assert (tmp_path / "rank1").read_text().endswith("setup test\nteardown test\n")


def test_data_module_may_be_given_in_place_of_loaders(tmp_path: Path) -> None:
    trainer, module = quiet(), Data(str(tmp_path))
    trainer.fit(Net(), module)
    assert trainer.datamodule is module and trainer.global_step == 4
    quiet().validate(Net(), module, verbose=False)
    assert len(quiet().predict(Net(), module)) == 4
    assert [line for line in (tmp_path / "rank0").read_text().split("\n") if "setup" in line] == [
        "setup fit",
        "setup validate",
        "setup predict",
    ]


class Joint(Net):
    """Trains on batches of two loaders at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.zeros(0, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = batch.values() if isinstance(batch, dict) else batch
        self.sizes = torch.cat([self.sizes, torch.tensor([[len(first[0]), len(second[0])]])])
        return super().training_step(first, batch_idx)


@pytest.mark.ranks
def test_training_loaders_side_by_side_cycle_the_shorter_one() -> None:
    for loaders in ({"labelled": loader(24), "more": loader(5, 4)}, [loader(24), loader(5, 4)]):
        trainer, model = quiet(), Joint()
        trainer.fit(model, loaders)
        assert model.sizes.tolist() == [[8, 4], [8, 1], [8, 4]] and trainer.num_training_batches == 3
    trainer, model = quiet(devices=2), Joint()
    trainer.fit(model, {"labelled": loader(24), "more": loader(5, 4)})
    assert model.sizes.tolist() == [[8, 4], [8, 4]], "whole batches, in turn"


# ---- hyperparameters -----------------------------------------------------------------------------------


class Base(Net):
    def __init__(self, width: int = 4, *, lr: float = 0.1, **more: Any) -> None:
        Module.__init__(self)
        self.save_hyperparameters(ignore=["loss"])
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Identity(), nn.Linear(width, 3))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.hparams["lr"])


class Derived(Base):
    def __init__(self, depth: int, loss: Any = None, width: int = 5) -> None:
        super().__init__(width, lr=0.2, extra=[1, 2])
        self.depth = depth


def test_save_hyperparameters_variants() -> None:
    assert Base(6).hparams == {"width": 6, "lr": 0.1}
    assert Base(6, other="x").hparams == {"width": 6, "lr": 0.1, "other": "x"}
    derived = Derived(3, loss=nn.MSELoss())
    assert derived.hparams == {"width": 5, "lr": 0.2, "extra": [1, 2], "depth": 3}
    assert derived.hparams.depth == derived.hparams["depth"] == 3
    with pytest.raises(AttributeError, match="no hyperparameter 'dept'; there are width, lr, extra, depth"):
        derived.hparams.dept  # noqa: B018

    class Named(Module):
        def __init__(self, a: int, b: int, c: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters("a", "c")

    assert Named(1, 2).hparams == {"a": 1, "c": 3}

    class Given(Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    from argparse import Namespace

    from omegaconf import OmegaConf

    for config in ({"a": 1, "b": {"c": 2}}, Namespace(a=1, b={"c": 2}), OmegaConf.create({"a": 1, "b": {"c": 2}})):
        assert Given(config).hparams == {"a": 1, "b": {"c": 2}}

    class Typo(Module):
        def __init__(self, a: int) -> None:
            super().__init__()
            self.save_hyperparameters("b")

    with pytest.raises(
        ValueError, match="save_hyperparameters\\('b'\\) names 'b', which is not an argument of __init__ \\(a\\)"
    ):
        Typo(1)


class FromConfig(Net):
    def __init__(self, config: dict[str, Any], scale: float = 1.0) -> None:
        Module.__init__(self)
        self.save_hyperparameters(config)
        self.scale = scale
        self.net = nn.Sequential(nn.Linear(8, config["width"]), nn.ReLU(), nn.Identity(), nn.Linear(config["width"], 3))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.hparams.lr)


def saved(model: Module, folder: Path) -> str:
    trainer = quiet(callbacks=[ModelCheckpoint(dirpath=folder)], enable_checkpointing=True)
    trainer.fit(model, loader(8))
    return trainer.checkpoint_callback.best_model_path


def test_load_from_checkpoint_rebuilds_what_was_saved(tmp_path: Path) -> None:
    model = Derived(3, loss=nn.MSELoss(), width=7)
    path = saved(model, tmp_path / "derived")
    loaded = Derived.load_from_checkpoint(path)
    assert loaded.hparams == {"width": 7, "lr": 0.2, "extra": [1, 2], "depth": 3} and equal(
        weights(loaded), weights(model)
    )
    assert Derived.load_from_checkpoint(path, depth=9, loss=None, map_location="cpu").depth == 9
    with pytest.raises(CheckpointError, match="shape"):
        Derived.load_from_checkpoint(path, width=6)

    model = FromConfig({"width": 3, "lr": 0.1, "nested": {"a": (1, 2)}})
    path = saved(model, tmp_path / "config")
    assert equal(weights(FromConfig.load_from_checkpoint(path)), weights(model)), (
        "what was given as one dict is given as one dict"
    )
    loaded = FromConfig.load_from_checkpoint(path, config={"width": 3, "lr": 0.5}, scale=2.0)
    assert loaded.hparams.lr == 0.5 and loaded.scale == 2.0

    class More(Derived):
        def __init__(self, depth: int, width: int) -> None:
            super().__init__(depth, width=width)
            self.head = nn.Linear(1, 1)

    assert isinstance(More.load_from_checkpoint(saved(Derived(3), tmp_path / "less"), strict=False).head, nn.Linear)
    with pytest.raises(CheckpointError, match="lacks \\['head.bias', 'head.weight'\\]"):
        More.load_from_checkpoint(saved(Derived(3), tmp_path / "strict"))


def test_hyperparameters_that_cannot_be_saved_are_refused_before_the_run(tmp_path: Path) -> None:
    class Holds(Net):
        def __init__(self, loss: nn.Module) -> None:
            Module.__init__(self)
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Identity(), nn.Linear(4, 3))

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    with pytest.raises(
        TypeError, match="hyperparameter 'loss'.*MSELoss.*save_hyperparameters\\(ignore=\\['loss'\\]\\)"
    ):
        quiet(enable_checkpointing=True).fit(Holds(nn.MSELoss()), loader(8))
    quiet().fit(Holds(nn.MSELoss()), loader(8))


# ---- what a step may ask ---------------------------------------------------------------------------------


class Facts(Net):
    """Asks everything, on every rank; an assertion that fails comes out of fit."""

    def on_fit_start(self) -> None:
        assert self.trainer.world_size == 2 and self.global_rank == self.local_rank == self.trainer.global_rank
        assert self.device == torch.device("cpu") and self.dtype == torch.float32
        assert self.logger is None and self.loggers == []
        rank = float(self.global_rank)
        gathered = self.all_gather({"a": torch.tensor([rank, 1.0]), "b": (rank, [torch.tensor(rank)])})
        assert gathered["a"].tolist() == [[0.0, 1.0], [1.0, 1.0]]
        assert gathered["b"][0].tolist() == [0.0, 1.0] and gathered["b"][1][0].shape == (2,)
        assert self.all_gather(Both(torch.zeros(1), torch.ones(1))).y.tolist() == [[1.0], [1.0]]
        assert self.trainer.strategy.broadcast(int(rank) + 5) == 5
        self.print("said once")
        assert self.trainer.estimated_stepping_batches == 4 and self.trainer.num_training_batches == 2
        assert self.trainer.train_dataloader.dataset.tensors[0].shape == (16, 8)

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 4, "for schedulers that must know the end"
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert (
            self.current_epoch == self.trainer.current_epoch and self.global_step == 2 * self.current_epoch + batch_idx
        )
        assert self.training and self.trainer.optimizers[0].param_groups[0]["lr"] == 0.01
        return super().training_step(batch, batch_idx)


@pytest.mark.ranks
def test_facts_in_a_step_on_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    model = Facts()
    quiet(devices=2, max_epochs=2).fit(model, loader(16, 4))
    assert capfd.readouterr().out.count("said once") == 1
    assert model.global_step == 4 and model.current_epoch == 2


def test_without_a_trainer() -> None:
    model = Net()
    assert (model.current_epoch, model.global_step, model.global_rank, model.logger, model.device) == (
        0,
        0,
        0,
        None,
        torch.device("cpu"),
    )
    with pytest.raises(RuntimeError, match="this Net is not attached to a Trainer"):
        model.trainer  # noqa: B018
    with pytest.raises(RuntimeError, match="self.log\\('x'\\) was called outside of a run"):
        model.log("x", 1.0)
    with pytest.raises(RuntimeError, match="not attached"):
        model.manual_backward(torch.ones(()))


def test_copies_of_a_module_during_and_after_fit(tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copied(Net):
        def on_train_epoch_end(self) -> None:
            copies.append(copy.deepcopy(self))
            torch.save(self, tmp_path / "whole.pt")
            copies.append(copy.deepcopy(self.net).eval())

    Copied.__qualname__ = "Copied"
    globals()["Copied"] = Copied
    model, trainer = Copied(), quiet()
    trainer.fit(model, loader(16))
    assert equal(weights(copies[0]), weights(model)) and equal(weights(copies[1]), weights(model.net))
    assert copies[0].hparams == model.hparams
    with pytest.raises(RuntimeError, match="not attached"):
        copies[0].trainer  # noqa: B018
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "whole.pt", weights_only=False),
    ):
        assert equal(weights(other), weights(model))
        quiet().fit(other, loader(8))
    del globals()["Copied"]


# ---- averages of weights, gradients in evaluation, reaching in --------------------------------------------


class Ema(Net):
    """Swaps averaged weights in for validation, as 8 of 39 modules in the wild do."""

    def __init__(self) -> None:
        super().__init__()
        for i, parameter in enumerate(self.net.parameters()):
            self.register_buffer(f"shadow{i}", parameter.detach().clone())
        self.kept: list[torch.Tensor] = []

    def shadows(self) -> list[torch.Tensor]:
        return [getattr(self, f"shadow{i}") for i, _ in enumerate(self.net.parameters())]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch._foreach_lerp_(self.shadows(), list(self.net.parameters()), 0.1)

    def on_validation_epoch_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.net.parameters()]
        torch._foreach_copy_([p.data for p in self.net.parameters()], self.shadows())

    def on_validation_epoch_end(self) -> None:
        torch._foreach_copy_([p.data for p in self.net.parameters()], self.kept)


class Training(Net):
    """Swaps in `train`/`eval` instead."""

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.swaps = [*getattr(self, "swaps", []), mode]
        return super().train(mode)


def test_weights_swapped_in_for_validation_leave_training_alone() -> None:
    model, reference = net(), net()
    ema = Ema()
    ema.net.load_state_dict(model.net.state_dict())
    torch._foreach_copy_(ema.shadows(), weights(ema.net))
    trainer, plain = quiet(max_epochs=2, val_check_interval=2), quiet(max_epochs=2)
    trainer.fit(ema, loader(32), loader(16))
    plain.fit(reference, loader(32), loader(16))
    assert equal(weights(ema.net), weights(reference.net))
    assert trainer.callback_metrics["val/loss"] != plain.callback_metrics["val/loss"]
    ema.net.load_state_dict(dict(zip(ema.net.state_dict(), ema.shadows(), strict=True)))
    averaged = quiet().validate(reference_with(ema), loader(16), verbose=False)[0]["val/loss"]
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(averaged)


def reference_with(ema: Ema) -> Net:
    model = net()
    model.net.load_state_dict(ema.net.state_dict())
    return model


class Extra(Net):
    """Keeps state that is no tensor, as averages of weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {"steps": 0}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.extra = {"steps": self.extra["steps"] + 1, "mean": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_extra_state_comes_home_and_is_saved(devices: int, tmp_path: Path) -> None:
    model, trainer = (
        Extra(),
        quiet(devices=devices, callbacks=ModelCheckpoint(dirpath=tmp_path), enable_checkpointing=True),
    )
    trainer.fit(model, loader(16, 4))
    for found in (model.extra, Extra.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).extra):
        assert found["steps"] == 4 // devices and found["mean"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("frozen", [False, True])
def test_train_and_eval_overrides_are_called_in_turn(frozen: bool) -> None:
    model = Training()
    if frozen:
        model.net[0].eval()
    quiet(max_epochs=2).fit(model, loader(16), loader(8))
    assert model.swaps == [False, True, False, True]
    assert model.net[0].training is not frozen and model.net[3].training


@pytest.mark.ranks
def test_gradients_in_evaluation() -> None:
    class Adversarial(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            with torch.set_grad_enabled(True):
                x = batch[0].clone().requires_grad_()
                loss = F.cross_entropy(self(x), batch[1])
                (gradient,) = torch.autograd.grad(loss, x)
            self.log("val/norm", gradient.norm())
            self.log("val/loss", loss)

        predict_step = lambda self, batch, batch_idx: torch.enable_grad()(lambda: self(batch[0]).sum(1))()  # noqa: E731

    trainer, model = quiet(), Adversarial()
    trainer.fit(model, loader(16), loader(8))
    assert trainer.callback_metrics["val/norm"] > 0
    reference = net()
    model = net()
    model.__class__ = Adversarial
    quiet().fit(model, loader(16), loader(8))
    quiet().fit(reference, loader(16))
    assert equal(weights(model), weights(reference))
    quiet(devices=2).validate(model, loader(8), verbose=False)


@pytest.mark.ranks
def test_reaching_into_the_trainer() -> None:
    class Own(Trainer):
        def fit(self, *args: Any, **kwargs: Any) -> None:
            self.started = True
            super().fit(*args, **kwargs)

    class Reaches(Net):
        def on_fit_start(self) -> None:
            first = next(iter(self.trainer.train_dataloader))
            size, rank = 4 // self.trainer.world_size, self.trainer.global_rank
            assert torch.equal(first[0], data(8).tensors[0][size * rank : size * (rank + 1)])
            assert len(list(self.trainer.train_dataloader)) == len(self.trainer.train_dataloader) == 2
            assert next(iter(self.trainer.val_dataloaders))[0].shape == (size, 8)
            assert self.trainer.started and self.trainer.mark == 5
            self.trainer.own = {"a": 1}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer.own == {"a": 1}
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.0
            assert self.trainer._run.schedulers[0].scheduler.last_epoch == 0
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [LambdaLR(optimizer, lambda epoch: 1.0)]

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    for devices in (1, 2):
        trainer, model = Own(devices=devices, **options), net()
        trainer.mark = 5  # type: ignore[attr-defined]
        model.__class__ = Reaches
        trainer.fit(model, loader(8, 4 // devices), loader(8, 4 // devices))
        assert equal(weights(model), weights(net())), "the rate was set to zero"
        assert trainer.global_step == 2
