"""Arguments stand where Lightning's do, and methods that are never called are refused."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep.lightning.pytorch as pl
from tests.trainer.lightning.differences import probe
from tests.trainer.lightning.projects import classifier, loader
from tests.trainer.lightning.test_behavior import trainer

QUIET = {name: value for name, value in probe.QUIET.items() if name != "log_every_n_steps"}
METHODS = [
    "Trainer.fit",
    "Trainer.validate",
    "Trainer.test",
    "Trainer.predict",
    "Trainer.save_checkpoint",
    "LightningModule.log",
    "LightningModule.clip_gradients",
    "LightningModule.configure_gradient_clipping",
    "LightningModule.optimizers",
    "LightningModule.toggle_optimizer",
    "LightningModule.all_gather",
    "LightningModule.optimizer_step",
    "LightningModule.lr_scheduler_step",
    "LightningModule.transfer_batch_to_device",
    "callbacks.EarlyStopping.__init__",
    "callbacks.ModelCheckpoint.__init__",
    "callbacks.LearningRateMonitor.__init__",
    "callbacks.Timer.__init__",
    "callbacks.Timer.time_remaining",
    "callbacks.LearningRateFinder.__init__",
    "callbacks.BatchSizeFinder.__init__",
    "callbacks.StochasticWeightAveraging.__init__",
    "callbacks.ModelPruning.__init__",
    "callbacks.BackboneFinetuning.__init__",
    "loggers.TensorBoardLogger.__init__",
    "loggers.CSVLogger.__init__",
    "loggers.TensorBoardLogger.log_hyperparams",
    "loggers.WandbLogger.__init__",
    "loggers.MLFlowLogger.__init__",
]
FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def names(package: Any, path: str) -> list[str]:
    value = package
    for name in path.split("."):
        value = getattr(value, name)
    return [name for name, parameter in inspect.signature(value).parameters.items() if parameter.kind not in FREE]


@pytest.mark.parametrize("path", METHODS)
def test_parameters_have_lightnings_names_and_places(path: str) -> None:
    theirs = names(pytest.importorskip("lightning.pytorch", reason="it is in the extra bench"), path)
    assert names(pl, path)[: len(theirs)] == theirs


def test_runs_take_their_arguments_by_place(tmp_path: Path) -> None:
    made, module = trainer(), classifier(pl)()
    made.fit(module, loader(), None, None, None, None)
    made.save_checkpoint(filepath=tmp_path / "a.ckpt")
    made.save_checkpoint(tmp_path / "b.ckpt", True, None)
    assert made.test(module, loader(), str(tmp_path / "a.ckpt"), False)
    assert made.validate(module, loader(), tmp_path / "b.ckpt", False, None, None)
    assert made.predict(module, loader(), None, True, tmp_path / "a.ckpt")
    assert made.predict(module, loader(), None, False) is None
    with pytest.raises(TypeError, match="save_checkpoint writes a folder and takes no storage_options"):
        made.save_checkpoint(tmp_path / "c.ckpt", storage_options={"a": 1})


class Logs(classifier(pl)):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("none", 1.0, logger=None, on_step=True, on_epoch=False)
        self.log("by_place", float(batch_idx), True, None, False, True, "sum", False, True, None, True, None)
        self.log_dict(dictionary={"kept": 1.0}, logger=False, on_epoch=True)
        self.log_dict({"shown": float(batch_idx)}, True, True, False, True, "max")
        return loss


class Hears(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("heard", 1.0, True, None)
        self.log_dict({"heard_too": 1.0}, True)


def test_values_are_logged_by_place(tmp_path: Path) -> None:
    made = trainer(logger=pl.loggers.CSVLogger(tmp_path), log_every_n_steps=1, callbacks=Hears())
    made.fit(Logs(), loader())
    batches = made.num_training_batches
    assert {"none", "by_place", "shown", "heard", "heard_too"} <= set(made.logged_metrics)
    assert "kept" in made.callback_metrics and "kept" not in made.logged_metrics
    assert made.callback_metrics["by_place"] == sum(range(batches))
    assert made.callback_metrics["shown"] == batches - 1 == made.progress_bar_metrics["shown"]


class Clips(pl.LightningModule):
    """Clips in a hook of its own, by what it is given as options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.options = nn.Linear(4, 1), options
        self.norms: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 100 * self.layer(batch).mean()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, **self.options)
        gradients = torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])
        self.norms.append((gradients.norm().item(), gradients.abs().max().item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("of_trainer", "options", "norm", "largest"),
    [
        ({"gradient_clip_val": 0.5}, {}, 0.5, None),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {}, None, 0.5),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {"gradient_clip_val": 0.25}, None, 0.25),
        ({}, {"gradient_clip_val": 0.25}, 0.25, None),
        ({}, {"gradient_clip_val": 0.0}, None, 100.0),
        ({}, {}, None, 100.0),
    ],
)
def test_clip_gradients_takes_what_it_is_not_given_from_the_trainer(
    of_trainer: dict[str, Any], options: dict[str, Any], norm: float | None, largest: float | None
) -> None:
    module = Clips(**options)
    trainer(**of_trainer).fit(module, torch.ones(8, 4).split(4))
    for found, at_most in module.norms:
        assert norm is None or found == pytest.approx(norm, rel=1e-4)
        assert largest is None or at_most == pytest.approx(largest)


def test_a_limit_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient_clip_val must be a number above 0, or 0 for no clipping, got -1"):
        trainer().fit(Clips(gradient_clip_val=-1.0), torch.ones(8, 4).split(4))


@pytest.mark.parametrize("given", [{"create_graph": True}, {"gradient": torch.ones(())}], ids=["graph", "gradient"])
def test_manual_backward_refuses_options_of_torch_by_name(given: dict[str, Any]) -> None:
    class Manual(Clips):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.layer(batch).mean(), **given)

    with pytest.raises(
        TypeError, match=f"takes retain_graph besides the loss, but not {next(iter(given))}; for a loss"
    ):
        trainer().fit(Manual(), torch.ones(8, 4).split(4))


@pytest.mark.parametrize(
    ("kind", "method", "instead"),
    [
        ("ModelCheckpoint", "_save_checkpoint", "override on_save_checkpoint, after_save_checkpoint of a logger"),
        ("ModelCheckpoint", "_remove_checkpoint", "override on_save_checkpoint"),
        ("EarlyStopping", "_run_early_stopping_check", "set trainer.should_stop in on_validation_end"),
        ("EarlyStopping", "_evaluate_stopping_criteria", "set trainer.should_stop in on_validation_end"),
        ("LearningRateFinder", "lr_find", "the search runs once, before fit"),
        ("BatchSizeFinder", "scale_batch_size", "the search runs once, before fit"),
    ],
)
def test_a_method_that_is_not_called_is_refused(kind: str, method: str, instead: str) -> None:
    base = getattr(pl.callbacks, kind)
    with pytest.raises(TypeError, match=f"Own overrides {method}, which {kind} .* does not call; {instead}"):
        type("Own", (base,), {method: lambda *args: None})
    type("Other", (base,), {"on_train_end": lambda *args: None})


@pytest.mark.parametrize("name", ["DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy", "SingleDeviceStrategy"])
def test_a_subclass_of_a_strategy_is_refused(name: str) -> None:
    base = getattr(importlib.import_module("lockstep.lightning.pytorch.strategies"), name)
    with pytest.raises(
        TypeError, match=f"Own derives from {name} of lockstep.lightning, which only makes a .*; derive"
    ):
        type("Own", (base,), {"setup": lambda self, trainer: None})


def test_a_method_that_is_not_offered_says_what_to_call_outside_of_a_run() -> None:
    with pytest.raises(AttributeError, match="Clips has no 'to_tensorrt'; call torch"):
        Clips().to_tensorrt()


@pytest.mark.parametrize(
    ("kind", "options", "instead"),
    [
        ("TensorBoardLogger", {"save_dir": ".", "max_queue": 5}, "of the SummaryWriter's options it takes flush_secs"),
        ("WandbLogger", {"experiment": object()}, "the logger begins the run of W&B"),
        ("WandbLogger", {"log_model": True}, "upload saved checkpoints in after_save_checkpoint of a logger"),
        ("WandbLogger", {"add_file_policy": "immutable"}, "files of W&B are copied when they are logged"),
        ("MLFlowLogger", {"artifact_location": "a"}, "set it where the experiment is made"),
    ],
)
def test_a_logger_says_what_to_write_for_each_option(kind: str, options: dict[str, Any], instead: str) -> None:
    with pytest.raises(TypeError, match=f"{kind} has no argument '.*'; {instead}"):
        getattr(pl.loggers, kind)(**options)


class Named(pl.Trainer):
    """Has an argument of its own."""

    def __init__(self, label: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.label = label


@pytest.mark.ranks
def test_a_trainer_with_arguments_of_its_own_searches_a_rate() -> None:
    module = classifier(pl)()
    module.lr = 0.5
    finder = pl.callbacks.LearningRateFinder(num_training_steps=3, update_attr=False)
    Named("mine", **QUIET, callbacks=finder).fit(module, loader())
    assert finder.optimal_lr is not None


class Mistaken(Clips):
    def configure_optimizers(self) -> Any:
        raise ValueError("a mistake")


@pytest.mark.parametrize("kind", ["TensorBoardLogger", "CSVLogger"])
def test_a_fit_that_fails_in_its_set_up_leaves_no_version(kind: str, tmp_path: Path) -> None:
    logger = getattr(pl.loggers, kind)(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="a mistake"):
            trainer(logger=logger).fit(Mistaken(), torch.ones(8, 4).split(4))
        assert not [*tmp_path.glob("lightning_logs/*")]
    trainer(logger=logger).fit(Clips(), torch.ones(8, 4).split(4))
    assert (tmp_path / "lightning_logs/version_0/hparams.yaml").is_file()
