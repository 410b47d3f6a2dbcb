"""What users read on a Trainer, in hooks and after a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Module, Trainer
from lockstep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lockstep.strategies import DDP
from tests.conftest import REPO_ROOT
from tests.trainer.toy import Net, loader, net, quiet


class Notes(Callback):
    """The state at several hooks, and the batches that are the last."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.last: list[bool] = []

    def note(self, trainer: Trainer) -> None:
        flags = (trainer.training, trainer.validating, trainer.testing, trainer.predicting)
        self.seen.append(
            (trainer.state.status, trainer.state.fn, trainer.state.stage, flags.index(True) if any(flags) else None)
        )
        assert trainer.lightning_module is trainer.model  # the strategy "single" wraps nothing

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        self.note(trainer)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self.note(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last.append(trainer.is_last_batch)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if not trainer.sanity_checking:
            self.note(trainer)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self.note(trainer)

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self.note(trainer)


class WithTest(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None: ...


def test_the_state_names_what_runs() -> None:
    notes, data = Notes(), loader(24)
    trainer = quiet(callbacks=[notes], num_sanity_val_steps=1, accelerator="cpu", devices=1)
    assert trainer.state == ("initializing", None, None)
    assert trainer.model is trainer.lightning_module is None
    module = WithTest()
    trainer.fit(model=module, train_dataloaders=data, val_dataloaders=[data])
    assert trainer.state == ("finished", "fit", None) and trainer.state.finished and not trainer.interrupted
    trainer.test(dataloaders=data, verbose=False)
    trainer.predict(dataloaders=data)
    assert notes.seen == [
        ("running", "fit", "sanity_check", None),
        ("running", "fit", "train", 0),
        ("running", "fit", "validate", 1),
        ("running", "test", "test", 2),
        ("running", "predict", "predict", 3),
    ]
    assert notes.last == [False, False, True]
    assert trainer.val_dataloaders == [data] and trainer.test_dataloaders is data is trainer.predict_dataloaders
    assert trainer.model is module


def test_a_run_that_fails_is_interrupted() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("no step")

    trainer = quiet()
    with pytest.raises(ValueError, match="no step"):
        trainer.fit(Fails(), loader(8))
    assert trainer.interrupted and trainer.state.stopped and trainer.state.stage is None


def test_facts_that_are_known_before_a_run() -> None:
    saver, stopper = ModelCheckpoint(), EarlyStopping(monitor="val/loss")
    trainer = Trainer(callbacks=[stopper, saver], precision=64, logger=False, accelerator="cpu", devices=1)
    assert (trainer.precision, trainer.num_devices, trainer.node_rank) == ("64-true", 1, 0)
    assert (trainer.checkpoint_callbacks, trainer.early_stopping_callback) == ([saver], stopper)
    assert quiet().early_stopping_callback is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("global_step", "resume with fit"),
        ("strategy", "give Trainer"),
        ("training", "it follows the run"),
    ],
)
def test_what_follows_the_run_cannot_be_set(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=f"trainer.{name} cannot be set; {said}"):
        setattr(quiet(), name, 1)


def test_a_strategy_has_optimizers_only_in_a_run() -> None:
    with pytest.raises(AttributeError, match="a strategy has optimizers only while fit runs; read trainer.optimizers"):
        quiet().strategy.optimizers = []  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="a strategy has lr_scheduler_configs only while fit runs"):
        _ = quiet().strategy.lr_scheduler_configs  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("world_size", "; read topology.world_size"),
        ("is_global_zero", "; read trainer.is_global_zero"),
        ("reduce", "; call all_reduce"),
        ("nothing", ""),
    ],
)
def test_attributes_of_other_strategies_are_named(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"^'SingleDevice' object has no attribute '{name}'{instead}$"):
        getattr(quiet(devices=1).strategy, name)
    quiet(devices=1).strategy.barrier("loaded")


def test_a_strategy_knows_its_device_before_a_run_and_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, found = quiet(devices=1, accelerator="cpu", max_epochs=1), []
    module = net(lr=0.1)
    module.on_train_start = lambda: found.append(trainer.strategy.root_device)  # type: ignore[attr-defined]
    trainer.fit(module, loader())
    assert [trainer.strategy.root_device, *found] == [torch.device("cpu")] * 2  # type: ignore[attr-defined]
    strategy = DDP()
    monkeypatch.setattr(strategy, "_accelerator", "cuda")
    assert strategy.root_device == torch.device("cuda", 0)


def test_evaluation_without_a_module_takes_the_best_weights(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val/loss", mode="max")  # the first epoch's, of three
    trainer = quiet(enable_checkpointing=True, callbacks=[saver], max_epochs=3, accelerator="cpu", devices=1)
    module = net(lr=0.1)
    trainer.fit(module, loader(), loader())
    last = trainer.callback_metrics["val/loss"]
    assert trainer.validate(module, loader(), verbose=False)[0]["val/loss"] == pytest.approx(float(last))
    best = trainer.validate(dataloaders=loader(), verbose=False)[0]["val/loss"]
    assert best == pytest.approx(float(saver.best_model_score or 0)) != pytest.approx(float(last))
    with pytest.raises(ValueError, match="test needs a module, as this Trainer has run none yet"):
        quiet().test(dataloaders=loader())


@pytest.mark.ranks
def test_started_ranks_bring_the_facts_back() -> None:
    trainer = quiet(devices=2, accelerator="cpu")
    module, data = net(), loader(16)
    trainer.fit(module, data, data)
    assert (trainer.num_devices, trainer.lightning_module, trainer.val_dataloaders) == (2, module, data)
    assert "val/loss" in trainer.validate(dataloaders=data, verbose=False)[0]


INTERRUPTED = """
import os, signal
from tests.trainer.toy import Net, loader, quiet
class Own(Net):
    def on_train_batch_end(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
quiet().fit(Own(), loader(80))
"""


@pytest.mark.long
@pytest.mark.ranks
def test_ctrl_c_ends_a_script_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=REPO_ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == -signal.SIGINT  # as Python ends by itself; 130 in a shell
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "lockstep: interrupted"
