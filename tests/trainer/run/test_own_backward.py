"""A module's own `backward` runs in place of that of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import backward as imported_backward
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_value_
from torch.utils.checkpoint import checkpoint

from lockstep import Module
from lockstep.strategies import FSDP
from lockstep.strategies.base import NO_HOOKS
from lockstep.strategies.losses import reached_by
from lockstep.strategies.single import SingleDevice
from tests.trainer.toy import Net, distance, loader, net, quiet, weights


class Penalized(Net):
    """What is added in `backward` is a term of the mean, as if `training_step` had added it."""

    in_step = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(optimizer="SGD", lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.penalty = 0.1 * logits.square().mean()
        loss = cross_entropy(logits, batch[1])
        return loss + self.penalty if self.in_step else loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss if self.in_step else loss + self.penalty, *args, **kwargs)


class Of(Penalized):
    """Runs backward as `kind` says."""

    def __init__(self, kind: str, after: str = "") -> None:
        super().__init__()
        self.kind, self.after = kind, after

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        if self.after == "before":
            self.zero_grad()
        KINDS[self.kind](self, loss)
        AFTER[self.after](self)


def by_grad(module: Any, loss: Tensor) -> None:
    parameters = [*module.parameters()]
    gradients = torch.autograd.grad(loss + module.penalty, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def twice(module: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    torch.autograd.backward([module.penalty])


KINDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "plain": lambda module, loss: (loss + module.penalty).backward(),
    "twice": twice,
    "never": lambda module, loss: None,
    "grad": by_grad,
    "imported": lambda module, loss: imported_backward(loss + module.penalty),
    "positions": lambda module, loss: torch.autograd.backward([loss, module.penalty], None, None, False, None, None),
    "seeds": lambda module, loss: torch.autograd.backward(
        (loss, module.penalty), grad_tensors=[None, torch.ones((), dtype=loss.dtype)]
    ),
}
AFTER: dict[str, Callable[[Any], Any]] = {
    "": lambda module: None,
    "before": lambda module: None,
    "clip": lambda module: clip_grad_value_(module.parameters(), 0.01),
    "assign": lambda module: setattr(p := next(module.parameters()), "grad", p.grad * 0.5),
}


def trained(module: Module, num_samples: int = 37, **options: Any) -> list[Tensor]:
    """By default one rank has no sample of the last batch."""
    quiet(**{"split_batches": True, "precision": "64-true"} | options).fit(module, loader(num_samples, batch_size=12))
    return weights(module)


def wanted() -> Module:
    module = Penalized()
    module.in_step = True
    return module


def test_what_it_runs_backward_from_is_weighted_as_the_loss() -> None:
    reference = trained(wanted(), accumulate_grad_batches=2)
    assert distance(trained(Penalized(), accumulate_grad_batches=2), reference) < 1e-14
    for kind in ("twice", "positions", "seeds"):
        assert distance(trained(Of(kind), accumulate_grad_batches=2), reference) < 1e-14, kind
    assert distance(trained(net(optimizer="SGD", lr=0.1)), trained(wanted())) > 1e-4


class Logged(Penalized):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.log("penalty", self.penalty.detach())


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_it_is_exact_on_ranks_some_without_samples(strategy: str) -> None:
    for num_samples, options in ((37, {"accumulate_grad_batches": 2}), (1, {})):
        reference = trained(wanted(), num_samples, **options)
        assert distance(trained(Logged(), num_samples, strategy=strategy, devices=2, **options), reference) < 1e-12


class Further(Penalized):
    """Only what it adds reaches a layer, which ranks exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = torch.nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.penalty = self.aside(batch[0]).square().mean()
        return loss + self.penalty if self.in_step else loss


class Counts(Penalized):
    calls = 0

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        self.calls += 1
        loss.backward()


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [FSDP(wrap=[torch.nn.Linear]), "ddp"], ids=["fsdp", "ddp"])
def test_ranks_without_samples_run_as_far_as_its_backward(strategy: Any) -> None:
    module = Further()
    module.in_step = True
    assert distance(trained(Further(), strategy=strategy, devices=2), trained(module)) < 1e-12
    with pytest.raises(RuntimeError, match="or backward, changed the number calls of the model in a step in which a r"):
        trained(Counts(), strategy=strategy, devices=2)


@pytest.mark.ranks
def test_ranks_need_one_backward() -> None:
    with pytest.raises(RuntimeError, match="module's backward has run backward twice, but the strategy sums"):
        trained(Of("twice"), strategy="ddp", devices=2)


@pytest.mark.parametrize("kind", ["never", "grad", "imported"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_gradients_that_have_no_weight_are_refused(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"module's backward has never run backward, .*; call loss.backward\(\)"):
        trained(Of(kind), **options)


def test_gradients_of_a_whole_step_may_be_changed() -> None:
    class AfterBackward(Penalized):
        def on_after_backward(self) -> None:
            clip_grad_value_(self.parameters(), 0.01)

    assert distance(trained(Of("plain", "clip")), trained(AfterBackward())) < 1e-14


@pytest.mark.parametrize("after", ["before", "clip", "assign"])
def test_gradients_of_a_part_of_a_step_may_not_be_changed(after: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"backward changed gradients by itself \(net.0.weight.*; change them in on_af"
    ):
        trained(Of("plain", after), accumulate_grad_batches=2)


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "tensor"}], ids=str)
def test_gradients_of_a_rank_may_not_be_changed(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"backward changed gradients by itself \(net.0.weight"):
        trained(Of("plain", "clip"), devices=2, **options)


class OfShares(Penalized):
    """Keeps nothing between the step and the backward, as shares must not."""

    edits = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        return loss + self.decay() if self.in_step else loss

    def decay(self) -> Tensor:
        return 0.05 * torch.stack([p.square().sum() for p in self.parameters()]).sum()

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        (loss if self.in_step else loss + self.decay()).backward()
        if self.edits:
            clip_grad_value_(self.parameters(), 0.01)


def test_shares_of_virtual_ranks_are_weighted() -> None:
    module, editing, reference = OfShares(), OfShares(), OfShares()
    editing.edits = reference.in_step = True
    assert distance(trained(module, virtual_ranks=2), trained(reference)) < 1e-12
    with pytest.raises(RuntimeError, match="backward changed gradients by itself"):
        trained(editing, virtual_ranks=2)


class Checkpointed(Penalized):
    """Its layers are recomputed in the backward, which with reentrant checkpoints runs one within."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.net, x.requires_grad_(), use_reentrant=True)
        return out


class Losses(OfShares):
    """A loss for each of two optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        losses = cross_entropy(logits, batch[1]), logits.square().mean()
        return {str(i): loss + self.decay() if self.in_step else loss for i, loss in enumerate(losses)}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[3])]


@pytest.mark.parametrize("kind", [Checkpointed, Losses])
def test_checkpoints_and_several_losses_are_weighted(kind: type[Penalized]) -> None:
    module = kind()
    module.in_step = True
    assert distance(trained(kind(), accumulate_grad_batches=2), trained(module, accumulate_grad_batches=2)) < 1e-14


def test_losses_are_scaled_with_16_mixed() -> None:
    options: dict[str, Any] = {"precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert distance(trained(Penalized(), **options), trained(wanted(), **options)) < 1e-4
    with pytest.raises(RuntimeError, match="or scaled by precision='16-mixed'; change them in on_after_backward"):
        trained(Of("plain", "clip"), precision="16-mixed")


def test_an_error_in_it_leaves_torch_as_it_was() -> None:
    class Fails(Penalized):
        def backward(self, loss: Tensor) -> None:  # type: ignore[override]
            loss.backward()
            raise KeyError("mine")

    before = torch.autograd.backward
    with pytest.raises(KeyError, match="mine"):
        trained(Fails())
    assert torch.autograd.backward is before is imported_backward


def test_a_planned_fault_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []

    class Notes(Penalized):
        def backward(self, loss: Tensor) -> None:  # type: ignore[override]
            got.append(loss.item())
            loss.backward()

    monkeypatch.setenv("LOCKSTEP_FAULTS", "step=1,point=forward,action=nan")
    with pytest.raises(FloatingPointError):
        trained(Notes())
    assert len(got) == 2 and math.isfinite(got[0]) and math.isnan(got[1])


def test_one_that_needs_more_than_the_loss_is_refused() -> None:
    class Old(Penalized):
        def backward(self, loss: Tensor, optimizer: Any, *args: Any) -> None: ...

    with pytest.raises(
        TypeError, match=r"Old.backward is called with the loss alone.*optimizer.*backward\(self, loss\)"
    ):
        quiet().fit(Old(), loader(45))


class Deaf(SingleDevice):
    def forward_backward(self, wrapped: Any, step_fn: Any, window: Any, hooks: Any = NO_HOOKS) -> Any:
        return super().forward_backward(wrapped, step_fn, window, hooks._replace(backward=None))


def test_a_strategy_that_does_not_call_it_is_refused() -> None:
    module = Penalized()
    before = weights(module)
    with pytest.raises(
        RuntimeError, match="overrides backward, but strategy Deaf has not called it; let its forward_b"
    ):
        trained(module, strategy=Deaf())
    assert distance(weights(module), before) == 0


@pytest.mark.parametrize("strategy", ["dp", "pipeline", "deepspeed_stage_2", "federated", "parameter_server"])
def test_strategies_whose_engine_owns_the_backward_refuse_it(strategy: str) -> None:
    with pytest.raises(ValueError, match="the module overrides backward, but .*; add terms to the loss in training_st"):
        quiet(strategy=strategy, devices=2).fit(Penalized(), loader(45))


def test_manual_optimization_refuses_it() -> None:
    module = Penalized()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="Penalized optimizes manually and overrides backward, which manual_backward"):
        quiet().fit(module, loader(45))


def test_on_padding_a_backward_runs_up_to_its_own() -> None:
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    loss = layer(torch.ones(1, 2)).sum()

    def catches_all(loss: Tensor) -> None:
        try:
            (loss + 1).backward()
        except:  # noqa: E722
            pass

    assert torch.equal(reached_by(catches_all, loss, layer), loss + 1)

    def forgets(loss: Tensor) -> None:
        layer.zero_grad()
        loss.backward()

    with pytest.raises(RuntimeError, match=r"changed gradients by itself \(weight, bias\)"):
        reached_by(forgets, loss, layer)
