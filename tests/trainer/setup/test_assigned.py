"""Optimizers and schedulers that hooks of the start assign: the numbers of those that are returned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lockstep import CheckpointError
from lockstep.callbacks import Callback, LRFinder, LRScaling, LRWarmup
from lockstep.lightning.pytorch.utilities.types import LRSchedulerConfig
from tests.trainer.toy import Net, distance, equal, loader, net, quiet, weights

ON_RANKS = ("ddp", "pipeline", "fsdp", "tensor", "fsdp=2,tensor=2", "dp")
STRATEGIES = ["single", *(pytest.param(name, marks=pytest.mark.ranks) for name in ON_RANKS[:2])]
STRATEGIES += [pytest.param(name, marks=[pytest.mark.ranks, pytest.mark.slow]) for name in ON_RANKS[2:]]
HOOKS = ("on_fit_start", "on_train_start")


def fit(module: Net, strategy: str = "single", epochs: int = 3, resume: Path | None = None) -> list[torch.Tensor]:
    devices = {"single": 1, "fsdp=2,tensor=2": 4}.get(strategy, 2)
    own = 8 // (2 if strategy in ("ddp", "fsdp", "fsdp=2,tensor=2") else 1)
    trainer = quiet(strategy=strategy, devices=devices, accelerator="cpu", precision="64-true", max_epochs=epochs)
    trainer.fit(module, loader(48, own), ckpt_path=resume)
    return weights(module)


class Assigns(Net):
    """`configure_optimizers` returns SGD; the hook `where` assigns AdamW with a scheduler, as other code returns."""

    def __init__(self, where: str = "", save: Path | None = None) -> None:
        super().__init__()
        self.where, self.save = where, save

    def make(self) -> tuple[list[Optimizer], list[Any]]:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]

    def configure_optimizers(self) -> Any:
        return self.make() if self.where == "configure_optimizers" else SGD(self.parameters(), lr=0.1)

    def assign(self, hook: str) -> None:
        if self.where == hook:
            optimizers, (scheduler,) = self.make()
            self.trainer.strategy.optimizers = optimizers  # type: ignore[attr-defined]
            self.trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler)]  # type: ignore[attr-defined]
            assert self.trainer.optimizers == optimizers

    def on_fit_start(self) -> None:
        self.assign("on_fit_start")

    def on_train_start(self) -> None:
        self.assign("on_train_start")

    def on_train_end(self) -> None:
        if self.save is not None:
            self.trainer.save_checkpoint(self.save)


def assigns(*args: Any) -> Assigns:
    torch.manual_seed(0)
    return Assigns(*args)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hook", HOOKS)
def test_assigned_optimizers_train_and_resume_as_returned_ones(hook: str, strategy: str, tmp_path: Path) -> None:
    expected, saved = fit(assigns("configure_optimizers")), tmp_path / "one.ckpt"
    whole = fit(assigns(hook), strategy)
    assert distance(whole, expected) < 1e-12
    fit(assigns(hook, saved), strategy, epochs=1)
    assert equal(fit(assigns(hook), strategy, resume=saved), whole)


@pytest.mark.parametrize(("saves", "resumes"), [("on_train_start", "configure_optimizers"), (HOOKS[::-1]), HOOKS])
def test_a_run_may_resume_them_wherever_its_code_gives_them(saves: str, resumes: str, tmp_path: Path) -> None:
    fit(assigns(saves, tmp_path / "one.ckpt"), epochs=1)
    expected = fit(assigns("configure_optimizers"))
    assert equal(fit(assigns(resumes), resume=tmp_path / "one.ckpt"), expected)


def test_a_resumed_run_that_does_not_assign_them_is_refused(tmp_path: Path) -> None:
    fit(assigns("on_train_start", tmp_path / "one.ckpt"), epochs=1)
    with pytest.raises(CheckpointError, match="holds the state of AdamW for optimizer '0', but .* returned SGD"):
        fit(assigns(), resume=tmp_path / "one.ckpt")


def test_a_run_that_assigns_others_than_were_saved_is_refused(tmp_path: Path) -> None:
    fit(assigns("", tmp_path / "one.ckpt"), epochs=1)
    with pytest.raises(CheckpointError, match="holds the state of SGD for optimizer '0', but .* returned AdamW"):
        fit(assigns("on_train_start"), resume=tmp_path / "one.ckpt")


class AssignsScheduler(Net):
    """The hook `where` gives a scheduler to an optimizer whose state is spread over ranks by then."""

    def __init__(self, kind: type[Optimizer], where: str = "") -> None:
        super().__init__()
        self.kind, self.where = kind, where

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.1)  # type: ignore[call-arg]
        return optimizer if self.where else ([optimizer], [StepLR(optimizer, 1, 0.5)])

    def on_fit_start(self) -> None:
        if self.where == "on_fit_start":
            self.trainer.lr_scheduler_configs = [StepLR(self.trainer.optimizers[0], 1, 0.5)]


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "kind"), [("pipeline", Adadelta), ("fsdp", Adafactor)])
def test_a_scheduler_may_be_assigned_to_an_optimizer_that_is_set_up(strategy: str, kind: type[Optimizer]) -> None:
    torch.manual_seed(0)
    modules = AssignsScheduler(kind), AssignsScheduler(kind, "on_fit_start")
    modules[1].load_state_dict(modules[0].state_dict())
    assert distance(fit(modules[1], strategy), fit(modules[0])) < 1e-12


class Keeps(Net):
    """Assigns in each hook what is there already, as code for old versions of Lightning does."""

    def assign_what_is_there(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy.optimizers = [self.trainer.lr_scheduler_configs[0].scheduler.optimizer]
        strategy.lr_scheduler_configs = self.trainer.lr_scheduler_configs
        self.trainer.optimizers = [self.optimizers()]

    def on_train_start(self) -> None:
        self.assign_what_is_there()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.assign_what_is_there()

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


def test_assigning_what_is_there_changes_nothing() -> None:
    torch.manual_seed(0)
    assert equal(fit(Keeps()), fit(assigns("configure_optimizers")))


class Changes(Callback):
    """Calls `change` with the Trainer and the module as training starts, or `later`."""

    def __init__(self, change: Callable[[Any, Any], object], later: bool = False) -> None:
        self.change, self.later = change, later

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if not self.later:
            self.change(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.later:
            self.change(trainer, module)


def change(change: Callable[[Any, Any], object], strategy: str = "single", later: bool = False) -> Net:
    module, devices = net(optimizer="SGD"), 1 if strategy == "single" else 2
    callbacks: list[Callback] = [Changes(change, later)]
    quiet(strategy=strategy, devices=devices, accelerator="cpu", callbacks=callbacks).fit(module, loader(), loader())
    return module


def adam(module: nn.Module) -> AdamW:
    return AdamW(module.parameters(), lr=1e-2)


def set_plateau(trainer: Any, module: Any) -> None:
    optimizer = adam(module)
    trainer.optimizers = optimizer
    trainer.lr_scheduler_configs = [
        LRSchedulerConfig(ReduceLROnPlateau(optimizer, factor=0.5, patience=0, mode="max"), monitor="val/loss")
    ]


def test_a_scheduler_that_monitors_a_metric_may_be_assigned() -> None:
    rates: list[float] = []
    callbacks: list[Callback] = [Changes(set_plateau), Rates(rates)]
    quiet(callbacks=callbacks, max_epochs=4, accelerator="cpu", devices=1).fit(net(), loader(), loader())
    assert rates[0] == 1e-2 and rates[-1] < 1e-2


def scheduler_by(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """Assigns what `make` builds on an optimizer that is assigned, too."""

    def assign(trainer: Any, module: Any) -> None:
        optimizer = adam(module)
        trainer.optimizers = optimizer
        trainer.lr_scheduler_configs = [make(module, optimizer)]

    return assign


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, o: LRSchedulerConfig(StepLR(o, 1), interval="batch"), "interval of an lr_scheduler.*'batch'"),
        (lambda m, o: LRSchedulerConfig(StepLR(o, 1), frequency=0), "frequency of an lr_scheduler.*frequency=0"),
        (lambda m, o: LRSchedulerConfig(StepLR(o, 1), frequency=True), "frequency of an lr_scheduler.*frequency=True"),
        (
            lambda m, o: LRSchedulerConfig(StepLR(m.optimizers(), 1)),
            r"StepLR is built on what self.optimizers\(\) gives",
        ),
    ],
)
def test_a_scheduler_that_would_change_nothing_is_refused(make: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(scheduler_by(make))


@pytest.mark.parametrize(
    "make",
    [
        lambda m, o: LRSchedulerConfig(StepLR(o, 1, 0.5), "rate", "epoch", numpy.int64(1)),  # Lightning's order
        lambda m, o: LRSchedulerConfig(
            ReduceLROnPlateau(o, "max", 0.5, 0), reduce_on_plateau=False, monitor="val/loss"
        ),
    ],
)
def test_a_scheduler_of_lightnings_class_steps(make: Callable[[Any, Any], Any]) -> None:
    rates: list[float] = []
    callbacks: list[Callback] = [Changes(scheduler_by(make)), Rates(rates)]
    quiet(callbacks=callbacks, max_epochs=4, accelerator="cpu", devices=1).fit(net(), loader(), loader())
    assert rates[0] == 1e-2 and rates[-1] < 1e-2


def test_what_optimizers_gives_can_be_copied() -> None:
    held: list[Any] = []
    change(lambda trainer, module: held.append(copy.copy(module.optimizers())))
    assert isinstance(held[0], SGD) and held[0].param_groups


class Rates(Callback):
    def __init__(self, rates: list[float]) -> None:
        self.rates = rates

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_a_warmup_holds_for_what_is_assigned() -> None:
    trained = []
    for hook in ("configure_optimizers", *HOOKS):
        module, warmups = assigns(hook), [LRWarmup(steps=5), LRScaling(32)]
        quiet(callbacks=warmups, max_epochs=2, accelerator="cpu", devices=1).fit(module, loader())
        trained.append(weights(module))
    assert equal(trained[1], trained[0]) and equal(trained[2], trained[0])


@pytest.mark.ranks
def test_a_search_of_the_rate_raises_that_of_what_is_assigned() -> None:
    found = []
    for hook in ("configure_optimizers", *HOOKS):
        finder = LRFinder(num_training_steps=20, update_attr=False)
        quiet(callbacks=[finder], accelerator="cpu", devices=1).fit(assigns(hook), loader())
        assert finder.result is not None
        found.append((finder.result.lrs, finder.result.losses))
    assert found[1] == found[0] == found[2]


def test_an_optimizer_that_calls_its_closure_may_be_assigned() -> None:
    module = change(lambda trainer, module: setattr(trainer, "optimizers", [LBFGS(module.parameters(), max_iter=3)]))
    expected = net(optimizer="LBFGS", lr=1)
    expected.configure_optimizers = lambda: LBFGS(expected.parameters(), max_iter=3)  # type: ignore[method-assign]
    quiet(accelerator="cpu", devices=1).fit(expected, loader())
    assert equal(weights(module), weights(expected))


def keep_a_layer(trainer: Any, module: Any) -> None:
    trainer.optimizers = [AdamW(module.net[3].parameters(), lr=1e-2)]


def test_a_layer_that_the_assigned_optimizer_does_not_step_is_named() -> None:
    with pytest.raises(ValueError, match="no optimizer steps .*net.0"):
        change(keep_a_layer)


def keep_the_scheduler(trainer: Any, module: Any) -> None:
    trainer.lr_scheduler_configs = [StepLR(trainer.optimizers[0], 1)]
    trainer.optimizers = [adam(module)]


def assign_on_one_rank(trainer: Any, module: Any) -> None:
    if trainer.global_rank:
        trainer.optimizers = [adam(module)]


def assign_a_scheduler_on_one_rank(trainer: Any, module: Any) -> None:
    if trainer.global_rank:
        trainer.lr_scheduler_configs = [StepLR(trainer.optimizers[0], 1)]


def assign_for_other_parameters(trainer: Any, module: Any) -> None:
    weights, biases = (
        {"params": [p for name, p in module.named_parameters() if name.endswith(kind)]} for kind in ("weight", "bias")
    )
    groups = [weights, biases] if trainer.global_rank else [biases, weights]
    groups[0]["lr"] = 1e-2
    trainer.optimizers = [AdamW(groups)]


REFUSED: dict[str, tuple[Callable[[Any, Any], object], type[Exception], str]] = {
    "a rate": (lambda trainer, _: setattr(trainer, "optimizers", 0.1), TypeError, "takes a list .* was given float"),
    "none": (lambda trainer, _: setattr(trainer, "optimizers", []), ValueError, "no optimizer; return one"),
    "of other tensors": (
        lambda trainer, _: setattr(trainer, "optimizers", [adam(nn.Linear(1, 1))]),
        ValueError,
        "steps a tensor that is not a parameter of Net",
    ),
    "beside their scheduler": (keep_the_scheduler, ValueError, "StepLR drives a SGD .* another one has replaced"),
    "saved at once": (
        lambda trainer, module: (setattr(trainer, "optimizers", [adam(module)]), trainer.save_checkpoint("x.ckpt")),
        RuntimeError,
        "save_checkpoint was called beside optimizers that were just set",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_assigned_is_refused(kind: str) -> None:
    how, error, said = REFUSED[kind]
    with pytest.raises(error, match=said):
        change(how)


@pytest.mark.parametrize(
    ("name", "instead"), [("optimizers", r"optimizer.state.clear\(\)"), ("lr_scheduler_configs", "lr_schedulers")]
)
def test_nothing_else_is_assigned_later_in_a_run(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} can be set in on_fit_start and on_train_start.*{instead}"):
        change(lambda trainer, module: setattr(trainer.strategy, name, [adam(module)]), later=True)
    with pytest.raises(AttributeError, match=f"{name} can be set in on_fit_start"):
        setattr(quiet(), name, [adam(net())])


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("pipeline", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how",
    [assign_on_one_rank, assign_a_scheduler_on_one_rank, assign_for_other_parameters],
    ids=lambda how: how.__name__,
)
def test_ranks_that_do_not_assign_the_same_are_named(how: Callable[[Any, Any], object], strategy: str) -> None:
    with pytest.raises(RuntimeError, match="on rank 1 classes, options or parameters .*in on_fit_start or on_train_st"):
        change(how, strategy)


class OfTheRank(Net):
    """Each rank steps weights with one rate and biases with another, but rank 1 the other way round."""

    def configure_optimizers(self) -> Optimizer:
        weights, biases = (
            [p for name, p in self.named_parameters() if name.endswith(kind)] for kind in ("weight", "bias")
        )
        first, second = (biases, weights) if self.trainer.global_rank else (weights, biases)
        return AdamW([{"params": first}, {"params": second, "lr": 1e-2}])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(s, marks=pytest.mark.slow) for s in ("tensor", "pipeline"))]
)
def test_ranks_that_return_optimizers_of_other_parameters_are_named(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="on rank 1 classes, options or parameters .*in configure_optimizers"):
        fit(OfTheRank(), strategy)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "why"),
    [("local_sgd", "each learner of local updates"), ("deepspeed_stage_2", "DeepSpeed's engine holds")],
)
def test_strategies_that_cannot_exchange_them_say_so(strategy: str, why: str) -> None:
    with pytest.raises(AttributeError, match=f"trainer.optimizers was set, but {why}"):
        change(lambda trainer, module: setattr(trainer, "optimizers", [adam(module)]), strategy)
