"""Modules without data, which are converted in place."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.strategies.modules.casts import forget_casts, watch_casts
from lockstep.strategies.planning.fake_model import converting_in_place, fake_copy


def test_a_model_that_a_strategy_sets_up_in_a_plan_is_converted_in_place() -> None:
    model = fake_copy(nn.Linear(2, 2), FakeTensorMode())
    weight, referred = model.weight, weakref.ref(model.weight)
    with converting_in_place():
        watch_casts()  # as each set-up does
        model.double()
    assert referred() is model.weight is weight and weight.dtype == torch.float64
    watch_casts()
    forget_casts()
    assert nn.Linear(2, 2).double().weight.dtype == torch.float64
