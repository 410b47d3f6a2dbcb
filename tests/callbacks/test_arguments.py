"""Callbacks refuse numbers of another kind, or out of range, where they are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.callbacks import BackboneFinetuning, EarlyStopping, GradientAccumulationScheduler, WeightAveraging


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (EarlyStopping, "min_delta", "3", "min_delta of EarlyStopping must be a number, got '3'"),
        (EarlyStopping, "min_delta", float("nan"), "must be a number, got nan"),
        (EarlyStopping, "patience", float("nan"), "must be a number of at least 0, got nan"),
        (EarlyStopping, "stopping_threshold", "3", "stopping_threshold of EarlyStopping must be a number, or None"),
        (WeightAveraging, "decay", "0.5", "decay of WeightAveraging must be a number, or None, got '0.5'"),
        (WeightAveraging, "update_starting_at_step", -1, "must be a whole number of at least 0, got -1"),
        (WeightAveraging, "update_starting_at_epoch", "a", "must be a whole number of at least 0, got 'a'"),
        (GradientAccumulationScheduler, "scheduling", [1, 2], r"scheduling must be a dict .*, got \[1, 2\]"),
        (BackboneFinetuning, "unfreeze_backbone_at_epoch", "a", "must be a whole number of at least 0, got 'a'"),
    ],
)
def test_a_number_of_another_kind_is_refused_by_name(
    kind: Callable[..., Any], name: str, value: Any, message: str
) -> None:
    options = {"monitor": "loss"} if kind is EarlyStopping else {}
    with pytest.raises(ValueError, match=message):
        kind(**options, **{name: value})
