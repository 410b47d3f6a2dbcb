"""Optimizers that know parameters by name or identity, keep numbers in groups, or edit gradients: the weights of one
process, or a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Optimizer

from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies.optimizers.probe import probe, steps_groups_alike
from tests.strategies.mesh.perceptrons import Perceptron, labeled
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, quiet, weights


class OneByOne(Optimizer):
    """Steps each parameter by `one`, by its gradient or that over its norm."""

    def __init__(self, params: Any, whole: bool = False, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.whole = whole

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad / parameter.grad.norm() if self.whole else parameter.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            for parameter, name in zip(group["params"], names, strict=True):
                if parameter.grad is not None:
                    self.one(parameter, name, group)

    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        parameter.sub_(self.direction(parameter), alpha=group["lr"])


class ByName(OneByOne):
    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        factor = (0.1 if name.endswith("bias") else 1) * (0.5 if name.startswith("net.0") else 1)
        parameter.sub_(self.direction(parameter), alpha=group["lr"] * factor)


class ById(OneByOne):
    """Knows by `id` which parameters to step by whole tensors."""

    def __init__(self, params: Any, whole: bool = False, lr: float = 0.1) -> None:
        super().__init__(params, whole, lr)
        self.matrices = {id(p) for group in self.param_groups for p in group["params"] if p.dim() == 2}

    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        step = self.direction(parameter) if id(parameter) in self.matrices else parameter.grad
        parameter.sub_(step, alpha=group["lr"])


class ByKey(ById):
    def __init__(self, params: Any, whole: bool = False, lr: float = 0.1) -> None:
        super().__init__(params, whole, lr)
        self.rates = {p: 0.1 for group in self.param_groups for p in group["params"] if p.dim() == 1}

    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        parameter.sub_(self.direction(parameter), alpha=group["lr"] * self.rates.get(parameter, 1.0))


class Counts(OneByOne):
    """Counts in a group the steps in which one of its parameters had a gradient, and lowers its rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if any(parameter.grad is not None for parameter in group["params"]):
                group["t"] = group.get("t", 0) + 1
                group["lr"] *= 0.9
        super().step()

    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        parameter.sub_(self.direction(parameter), alpha=group["lr"] / group["t"])


class Decays(OneByOne):
    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        parameter.grad.data.add_(parameter, alpha=0.3)  # type: ignore[union-attr]
        super().one(parameter, name, group)


class Drops(OneByOne):
    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        super().one(parameter, name, group)
        parameter.grad = None


class ChangesBefore(Optimizer):
    """Lowers its rate before it calls the closure, and steps by the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.9
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            for parameter in held:
                parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])
        return loss


class Stepped(Perceptron):
    make: Callable[[nn.Module], Any]

    def configure_optimizers(self) -> Any:
        return type(self).make(self)


class Keeping(Stepped):
    """Sets gradients to zero in every other step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class UnfrozenLater(Stepped):
    """The first parameter of the first group has no gradient at first."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].weight.requires_grad_(self.global_step > 1)


def made(make: Callable[[nn.Module], Any], base: type[Stepped] = Stepped) -> type[Stepped]:
    return type("Made", (base,), {"make": staticmethod(make)})


def in_two_groups(module: nn.Module) -> Optimizer:
    first = [module.net[0].weight, module.net[2].weight]
    chosen = {id(p) for p in first}
    return Counts([{"params": first}, {"params": [p for p in module.parameters() if id(p) not in chosen]}], whole=True)


def by_layer(module: nn.Module) -> Optimizer:
    layers = [layer for layer in module.net if isinstance(layer, nn.Linear)]
    return Counts([{"params": layer.parameters()} for layer in layers])


EXACT: dict[str, tuple[type[Stepped], tuple[str, ...]]] = {
    "names": (made(lambda m: ByName(m.named_parameters())), ("pipeline", "fsdp")),
    "names of whole tensors": (made(lambda m: ByName(m.named_parameters(), True)), ("fsdp",)),
    "ids": (made(lambda m: ById(m.parameters(), True)), ("pipeline",)),
    "keys": (made(lambda m: ByKey(m.parameters())), ("pipeline", "fsdp")),
    "edited gradients": (made(lambda m: Decays(m.parameters(), True), Keeping), ("fsdp",)),
    "dropped gradients": (made(lambda m: Drops(m.parameters(), True), Keeping), ("fsdp",)),
    "groups of other owners": (made(in_two_groups, UnfrozenLater), ("fsdp",)),
    "groups of other stages": (made(by_layer), ("pipeline",)),
    "rates before a closure": (made(lambda m: ChangesBefore(m.parameters())), ("fsdp",)),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXACT)
def test_the_weights_are_those_of_one_process(name: str) -> None:
    kind, strategies = EXACT[name]
    alone = kind()
    fit("single", 1, alone, labeled(48), max_epochs=1)
    for strategy in strategies:
        module = kind()
        fit(strategy, 2, module, labeled(48), max_epochs=1)
        assert distance(weights(module), weights(alone)) < 1e-12, strategy


@pytest.mark.ranks
def test_a_pipeline_saves_the_numbers_of_every_stage(tmp_path: Path) -> None:
    found = []
    for ckpt in (None, tmp_path / "step=2"):
        module = made(by_layer)()
        save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        options = {"callbacks": [save], "enable_checkpointing": True}
        fit("pipeline", 2, module, labeled(48), max_epochs=1, ckpt_path=ckpt, **options)
        found.append(weights(module))
    assert distance(*found) < 1e-12


def hook(*_: Any) -> None: ...


class Hooked(Stepped):
    make = staticmethod(lambda m: SGD(m.parameters(), lr=0.1))

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].register_step_pre_hook(hook)


class OwnersHooked(Hooked):
    make = staticmethod(lambda m: Adafactor(m.parameters()))


class Patched(Hooked):
    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        step = optimizer.step
        optimizer.step = lambda *args: step(*args)


REFUSED = {
    "ids of whole tensors": (made(lambda m: ById(m.parameters(), True)), "fsdp", "outside of param_groups and state"),
    "a hook in a pipeline": (Hooked, "pipeline", "SGD has got a step hook during the run"),
    "another step in a pipeline": (Patched, "pipeline", "SGD has got another step on the object during the run"),
    "a hook of owners": (OwnersHooked, "fsdp", r"\(Adafactor\) has got a step hook during the run"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", REFUSED)
def test_what_sees_one_rank_only_is_refused_by_name(name: str) -> None:
    kind, strategy, message = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(strategy, 2, kind(), labeled(48), max_epochs=1)


class CountsCalls(OneByOne):
    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step()

    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        parameter.sub_(self.direction(parameter), alpha=group["lr"] / self.calls)


def of_dimensions(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in module.parameters() if p.dim() == dim]} for dim in (2, 1)]


OF_ZERO = {
    "names": (lambda m: ByName(m.named_parameters()), "ByName has param_names in its groups, but ZeRO hands it flat"),
    "keys": (
        lambda m: ByKey(m.parameters()),
        "ByKey keeps parameters, or values for each of them, outside of param_groups",
    ),
    "calls": (lambda m: CountsCalls(of_dimensions(m)), "ZeRO-1 steps CountsCalls once for each of its 2 parameter"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", OF_ZERO)
def test_zero_refuses_what_flat_groups_would_change(name: str) -> None:
    pytest.importorskip("deepspeed")
    make, message = OF_ZERO[name]
    with pytest.raises(ValueError, match=message):
        quiet(strategy="deepspeed_stage_1", devices=2).fit(made(make)(), labeled(48))


class Blocks(OneByOne):
    """Rounds by blocks of large tensors."""

    def one(self, parameter: Tensor, name: str, group: dict[str, Any]) -> None:
        step = self.direction(parameter).clone()
        if parameter.numel() >= 4096 and parameter.numel() % 256 == 0:
            blocks = step.view(-1, 256)
            scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
            blocks.copy_((blocks / scale * 127).round() / 127 * scale)
        parameter.sub_(step, alpha=group["lr"])


def test_a_threshold_by_size_is_found() -> None:
    for shape in ((5, 1024), (512, 512), (8192,)):
        assert probe(Blocks([nn.Parameter(torch.randn(shape))])).kind == "whole_tensor", shape


def test_a_trial_knows_copies_of_parameters_by_their_id() -> None:
    module = Perceptron()
    assert probe(ById(module.parameters(), True)).kind == "whole_tensor"
    assert probe(ById(module.parameters())).kind == "elementwise"


def test_groups_that_are_stepped_apart_are_tried() -> None:
    groups = of_dimensions(Perceptron())
    for empties in (False, True):
        assert steps_groups_alike(torch.optim.NAdam(groups), empties)
        assert not steps_groups_alike(CountsCalls(groups), empties)


def test_many_groups_are_tried_as_fast_as_a_few() -> None:
    trials = []

    class Tried(torch.optim.RMSprop):
        def step(self, closure: Any = None) -> Any:
            trials.append(None)
            return super().step(closure)

    counts = []
    for number in (4, 24):
        trials.clear()
        probe(Tried([{"params": [nn.Parameter(torch.randn(3, 3))]} for _ in range(number)]))
        counts.append(len(trials))
    assert counts[0] == counts[1]
