"""WeightAveraging with functions of torch.optim.swa_utils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import lockstep.lightning.pytorch as pl
from tests.trainer.lightning.projects import BARE, classifier, loader
from tests.trainer.toy import distance, weights

QUIET = BARE | {"max_epochs": 1}


class FromThird(pl.callbacks.WeightAveraging):
    """As Lightning's documentation writes it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, use_buffers=False)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 2


def by_hand(module: Any, function: Callable[..., Any]) -> Any:
    average, optimizer = AveragedModel(module, avg_fn=function), module.configure_optimizers()
    for i, batch in enumerate(loader(batch_size=8)):
        optimizer.zero_grad()
        module.training_step(batch, i).backward()
        optimizer.step()
        if i >= 2:
            average.update_parameters(module)
    return average.module


def made() -> Any:
    torch.manual_seed(0)
    module = classifier(pl)()
    module.log = lambda *args, **options: None
    return module


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"avg_fn": get_ema_avg_fn(0.7)}, {"devices": 1}),
        ({"multi_avg_fn": get_ema_multi_avg_fn(0.7)}, {"devices": 1}),
        pytest.param({"avg_fn": get_ema_avg_fn(0.7)}, {"devices": 2, "strategy": "ddp"}, marks=pytest.mark.ranks),
        pytest.param({"avg_fn": get_ema_avg_fn(0.7)}, {"devices": 2, "strategy": "pipeline"}, marks=pytest.mark.ranks),
    ],
)
def test_averages_are_those_of_torch(options: Any, arguments: Any) -> None:
    module = made()
    size = 4 if arguments.get("strategy") == "ddp" else 8
    trainer = pl.Trainer(**QUIET | arguments, callbacks=[FromThird(**options)])
    trainer.fit(module, loader(batch_size=size))
    assert distance(weights(module), weights(by_hand(made(), get_ema_avg_fn(0.7)))) <= 1e-6


def test_a_function_averages_equal_numbers_too() -> None:
    module = made()
    module.register_buffer("one", torch.ones(1))
    module.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    average = pl.callbacks.WeightAveraging(avg_fn=lambda old, new, done: old * 0.5 + new * 0.25)
    pl.Trainer(**QUIET, devices=1, limit_train_batches=2, callbacks=[average]).fit(module, loader(batch_size=8))
    assert module.one.item() == 0.75 and module.mask.tolist() == [0.0, float("-inf")]


@pytest.mark.ranks
def test_shards_are_not_given_to_a_function() -> None:
    trainer = pl.Trainer(**QUIET, devices=2, strategy="fsdp", callbacks=[FromThird(avg_fn=get_ema_avg_fn(0.7))])
    with pytest.raises(ValueError, match="avg_fn of WeightAveraging would see parts of the model under FSDP; use EMA"):
        trainer.fit(made(), loader())
