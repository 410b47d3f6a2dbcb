"""What a user can get wrong is one sentence that says what to do, before any process starts where it can be known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import CheckpointError, DataModule, Loss, Module, Trainer
from lockstep.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoardLogger
from lockstep.strategies import DDP
from lockstep.strategies.launch import launcher
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights


@pytest.fixture
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(launcher, "launch", refuse)


def sentence(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, which is one line and no longer than a user reads."""
    text = str(caught.value)
    assert "\n" not in text and 20 < len(text) < 400, text
    return text


TRAINER: dict[str, tuple[dict[str, Any], str]] = {
    "max_epochs": ({"max_epochs": 0}, "max_epochs must be a whole number of at least 1, but max_epochs=0"),
    "max_epochs type": ({"max_epochs": "5"}, "max_epochs must be a whole number of at least 1, but max_epochs='5'"),
    "max_steps": ({"max_steps": 0}, "max_steps must be"),
    "min_epochs": ({"min_epochs": 3, "max_epochs": 2}, "min_epochs=3 is more than max_epochs=2; lower it"),
    "accumulate": ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be .* but accumulate_grad_batches=0"),
    "accumulate type": ({"accumulate_grad_batches": 2.0}, "accumulate_grad_batches=2.0"),
    "log_every": ({"log_every_n_steps": True}, "log_every_n_steps must be a whole number"),
    "sanity": ({"num_sanity_val_steps": -2}, "num_sanity_val_steps must be a whole number of at least -1"),
    "limit above": (
        {"limit_val_batches": 1.5},
        "limit_val_batches must be a whole number of batches or a fraction in \\[0.0, 1.0\\], but "
        "limit_val_batches=1.5",
    ),
    "limit below": ({"limit_test_batches": -1}, "limit_test_batches=-1"),
    "limit type": ({"limit_train_batches": "half"}, "limit_train_batches='half'"),
    "limit zero": (
        {"limit_train_batches": 0},
        "limit_train_batches and val_check_interval must be above 0; to turn validation off set limit_val_batches=0",
    ),
    "overfit": ({"overfit_batches": True}, "overfit_batches must be"),
    "across epochs": (
        {"check_val_every_n_epoch": None},
        "check_val_every_n_epoch=None .* must be a whole number, but it is None",
    ),
    "across epochs, part": (
        {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
        "must be a whole number, but it is 0.5",
    ),
    "clip": (
        {"gradient_clip_val": 0},
        "gradient_clip_val must be a number above 0, or None for no clipping, but gradient_clip_val=0",
    ),
    "clip in words": ({"gradient_clip_val": "0.5"}, "must be a number above 0, .* but gradient_clip_val='0.5'"),
    "clip at NaN": ({"gradient_clip_val": float("nan")}, "must be a number above 0, .* but gradient_clip_val=nan"),
    "clip how": (
        {"gradient_clip_algorithm": "l2"},
        "gradient_clip_algorithm must be 'norm' or 'value', but gradient_clip_algorithm='l2'",
    ),
    "seed by name": ({"seed": "a"}, "seed must be in .*, but seed='a'"),
    "fast": ({"fast_dev_run": "yes"}, "fast_dev_run must be a whole number of at least 0, but fast_dev_run='yes'"),
    "folder": ({"default_root_dir": 3}, "default_root_dir must be a path, got 3"),
    "seed": ({"seed": -1}, "seed must be in \\[0, 2\\*\\*63\\), but seed=-1"),
    "precision": ({"precision": "17"}, "precision must be one of 32-true, .*, but precision='17'"),
    "strategy": ({"strategy": "dpd"}, "strategy must be one of .*, but strategy='dpd'; did you mean '.*'\\?"),
    "strategy far": ({"strategy": "quantum"}, "but strategy='quantum'$"),
    "strategy class": ({"strategy": DDP}, "but strategy=<class .*DDP'>; write DDP\\(\\)"),
    "no strategy": ({"strategy": None}, "but strategy=None; give 'auto'"),
    "devices twice": ({"devices": [0, 0]}, "a list such as \\[0, 1\\], but devices=\\[0, 0\\]"),
    "devices in part": ({"devices": 1.5}, "devices must be .*, but devices=1.5"),
    "strategy type": ({"strategy": 3}, "strategy must be a name or a Strategy object, but strategy=3"),
    "devices": (
        {"devices": "many"},
        "devices must be 'auto', -1, a whole number of at least 1 or a list such as \\[0, 1\\], but devices='many'",
    ),
    "devices zero": ({"devices": 0}, "devices=0"),
    "single": (
        {"strategy": "single", "devices": 2},
        "strategy='single' runs on one device, but devices=2; use strategy='ddp' for 2",
    ),
    "nodes": ({"num_nodes": 2}, "num_nodes=2 needs a launcher .*torchrun --nnodes=2"),
    "accelerator": (
        {"accelerator": "tpu"},
        "accelerator must be 'auto', 'cpu', 'gpu' or 'cuda', but accelerator='tpu'",
    ),
    "callback": (
        {"callbacks": [EarlyStopping]},
        "callbacks must be Callback objects, but one is <class .*EarlyStopping'>; write EarlyStopping\\(…\\)",
    ),
    "no callback": ({"callbacks": [None]}, "one is None; subclass lockstep.callbacks.Callback"),
    "callbacks as a number": ({"callbacks": 3}, "one is 3; subclass lockstep.callbacks.Callback"),
    "callback by name": ({"callbacks": "early"}, "one is 'early'; subclass lockstep.callbacks.Callback"),
    "logger": (
        {"logger": ["tensorboard"]},
        "logger must be True, False, a Logger or a list of them, but one is 'tensorboard'",
    ),
    "logger by name": ({"logger": "csv"}, "but one is 'csv'; subclass lockstep.callbacks.Logger"),
    "flag": ({"enable_progress_bar": "no"}, "enable_progress_bar must be True or False, but enable_progress_bar='no'"),
    "savers": (
        {"callbacks": ModelCheckpoint()},
        "enable_checkpointing=False contradicts a ModelCheckpoint among the callbacks; drop one of them",
    ),
    "twice": (
        {"callbacks": [EarlyStopping("a"), EarlyStopping("a")]},
        "two callbacks have the same state_key 'EarlyStopping\\[monitor=a, mode=min\\]'",
    ),
    "max_time": ({"max_time": "ten minutes"}, "max_time must read DD:HH:MM:SS, .* but it is 'ten minutes'"),
    "max_time of NaN": ({"max_time": {"hours": float("nan")}}, "max_time as a dict takes numbers .* {'hours': nan}"),
    "limit of NaN": ({"limit_train_batches": float("nan")}, "limit_train_batches must .* but limit_train_batches=nan"),
    "overfit NaN": ({"overfit_batches": float("nan")}, "overfit_batches must be .*, but overfit_batches=nan"),
    "seed as a flag": ({"seed": True}, "seed must be in .*, but seed=True"),
    "number of numpy": ({"max_epochs": np.int64(0)}, "max_epochs must be .*, but max_epochs=0"),
    "flag as a number": ({"benchmark": 2}, "benchmark must be True or False, but benchmark=2"),
}


@pytest.mark.parametrize(("options", "message"), TRAINER.values(), ids=TRAINER)
def test_arguments_of_the_trainer(options: dict[str, Any], message: str, starts_nothing: None) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        quiet(**options)
    sentence(caught)


def test_arguments_by_place() -> None:
    with pytest.raises(
        TypeError, match=r"Trainer takes its arguments by name, but got 5; write Trainer\(max_epochs=…\)"
    ):
        Trainer(5)


def test_a_backward_within_the_step() -> None:
    class Twice(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.backward()
            return loss

    with pytest.raises(RuntimeError, match="let training_step return its loss without calling backward"):
        quiet(max_epochs=1).fit(Twice(), loader(8))


def test_predictions_without_a_forward() -> None:
    class Headless(Module):
        pass

    with pytest.raises(ValueError, match="predict needs Headless.predict_step or forward; define one"):
        quiet().predict(Headless(), loader(8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(
        ValueError, match="accelerator='gpu' needs a CUDA device, and torch sees none; use accelerator='cpu' or 'auto'"
    ):
        quiet(accelerator="gpu")


def test_numbers_of_numpy_are_those_of_python() -> None:
    given = quiet(max_epochs=np.int64(3), seed=np.int32(7), limit_val_batches=np.float32(0.5)).arguments
    assert [(type(value), value) for value in (given.max_epochs, given.seed, given.limit_val_batches)] == [
        (int, 3),
        (int, 7),
        (float, 0.5),
    ]


def test_no_limit_may_be_written_as_minus_one() -> None:
    trainer = quiet(max_epochs=-1, max_steps=5)
    trainer.fit(Net(), loader(16))
    assert (trainer.global_step, trainer.current_epoch, trainer.max_epochs) == (5, 2, None)
    trainer = quiet(max_epochs=2, max_steps=-1)
    trainer.fit(Net(), loader(16))
    assert trainer.global_step == 4


LAUNCHERS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "half set": ({"RANK": "0"}, {}, "RANK=0 is set but WORLD_SIZE is not: set both, or unset both"),
    "no address": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        {},
        "MASTER_ADDR is not set although .*: set it to the host of rank 0",
    ),
    "devices": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"},
        {"devices": 3},
        "devices=3 contradicts .*started 2 ranks",
    ),
    "single": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"},
        {"strategy": "single"},
        "runs on one process, but .* 2; use",
    ),
    "nodes": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"},
        {"num_nodes": 3},
        "num_nodes=3 contradicts",
    ),
}


@pytest.mark.parametrize(("variables", "options", "message"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_launchers_that_contradict(
    variables: dict[str, str],
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    starts_nothing: None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as caught:
        quiet(**options)
    sentence(caught)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class NoStep(Module):
    configure_optimizers = Net.configure_optimizers


class NoOptimizers(Module):
    training_step = Net.training_step


def empty() -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(0, 8), torch.zeros(0)), batch_size=4)


def writing(**options: Any) -> Trainer:
    """What would write below a file."""
    Path("file").touch()
    return quiet(devices=2, **options)


BEFORE: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (
        lambda: quiet(devices=2).fit(nn.Linear(1, 1), loader()),
        "fit takes a lockstep.Module, but model is Linear; subclass Module",
    ),
    "class": (
        lambda: quiet(devices=2).fit(Net, loader()),
        "fit takes a lockstep.Module, but model is the class Net; write Net\\(…\\)",
    ),
    "file of data": (
        lambda: quiet().fit(Net(), "train.csv"),
        "a loader is a DataLoader, an iterable of batches or .*, but it is str; pass a DataLoader",
    ),
    "tensor": (lambda: quiet().fit(Net(), torch.zeros(3, 8)), "but it is Tensor; pass a DataLoader"),
    "array": (lambda: quiet().fit(Net(), np.zeros((3, 8))), "but it is ndarray; pass a DataLoader"),
    "not set up": (
        lambda: quiet(devices=2).validate(type("Bare", (Net,), {"__init__": lambda self: None})(), loader()),
        r"Bare has not been set up as a Module; call super\(\).__init__\(\) first in Bare.__init__",
    ),
    "number as a folder": (lambda: CSVLogger(3), "save_dir of CSVLogger must be a path, got 3"),
    "class of data": (
        lambda: quiet().fit(Net(), DataModule),
        "but it is the class DataModule; pass an object of it",
    ),
    "no path": (lambda: quiet().fit(Net(), loader(), ckpt_path=""), "ckpt_path must be the path .*, but ckpt_path=''"),
    "no step": (lambda: quiet(devices=2).fit(NoStep(), loader()), "NoStep needs the method training_step; define it"),
    "no optimizers": (
        lambda: quiet(devices=2).fit(NoOptimizers(), loader()),
        "NoOptimizers needs the method configure_optimizers; define it",
    ),
    "no end": (
        lambda: quiet(devices=2, max_epochs=None).fit(Net(), loader()),
        "fit needs an end: give the Trainer max_epochs, max_steps or max_time",
    ),
    "no data": (
        lambda: quiet(devices=2).fit(Net()),
        "fit needs training data: give train_dataloaders, or a DataModule or Module with train_dataloader",
    ),
    "bare data module": (lambda: quiet(devices=2).fit(Net(), datamodule=DataModule()), "fit needs training data"),
    "frozen": (
        lambda: quiet(devices=2).fit(Frozen(), loader()),
        "Frozen has no trainable parameter; give it layers, or set requires_grad",
    ),
    "empty": (
        lambda: quiet(devices=2).fit(Net(), empty()),
        "train_dataloaders is empty: its dataset has no sample, or drop_last drops its only batch",
    ),
    "all dropped": (
        lambda: quiet(devices=2).fit(Net(), loader(4, 8, drop_last=True)),
        "train_dataloaders is empty.* drop_last",
    ),
    "empty list": (
        lambda: quiet(devices=2).fit(Net(), []),
        "train_dataloaders is an empty list or dict; give a loader",
    ),
    "empty beside": (lambda: quiet(devices=2).fit(Net(), {"a": loader(), "b": empty()}), "train_dataloaders is empty"),
    "empty validation": (
        lambda: quiet(devices=2).fit(Net(), loader(), [loader(), empty()]),
        "a loader for validation is empty",
    ),
    "empty test": (lambda: quiet(devices=2).predict(Net(), empty()), "a loader for predict is empty"),
    "folder": (
        lambda: writing(logger=True, default_root_dir="file/x").fit(Net(), loader()),
        "default_root_dir.*must be folders that can be written, but 'file/x' cannot: Not a directory",
    ),
    "folder of no UTF-8": (
        lambda: writing(logger=True, default_root_dir="a\udcff").fit(Net(), loader()),
        r"default_root_dir.*must be folders that can be written, but 'a\\udcff' cannot: 'utf-8' codec can't encode",
    ),
    "long name": (
        lambda: writing(logger=TensorBoardLogger(name="n" * 256)).fit(Net(), loader()),
        r"the run folder 'runs/nnn\w+' cannot be made \(File name too long\); give the logger another name or version",
    ),
    "file in place of a name": (
        lambda: writing(logger=TensorBoardLogger(".", name="file")).fit(Net(), loader()),
        r"the run folder 'file' cannot be made \(File exists\); give the logger another name",
    ),
    "name with a null": (
        lambda: writing(logger=TensorBoardLogger(version="a\0b")).fit(Net(), loader()),
        r"the run folder .* cannot be made \(embedded null byte\); give the logger another name or version",
    ),
    "saver's folder": (
        lambda: writing(enable_checkpointing=True, callbacks=ModelCheckpoint(dirpath="file/x")).fit(Net(), loader()),
        "dirpath .*'.*file/x' cannot",
    ),
    "logger's folder": (
        lambda: writing(logger=TensorBoardLogger("file/x")).fit(Net(), loader()),
        "save_dir.*'file/x' cannot",
    ),
    "checkpoint": (lambda: quiet(devices=2).fit(Net(), loader(), ckpt_path="nowhere"), "nowhere"),
    "checkpoint to test": (lambda: quiet(devices=2).validate(Net(), loader(), ckpt_path="nowhere"), "nowhere"),
    "best": (
        lambda: quiet(devices=2).fit(Net(), loader(), ckpt_path="best"),
        "ckpt_path='best' needs a ModelCheckpoint that has saved in this process; fit first, or give a path",
    ),
    "outside": (
        lambda: quiet().save_checkpoint("x"),
        "save_checkpoint was called where this Trainer has no state of a fit",
    ),
    "negative": (
        lambda: DDP(find_unused_parameters=True, static_graph=True),
        "find_unused_parameters=True contradicts static_graph=True",
    ),
}


@pytest.mark.parametrize(("call", "message"), BEFORE.values(), ids=BEFORE)
def test_known_before_any_process_starts(call: Callable[[], Any], message: str, starts_nothing: None) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as caught:
        call()
    sentence(caught)


def test_no_validation_loader_is_allowed() -> None:
    quiet().fit(Net(), loader(8), [])
    quiet().fit(Net(), loader(8), {})


# ---- what only the run can know --------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        yield from ((torch.zeros(8), 0) for _ in range(self.n))


class Late(DataModule):
    def train_dataloader(self) -> Any:
        return empty()


DURING: dict[str, tuple[Callable[[], Any], str]] = {
    "data module": (lambda: quiet().fit(Net(), datamodule=Late()), "the loader is empty: TensorDataset has 0 samples"),
    "stream": (
        lambda: quiet().fit(Net(), DataLoader(Stream(0))),
        "the loader yielded no batch in epoch 0: Stream yields no item",
    ),
    "fraction": (
        lambda: quiet(limit_train_batches=0.1).fit(Net(), loader(16)),
        "limit_train_batches=0.1 of 2 batches is less than one; give at least 0.5000",
    ),
    "fraction of unknown": (
        lambda: quiet(limit_train_batches=0.5).fit(Net(), DataLoader(Stream(4))),
        "limit_train_batches=0.5 is a fraction, which needs a loader",
    ),
    "interval": (
        lambda: quiet(val_check_interval=3).fit(Net(), loader(16), loader(8)),
        "val_check_interval=3 is more than the 2 batches of an epoch; lower it",
    ),
    "part of unknown": (
        lambda: quiet(val_check_interval=0.5).fit(Net(), DataLoader(Stream(4)), loader(8)),
        "val_check_interval=0.5 is a fraction, which needs a training loader of known length",
    ),
    "loader": (
        lambda: quiet().fit(Net(), 5),
        "a loader is a DataLoader, an iterable of batches or a function that returns one, but it is int",
    ),
    "indices in place of batches": (
        lambda: quiet().fit(Net(), DataLoader(data(8), batch_sampler=range(8))),  # type: ignore[arg-type]
        "a batch sampler must yield lists of indices, but range yielded 0; pass it as sampler=, with a batch_size",
    ),
    "sampler": (
        lambda: quiet(devices=1, split_batches=True, accumulate_grad_batches=2).fit(Net(), [[torch.zeros(1)]]),
        "split_batches needs batches that can be split",
    ),
}


@pytest.mark.parametrize(("call", "message"), DURING.values(), ids=DURING)
def test_known_from_the_data(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    sentence(caught)


def step(returns: Callable[[Any, Any], Any]) -> type[Net]:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return returns(self, batch)

    return type("Wrong", (Net,), {"training_step": training_step})


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "detached": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1]).detach(),
        "training_step returned a loss without gradient: it does not depend on a trainable parameter",
    ),
    "constant": (lambda m, b: torch.ones(()), "a loss without gradient"),
    "not scalar": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
        "must return a scalar loss, but its loss has shape \\[8\\]; return its mean",
    ),
    "complex": (
        lambda m, b: m(b[0]).mean() * 1j,
        "training_step must return a real loss, but its loss is torch.complex64; return its absolute value or real",
    ),
    "number": (
        lambda m, b: 1.0,
        "must return a scalar tensor, a dict with 'loss', Loss\\(total, count\\) or None, but it returned float",
    ),
    "tuple": (lambda m, b: (torch.ones(()),), "but it returned tuple"),
    "dict": (lambda m, b: {"lost": 1, "los": 2}, "but it returned dict with keys \\['los', 'lost'\\]"),
    "total detached": (lambda m, b: Loss(torch.ones(()), 1), "a loss without gradient"),
}


@pytest.mark.parametrize(("returns", "message"), LOSSES.values(), ids=LOSSES)
def test_losses_without_a_backward_are_refused(returns: Callable[[Any, Any], Any], message: str) -> None:
    model = net()
    model.__class__ = step(returns)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        quiet().fit(model, loader(8))
    sentence(caught)
    assert equal(weights(model), weights(net()))


def test_no_loss_at_all_never_reaches_max_steps() -> None:
    with pytest.raises(
        ValueError,
        match="no batch of epoch 0 led to an optimizer step, so the run would not end; let training_step return a loss",
    ):
        quiet(max_epochs=None, max_steps=5).fit(step(lambda m, b: None)(), loader(8))


class Diverges(Net):
    """One rank's loss is not finite in step 2; every rank notes what it saw."""

    def __init__(self, value: float, where: int) -> None:
        super().__init__()
        self.value, self.where = value, where
        self.before: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.before = weights(self)
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self.global_step == 2 and self.global_rank == self.where else loss

    def on_exception(self, exception: BaseException) -> None:
        Path(f"rank{self.global_rank}").write_text(
            f"{equal(self.before, weights(self))} {self.global_step} {type(exception).__name__}"
        )


@pytest.mark.ranks
@pytest.mark.parametrize(("devices", "value"), [(1, float("inf")), (2, float("nan"))])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_with_parameters_untouched(devices: int, value: float) -> None:
    rank = devices - 1
    with pytest.raises(
        FloatingPointError,
        match=f"the loss of rank {rank} is NaN or infinite in step 2 of epoch 0; no parameter was changed by it",
    ) as caught:
        quiet(devices=devices).fit(Diverges(value, rank), loader(40, 4))
    sentence(caught)
    assert [Path(f"rank{i}").read_text() for i in range(devices)] == ["True 2 FloatingPointError"] * devices


@pytest.mark.slow  # tests/trainer/test_exactness.py has a program that fails so
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "quiet(devices=2).fit(Diverges(float('nan'), 1), loader(40, 4))",
            "FloatingPointError: the loss of rank 1 is NaN or infinite in step 2",
        ),
        ("quiet(strategy='fdsp')", "ValueError: strategy must be one of"),
    ],
)
def test_the_exit_code_tells(script: str, message: str) -> None:
    code = f"from tests.trainer.test_errors import *; {script}"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stderr.strip().split("\n")[-1].startswith(message)


class Spare(Net):
    """Has layers that a step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.late = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.late(batch[0]).mean() if self.global_step == 0 else loss


@pytest.mark.long
@pytest.mark.ranks
def test_unused_parameters_under_ddp_are_named() -> None:
    with pytest.raises(
        RuntimeError,
        match=(
            "these parameters got no gradient in a step: spare.weight, spare.bias; "
            ".*DDP\\(find_unused_parameters=True\\)"
        ),
    ) as caught:
        quiet(devices=2).fit(Spare(), loader(32, 4))
    sentence(caught)
    model = Spare()
    model.spare.requires_grad_(False)
    with pytest.raises(RuntimeError, match="these parameters got no gradient in a step: late.weight, late.bias;"):
        quiet(devices=2).fit(model, loader(32, 4))
    trainer = quiet(devices=2, strategy=DDP(find_unused_parameters=True))
    trainer.fit(Spare(), loader(32, 4))
    assert trainer.global_step == 4


@pytest.mark.parametrize("package", ["tensorboard", "torchmetrics"])
def test_a_missing_optional_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if package == "tensorboard":
        from importlib import util

        find = util.find_spec
        monkeypatch.setattr(util, "find_spec", lambda name, *args: None if name == "tensorboard" else find(name, *args))
        with pytest.raises(
            ImportError,
            match="TensorBoardLogger needs the package tensorboard, which is not installed: pip install tensorboard",
        ):
            Trainer(max_epochs=1)
    else:
        monkeypatch.setitem(sys.modules, "torchmetrics", None)
        quiet().fit(Net(), loader(8), loader(8))  # only who uses it needs it


def test_a_path_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"x")
    for path in ("weights.pt", tmp_path, "missing"):
        with pytest.raises(CheckpointError, match=str(path)):
            quiet().fit(Net(), loader(8), ckpt_path=path)


class ReturnsText(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return "a loss"


class ReturnsANumber(Net):
    def configure_optimizers(self) -> Any:
        return 0.1


@pytest.mark.parametrize(
    ("make", "place"), [(ReturnsText, "ReturnsText.training_step"), (ReturnsANumber, "ReturnsANumber.configure_optim")]
)
def test_an_error_about_a_method_says_whose_and_where(make: type[Net], place: str) -> None:
    with pytest.raises(TypeError, match=rf" \({place}\w*, test_errors\.py, line \d+\)$"):
        quiet().fit(make(), loader())


class Grown(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


def test_a_checkpoint_of_another_module_says_what_differs(tmp_path: Path) -> None:
    trainer = quiet(accelerator="cpu", devices=1, max_steps=1)
    trainer.fit(Net(), loader())
    with pytest.raises(TypeError, match="save_checkpoint takes a path, but path=3"):
        trainer.save_checkpoint(3)  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "net")
    for module, message in (
        (Grown(), "of another module: it lacks more.bias, more.weight; build the module it was saved of"),
        (Net(width=4), r"net.0.weight has shape \[16, 8\], but the module's has \[4, 8\]; build the module with"),
    ):
        with pytest.raises(CheckpointError, match=message):
            quiet(accelerator="cpu", devices=1).fit(module, loader(), ckpt_path=tmp_path / "net")


def test_the_name_of_a_logged_value_is_a_string() -> None:
    class Numbered(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log(3, 1.0)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="takes a name and a value, but its name is 3; write self.log"):
        quiet(accelerator="cpu", devices=1).fit(Numbered(), loader())
