"""Whether the strategy changes the numbers, as a user checks it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lockstep import DataModule
from lockstep.strategies import DDP, SingleDevice, registry
from lockstep.trainer.cli.main import main
from lockstep.trainer.testing import compare
from lockstep.trainer.testing.compare import (
    IGNORED_METRICS,
    Difference,
    Recorder,
    differences,
    record,
    relative,
    table,
    to_json,
)
from lockstep.trainer.trainer import Trainer
from tests.trainer.toy import Net, data, loader, net

pytest_plugins = ["lockstep.trainer.testing.plugin"]


class Wrong(DDP):
    """Sums gradients where it should average them: what a mistaken strategy does."""

    def forward_backward(self, wrapped: Any, *args: Any, **options: Any) -> Any:
        result = super().forward_backward(wrapped, *args, **options)
        for parameter in wrapped.parameters():
            parameter.grad *= self.topology.data_size
        return result


class BuiltLater(Net):
    """Its layers are built as a run begins."""

    def __init__(self) -> None:
        super().__init__(optimizer="SGD", lr=0.1)

    def configure_model(self) -> None:
        self.net.append(nn.Dropout(0.5))


def make_net() -> Net:
    return Net(optimizer="SGD", lr=0.1)


@pytest.mark.long
@pytest.mark.ranks
def test_strategies_that_agree_pass(assert_same_run: Any) -> None:
    results = assert_same_run(
        make_net,
        lambda: loader(50, 12, shuffle=True),
        ("single", "ddp", "dp"),
        steps=7,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    assert list(results) == ["single", "ddp", "dp"]
    for found in results.values():
        assert found.same and found.steps == 7 and found.loss < 1e-12 and found.grad_norm < 1e-12
        assert set(found.parameters) == {f"net.{i}.{kind}" for i in (0, 3) for kind in ("weight", "bias")}
        assert "train/loss_step" in found.metrics
    assert results["single"].bitwise


@pytest.mark.ranks
def test_a_strategy_that_differs_is_named_with_step_and_parameter(assert_same_run: Any) -> None:
    with pytest.raises(AssertionError, match=r"Wrong.*differs: step 1, ") as caught:
        assert_same_run(make_net, lambda: loader(32, 8), ("single", Wrong()), steps=3)
    assert "1.0e+00" in str(caught.value), "twice the gradient norm is a relative difference of one"


@pytest.mark.ranks
def test_noise_is_taken_out(assert_same_run: Any) -> None:
    assert_same_run(lambda: Net(dropout=0.5), lambda: loader(32, 8), ("single", "ddp"), steps=3)
    assert_same_run(BuiltLater, lambda: loader(32, 8), ("single", "ddp"), steps=3)
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2, dropout=0.1),
            "rnn": nn.LSTM(8, 8, 2, dropout=0.2),
            "none": nn.Dropout(0.0),
        }
    )
    assert compare.without_noise(model) == 2 and model["attention"].dropout == model["rnn"].dropout == 0.0


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "order", [("single", "deepspeed_stage_2", "ddp"), ("deepspeed_stage_2", "single")], ids="-".join
)
def test_what_has_no_float64_is_compared_in_float32(order: tuple[str, ...], assert_same_run: Any) -> None:
    pytest.importorskip("deepspeed")
    results = assert_same_run(
        make_net, lambda: loader(32, 8), order, steps=3, tolerance=1e-12 if order[0] == "single" else None
    )
    for name, found in results.items():
        exact = order[0] == "single" and name != "deepspeed_stage_2"
        assert (found.precision, found.tolerance) == (("64-true", 1e-12) if exact else ("32-true", 1e-5))
    if order[0] == "single":
        assert 1e-12 < max(results["deepspeed_stage_2"].parameters.values()) < 1e-5
        assert re.search(r"deepspeed_stage_2 .* same \(in 32-true, tolerance 1e-05\)\nddp .* same\n", table(results))


def settings(strategy: Any, recorder: Recorder, **layout: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(strategy=strategy, callbacks=[recorder], max_epochs=1, **quiet, **layout)


def test_a_strategy_that_fails_is_reported_beside_the_others() -> None:
    def fit(recorder: Recorder, strategy: Any, **layout: Any) -> None:
        if strategy == "dp":
            raise ValueError("\nnot here\nthird line")
        settings(strategy, recorder, **layout).fit(net(), loader(16))

    results = compare.compare(fit, ["single", "dp", "single"], devices=1)
    assert results["dp"].error == "ValueError: not here" and not results["dp"].same
    assert results["single (2)"].bitwise and results["single (2)"].same
    assert "ValueError: not here" in table(results)
    assert json.loads(to_json(results))["dp"]["same"] is False


def test_what_cannot_be_compared_is_refused_before_anything_runs() -> None:
    def fit(recorder: Recorder, **layout: Any) -> None:
        raise AssertionError("ran")

    for strategies, message in (
        (["single"], "two strategies or more"),
        (["single", "dpp"], "did you mean 'dp'"),
        (["single", "ddp=2,tenso=2"], "'tensor'"),
    ):
        with pytest.raises(ValueError, match=message):
            compare.compare(fit, strategies)


def test_recordings_of_different_runs_are_refused(tmp_path: Path) -> None:
    for folder, steps in (("one", 2), ("two", 3)):
        Trainer(
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Recorder(tmp_path / folder)],
        ).fit(make_net(), loader(40))
    with pytest.raises(ValueError, match="took different steps: 2 .* against 3"):
        differences(tmp_path / "one", tmp_path / "two", 0.1)
    with pytest.raises(ValueError, match="no optimizer step was recorded"):
        differences(tmp_path / "none", tmp_path / "none", 0.1)


def test_a_loop_without_trainer_can_be_recorded(tmp_path: Path) -> None:
    """And is bit for bit what the Trainer does."""
    settings("single", Recorder(tmp_path / "trainer"), accelerator="cpu").fit(net(), loader(40))
    strategy = SingleDevice()
    strategy.configure(accelerator="cpu")
    strategy.setup()
    try:
        model = net()
        wrapped = strategy.setup_module(model)
        optimizers = strategy.setup_optimizers(wrapped, {"main": model.configure_optimizers()})
        for step, (x, y) in enumerate(loader(40), start=1):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizers["main"].step()
            optimizers["main"].zero_grad()
            record(tmp_path / "loop", step, strategy, wrapped, optimizers, loss.item(), [norm.item()])
    finally:
        strategy.teardown()
    found = differences(tmp_path / "loop", tmp_path / "trainer", 0.0, ignore="")
    assert found.same and found.bitwise and found.steps == 5


def write(
    folder: Path, loss: float | None = 1.0, weight: float = 1.0, norms: tuple[float, ...] = (), **metrics: float
) -> Path:
    """A recording of one step."""
    strategy = SingleDevice()
    strategy.configure(accelerator="cpu")
    strategy.setup()
    try:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, weight)
        nn.init.zeros_(model.bias)
        record(folder, 1, strategy, strategy.setup_module(model), {}, loss, norms, metrics)
    finally:
        strategy.teardown()
    return folder


def test_what_is_missing_or_no_number_is_a_difference(tmp_path: Path) -> None:
    one = write(tmp_path / "one", norms=(1.0,), acc=1.0, tokens_per_s=3.0)
    same = differences(one, write(tmp_path / "same", norms=(1.0,), acc=1.0, tokens_per_s=4.0), 0.0)
    assert same.same and same.bitwise and set(same.metrics) == {"acc"}
    zero, negative = (write(tmp_path / f"zero {value}", weight=value) for value in (0.0, -0.0))
    allowed, strict = differences(zero, negative, 0.1), differences(zero, negative, 0.0)
    assert allowed.same and not allowed.bitwise and allowed.parameters["weight"] == 0
    assert (strict.first_name, strict.same) == ("weight", False), "the same bits were asked for"
    for i, (change, name) in enumerate(
        [
            ({"loss": None}, "loss"),
            ({"loss": math.nan}, "loss"),
            ({"norms": (math.nan,)}, "gradient norm"),
            ({"acc": math.nan}, "acc"),
            ({"f1": 1.0}, "f1"),
            ({"weight": math.nan}, "weight"),
            ({"weight": 1.5, "loss": 2.0}, "weight"),
        ]
    ):
        found = differences(one, write(tmp_path / str(i), **{"norms": (1.0,), "acc": 1.0} | change), 0.1)
        assert (found.first_step, found.first_name) == (1, name)
        assert json.loads(to_json({"x": found}))["x"]["same"] is False
    with pytest.raises(ValueError, match="different numbers of optimizers: 1 against 2"):
        differences(one, write(tmp_path / "norms", norms=(1.0, 1.0)), 0.1)
    assert relative(torch.ones(2), torch.ones(2).double()) == math.inf == relative(torch.ones(2), torch.ones(3))
    assert relative(torch.tensor([3 + 5j]), torch.tensor([3 + 4j])) == 0.2, "imaginary parts count"
    assert relative(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("tokens_per_s", True),
        ("val/time", True),
        ("step_time_ms", True),
        ("seconds", True),
        ("sentiment_acc", False),
        ("loss_per_sample", False),
    ],
)
def test_metrics_that_tell_of_speed(name: str, ignored: bool) -> None:
    assert bool(re.search(IGNORED_METRICS, name)) is ignored


def test_of_many_names_the_table_shows_the_worst() -> None:
    found = Difference(steps=1, parameters={f"layer.{i}": i * 1e-3 for i in range(100)})
    text = table({"single": Difference(steps=1, parameters=dict.fromkeys(found.parameters, 0.0)), "ddp": found})
    assert (
        "layer.99" in text
        and "layer.40 " in text
        and "layer.39 " not in text
        and "and 40 more with smaller differences" in text
    )


class Digits(DataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(data(50), 6, shuffle=True)


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(
        "module: {class: tests.trainer.toy.Net}\ndata: {class: tests.trainer.testing.test_compare.Digits}\n"
        "trainer: {max_epochs: 1, accelerator: cpu, seed: 3, logger: {class: CSVLogger}, callbacks: [{class: "
        "ModelCheckpoint}]}\n"
    )
    return "run.yaml"


@pytest.mark.ranks
def test_from_the_command_line(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overrides may stand anywhere, the seed is the config's, nothing but the JSON file is left."""
    monkeypatch.setitem(registry.STRATEGIES, "wrong", Wrong)
    assert (
        main(["compare", config, "--steps", "3", "--strategies", "single,ddp", "module.width=4", "--json", "all.json"])
        == 0
    )
    printed = capsys.readouterr().out
    assert re.search(r"^ +ddp\ntrain/loss.*\n(.*\n)?(.*\n)?net\.0\.bias .*\n", printed)
    assert re.search(
        r"^single +3 +0 +0 +0 +0 +reference\nddp +3 .* same\nlargest .* single in 64-true; tolerance 1e-12$",
        printed,
        flags=re.MULTILINE,
    )
    found = json.loads(Path("all.json").read_text())
    assert (
        found["ddp"]["same"]
        and max(found["ddp"]["parameters"].values()) < 1e-12
        and set(Path().iterdir()) == {Path("run.yaml"), Path("all.json")}
    )
    assert main(["compare", config, "--steps", "2", "--strategies", "single,wrong"]) == 1
    assert re.search(r"^wrong .* differs: step 1, net\.", capsys.readouterr().out, flags=re.MULTILINE)


@pytest.mark.ranks
def test_one_callback_alone_is_given_as_in_fit(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--strategies", "single,single", "--steps", "2"]
    assert main(["compare", config, "trainer.callbacks={class: LRWarmup, steps: 2}", *words]) == 0
    assert "bitwise" in capsys.readouterr().out
    assert main(["compare", config, "trainer.callbacks={class: LRWarmup, step: 2}", *words]) == 2
    assert "did you mean 'steps'" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 0", "--steps must be at least 1, but --steps 0"),
        ("--tolerance nan", "--tolerance must be a number of at least 0, but --tolerance nan"),
        ("--ignore (", "--ignore must be a regular expression"),
        ("--json nowhere/x.json", "there is no folder"),
        ("--strategies single", "a comparison needs two strategies or more"),
        ("--strategies single,dpp", "did you mean 'dp'"),
        ("--strategies single,ddp=2+tensor=3 --devices 4 --precision 65", "precision must be one of"),
        ("--devices 0", "devices must be"),
        ("--nope", "unrecognized arguments: --nope"),
        ("module.widht=3", "did you mean 'width'"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_runs(
    words: str, message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", config, *words.split()]) == 2
    printed = capsys.readouterr()
    assert (
        message in printed.err
        and printed.err.startswith("lockstep: error: ")
        and printed.err.count("\n") == 1
        and not printed.out
    )


@pytest.mark.long
@pytest.mark.ranks
def test_bitwise_asks_for_every_bit_with_dropout_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(Path(__file__).parents[3] / "examples" / "digits.yaml")
    assert main(["compare", config, "--bitwise", "--steps", "3", "--strategies", "single,ddp"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ddp .* bitwise$", printed, re.MULTILINE) and "in 32-true; tolerance 0e+00" in printed
    assert main(["compare", config, "--bitwise", "--strategies", "single,tensor"]) == 2
    assert "virtual_ranks=8 cannot be used with the axis tensor" in capsys.readouterr().err
