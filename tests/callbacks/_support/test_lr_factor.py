"""Factors of the learning rate exist only inside the step, compose, and leave no trace."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lockstep.callbacks._support.lr_factor import add_lr_factor, lr_factor


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros((), dtype=torch.float64))


def step(optimizer: torch.optim.Optimizer) -> list[float]:
    """The rate that each parameter was moved with, read off plain SGD on a gradient of 1."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.data.zero_()
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [-p.item() for p in parameters]


def test_factors_multiply_and_the_rate_is_put_back_exactly() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    remove_third = add_lr_factor(optimizer, lambda: 1 / 3)
    remove_seven = add_lr_factor(optimizer, lambda: 7.0)
    assert lr_factor(optimizer) == pytest.approx(7 / 3, rel=1e-15)
    assert step(optimizer) == pytest.approx([0.7 / 3], rel=1e-15)
    assert optimizer.param_groups[0]["lr"] == 0.1  # 0.1 / 3 * 3 would not be

    remove_third()
    assert step(optimizer) == pytest.approx([0.7], rel=1e-15)
    remove_seven()
    assert step(optimizer) == [0.1]
    assert lr_factor(optimizer) == 1.0


def test_groups_that_are_added_later_are_included() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    add_lr_factor(optimizer, lambda: 0.5)
    optimizer.add_param_group({"params": [parameter()], "lr": 0.3})
    assert step(optimizer) == [0.05, 0.15]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]


def test_a_tensor_rate_that_groups_share_is_scaled_once_and_stays_the_same_object() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=rate)
    groups = optimizer.param_groups
    assert groups[0]["lr"] is groups[1]["lr"]
    add_lr_factor(optimizer, lambda: 0.5)
    assert step(optimizer) == [0.05, 0.05]
    assert groups[0]["lr"] is rate
    assert groups[1]["lr"] is rate
    assert rate.item() == 0.1


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_with_a_tensor_rate_moves_as_with_the_product(fused: bool) -> None:
    def train(lr: float, factor: float | None) -> torch.Tensor:
        torch.manual_seed(1)
        weight = nn.Parameter(torch.randn(4, 4))
        optimizer = torch.optim.AdamW([weight], lr=torch.tensor(lr), fused=fused, foreach=False)
        if factor:
            add_lr_factor(optimizer, lambda: factor)
        for _ in range(3):
            weight.grad = torch.sin(weight.detach())
            optimizer.step()
        return weight.detach()

    assert torch.equal(train(0.125, 0.25), train(0.03125, None))


def test_a_step_that_raises_does_not_leave_the_rate_scaled_for_the_next() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    remove = add_lr_factor(optimizer, lambda: 0.5)

    def fail() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    assert step(optimizer) == [0.05]
    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    remove()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_nothing_of_it_is_saved_with_the_optimizer() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    before = optimizer.state_dict()
    add_lr_factor(optimizer, lambda: 0.5)
    step(optimizer)
    assert optimizer.state_dict() == before


@pytest.mark.ranks
def test_an_optimizer_is_not_kept_alive() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    add_lr_factor(optimizer, lambda: 0.5)
    step(optimizer)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
