"""`LightningCLI` of `lockstep.lightning`: what it builds from files and words, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, StepLR

import lockstep.lightning as L
from lockstep import ConfigError
from lockstep.lightning.pytorch import callbacks
from lockstep.lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from tests.trainer.toy import Net, loader

QUIET = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
QUIET += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=1"]


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


YAML = """
seed_everything: 3
model: {width: 5}
data: {batch_size: 10}
trainer:
  callbacks:
    - {class_path: EarlyStopping, init_args: {monitor: train/loss, patience: 2}}
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5}}
"""


def test_without_run_it_offers_what_it_has_built(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    words = ["--config", str(file), "--model.lr", "0.25", "--optimizer.lr=0.125", *QUIET]
    words += ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=2"]
    cli = LightningCLI(Net, Data, run=False, args=words, trainer_defaults={"max_steps": 3, "callbacks": L.Callback()})
    assert (cli.model.hparams.width, cli.model.hparams.lr, cli.datamodule.batch_size) == (5, 0.25, 10)
    assert (cli.config.model.width, cli.config["model"]["optimizer"], cli.config.seed_everything) == (5, "AdamW", 3)
    kinds = [type(item) for item in cli.trainer.callbacks[:3]]
    assert kinds == [callbacks.EarlyStopping, callbacks.LearningRateMonitor, L.Callback]
    torch.manual_seed(3)
    assert torch.equal(cli.model.net[0].weight, Net(width=5).net[0].weight)
    assert cli.trainer.global_step == 0 and cli.subcommand is None
    cli.trainer.callbacks.pop(1)  # it needs a logger
    cli.trainer.fit(cli.model, cli.datamodule)
    (optimizer,), scheduler = cli.trainer.optimizers, cli.model.lr_schedulers()
    assert cli.trainer.global_step == 3 and isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["initial_lr"] == 0.125 and isinstance(scheduler, StepLR)


def test_subcommands_and_classes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class CLI(LightningCLI):
        def before_fit(self) -> None:
            calls.append("before")

        def after_fit(self) -> None:
            calls.append(self.trainer.current_epoch)

    words = ["fit", "--model", "tests.trainer.toy.Net", "--model.init_args.width=4", f"--data={__name__}.Data", *QUIET]
    monkeypatch.setattr(sys, "argv", ["main.py", *words])
    cli = CLI()
    assert calls == ["before", 1] and cli.model.hparams.width == 4
    assert cli.config.fit.model.class_path == "tests.trainer.toy.Net" and cli.config.fit.data.init_args.batch_size == 8
    nested = {"model": {"width": 2}, "trainer": {"max_steps": 1, "logger": False}}
    assert LightningCLI(Net, run=False, args=nested).model.hparams.width == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.widht=3"], r"model.widht \(command line\): Net has no argument 'widht'; did you mean 'width'"),
        (["--model.width=wide"], r"model.width \(command line\): must be an integer, but it is 'wide'"),
        (["--modle.width=3"], r"modle \(command line\): no such section; did you mean 'model'.$"),
        (["--trainer.max_epochs"], "'--trainer.max_epochs' .*its value is missing"),
        (["--optimizer=Sgd"], r"optimizer.class \(command line\): torch.optim has no class 'Sgd'; did you mean 'SGD'"),
        (["fit"], "'fit' .*words are --config FILE and --section.argument=value"),
        (["--config=none.yaml"], "cannot read config file 'none.yaml'"),
        (["--trainer.max_epoch=1"], "trainer: Trainer has no argument 'max_epoch'; did you mean 'max_epochs'"),
        (["--trainer.strategy=ddpp"], "trainer: strategy must be one of .*; did you mean 'ddp'"),
        (["--data=nowhere.Data"], r"data.*: must be the arguments of Data, but it is"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        LightningCLI(Net, Data, run=False, args=words)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["--help"],
            ["usage: main.py fit|validate|test|predict [--config FILE]", "  --model.width=16", "--data.batch_size=8"],
        ),
        (["fit", "--model.width=3", "--print_config"], ["model:", "  width: 3"]),
    ],
)
def test_pages_are_printed_and_nothing_is_run(
    words: list[str], shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", *words])
    with pytest.raises(SystemExit) as caught:
        LightningCLI(Net, Data)
    printed = capsys.readouterr().out
    assert caught.value.code == 0 and all(line in printed for line in shown), printed


def test_what_is_refused_of_its_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="first word must be one of fit, .*'fti'; did you mean 'fit'"):
        LightningCLI(Net, args=["fti"])
    with pytest.raises(TypeError, match="takes no save_config_callback=<class 'int'>; the run's folder has its config"):
        LightningCLI(Net, save_config_callback=int)
    with pytest.raises(TypeError, match="model_class must be a subclass of Module"):
        LightningCLI(Data, run=False)  # type: ignore[arg-type]

    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None: ...

    with pytest.raises(TypeError, match="no parser; link arguments by interpolation"):
        Linked(Net)
    monkeypatch.setattr(sys, "argv", ["main.py", "fit", "--model.widht=1"])
    with pytest.raises(SystemExit) as caught:
        LightningCLI(Net)
    assert caught.value.code == 2 and capsys.readouterr().err.startswith("main.py: error: model.widht (command line)")


def test_a_cli_may_run_the_stage_itself() -> None:
    class Own(LightningCLI):
        def before_fit(self) -> None:
            self.called = ["before"]

        def fit(self, **given: Any) -> None:
            self.called.append(given["model"])

    cli = Own(Net, args=["fit", *QUIET])
    assert cli.called == ["before", cli.model]


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 1.0)


@pytest.mark.parametrize("name", ["ReduceLROnPlateau", "lightning.pytorch.cli.ReduceLROnPlateau"])
def test_a_scheduler_that_monitors_a_metric(name: str) -> None:
    words = [*QUIET, "--optimizer=SGD", "--optimizer.lr=0.5", f"--lr_scheduler={name}", "--lr_scheduler.patience=3"]
    with pytest.raises(ConfigError, match=r"lr_scheduler\.monitor: missing; ReduceLROnPlateau needs it"):
        LightningCLI(Validated, run=False, args=words)
    cli = LightningCLI(Validated, run=False, args=[*words, "--lr_scheduler.monitor=val/loss"])
    cli.trainer.fit(cli.model, loader(), loader(8))
    (config,) = cli.trainer.lr_scheduler_configs
    assert isinstance(config.scheduler, ReduceLROnPlateau)
    assert (config.monitor, config.scheduler.patience, config.scheduler.num_bad_epochs) == ("val/loss", 3, 0)


class Called(Net):
    """Makes what it is given functions for."""

    def __init__(self, optimizer: OptimizerCallable = SGD, scheduler: LRSchedulerCallable = ConstantLR) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [self.scheduler(optimizer)]


GIVEN = ["--model.optimizer=Adam", "--model.optimizer.lr=0.25", "--model.scheduler=StepLR"]


@pytest.mark.parametrize(
    ("words", "found"),
    [([], (SGD, 1e-3 / 3, ConstantLR)), ([*GIVEN, "--model.scheduler.step_size=9"], (torch.optim.Adam, 0.25, StepLR))],
)
def test_a_model_takes_functions_that_make_optimizers(words: list[str], found: tuple[Any, ...]) -> None:
    cli = LightningCLI(Called, run=False, args=[*QUIET, *words])
    (optimizer,), (scheduler,) = cli.model.configure_optimizers()
    assert (type(optimizer), optimizer.param_groups[0]["lr"], type(scheduler)) == found
