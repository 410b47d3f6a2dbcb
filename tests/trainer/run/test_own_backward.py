"""A module's own `backward` runs in place of that of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lockstep import Module
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


class Twice(Penalized):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward(retain_graph=True)
        torch.autograd.backward([self.penalty])


class Never(Penalized):
    def backward(self, loss: Tensor) -> None: ...  # type: ignore[override]


def trained(module: Module, **options: Any) -> list[Tensor]:
    quiet(split_batches=True, precision="64-true", **options).fit(module, loader(44, batch_size=12))
    return weights(module)


def wanted() -> Module:
    module = Penalized()
    module.in_step = True
    return module


def test_what_it_runs_backward_from_is_weighted_as_the_loss() -> None:
    reference = trained(wanted(), accumulate_grad_batches=2)
    assert distance(trained(Penalized(), accumulate_grad_batches=2), reference) < 1e-14
    assert distance(trained(Twice(), accumulate_grad_batches=2), reference) < 1e-14
    assert distance(trained(net(optimizer="SGD", lr=0.1)), trained(wanted())) > 1e-4


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_it_is_exact_on_ranks(strategy: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2} if strategy == "ddp" else {}
    assert distance(trained(Penalized(), strategy=strategy, devices=2, **options), trained(wanted(), **options)) < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "times"), [(Twice, "twice"), (Never, "never")])
def test_ranks_need_one_backward(kind: type[Module], times: str) -> None:
    with pytest.raises(RuntimeError, match=f"module's backward has run backward {times}, but the strategy sums"):
        trained(kind(), strategy="ddp", devices=2)


@pytest.mark.parametrize("strategy", ["dp", "pipeline", "deepspeed_stage_2", "federated", "parameter_server"])
def test_strategies_whose_engine_owns_the_backward_refuse_it(strategy: str) -> None:
    with pytest.raises(ValueError, match="the module overrides backward, but .*; add terms to the loss in training_st"):
        quiet(strategy=strategy, devices=2).fit(Penalized(), loader(44))


def test_manual_optimization_refuses_it() -> None:
    module = Penalized()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="Penalized optimizes manually and overrides backward, which manual_backward"):
        quiet().fit(module, loader(44))
