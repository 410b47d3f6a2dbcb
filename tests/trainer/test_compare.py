"""Whether the strategy changes the numbers, as a user checks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strategies import DDP
from tests.trainer.toy import Net, loader
from trainer import compare
from trainer.compare import Recorder, differences, table, to_json
from trainer.trainer import Trainer

pytest_plugins = ["trainer.pytest_plugin"]


class Wrong(DDP):
    """Sums gradients where it should average them: what a mistaken strategy does."""

    def forward_backward(self, placed: Any, *args: Any, **options: Any) -> Any:
        agreement = super().forward_backward(placed, *args, **options)
        for parameter in placed.parameters():
            parameter.grad *= self.data_size
        return agreement


def make_net() -> Net:
    return Net(optimizer="SGD", lr=0.1)


def test_strategies_that_agree_pass(assert_same_run: Any) -> None:
    results = assert_same_run(
        make_net, lambda: loader(50, 12, shuffle=True), ("single", "ddp", "dp"), steps=7, accumulate_grad_batches=2, gradient_clip_val=0.5
    )
    assert list(results) == ["single", "ddp", "dp"]
    for found in results.values():
        assert found.same and found.steps == 7 and found.loss < 1e-12 and found.grad_norm < 1e-12
        assert set(found.parameters) == {f"net.{i}.{kind}" for i in (0, 3) for kind in ("weight", "bias")}
        assert "train/loss_step" in found.metrics
    assert results["single"].bitwise


def test_a_strategy_that_differs_is_named_with_step_and_parameter(assert_same_run: Any) -> None:
    with pytest.raises(AssertionError, match=r"Wrong.*differs: step 1, ") as caught:
        assert_same_run(make_net, lambda: loader(32, 8), ("single", Wrong()), steps=3)
    assert "1.0e+00" in str(caught.value), "twice the gradient norm is a relative difference of one"


def test_noise_is_taken_out(assert_same_run: Any) -> None:
    assert_same_run(lambda: Net(dropout=0.5), lambda: loader(32, 8), ("single", "ddp"), steps=3)


def test_a_strategy_that_fails_is_reported_beside_the_others(tmp_path: Any) -> None:
    def fit(strategy: Any, recorder: Recorder) -> None:
        if strategy == "broken":
            raise ValueError("not here\nsecond line")
        torch.manual_seed(0)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
        Trainer(strategy=strategy, callbacks=[recorder], **options).fit(make_net(), loader(16))

    results = compare.compare(fit, ["single", "broken"], 1e-12)
    assert results["broken"].error == "ValueError: not here" and not results["broken"].same
    assert "ValueError: not here" in table(results, 1e-12)
    assert '"same": false' in to_json(results, 1e-12)


def test_recordings_of_different_runs_are_refused(tmp_path: Any) -> None:
    for folder, steps in (("one", 2), ("two", 3)):
        Trainer(max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[Recorder(tmp_path / folder)]).fit(
            make_net(), loader(40)
        )
    with pytest.raises(ValueError, match="took different steps: 2 .* against 3"):
        differences(tmp_path / "one", tmp_path / "two", 0.1)
