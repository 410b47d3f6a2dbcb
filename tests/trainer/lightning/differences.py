"""A small program for each row of "Different" in docs/migrating/lightning.md, and what it gives in both packages.

Each takes the package as `pl` and a folder, and returns what it saw; errors are the names of their classes.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from tests.trainer.lightning.projects import classifier, data, loader

QUIET = {
    "max_epochs": 1,
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}
Probe = Callable[[Any, Path], Any]
DIFFERENCES: dict[str, tuple[Probe, Any, Any]] = {}
"""By row of the page: the program, what it gives in Lightning, and in Lockstep."""
RANKS: set[str] = set()
"""Rows whose program starts ranks."""
ELSEWHERE = {
    '`strategy="ddp"`': "tests/trainer/test_launch.py",
    "`manual_backward(loss, retain_graph=True)`": "tests/trainer/lightning/test_behavior.py",
    "a loader with `state_dict` in a `CombinedLoader`": "tests/trainer/lightning/test_behavior.py",
    "another number of ranks": "tests/trainer/test_exactness.py",
}
"""Rows that are not shown side by side: the file whose tests show what Lockstep does."""


def differs(row: str, theirs: Any, ours: Any, ranks: bool = False) -> Callable[[Probe], Probe]:
    def add(probe: Probe) -> Probe:
        DIFFERENCES[row] = probe, theirs, ours
        if ranks:
            RANKS.add(row)
        return probe

    return add


def seen(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the name of the error that it raises."""
    try:
        return call()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return type(error).__name__


def fit(pl: Any, module: Any, train: Any = None, val: Any = None, ckpt_path: Any = None, **arguments: Any) -> Any:
    """The Trainer after a short fit."""
    trainer = pl.Trainer(**QUIET | arguments)
    trainer.fit(module, loader(8) if train is None else train, val, ckpt_path=ckpt_path)
    return trainer


def part(pl: Any, path: str) -> Any:
    """A module below the package."""
    return importlib.import_module(f"{pl.__name__}.{path}")


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of the only metrics.csv below a folder."""
    import csv

    (found,) = path.rglob("metrics.csv")
    with open(found, newline="") as file:
        return list(csv.DictReader(file))


# ---- steps and losses ------------------------------------------------------------------------------


@differs("a fit without an end", [1000, 1], [1000, "ValueError"])
def _(pl: Any, folder: Path) -> Any:
    def stop(self: Any) -> None:
        self.trainer.should_stop = True

    module = classifier(pl, on_train_epoch_end=stop)
    return [
        fit(pl, module(), max_epochs=None).max_epochs,
        seen(lambda: fit(pl, module(), max_epochs=-1).current_epoch),
    ]


@differs(
    "a fit that trains nothing: `max_epochs`, `max_steps` or `limit_train_batches` of 0, a loader without batches, no "
    "optimizer, a step that returns None every time",
    [True] * 6,
    ["ValueError"] * 6,
)
def _(pl: Any, folder: Path) -> Any:
    def returns(module: Any, **arguments: Any) -> Any:
        return seen(lambda: bool(fit(pl, module(), **arguments)))

    plain = classifier(pl)
    return [
        returns(plain, max_epochs=0),
        returns(plain, max_steps=0),
        returns(plain, limit_train_batches=0),
        returns(plain, train=DataLoader(data(2), 4, drop_last=True)),
        returns(classifier(pl, configure_optimizers=lambda self: None)),
        returns(classifier(pl, training_step=lambda self, batch, batch_idx: None)),
    ]


@differs("a loss or gradient that is not finite", 2, "FloatingPointError")
def _(pl: Any, folder: Path) -> Any:
    nan = classifier(pl, training_step=lambda self, batch, batch_idx: self(batch[0]).sum() * math.nan)
    return seen(lambda: fit(pl, nan()).global_step)


@differs("a step of an optimizer that moves no parameter", 2, "RuntimeError")
def _(pl: Any, folder: Path) -> Any:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return closure() if closure is not None else None

    still = classifier(pl, configure_optimizers=lambda self: Idle(self.parameters(), 0.1))
    return seen(lambda: fit(pl, still()).global_step)


@differs("`-1` from `on_train_batch_start`", 0, "RuntimeError")
def _(pl: Any, folder: Path) -> Any:
    skips = classifier(pl, on_train_batch_start=lambda self, batch, batch_idx: -1)
    return seen(lambda: fit(pl, skips()).global_step)


@differs("`training_step(self, dataloader_iter)`", 2, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self(batch[0]), batch[1])

    return seen(lambda: fit(pl, classifier(pl, training_step=training_step)()).global_step)


@differs("steps and hooks without `dataloader_idx`, and several loaders", "RuntimeError", True)
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: bool(fit(pl, classifier(pl)(), val=[loader(4), loader(4)])))


def _constant(pl: Any, **attributes: Any) -> Any:
    """A module whose last bias falls by 0.1 times the weight of each batch in a step."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.net[-1].bias[0] + 0 * self(batch[0]).sum()

    return classifier(pl, **{"training_step": training_step} | attributes)


def _fallen(pl: Any, module: Any, *given: Any, **arguments: Any) -> float:
    """How far a first bias has fallen."""
    before = module.net[-1].bias[0].item()
    fit(pl, module, *given, **arguments)
    return round(before - module.net[-1].bias[0].item(), 5)


@differs("short last accumulation window", 0.15, 0.2)
def _(pl: Any, folder: Path) -> Any:
    return _fallen(pl, _constant(pl)(), loader(12), accumulate_grad_batches=2)


@differs("uneven batches and ranks", 0.05, 0.08)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return (self.net[-1].bias[0] + 0 * self(batch[0]).sum()) * (batch_idx == 0)

    return _fallen(pl, _constant(pl, training_step=training_step)(), DataLoader(data(5), 4), accumulate_grad_batches=2)


@differs("resume in mid-epoch", [0, 1], [2, 3])
def _(pl: Any, folder: Path) -> Any:
    places: list[int] = []
    x = torch.arange(16.0).repeat_interleave(4).view(16, 4) / 4

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        places.append(int(batch[0][0, 0]))
        return F.cross_entropy(self(batch[0] / 16), batch[1])

    module = classifier(pl, training_step=training_step)
    batches = DataLoader(TensorDataset(x, torch.zeros(16, dtype=torch.long)), 4)
    save = part(pl, "callbacks").ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(pl, module(), batches, callbacks=[save], enable_checkpointing=True, default_root_dir=folder)
    places.clear()
    fit(pl, module(), batches, ckpt_path=folder / "step=2.ckpt")
    return places


# ---- what is logged --------------------------------------------------------------------------------


@differs("the step of loggers", ["0", "1", "2"], ["1", "2", "3"])
def _(pl: Any, folder: Path) -> Any:
    fit(pl, classifier(pl)(), loader(12), logger=part(pl, "loggers").CSVLogger(folder))
    return sorted({row["step"] for row in rows(folder) if row["train_loss_step"]})


@differs("values of steps", 1, 2)
def _(pl: Any, folder: Path) -> Any:
    fit(pl, classifier(pl)(), loader(12), logger=part(pl, "loggers").CSVLogger(folder), log_every_n_steps=2)
    return len([row for row in rows(folder) if row["train_loss_step"]])


@differs("`on_step=True` in evaluation", [True, 2], [False, 0])
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("x", float(batch_idx), on_step=True, on_epoch=True)

    trainer = fit(
        pl,
        classifier(pl, validation_step=validation_step)(),
        val=loader(8),
        logger=part(pl, "loggers").CSVLogger(folder),
    )
    del trainer
    steps = [row for row in rows(folder) if row.get("x_step")]
    return [bool(steps), len(steps)]


@differs("what `validate` and `test` return", [{}], [{"x": 0.5}])
def _(pl: Any, folder: Path) -> Any:
    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)

    return pl.Trainer(**QUIET).test(classifier(pl, test_step=test_step)(), loader(8), verbose=False)


@differs("values in `callback_metrics` and `logged_metrics`", "torch.float32", "torch.float64")
def _(pl: Any, folder: Path) -> Any:
    return str(fit(pl, classifier(pl)()).callback_metrics["train_loss"].dtype)


@differs("`self.log` without a Trainer", None, "RuntimeError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: classifier(pl)().log("x", 1.0))


@differs("`self.log` twice in a step with other options", "MisconfigurationException", ["x", "x_epoch", "x_step"])
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.log("x", 1.0, on_step=True, on_epoch=True)
        self.log("x", 2.0, on_step=False, on_epoch=True)
        return F.cross_entropy(self(batch[0]), batch[1])

    return seen(lambda: sorted(fit(pl, classifier(pl, training_step=training_step)()).callback_metrics))


@differs("hyperparameters of the same name in module and DataModule", "RuntimeError", {"lr": 0.1, "data.lr": 7})
def _(pl: Any, folder: Path) -> Any:
    class Data(pl.LightningDataModule):
        def __init__(self, lr: float = 7) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(8)

    logger = part(pl, "loggers").CSVLogger(folder)

    def run() -> Any:
        pl.Trainer(**QUIET | {"logger": logger}).fit(classifier(pl)(), Data())
        import yaml

        (found,) = folder.rglob("hparams.yaml")
        return yaml.safe_load(found.read_text())

    return seen(run)


@differs("what `self.log` shows at a step", [[1.0], [0.0, 0.0, 2.0, 2.0]], [[0.5, 2.0], [0.0, 2.0]])
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)
        return F.cross_entropy(self(batch[0]), batch[1])

    def sometimes(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return training_step(self, batch, batch_idx) if batch_idx % 2 == 0 else self(batch[0]).sum()

    found = []
    for every, step, samples in ((2, training_step, 12), (1, sometimes, 16)):
        logger = part(pl, "loggers").CSVLogger(folder / str(every))
        fit(pl, classifier(pl, training_step=step)(), loader(samples), logger=logger, log_every_n_steps=every)
        found.append([float(row["x"]) for row in rows(folder / str(every)) if row["x"]])
    return found


@differs("what `on_train_batch_end` logs", ["0", "1"], ["2", "2"])
def _(pl: Any, folder: Path) -> Any:
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)

    logger = part(pl, "loggers").CSVLogger(folder)
    fit(pl, classifier(pl, on_train_batch_end=on_train_batch_end)(), logger=logger)
    return [row["step"] for row in rows(folder) if row.get("x")]


@differs("a metric that is logged in the steps of one loader and updated in those of others", 0.5, 0.25)
def _(pl: Any, folder: Path) -> Any:
    from torchmetrics import MeanMetric

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.mean.update(0.5 - 0.5 * dataloader_idx)
        if dataloader_idx == 0:
            self.log("x", self.mean, add_dataloader_idx=False)

    module = classifier(pl, validation_step=validation_step)()
    module.mean = MeanMetric()
    return float(fit(pl, module, val=[loader(4), loader(4)]).callback_metrics["x"])


# ---- hooks -----------------------------------------------------------------------------------------


@differs("order at each hook", ["callback", "module"], ["module", "callback"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []

    class Notes(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            order.append("callback")

    module = classifier(pl, on_train_start=lambda self: order.append("module"))
    fit(pl, module(), callbacks=[Notes()])
    return order


@differs("`on_before_zero_grad`", ["zero", "backward", "step"], ["backward", "step", "zero"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []
    module = classifier(
        pl,
        on_before_zero_grad=lambda self, optimizer: order.append("zero"),
        on_before_backward=lambda self, loss: order.append("backward"),
        on_before_optimizer_step=lambda self, optimizer: order.append("step"),
    )
    fit(pl, module(), limit_train_batches=1)
    return order


@differs("`outputs` in `on_train_batch_end`", [["loss"], ["a", "loss"]], [["loss"], ["a", "loss"]])
def _(pl: Any, folder: Path) -> Any:
    keys: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return {"loss": self(batch[0]).sum(), "a": 1}

    for methods in ({}, {"training_step": training_step}):
        hook = {"on_train_batch_end": lambda self, outputs, *_: keys.append(sorted(outputs))}
        fit(pl, classifier(pl, **methods | hook)(), limit_train_batches=1)
    return keys


# ---- optimizers ------------------------------------------------------------------------------------


def _configured(**extra: Any) -> Any:
    def configure_optimizers(self: Any) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), 0.1)} | extra

    return configure_optimizers


@differs("unknown keys in the dicts of `configure_optimizers`", None, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl, configure_optimizers=_configured(wrong=1))()) and None)


def _manual(pl: Any, step: Callable[[Any, Tensor], Any], **attributes: Any) -> Any:
    """A module in manual optimization that calls `step` with itself and its loss."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        step(self, F.cross_entropy(self(batch[0]), batch[1]))

    return classifier(pl, automatic_optimization=False, training_step=training_step, **attributes)()


@differs("arguments of `self.optimizers().step()` besides the closure", 2, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None, scale: int = 1) -> Any:  # type: ignore[override]
            return super().step(closure)

    def step(module: Any, loss: Tensor) -> None:
        module.manual_backward(loss)
        module.optimizers().step(scale=2)

    module = _manual(pl, step, configure_optimizers=lambda self: Scaled(self.parameters(), 0.1))
    return seen(lambda: fit(pl, module).global_step)


@differs("`self.optimizers(use_pl_optimizer=False)`", [True], [False])
def _(pl: Any, folder: Path) -> Any:
    found: list[bool] = []

    def step(module: Any, loss: Tensor) -> None:
        found.append(isinstance(module.optimizers(use_pl_optimizer=False), torch.optim.SGD))
        module.manual_backward(loss)
        module.optimizers().step()

    fit(pl, _manual(pl, step), limit_train_batches=1)
    return found


def _two(self: Any) -> Any:
    return torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[-1].parameters(), 0.1)


@differs("several optimizers", "RuntimeError", 2)
def _(pl: Any, folder: Path) -> Any:
    def configure_optimizers(self: Any) -> Any:
        first, last = _two(self)
        return {"first": first, "last": last} if "lockstep" in pl.__name__ else [first, last]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return {"first": loss, "last": 2 * loss}

    return seen(
        lambda: (
            fit(
                pl, classifier(pl, configure_optimizers=configure_optimizers, training_step=training_step)()
            ).global_step
        )
    )


@differs("`global_step`", 4, 2)
def _(pl: Any, folder: Path) -> Any:
    def step(module: Any, loss: Tensor) -> None:
        module.manual_backward(loss)
        for optimizer in module.optimizers():
            optimizer.step()

    return fit(pl, _manual(pl, step, configure_optimizers=_two)).global_step


@differs("`None` from `training_step`", [0.1, 0.05], [0.1, 0.1])
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self.net[-1].bias[0] + 0 * self(batch[0]).sum()

    module = _constant(pl, training_step=training_step)
    return [_fallen(pl, module()), _fallen(pl, module(), accumulate_grad_batches=2)]


@differs("schedulers by epoch", [0.1, 0.05], [0.1, 0.1])
def _(pl: Any, folder: Path) -> Any:
    rates: list[float] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_train_batch_end(self: Any, *_: Any) -> None:
        rates.append(self.optimizers().param_groups[0]["lr"])

    fit(pl, classifier(pl, configure_optimizers=configure_optimizers, on_train_batch_end=on_train_batch_end)())
    return rates


# ---- runs ------------------------------------------------------------------------------------------


@differs("a `Trainer(num_nodes=2)` without a launcher", None, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: pl.Trainer(**QUIET, num_nodes=2) and None)


@differs("checkpoints", [True, False], [False, True])
def _(pl: Any, folder: Path) -> Any:
    path = folder / "x.ckpt"
    fit(pl, classifier(pl)()).save_checkpoint(path)
    return [path.is_file(), (path / "manifest.json").is_file()]


@differs("`checkpoint` in `on_save_checkpoint`", [3, 2, True], [3, 2, "KeyError"])
def _(pl: Any, folder: Path) -> Any:
    found: list[Any] = []

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        checkpoint["mine"] = 3
        found.extend((checkpoint["mine"], checkpoint["global_step"], seen(lambda: bool(checkpoint["state_dict"]))))

    fit(pl, classifier(pl, on_save_checkpoint=on_save_checkpoint)()).save_checkpoint(folder / "x.ckpt")
    return found


def _files(folder: Path) -> list[str]:
    """The files and checkpoints below a folder, without the logger's own."""
    found = [path.relative_to(folder) for path in folder.rglob("*")]
    kept = [path for path in found if path.suffix in (".ckpt", ".json", ".yaml", ".lock")]
    return sorted(str(path) for path in kept if not any(parent.suffix == ".ckpt" for parent in path.parents))


@differs(
    "location of runs",
    ["checkpoints/epoch=0-step=2.ckpt"],
    [
        f"Classifier/version_0/{name}"
        for name in ("checkpoints/epoch=0-step=2.ckpt", "config.yaml", "run.lock", "summary.json", "versions.json")
    ],
)
def _(pl: Any, folder: Path) -> Any:
    fit(pl, classifier(pl)(), default_root_dir=folder, enable_checkpointing=True)
    return _files(folder)


@differs("`ckpt_path`", ["ValueError", "FileNotFoundError"], ["MissingCheckpointError", 2])
def _(pl: Any, folder: Path) -> Any:
    module = classifier(pl)
    return [
        seen(lambda word=word: fit(pl, module(), ckpt_path=word, default_root_dir=folder).global_step)
        for word in ("hpc", "auto")
    ]


@differs('`ckpt_path="last"` without a checkpoint', 2, "CheckpointError")
def _(pl: Any, folder: Path) -> Any:
    return seen(
        lambda: (
            fit(pl, classifier(pl)(), ckpt_path="last", enable_checkpointing=True, default_root_dir=folder).global_step
        )
    )


@differs(
    "an epoch that `max_steps` or `should_stop` cuts short",
    [["train_end"], False, 1],
    [[], True, 0],
)
def _(pl: Any, folder: Path) -> Any:
    ends: list[str] = []
    module = classifier(pl, on_train_epoch_end=lambda self: ends.append("train_end"))
    trainer = fit(pl, module(), loader(16), loader(4), max_steps=2)
    return [ends, "val_loss" in trainer.callback_metrics, trainer.current_epoch]


@differs("a checkpoint of an epoch's end, resumed", [1, 1], [0, 1])
def _(pl: Any, folder: Path) -> Any:
    epochs: list[int] = []
    save = part(pl, "callbacks").ModelCheckpoint(folder, "x")
    fit(pl, classifier(pl)(), callbacks=[save], enable_checkpointing=True, default_root_dir=folder)

    def note(self: Any) -> None:
        epochs.append(self.current_epoch)

    module = classifier(pl, on_train_start=note, on_train_epoch_start=note)
    fit(pl, module(), ckpt_path=folder / "x.ckpt", max_epochs=2)
    return epochs


@differs("the validation before training of a resumed run", 2, 0)
def _(pl: Any, folder: Path) -> Any:
    seen_: list[bool] = []
    fit(pl, classifier(pl)()).save_checkpoint(folder / "x.ckpt")
    module = classifier(pl, validation_step=lambda self, *_: seen_.append(self.trainer.sanity_checking))
    fit(pl, module(), val=loader(8), ckpt_path=folder / "x.ckpt", max_epochs=2, num_sanity_val_steps=2)
    return sum(seen_)


# ---- loaders ---------------------------------------------------------------------------------------


@differs("first loader that is asked for", ["val", "train"], ["train", "val"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []

    def ask(kind: str) -> Any:
        return lambda self: (order.append(kind), loader(8))[1]

    module = classifier(pl, train_dataloader=ask("train"), val_dataloader=ask("val"))()
    pl.Trainer(**QUIET | {"num_sanity_val_steps": 1}).fit(module)
    return order


@differs("loaders and a DataModule", "MisconfigurationException", 2)
def _(pl: Any, folder: Path) -> Any:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(16)

    trainer = pl.Trainer(**QUIET)
    return seen(lambda: trainer.fit(classifier(pl)(), loader(8), datamodule=Data()) or trainer.global_step)


@differs("`validate` and `test` with a limit of 0 batches", [], ["asked", "start", "end"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []
    module = classifier(
        pl,
        val_dataloader=lambda self: (order.append("asked"), loader(4))[1],
        on_validation_start=lambda self: order.append("start"),
        on_validation_end=lambda self: order.append("end"),
    )
    pl.Trainer(**QUIET, limit_val_batches=0).validate(module(), verbose=False)
    return order


@differs("`val_check_interval` within an accumulation window", 0, 1)
def _(pl: Any, folder: Path) -> Any:
    at: list[int] = []
    module = classifier(pl, on_validation_start=lambda self: at.append(self.global_step))
    fit(pl, module(), loader(16), loader(4), val_check_interval=2, accumulate_grad_batches=3, max_steps=1)
    return at[0]


class Ordered(SequentialSampler):
    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@differs("`set_epoch` of a sampler in evaluation", {0, 1}, {0})
def _(pl: Any, folder: Path) -> Any:
    sampler = Ordered(range(8))
    sampler.epochs = []
    fit(pl, classifier(pl)(), val=DataLoader(data(8), 4, sampler=sampler), max_epochs=2)
    return set(sampler.epochs)


@differs("`reload_dataloaders_every_n_epochs`", 4, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(
        lambda: fit(pl, classifier(pl)(), val=loader(4), max_epochs=2, reload_dataloaders_every_n_epochs=1).global_step
    )


@differs("`overfit_batches`", [3], [4])
def _(pl: Any, folder: Path) -> Any:
    validated: list[int] = []
    module = classifier(pl, validation_step=lambda self, batch, batch_idx: validated.append(len(batch[0])))
    fit(pl, module(), loader(8), DataLoader(data(9), 3), overfit_batches=1)
    return validated


@differs("`min_epochs` above `max_epochs`", 2, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl)(), min_epochs=2).global_step)


@differs("Ctrl-C in `fit`", "SystemExit", "KeyboardInterrupt")
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        raise KeyboardInterrupt

    return seen(lambda: fit(pl, classifier(pl, training_step=training_step)()))


class _Unsized(IterableDataset):
    def __iter__(self) -> Any:
        yield from data(8)


@differs("`is_last_batch`", [False, True], [False, False])
def _(pl: Any, folder: Path) -> Any:
    found: list[bool] = []
    module = classifier(pl, on_train_batch_start=lambda self, *_: found.append(self.trainer.is_last_batch))
    fit(pl, module(), DataLoader(_Unsized(), 4))
    return found


@differs("a list of lists of batches as loaders", 4, 2)
def _(pl: Any, folder: Path) -> Any:
    batches = list(loader(8))
    lengths: list[int] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        lengths.append(batch_idx)
        return self(batch[0][0]).sum() if isinstance(batch[0], list | tuple) else self(batch[0]).sum()

    lists = [[batches[0][0]], [batches[1][0]]]  # a row at a time, or a batch
    fit(pl, classifier(pl, training_step=training_step)(), lists)
    return len(lengths)


@differs("a limit above the number of batches such as `1e50`", 2, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl)(), limit_train_batches=1e50).global_step)


@differs(
    "a name with `/dataloader_idx_` in `self.log`, or `self.log` in `on_fit_start`",
    ["MisconfigurationException"] * 2,
    [2, 2],
)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("x/dataloader_idx_0", 1.0)
        return self(batch[0]).sum()

    return [
        seen(lambda methods=methods: fit(pl, classifier(pl, **methods)()).global_step)
        for methods in ({"training_step": training_step}, {"on_fit_start": lambda self: self.log("x", 1.0)})
    ]


@differs("`batch_indices` of `BasePredictionWriter` with a sampler of your own", [[7, 6]], [None])
def _(pl: Any, folder: Path) -> Any:
    found: list[Any] = []

    class Writer(part(pl, "callbacks").BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            found.append(indices)

    batches = DataLoader(data(8), 2, sampler=[7, 6])  # type: ignore[arg-type]
    pl.Trainer(**QUIET, callbacks=[Writer("batch")]).predict(
        classifier(pl, predict_step=lambda self, batch, batch_idx: batch[1])(), batches
    )
    return found


@differs("several training loaders", True, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    combined = part(pl, "utilities").CombinedLoader([loader(4), loader(8)], "max_size")
    return seen(lambda: bool(next(iter(combined))))


@differs("workers of a loader with `persistent_workers`", 0, 1, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    batches = DataLoader(data(4), 4, num_workers=1, persistent_workers=True)
    before = multiprocessing.active_children()
    fit(pl, classifier(pl)(), batches)
    return len(set(multiprocessing.active_children()) - set(before))


# ---- callbacks and others --------------------------------------------------------------------------


@differs("`kth_best_model_path` with `save_top_k=-1`", True, False)
def _(pl: Any, folder: Path) -> Any:
    save = part(pl, "callbacks").ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1)
    fit(pl, classifier(pl)(), val=loader(4), callbacks=[save], enable_checkpointing=True, default_root_dir=folder)
    return bool(save.kth_best_model_path)


@dataclasses.dataclass
class Setting:
    rate: float = 0.1


@differs("a `torch.dtype`, a dataclass or another object among hyperparameters", Setting(), "TypeError")
def _(pl: Any, folder: Path) -> Any:
    class Set(classifier(pl)):  # type: ignore[misc]
        def __init__(self, setting: Setting) -> None:
            super().__init__()
            self.save_hyperparameters("setting")

    fit(pl, Set(Setting())).save_checkpoint(folder / "x.ckpt")
    return seen(lambda: Set.load_from_checkpoint(folder / "x.ckpt", weights_only=False).hparams.setting)


@differs("seed", [None, "3"], [None, None])
def _(pl: Any, folder: Path) -> Any:
    before = os.environ.pop("PL_GLOBAL_SEED", None)
    pl.seed_everything(3)
    after = os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ.pop("PL_SEED_WORKERS", None)
    return [before and None, after]


@differs("random streams in validation", False, True)
def _(pl: Any, folder: Path) -> Any:
    found: list[float] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        found.append(torch.rand(()).item())
        return self(batch[0]).sum()

    module = classifier(pl, training_step=training_step, validation_step=lambda self, *_: torch.rand(3))
    for val in (None, loader(4)):
        pl.seed_everything(3)
        os.environ.pop("PL_GLOBAL_SEED", None)
        os.environ.pop("PL_SEED_WORKERS", None)
        fit(pl, module(), loader(4), val, max_epochs=2)
    return found[:2] == found[2:]


@differs("`trainer.train_dataloader`", True, False)
def _(pl: Any, folder: Path) -> Any:
    found: list[Any] = []
    given = loader(8)
    module = classifier(pl, on_train_start=lambda self: found.append(self.trainer.train_dataloader))
    fit(pl, module(), given)
    assert pl.__name__.split(".")[0] == "lightning" or found[0].loader is given
    return found[0] is given


@differs("`profiler`", [None, "MisconfigurationException"], ["ValueError", None])
def _(pl: Any, folder: Path) -> Any:
    return [seen(lambda word=word: pl.Trainer(**QUIET, profiler=word) and None) for word in ("advanced", "torch")]


@differs("asynchronous saves", "AsyncCheckpointIO", "ImportError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: part(pl, "plugins.io").AsyncCheckpointIO.__name__)


@differs("options of a strategy", "DDPStrategy", "DDP")
def _(pl: Any, folder: Path) -> Any:
    return type(part(pl, "strategies").DDPStrategy(find_unused_parameters=True)).__name__


@differs("your own handler of SIGTERM", [["called"], "SIGTERMException"], [[], "SystemExit"])
def _(pl: Any, folder: Path) -> Any:
    called: list[str] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(self(batch[0]), batch[1])

    before = signal.signal(signal.SIGTERM, lambda *_: called.append("called"))
    try:
        error = seen(lambda: bool(fit(pl, classifier(pl, training_step=training_step)(), default_root_dir=folder)))
    finally:
        signal.signal(signal.SIGTERM, before)
    return [called, error]


# ---- several ranks ---------------------------------------------------------------------------------


def on_two_ranks(pl: Any, module: Any, **given: Any) -> dict[str, float]:
    """The metrics of a fit on two processes."""
    trainer = fit(pl, module, strategy="ddp_fork", devices=2, **given)
    return {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}


@differs("evaluation on several ranks", 6, 5, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    return on_two_ranks(pl, classifier(pl, validation_step=validation_step)(), val=DataLoader(data(5), 4))["samples"]


@differs("`sync_dist`", 0.0, 0.5, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank))

    return on_two_ranks(pl, classifier(pl, validation_step=validation_step)(), val=loader(8))["rank"]


@differs("rank-zero-only values", [1.0, 1.0], ["RuntimeError", 1.0], ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def on_if(self: Any) -> None:
        if self.trainer.is_global_zero:
            self.log("x", 1.0)

    def on_all(self: Any) -> None:
        self.log("x", 1.0, rank_zero_only=True)

    return [
        seen(lambda hook=hook: on_two_ranks(pl, classifier(pl, on_train_epoch_end=hook)())["x"])
        for hook in (on_if, on_all)
    ]


@differs("a training loader with `shuffle=False` on several ranks", False, True, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.log("place", batch[1].float().mean(), reduce_fx="max")
        return self(batch[0]).sum()

    places = TensorDataset(torch.randn(16, 4), torch.arange(16))
    found = on_two_ranks(pl, classifier(pl, training_step=training_step)(), train=DataLoader(places, 4))
    return found["place"] in (11.5, 13.5)


@differs("`self.all_gather(sync_grads=True)`", 1.0, "ValueError", ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        scores = self.all_gather(self(batch[0]), sync_grads=True)
        self.log("flows", float(scores.requires_grad))
        return scores.sum()

    return seen(lambda: on_two_ranks(pl, classifier(pl, training_step=training_step)())["flows"])
