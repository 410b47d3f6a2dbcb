"""What code for Lightning expects of callbacks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

import lockstep.lightning.pytorch as pl
from lockstep.lightning.pytorch import callbacks
from tests.trainer.lightning.projects import classifier, loader
from tests.trainer.lightning.test_behavior import trainer


def test_a_mock_is_a_callback_like_others() -> None:
    """`Mock(spec=Callback)` has the hooks of Callback, and its class has none."""
    given, configured = Mock(spec=pl.Callback), Mock(spec=pl.Callback)
    module = type("Configured", (classifier(pl),), {"configure_callbacks": lambda self: configured})()
    made = trainer(callbacks=given)
    made.fit(module, loader(), loader())
    made.test(module, loader())
    made.predict(module, loader())
    assert given.on_train_batch_end.call_count == made.global_step > 0
    called = [call[0] for call in given.method_calls]
    assert {"on_fit_start", "on_validation_end", "on_test_end", "on_predict_end"} <= set(called)
    assert called == [call[0] for call in configured.method_calls] and made.callbacks[-1] is configured


def test_max_time_is_a_timer(capfd: pytest.CaptureFixture[str]) -> None:
    (timer,) = (item for item in trainer(max_time={"hours": 1}).callbacks if isinstance(item, callbacks.Timer))
    assert timer.duration_s == 3600
    for verbose in (True, False):
        trainer(callbacks=callbacks.Timer({"seconds": 0}, verbose=verbose)).fit(classifier(pl)(), loader())
        assert ("of training time used" in capfd.readouterr().out) is verbose


def test_attributes_and_helpers_of_finetuning() -> None:
    finetuning = callbacks.BackboneFinetuning(initial_denom_lr=5.0, verbose=True, rounding=3)
    assert (finetuning.initial_denom_lr, finetuning.verbose, finetuning.rounding) == (5.0, True, 3)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    assert [id(p) for p in finetuning.filter_on_optimizer(optimizer, layer.parameters())] == [id(layer.bias)]
