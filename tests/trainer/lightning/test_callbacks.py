"""What code for Lightning expects of callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import lockstep.lightning.pytorch as pl
from lockstep.lightning.pytorch import callbacks
from tests.trainer.lightning.projects import classifier, loader
from tests.trainer.lightning.test_behavior import trainer


def test_a_mock_is_a_callback_like_others(tmp_path: Path) -> None:
    """`Mock(spec=Callback)` has the hooks of Callback, and its class has none."""
    given, configured = Mock(spec=pl.Callback), Mock(spec=pl.Callback)
    module = type("Configured", (classifier(pl),), {"configure_callbacks": lambda self: configured})()
    made = trainer(callbacks=given)
    made.fit(module, loader(), loader())
    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    made.test(module, loader(), ckpt_path=tmp_path / "weights.ckpt")
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


def test_a_summary_of_ones_own(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown: list[Any] = []

    class Own(callbacks.ModelSummary):
        @staticmethod
        def summarize(*args: Any, **options: Any) -> None:
            shown.append((*args, options))

    class Net(classifier(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.BatchNorm1d(600).eval().requires_grad_(False)

    net = Net()
    options: Any = {"enable_model_summary": True, "default_root_dir": tmp_path}
    trainer(**options, callbacks=Own(colored=True)).fit(net, loader())
    ((columns, total, trainable, size, modes, given),) = shown
    assert dict(columns)["Name"][-1] == "frozen" and dict(columns)["Type"][-1] == "BatchNorm1d"
    assert dict(columns)["Params"][-1] == "1,200" and dict(columns)["Mode"][-1] == "eval"
    assert total - trainable == 1200 and size == total * 4 / 1e6
    assert modes["eval"] == 1 and modes["train"] == len(list(net.modules())) - 2
    assert given == {"total_flops": 0, "colored": True}
    for silent in (Own(max_depth=0), callbacks.ModelSummary(max_depth=0)):
        trainer(**options, callbacks=silent).fit(net, loader())
    assert len(shown) == 1 and "Parameters:" not in capfd.readouterr().out
    trainer(**options).fit(net, loader())
    assert "Parameters:" in capfd.readouterr().out


def test_a_summary_of_ones_own_needs_no_example_that_works(tmp_path: Path) -> None:
    class Own(callbacks.ModelSummary):
        @staticmethod
        def summarize(*args: Any, **options: Any) -> None: ...

    net = classifier(pl)()
    net.example_input_array = torch.ones(2, 3)
    with pytest.warns(UserWarning, match="has no sizes and no FLOPs, as its forward on example_input_array fails"):
        trainer(enable_model_summary=True, default_root_dir=tmp_path, callbacks=Own()).fit(net, loader())
    assert net.example_input_array is not None


def test_a_theme_of_the_rich_bar_is_accepted() -> None:
    from lockstep.lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme

    theme = RichProgressBarTheme(description="green_yellow", metrics_format=".3e")
    assert (theme.description, theme.time) == ("green_yellow", "dim")
    made = trainer(callbacks=callbacks.RichProgressBar(leave=True, theme=theme), enable_progress_bar=True)
    made.fit(classifier(pl)(), loader())
    assert isinstance(made.progress_bar_callback, callbacks.RichProgressBar)
